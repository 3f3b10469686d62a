"""The catalogue: closed, whole, smaller than it was, and true to the pinned engine's source."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
import tomllib
from pathlib import Path

import pytest

from entrypoint.healing import causes
from entrypoint.healing.areas import areas, innermost, site_of
from entrypoint.healing.causes import MEANING_FILES, Expression, Message, catalogue
from entrypoint.healing.classify import classify
from entrypoint.healing.prefilter import required_literals

ROOT = Path(__file__).parents[2]
DIRECTORY = Path(causes.__file__).parent / "catalogue"
DATA = Path(__file__).parents[1] / "data" / "failures"
CORPUS = [
    json.loads(line)
    for name in ("written.jsonl", "reports.jsonl")
    for line in (DATA / name).read_text(encoding="utf-8").splitlines()
]
FORMER_EXPRESSIONS = 358  # of the catalogue of expressions that this one replaced


def rows() -> list[dict[str, object]]:
    return [row for name in MEANING_FILES for row in tomllib.loads((DIRECTORY / f"{name}.toml").read_text())["meaning"]]


def test_the_catalogue_is_closed_and_whole() -> None:
    names = catalogue().causes
    assert len(names) == 39
    for meaning in catalogue().meanings:
        assert meaning.cause in names or meaning.cause in catalogue().by_stage
    for table in catalogue().by_stage.values():
        assert set(table.values()) <= set(names) and "default" in table
    for area in areas():
        assert (area.cause in names or area.cause in catalogue().by_stage) and area.why


def test_the_catalogue_is_smaller_than_the_one_it_replaced() -> None:
    assert sum(len(row["says"]) for row in rows()) < FORMER_EXPRESSIONS  # type: ignore[arg-type]


def test_every_term_is_used() -> None:
    terms = tomllib.loads((DIRECTORY / "terms.toml").read_text())["terms"]
    text = "".join((DIRECTORY / f"{name}.toml").read_text() for name in MEANING_FILES)
    assert [name for name in terms if f"{{{name}}}" not in text] == []


def test_no_clause_is_a_whole_line_of_a_case() -> None:
    """Meanings generalise: none spells a whole line of the corpus."""
    lines = {line.lower() for case in CORPUS for line in case["text"].split("\n") if len(line) > 32}
    for row in rows():
        for run in re.split(r"\\[a-z]\??|\.\{[\d,]+\}|\|\(|[|()\[\]*+?^$]", " ".join(row["says"])):  # type: ignore[arg-type]
            literal = run.replace("\\", "").lower().strip()
            for line in lines:
                assert line not in literal, (row["cause"], line)
                assert literal not in line or len(literal) < 0.9 * len(line), (row["cause"], line)


@pytest.mark.parametrize(
    ("expression", "text"),
    [
        ("(?:out|ran) of memory", "ran of memory"),
        ("colou?r (red|blue)", "color blue"),
        ("[abc]+x{2,3}yz \\(done\\)", "axxyz (done)"),
        ("(?<!no )failed", "it failed"),
        ("a|bcd", "a"),
    ],
)
def test_the_literals_that_an_expression_needs_are_in_what_it_matches(expression: str, text: str) -> None:
    assert re.search(expression, text)
    literals = required_literals(expression)
    assert literals is None or any(literal in text for literal in literals)


def test_trying_literals_first_changes_no_answer() -> None:
    expressions = {
        expression
        for meaning in catalogue().meanings
        for clause in meaning.says
        for expression in (*clause.present, *clause.absent, *([meaning.unless] if meaning.unless else ()))
    }
    for line in {line.lower() for case in CORPUS for line in case["text"].split("\n")}:
        for expression in expressions:
            assert expression.search(line) == (expression.pattern.search(line) is not None), (expression.pattern, line)


def test_a_message_remembers_what_it_contains() -> None:
    expression = Expression("out of memory")
    assert Message("CUDA Out Of Memory").has(expression)


def test_a_message_without_its_traceback_is_found_in_the_engines_source() -> None:
    area = ""
    for at, line in enumerate((DIRECTORY / "sites.txt").read_text(encoding="utf-8").splitlines()):
        if line.startswith("# area_"):
            area = line[2:]
        elif at % 97 == 0:
            assert site_of(f"ValueError: {line} 4711") == area, line
    assert site_of("nothing that anybody raises") is None


def test_what_the_engine_only_warns_of_is_no_failure() -> None:
    """sglang's log names no level: its source does. A text that decides whatever else is there is believed even so."""
    warnings = (DIRECTORY / "warnings.txt").read_text(encoding="utf-8").splitlines()[::7]
    wrong = [text for text in warnings if classify([f"[2026-11-29 16:41:08 TP0] {text} 4711"]).cause != "none"]
    assert len(warnings) > 250
    assert len(wrong) <= 0.01 * len(warnings), wrong


def engine(part: str) -> Path:
    found = importlib.util.find_spec("sglang")
    assert found is not None and found.origin is not None
    return Path(found.origin).parent / part


@pytest.mark.engine
def test_every_raise_site_of_the_engine_has_a_cause_or_a_reasoned_default() -> None:
    """By its text, or by the area that it lies in: none is left to chance."""
    sys.path.insert(0, str(ROOT / "scripts"))
    try:
        import raise_sites
    finally:
        sys.path.pop(0)
    root = engine("srt")
    placed = total = 0
    left: dict[str, int] = {}
    for path in sorted(root.rglob("*.py")):
        name = f"sglang/srt/{path.relative_to(root)}"
        for _, function, _ in raise_sites.sites(raise_sites.parsed(path)):
            total += 1
            if innermost(f"{name} in {function}") is not None:
                placed += 1
            else:
                left[name] = left.get(name, 0) + 1
    assert total > 10_000
    assert placed == total, left


@pytest.mark.parametrize("held_out", [False, True], ids=["tuned on", "held out"])
def test_public_reports(held_out: bool) -> None:
    """Accuracy on public reports; those that are held out were never tuned on."""
    reports = [case for case in CORPUS if "source" in case and case.get("held_out", False) == held_out]
    wrong: dict[bool, list[tuple[str, str]]] = {True: [], False: []}
    for case in reports:
        verdict = classify(case["text"].split("\n"))
        if verdict.cause not in (case["cause"], *case["also"]):
            wrong[case["cause"] == "none"].append((case["source"], verdict.cause))
    harmless = sum(case["cause"] == "none" for case in reports)
    assert len(reports) > 20 and harmless >= 3
    assert len(wrong[False]) <= 0.08 * (len(reports) - harmless), wrong[False]
    assert len(wrong[True]) <= (2 if held_out else 0), wrong[True]  # two of twelve at first sight: docs/measured.md
