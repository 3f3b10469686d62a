"""Reads a log line by line and keeps what could explain an end: runs of the engine with their named incidents. Pure.

Bounded in time and memory for any input: lines that differ in digits alone are named a few times, long lines are cut at
both ends, and so many incidents are named at all.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable

from ..engine.lines import LONGEST, EvidenceFilter, expand, is_request, unwrap
from ..engine.log import mark_of
from .areas import innermost, is_warned, site_of
from .causes import Meaning, Message, catalogue
from .incidents import Incident, IncidentReader
from .lifecycle import Hit, Run, begins_run, refine, stage_of_frames
from .numbers import files_in, foreign, numbers_in

# Lines that differ in digits alone are named this often; of one run of an engine so many incidents are named from its
# begin, so many more when they are exceptions, and so many from its end. Naming takes about a millisecond.
SAME_SHAPE, NAMED, NAMED_EXCEPTIONS, NAMED_LAST = 8, 4_000, 2_000, 1_000
HIT_LIMIT = 4_000  # more hits than this are only counted: by then the first failure has been seen
RUNS = 8  # that are kept of a log in which an engine was started again and again
SHAPES = 200_000  # after so many different lines their memory is dropped
_DIGITS = str.maketrans("123456789", "000000000")
_XID = re.compile(r"\bxid(?: ?\([^)]*\):| error| code|:)? (\d{1,3})\b(?!.* action changed .* to 0x0)", re.IGNORECASE)
_EXCEPTION_INSIDE = re.compile(r"\b[A-Z]\w*(?:Error|Exception|OutOfResources)\b: ")
_KERNEL = re.compile(r"NVRM: |oom-kill|Out of memory: Kill|oom_reaper|invoked oom-killer")
_STAMP = re.compile(r"\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d[^\]]*\] ?")
_RANK = re.compile(r"\b(?:[Rr]ank|scheduler)[ _=]?(\d+)\b")

# Scores. `EXCEPTION_BONUS`: an exception's own line says more than a log line about it; `WARNING_MALUS`: a warning must
# not outweigh any failure, whatever it talks about (weights go from 5 to 98); `FOREIGN_BONUS`: numbers that show whose
# memory it is say more than the text.
EXCEPTION_BONUS, WARNING_MALUS, FOREIGN_BONUS = 10, 55, 6
FAULT_WITH_MANY_CAUSES, GPU_NEEDS_A_PERSON = 60, 98  # weights of an Xid
FROM_ITS_PLACE = 55  # weight of an exception's place, where its text says nothing more
DECISIVE = 90  # from this weight on a text is believed even in a warning
SAYS_ONLY_THAT_IT_ENDED = 32  # up to this weight a meaning says that something ended, not why
ENDS = frozenset({"unknown", "killed", "crash", "bus_error"})


class Scanner:
    """Feed every line once; then read ``runs`` (the last one is in progress at the end of the log).

    ``one_run``: the lines are known to be of one run: what looks like another start is somebody's text.
    """

    def __init__(self, *, one_run: bool = False) -> None:
        self.runs = [Run()]
        self.lines = 0  # lines with any text
        self._one_run = one_run
        self._reader = IncidentReader()
        self._filter = EvidenceFilter()
        self._shapes: dict[str, int] = {}
        self._echoes: set[str] = set()  # of these, what only repeats what a client sent
        self._often: set[str] = set()  # lines, without their time, that have been seen often enough
        self._named = 0
        self._last: deque[Incident] = deque(maxlen=NAMED_LAST)

    @property
    def run(self) -> Run:
        """The last run."""
        return self.runs[-1]

    @property
    def recognised(self) -> bool:
        """Whether anything of the log means something: a stage, an answer, a failure."""
        return any(run.hits or run.advances or run.ready for run in self.runs)

    def feed(self, number: int, raw: str) -> None:
        """Take in one physical line, without its line end."""
        if not self._filter.in_request and _untimed(raw) in self._often:
            self.lines += 1
            return
        if not raw or raw.isspace():
            self._take(self._reader.flush())
            return
        self.lines += 1
        if len(raw) > LONGEST:  # what is said stands at the begin, or at the end of what was printed without line ends
            raw = f"{raw[: LONGEST // 2]} {raw[-LONGEST // 2 :]}"
        parts = expand(raw)
        if len(parts) > 1 and is_request(unwrap(parts[0]).text):
            parts = parts[:1]
        for part in parts:
            self._line(number, part)

    def end(self) -> None:
        """No more lines."""
        self._take(self._reader.flush())
        self._name_last()

    def _line(self, number: int, raw: str) -> None:
        line = None
        if self._filter.in_request:
            line = unwrap(raw)
            if not self._filter.admits(line) and self._filter.in_request:
                return
        if self._life(number, raw):
            return
        shape = _STAMP.sub("", raw, 1).translate(_DIGITS)
        if self._seen_often(shape):
            self._often.add(_untimed(raw))
            return
        line = line or unwrap(raw)
        if line.prefix or "%" in raw or mark_of(line.text):
            self._take(self._reader.flush())  # before this line moves a stage: it happened in the one before
        if not self._filter.admits(line):
            if self._filter.in_request:
                self._echoes.add(shape)
            elif begins_run(line.text):
                self._begin()
            return
        if self.run.read(number, line):
            return
        if catalogue().subject["ended"].search(line.text[:300].lower()):
            self.run.ended = number
        if _KERNEL.search(line.text) and _STAMP.match(raw):
            return  # the kernel does not write through the engine's logger: somebody's text
        self._take(self._reader.feed(number, line))

    def _life(self, number: int, raw: str) -> bool:
        """Whether a line is an answered request or a batch, which most lines of a server's log are."""
        if '" 200 OK' in raw:
            if '"POST' in raw:
                self.run.answer(number, raw)
            return True
        if " batch, #" in raw or " batch [" in raw:
            self._batch(number, raw)
            return True
        return False

    def _seen_often(self, shape: str) -> bool:
        """Count a line; whether it says nothing new. What repeats a client's text must be looked at every time."""
        if len(self._shapes) > SHAPES:
            self._forget()
        seen = self._shapes.get(shape, 0)
        self._shapes[shape] = seen + 1
        return seen >= SAME_SHAPE and shape not in self._echoes

    def _forget(self) -> None:
        self._shapes, self._often, self._echoes = {}, set(), set()

    def _batch(self, number: int, raw: str) -> None:
        self._take(self._reader.flush())
        run = self.run
        run.activity = "prefill" if "Prefill" in raw else "decode"
        run.latest, run.computed, run.lives = run.latest or "serving", number, run.lives + 1
        if run.activity == "prefill":
            run.numbers.update(numbers_in(raw, "new_tokens"))

    def _begin(self) -> None:
        """sglang prints its configuration once per run: a second time means that it was started again."""
        if not self._one_run and (self.run.ended or self.run.ready or self.run.hits):
            self._take(self._reader.flush())
            self._name_last()
            self.runs = [*self.runs[1 - RUNS :], Run()]
            self._reader, self._named = IncidentReader(), 0
            self._forget()
        self.run.latest = self.run.latest or "init"

    def _take(self, incidents: Iterable[Incident]) -> None:
        for incident in incidents:
            exception = bool(incident.type)
            if self._named < NAMED + (NAMED_EXCEPTIONS if exception else 0):
                self._named += 1
                self._name(incident)
            else:
                self._last.append(incident)

    def _name_last(self) -> None:
        """Name what came after there were too many to name them all."""
        while self._last:
            self._name(self._last.popleft())

    def _name(self, incident: Incident) -> None:
        """Keep every meaning of an incident as a hit of the run."""
        reached = self.run.stage_of(incident.line.writer)
        shown = stage_of_frames(incident.frames)
        message = Message(incident.message)
        stage = refine(reached, shown, None)
        area = _area(incident)
        found = [meaning for meaning in catalogue().meanings if meaning.fits(message, incident.frames, stage)]
        if area is not None:
            found.append(Meaning.bare(area, FROM_ITS_PLACE))
        xid = _xid(incident)
        if xid is not None:
            found.append(xid)
        for meaning in found:
            self._keep(incident, meaning, reached, shown, area)

    def _keep(
        self, incident: Incident, meaning: Meaning, reached: str | None, shown: str | None, area: str | None
    ) -> None:
        run, text = self.run, incident.text
        rank = incident.line.rank
        if rank is None and (named := _RANK.search(text)):
            rank = int(named[1])
        of_request, fatal = _subject(incident, meaning, area)
        stage = refine(reached, shown, run.activity if meaning.cause == "oom" else None)
        meant = "exception" if fatal and meaning.cause == "area_request" else meaning.cause
        cause = catalogue().resolve(meant, meaning.stage or stage)
        soft = _is_warning(incident, meaning)
        score = meaning.weight + (EXCEPTION_BONUS if incident.type else 0) - (WARNING_MALUS if soft else 0)
        if meaning.cause in ENDS and meaning.weight <= SAYS_ONLY_THAT_IT_ENDED and not (soft or of_request):
            run.ended = run.ended or incident.number
        numbers = numbers_in(incident.message)
        if meaning.cause == "oom" and foreign(numbers):
            cause, score = "memory_unbalanced", score + FOREIGN_BONUS
        stage = meaning.stage or {"prefill": "serving", "decode": "serving"}.get(stage or "", stage)
        if reached == "first_forward" and stage == "serving":
            stage = "first_forward"
        for name, value in numbers.items():
            run.numbers.setdefault(name, value)
        if meaning.weight > SAYS_ONLY_THAT_IT_ENDED:
            run.files.update(dict.fromkeys(files_in(incident.message)))
        if len(run.hits) < HIT_LIMIT:
            run.hits.append(
                Hit(
                    incident.number,
                    text,
                    meaning,
                    cause,
                    score,
                    soft,
                    of_request,
                    fatal,
                    stage,
                    rank,
                    meaning.next_step,
                    run.lives,
                )
            )


