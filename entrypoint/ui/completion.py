"""Shell completion: a script for bash, zsh or fish, made from the command line's own parser."""

from __future__ import annotations

import argparse
from collections.abc import Iterator


def script(parser: argparse.ArgumentParser, shell: str) -> str:
    """The completion script of ``parser`` for ``shell`` (bash, zsh or fish), to be sourced: ``source <(relaunch
    completion bash)``, or ``relaunch completion fish | source``."""
    verbs = {name: (text, sorted(words), takes_file) for name, text, words, takes_file in _verbs(parser)}
    if shell == "fish":
        return _fish(verbs)
    return _bash(verbs, zsh=shell == "zsh")


Verbs = dict[str, tuple[str, list[str], bool]]


def _verbs(parser: argparse.ArgumentParser) -> Iterator[tuple[str, str, list[str], bool]]:
    """(name, help, words that may follow, does it take a file)."""
    for action in parser._actions:
        if not isinstance(action, argparse._SubParsersAction):
            continue
        for choice in action._choices_actions:
            sub = action.choices[choice.dest]
            words: list[str] = []
            takes_file = False
            for option in sub._actions:
                words += [word for word in option.option_strings if word.startswith("--")]
                if not option.option_strings and option.choices:
                    words += [str(word) for word in option.choices]
                if "FILE" in str(option.metavar):
                    takes_file = True
            yield choice.dest, choice.help or "", words, takes_file


def _bash(verbs: Verbs, *, zsh: bool) -> str:
    cases = "\n".join(f"    {name}) words={' '.join(words)!r} ;;" for name, (_, words, _) in verbs.items())
    files = "|".join(name for name, (_, _, takes_file) in verbs.items() if takes_file)
    head = "autoload -U +X bashcompinit && bashcompinit\n" if zsh else ""
    return f"""{head}_relaunch() {{
  local word=${{COMP_WORDS[COMP_CWORD]}} verb=${{COMP_WORDS[1]}} words=
  if [ "$COMP_CWORD" -eq 1 ]; then
    COMPREPLY=( $(compgen -W '{" ".join(verbs)} --help --version' -- "$word") )
    return
  fi
  case $verb in
{cases}
  esac
  COMPREPLY=( $(compgen -W "$words" -- "$word") )
  case $verb in
    {files}) case $word in -*) ;; *) COMPREPLY+=( $(compgen -f -- "$word") ) ;; esac ;;
  esac
}}
complete -o filenames -F _relaunch relaunch ./relaunch
"""


def _fish(verbs: Verbs) -> str:
    lines = ["complete -c relaunch -f"]
    for name, (text, words, takes_file) in verbs.items():
        quoted = text.replace("'", "\\'")
        lines.append(f"complete -c relaunch -n __fish_use_subcommand -a {name} -d '{quoted}'")
        for word in words:
            option = f"-l {word[2:]}" if word.startswith("--") else f"-a {word}"
            lines.append(f"complete -c relaunch -n '__fish_seen_subcommand_from {name}' {option}")
        if takes_file:
            lines.append(f"complete -c relaunch -n '__fish_seen_subcommand_from {name}' -F")
    return "\n".join(lines) + "\n"
