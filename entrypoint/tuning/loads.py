"""What is sent to a server to measure it, as arguments of the engine's own benchmark."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path

from ..errors import config_rejected

# Prompts of the benchmark may grow when their text is tokenized again: this share of the context is planned with.
CONTEXT_SHARE = 0.9
# Of an encoder, whose vocabulary holds many words that are written as several tokens, this share.
ENCODER_SHARE = 0.25


@dataclass(frozen=True)
class Load:
    """One kind of traffic. Lengths in tokens, drawn evenly between half and all of them: ``shared_tokens`` stand at the
    beginning of every prompt of a group of ``group`` requests, ``prompt_tokens`` are its own. ``file``: conversations
    (JSON lines, "conversations": [{"content": ...}, ...]) in place of generated prompts."""

    name: str
    prompt_tokens: int
    output_tokens: int
    shared_tokens: int = 0
    group: int = 8
    file: Path | None = None

    def document(self) -> dict[str, object]:
        """What a receipt says of it; no path, no prompt."""
        return {
            "name": self.name,
            "prompt_tokens": self.prompt_tokens,
            "output_tokens": self.output_tokens,
            "shared_tokens": self.shared_tokens,
        }


LOADS = {
    load.name: load
    for load in (
        Load("chat", prompt_tokens=1024, output_tokens=512),
        Load("agent", prompt_tokens=512, output_tokens=256, shared_tokens=4096),
        Load("long", prompt_tokens=16000, output_tokens=256),
    )
}


def named(word: str) -> Load:
    """Return the load called ``word``, that of so many tokens (``1024/512``: prompt and answer), or that of the file
    ``word``. Raises Stop (78) when it is none of these."""
    if word in LOADS:
        return LOADS[word]
    if lengths := re.fullmatch(r"(\d{1,7})/(\d{1,7})", word):
        return Load(word, prompt_tokens=int(lengths[1]), output_tokens=int(lengths[2]))
    path = Path(word)
    if not path.is_file():
        raise config_rejected(
            f"--load {word} is no file and none of {', '.join(LOADS)}",
            "name one of them, or tokens of prompt and answer such as 1024/512",
        )
    return Load("file", prompt_tokens=0, output_tokens=0, file=path)


def fitted(load: Load, context: int | None, *, embedding: bool) -> Load:
    """Return ``load`` shortened in proportion to what a server of ``context`` tokens can take (None: it does not say),
    and without an answer for ``embedding``."""
    if load.file is not None:
        return load
    wanted = load.shared_tokens + load.prompt_tokens + load.output_tokens
    room = int((context or wanted) * (ENCODER_SHARE if embedding else CONTEXT_SHARE)) if context else wanted
    share = min(1.0, room / wanted)
    return replace(
        load,
        prompt_tokens=max(4, int(load.prompt_tokens * share)),
        output_tokens=0 if embedding else max(4, int(load.output_tokens * share)),
        shared_tokens=int(load.shared_tokens * share),
    )


def arguments(load: Load, requests: int, context: int | None) -> list[str]:
    """Return the benchmark's words for ``requests`` requests of ``load``."""
    if load.file is not None:
        limit = ["--sharegpt-context-len", str(context)] if context else []
        return ["--dataset-name", "custom", "--dataset-path", str(load.file), "--num-prompts", str(requests), *limit]
    output = str(max(1, load.output_tokens))
    if load.shared_tokens:
        groups = -(-requests // load.group)
        return [
            *("--dataset-name", "generated-shared-prefix", "--gsp-range-ratio", "0.5"),
            *("--gsp-num-groups", str(groups), "--gsp-prompts-per-group", str(min(requests, load.group))),
            *("--gsp-system-prompt-len", str(load.shared_tokens), "--gsp-question-len", str(load.prompt_tokens)),
            *("--gsp-output-len", output),
        ]
    return [
        *("--dataset-name", "random-ids", "--random-range-ratio", "0.5", "--num-prompts", str(requests)),
        *("--random-input-len", str(load.prompt_tokens), "--random-output-len", output),
    ]