def _untimed(raw: str) -> str:
    """A line without the time that sglang writes before it."""
    return raw[raw.find("]") + 1 :] if raw[:3] == "[20" else raw


def _xid(incident: Incident) -> Meaning | None:
    """What NVIDIA's number says, where the kernel gives one that matters."""
    number = _XID.search(incident.text)
    if number is None:
        return None
    kind = catalogue().xids.get(int(number[1]), "restart")
    if kind == "ignore":
        return None
    if kind == "restart":
        return Meaning.bare("engine_crash", FAULT_WITH_MANY_CAUSES)
    return Meaning.bare("gpu_lost", GPU_NEEDS_A_PERSON, catalogue().xid_next[kind])


def _area(incident: Incident) -> str | None:
    """The area of the engine that an exception comes from: by its traceback, else by its text."""
    if not incident.type:
        return None
    area = innermost(incident.frames)
    return area.cause if area is not None else site_of(incident.message) if not incident.frames else None


def _is_warning(incident: Incident, meaning: Meaning) -> bool:
    """Whether the writer says that it goes on. One that calls it an error must say so in more than passing."""
    if incident.type or meaning.weight >= DECISIVE:
        return False
    hang = meaning.cause.startswith("hang_")  # an observation: whoever waits does not know that it is an error
    if incident.level in ("info", "warning") and not hang and not _EXCEPTION_INSIDE.search(incident.text):
        return True
    subject = catalogue().subject
    if subject["goes_on"].search(incident.text):
        return True
    if is_warned(incident.text) and not subject["ended"].search(incident.text):
        return True
    return incident.level != "error" and subject["warnings"].search(incident.text) is not None


def _subject(incident: Incident, meaning: Meaning, area: str | None) -> tuple[bool, bool]:
    """Whether an incident is a fault of one request, and whether an engine process does not survive it."""
    subject = catalogue().subject
    opener = incident.opener.lower()
    engine = bool(subject["engine_openers"].search(opener) or subject["engine_openers"].search(incident.text[:200]))
    engine = engine or bool(incident.frames and subject["engine_frames"].search(incident.frames))
    if engine:
        return False, True
    if incident.frames and subject["request_frames"].search(incident.frames):
        return True, False
    if area == "area_request" and (incident.frames or meaning.weight <= FROM_ITS_PLACE):
        return True, False
    if subject["request_openers"].search(opener) or subject["request_texts"].search(incident.text):
        return True, False
    return False, bool(incident.type and incident.frames) or meaning.weight >= DECISIVE
