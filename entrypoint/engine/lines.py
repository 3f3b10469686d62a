"""One line of anybody's log: what is wrapped around the message, and which rank wrote it.

sglang writes ``[2026-11-29 16:41:08 TP0] message``. Around that docker compose, Kubernetes, journald, the
kernel's ring buffer, Ray, vLLM and torch put prefixes of their own; they are taken off one by one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import NamedTuple

LONGEST = 8192  # characters of one line that are looked at: no known failure text stands further to the right

_ANSI = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])")
_STAMP = r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d+)?"
_WRAPPERS = tuple(
    re.compile(pattern)
    for pattern in (
        rf"\[{_STAMP}(?P<fields>(?: [A-Z_]+\d+)*)\] ?",  # sglang
        r"\[rank(?P<rank>\d+)\]: ?",  # torch
        rf"{_STAMP}(?:Z|[+-]\d\d:?\d\d) (?!stdout|stderr)\S+ [\w@./-]+(?:\[\d+\])?: ",  # journald, short-iso
        rf"\[?{_STAMP}(?:Z|[+-]\d\d:?\d\d)?\]?(?: (?:stdout|stderr) [FP])?[ \t]+",  # Kubernetes, RFC 3339
        r"\w[\w./-]*\s*\| ",  # docker compose
        r"\[pod/[^\]]+\] ",  # kubectl logs --prefix
        rf"<\d{{1,3}}>1 {_STAMP}(?:Z|[+-]\d\d:?\d\d) \S+ \S+ \S+ \S+ (?:-|\[.*?\]) (?:\ufeff)?",  # RFC 5424
        r"<\d{1,3}>(?=[A-Z\[])",  # RFC 3164 and kmsg priorities
        r"[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d \S+ [\w@.:/-]+(?:\[\d+\])?: ",  # journald, syslog
        r"\[ *\d+\.\d{3,6}\] ",  # dmesg
        r"\[[A-Z][a-z]{2} [A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d \d{4}\] ",  # dmesg -T
        r"\((?:\w*?_?(?:TP|rank)(?P<worker>\d+)\w*|[A-Z]\w*)(?: (?:pid|ip)=[^)]*)?\) ?",  # vLLM, Ray
        r"(?P<level>DEBUG|INFO|WARNING|ERROR|CRITICAL) \d\d-\d\d \d\d:\d\d:\d\d(?:\.\d+)? "
        r"(?:\[[^\]]*\] ?|[\w.]+:\d+\] ?)+",  # vLLM
        r"(?P<prefix>DEBUG|INFO|WARNING|ERROR|CRITICAL):(?= )\s*",  # uvicorn, logging.basicConfig
        r"\[\d\d:\d\d:\d\d(?: TP(?P<tp>\d+))?\] ",  # sglang before 0.4
        r"[\w.-]+:\d+:\d+ \[(?P<device>\d+)\] (?=(?:\S+ )?(?:NCCL|\[))",  # NCCL: host:pid:tid [device]
        r"(?:> ?|\$ |(?:\| )+(?=\S))",  # quoted in an issue
    )
)
_TP = re.compile(r"\bTP(\d+)")
_ESCAPED = re.compile(r"\\n\s*(?:File \\?\"|Traceback|\[\d{4}-|(?:\w+\.)*\w+(?:Error|Exception)\b)|(?:\):|last\):)\\n")


class Line(NamedTuple):
    """A message without its wrappers. ``rank``: the tensor-parallel rank that wrote it, None when unsaid;
    ``writer``: the rank's whole mark (``DP0 TP1 EP1``), so that pipeline stages stay apart; ``starts_record``: an
    engine's own prefix stands before it, so it is not the continuation of the record above; ``level``: the level
    that the prefix names, in upper case, or an empty string; ``prefix``: what was taken off."""

    text: str
    rank: int | None
    writer: str
    starts_record: bool = False
    level: str = ""
    prefix: str = ""


def strip_ansi(text: str) -> str:
    """``text`` without terminal colours and titles."""
    return _ANSI.sub("", text) if "\x1b" in text else text


def unwrap(raw: str) -> Line:
    """The message in ``raw``, at most ``LONGEST`` characters of it, and who wrote it."""
    text = strip_ansi(raw[:LONGEST]).rstrip("\r\n")
    if text.startswith('{"') and ('"log"' in text or '"message"' in text or '"msg"' in text):
        text = (_from_json(raw) or text)[:LONGEST]
    rank, writer, starts_record, level, whole = None, "", False, "", text
    for _ in range(6):
        for wrapper in _WRAPPERS:
            match = wrapper.match(text)
            if match and match.end():
                break
        else:
            break
        text = text[match.end() :]
        groups = match.groupdict()
        level = groups.get("level") or groups.get("prefix") or level
        # A level alone is no prefix of the engine's logger, which writes the time: any text can begin with ERROR:
        starts_record = starts_record or not {"fields", "tp", "level", "device"}.isdisjoint(groups)
        if groups.get("fields"):
            writer = groups["fields"].strip()
            found = _TP.search(writer)
            rank = int(found[1]) if found else rank
        for name in ("rank", "worker", "device", "tp"):
            if rank is None and groups.get(name):
                rank = int(groups[name])
    return Line(text, rank, writer, starts_record, level, whole[: len(whole) - len(text)])


def expand(raw: str) -> list[str]:
    """The lines that one physical line holds: a JSON string or a JSON logger's message may hold a whole traceback, a
    progress bar rewrites its line with ``\\r``. Nearly always the line itself."""
    head = raw[:2].lstrip()[:1]
    if head in ('"', "{"):
        message = _from_json(raw.strip())
        if message is not None and "\n" in message:
            return message.split("\n")
    if "\\n" in raw and _ESCAPED.search(raw):
        return raw.replace("\\n", "\n").replace('\\"', '"').split("\n")
    return raw.split("\r") if "\r" in raw else [raw]


def _from_json(raw: str) -> str | None:
    """The message of a line of docker's json-file driver or of a JSON logger."""
    try:
        document = json.loads(raw)
    except ValueError:
        return None
    if isinstance(document, str):
        return strip_ansi(document)
    for key in ("log", "message", "msg"):
        if isinstance(document, dict) and isinstance(document.get(key), str):
            return strip_ansi(document[key]).rstrip("\r\n")
    return None


