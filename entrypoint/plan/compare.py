"""What differs between two plan documents, of two versions of relaunch or of two sets of settings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import takewhile
from typing import Any

from .spec import SHOWN

Document = Mapping[str, Any]

# Parts of the account of a GPU; of several GPUs the largest value counts, since it decides.
_ACCOUNT = (
    *("baseline_bytes", "weights_bytes", "kv_bytes", "graph_bytes", "activation_bytes"),
    *("runtime_bytes", "margin_bytes", "free_bytes", "load_peak_bytes"),
)
_MODEL = ("id", "revision", "architecture", "quantization", "bytes", "tensors")


@dataclass(frozen=True)
class Difference:
    """One value that is not the same in both. ``part``: settings, model, plan, memory, flags, environment, warnings.
    ``before`` is None where only the later one has it, ``after`` where only the earlier one has. ``reason``: of a
    planned value, what the later plan says about it."""

    part: str
    name: str
    before: Any
    after: Any
    reason: str = ""

    def document(self) -> dict[str, Any]:
        """The difference as the JSON of `relaunch plan --compare` has it."""
        values = asdict(self)
        return {
            "part": values["part"],
            "name": values["name"],
            "from": values["before"],
            "to": values["after"],
            "reason": values["reason"],
        }


def plans(before: Document, after: Document) -> list[Difference]:
    """Return what differs between two plan documents, in the order of `Difference.part`. A document of an older version
    may lack any part."""
    reasons = {str(row.get("setting")): str(row.get("reason") or "") for row in after.get("decisions") or ()}
    found = [
        *_differences("model", _some(before.get("model"), _MODEL), _some(after.get("model"), _MODEL)),
        *_differences("plan", _planned(before), _planned(after), reasons),
        *_differences("memory", _largest(before), _largest(after)),
    ]
    old, new = before.get("engine") or {}, after.get("engine") or {}
    roots = _root(old), _root(new)
    found += _differences("flags", _flags(old, roots[0]), _flags(new, roots[1]))
    found += _differences("environment", _environment(old, roots[0]), _environment(new, roots[1]))
    for words, values in ((before, lambda text: (text, None)), (after, lambda text: (None, text))):
        other = after if words is before else before
        for text in words.get("warnings") or ():
            if text not in (other.get("warnings") or ()):
                found.append(Difference("warnings", "warning", *values(text)))
    return found


def settings(before: Document, after: Document) -> list[Difference]:
    """Return what differs between two documents of `relaunch config`: settings that only one version has, and those
    whose value differs though the same is asked of both, such as a changed default."""
    return list(_differences("settings", _values(before), _values(after)))


def _values(document: Document) -> dict[str, Any]:
    return {str(row["name"]): row["value"] for row in document.get("settings") or ()}


def _differences(
    part: str, before: Document, after: Document, reasons: Mapping[str, str] | None = None
) -> Iterator[Difference]:
    for name in dict.fromkeys((*before, *after)):
        if before.get(name) != after.get(name):
            yield Difference(part, name, before.get(name), after.get(name), (reasons or {}).get(name, ""))


def _some(values: Document | None, names: Sequence[str]) -> dict[str, Any]:
    return {name: (values or {}).get(name) for name in names}


def _planned(document: Document) -> dict[str, Any]:
    """Everything the plan has decided, the sum of it first."""
    shown = _some(document, ("feasible", *SHOWN, "kv_bytes_per_token"))
    decided = {str(row.get("setting")): row.get("value") for row in document.get("decisions") or ()}
    # A flag is compared where the command line is.
    decided = {name: value for name, value in decided.items() if name not in shown and not name.startswith("--")}
    return shown | dict(document.get("parallel") or {}) | decided


def _largest(document: Document) -> dict[str, Any]:
    accounts = document.get("per_gpu") or ()
    return {
        name: max(values)
        for name in _ACCOUNT
        if (values := [row[name] for row in accounts if row.get(name) is not None])
    }


def _root(engine: Document) -> str:
    """Where the version's packages are: the folder above ``bin/python``, which is another one in each clone."""
    interpreter = str((engine.get("argv") or [""])[0])
    return interpreter.rpartition("/bin/")[0]


def _flags(engine: Document, root: str) -> dict[str, Any]:
    """The command line as flag and value; True for a flag without one. What starts it (interpreter, module) is left
    out."""
    words = [_without(str(word), root) for word in engine.get("argv") or ()]
    found: dict[str, Any] = {}
    for index, word in enumerate(words):
        if word.startswith("--"):
            values = list(takewhile(lambda other: not other.startswith("--"), words[index + 1 :]))
            found[word] = " ".join(values) if values else True
    return found


def _environment(engine: Document, root: str) -> dict[str, Any]:
    return {str(name): _without(str(value), root) for name, value in (engine.get("env") or {}).items()}


def _without(text: str, root: str) -> str:
    return text.replace(root, "VENV") if root else text
