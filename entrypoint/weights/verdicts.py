"""From a verdict to a snapshot, or to the line that refuses it."""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import Stop
from .common import FileState, Located, Snapshot
from .verify import Verdict

NEXT_STEP = {
    "directory": "put the file back (the directory is yours: relaunch does not write there)",
    "package": "reinstall the Python package",
    "generated": "remove the folder; it is made again",
    "hub": "run `relaunch weights repair`",
}


def snapshot(located: Located, verdict: Verdict, notes: tuple[str, ...] = ()) -> Snapshot:
    """Every file of ``verdict`` is good, as far as its level looked."""
    assert located.path is not None
    return Snapshot(
        located.path,
        located.model,
        located.revision,
        verdict.level,
        verdict.ok,
        sum(state.size for state in verdict.states.values()),
        len(verdict.states),
        (*located.notes, *notes, *verdict.notes),
    )


def named(files: Sequence[FileState], limit: int = 4) -> str:
    """``a (is absent), b (is truncated...) and 3 more``."""
    text = ", ".join(f"{state.path} {state.reason}" for state in files[:limit])
    return text + (f", and {len(files) - limit} more" if len(files) > limit else "")


def refuse(located: Located, verdict: Verdict, next_step: str | None = None) -> Stop:
    """One line for bad files: corrupt (65) when one is damaged, else missing (66)."""
    damaged = [state for state in verdict.bad if state.state == "damaged"]
    published = [state for state in damaged if state.digest_ok]
    if published:
        step = "choose another RELAUNCH_REVISION; fetching it again gives the same bytes"
        return Stop("weights_corrupt", f"{located.model}: the published file is bad: {named(published)}", step)
    cause = "weights_corrupt" if damaged else "weights_missing"
    bad = sorted(verdict.bad, key=lambda state: state.state != "damaged")
    where = f" in {located.path}" if str(located.path) != located.model else ""
    return Stop(cause, f"{located.model}{where}: {named(bad)}", next_step or NEXT_STEP[located.kind])