_CONFIGURATION = ("server_args=", "ServerArgs(", "Namespace(", "Command: ", "+ ")
# Records in which the engine repeats what a client sent or a model wrote: with --log-requests, and always at
# constrained/*_backend.py, function_call/*.py and entrypoints/openai/serving_*.py.
_REQUEST = re.compile(
    r"\b(?:Receive|Finish): obj=|\b(?:Generate|Embedding)ReqInput\(|\bReceived request \S+: prompt:"
    r"|^(?:Hit invalid |Skip unsupported |[Ss]kip invalid |Rejecting \S+ grammar|Error in request\b"
    r"|Error in (?:detect_and_parse|parse_streaming_increment|preprocessing prompt)"
    r"|Error (?:getting structure|during (?:de)?tokeniz|processing embedding)"
    r"|Model attempted to call|\[?GigaChat\w*\]?|Surfacing Inkling|Invalid Inkling|Dropping malformed"
    r"|(?:Required )?[Tt]ool (?:call parsing|JSON parse) error|Tool call parsing error|Reasoning parsing error"
    r"|Tool \S.* not found|Failed to (?:parse|compile) |Malformed \S+ tool|Ignoring (?:invalid )?tool"
    r"|Request \S+ (?:failed|error)"
    r"|\[http_server\] Error)"
)


def is_configuration(text: str) -> bool:
    """Return whether a record only says how the engine was configured: what it names is no evidence."""
    return text.startswith(_CONFIGURATION) or "server_args=" in text[:120]


def is_request(text: str) -> bool:
    """Return whether a record repeats what a client asked for or a model answered."""
    return _REQUEST.search(text[:160]) is not None


class EvidenceFilter:
    """Tells the engine's own statements from what it only repeats.

    A request's text may hold line ends, and a long line is cut into pieces by whoever stored it: every line after a
    repeated request belongs to it until the engine's own prefix begins a new record. ``in_request``: the line above
    was such a one.
    """

    def __init__(self) -> None:
        self.in_request = False

    def admits(self, line: Line) -> bool:
        """Return whether ``line`` may be read as a statement of the engine. Call it with every line in order."""
        if is_request(line.text):
            self.in_request = True
        elif line.starts_record:
            self.in_request = False
        return not self.in_request and not is_configuration(line.text)


LEFT_OUT = "(a request, left out)"


def without_requests(lines: Iterable[str]) -> list[str]:
    """Return ``lines`` with `LEFT_OUT` in place of each that repeats a request, the further lines of one included."""
    told = EvidenceFilter()
    kept = []
    for line in lines:
        told.admits(unwrap(line))
        kept.append(LEFT_OUT if told.in_request else line)
    return kept
