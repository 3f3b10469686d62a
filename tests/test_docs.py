"""The pages say what the code does: settings, links, dashboard, alerts, presets."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from entrypoint import cli, errors
from entrypoint.config import presets, schema
from entrypoint.gateway.members import Member, metrics
from entrypoint.gateway.replicas import Replica

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(Path(__file__).parent / "control"))
import control_fakes as fakes  # noqa: E402

PAGES = [*ROOT.glob("docs/**/*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "env/README.md"]
SELECTOR = re.compile(r"\b(relaunch_[a-z0-9_]+)(?:\{([^}]*)\})?")
MATCHER = re.compile(r'(\w+)\s*(=~|!~|!=|=)\s*"([^"]*)"')


def gateway_metrics() -> str:
    replica = Replica("10.0.0.1", 30000, 30001)
    member = Member(replica, relay=None)  # type: ignore[arg-type]
    return metrics({replica: member}, router_up=True, generation=1).decode()


@pytest.fixture(scope="module")
def scrape() -> dict[str, list[dict[str, str]]]:
    """Label sets by sample name, from real scrapes of a starting and of a ready supervisor, and of a gateway."""
    found: dict[str, list[dict[str, str]]] = {}
    texts = [gateway_metrics()]
    for status in (fakes.starting(), fakes.ready()):
        with fakes.served(status, fakes.history(), gpus=fakes.nvml()) as address:
            texts.append(httpx.get(address + "/metrics", trust_env=False).text)
    for text in texts:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                # What Prometheus adds to each sample that it scrapes.
                labels = {**sample.labels, "instance": "box:30001", "job": "relaunch"}
                found.setdefault(sample.name, []).append(labels)
    return found


def selectors(expression: str) -> list[tuple[str, list[tuple[str, str, str]]]]:
    return [(m[1], MATCHER.findall(m[2] or "")) for m in SELECTOR.finditer(expression)]


def selects(labels: dict[str, str], matchers: list[tuple[str, str, str]]) -> bool:
    for name, operator, wanted in matchers:
        value = labels.get(name, "")
        equal = bool(re.fullmatch(wanted, value)) if "~" in operator else value == wanted
        if equal == operator.startswith("!"):
            return False
    return True


def check(expression: str, scrape: dict[str, list[dict[str, str]]]) -> None:
    found = selectors(expression)
    for name, matchers in found:
        assert name in scrape, f"{expression}: no metric {name}"
        assert any(selects(labels, matchers) for labels in scrape[name]), f"{expression}: {name} matches nothing"
    for labels in re.findall(r"\bby \(([^)]*)\)", expression):
        for label in labels.split(","):
            assert all(label.strip() in scrape[name][0] for name, _ in found), f"{expression}: no label {label}"
    assert expression.count("(") == expression.count(")")


def dashboard() -> dict[str, Any]:
    return json.loads((ROOT / "docs/grafana-dashboard.json").read_text())


def alerts() -> list[dict[str, Any]]:
    document = yaml.safe_load((ROOT / "docs/alerts.yml").read_text())
    return [rule for group in document["groups"] for rule in group["rules"]]


def test_every_query_of_the_dashboard_finds_something_in_a_real_scrape(scrape: dict[str, list[dict[str, str]]]) -> None:
    panels = dashboard()["panels"]
    queries = [target["expr"] for panel in panels for target in panel["targets"]]
    assert len(queries) >= 15
    for query in queries:
        check(query.replace("$instance", ".*"), scrape)
    assert len({panel["id"] for panel in panels}) == len(panels)
    for panel in panels:
        for target in panel["targets"]:
            for label in re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]):
                names = [name for name, _ in selectors(target["expr"])]
                assert all(label in scrape[name][0] for name in names), (panel["title"], label)


def test_panels_do_not_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in dashboard()["panels"]:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken, panel["title"]
        assert at["x"] + at["w"] <= 24
        taken |= cells


def test_every_alert_has_data_and_a_runbook(scrape: dict[str, list[dict[str, str]]]) -> None:
    operations = (ROOT / "docs/operations.md").read_text()
    for rule in alerts():
        check(rule["expr"], scrape)
        assert rule["labels"]["severity"] in ("critical", "warning")
        anchor = rule["annotations"]["runbook"].partition("#")[2]
        assert anchor in anchors(operations), rule["alert"]
        assert anchor == f"alert-{rule['alert'].lower()}"
    sections = {anchor for anchor in anchors(operations) if anchor.startswith("alert-")}
    assert sections == {f"alert-{rule['alert'].lower()}" for rule in alerts()}


def test_the_checker_notices_a_wrong_query(scrape: dict[str, list[dict[str, str]]]) -> None:
    for wrong in ("relaunch_redy == 1", 'relaunch_phase{phase="READDY"}', "sum by (cpu) (relaunch_ready)"):
        with pytest.raises(AssertionError):
            check(wrong, scrape)


def test_the_settings_page_is_not_stale_and_documents_every_setting() -> None:
    spec = importlib.util.spec_from_file_location("settings_doc", ROOT / "scripts/settings_doc.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    page = (ROOT / "docs/settings.md").read_text()
    assert page == module.render(), "run scripts/settings_doc.py"
    for record in schema.RECORDS.values():
        assert f"| `{record.name}` |" in page
        assert record.help.strip(), record.name
        assert record.group in module.GROUPS


def test_pages_name_only_settings_that_exist() -> None:
    known = {record.name for record in schema.RECORDS.values()}
    known |= {f"{record.name}_FILE" for record in schema.RECORDS.values() if record.secret}
    # The launcher's own, read by ./relaunch before any Python runs.
    known |= {"RELAUNCH_PYTHON", "RELAUNCH_RUN_ID", "RELAUNCH_"}
    for page in PAGES:
        for name in set(re.findall(r"\bRELAUNCH_[A-Z0-9_]*", page.read_text())):
            assert name in known, f"{page.relative_to(ROOT)}: {name}"


def test_links_inside_the_repository_lead_somewhere() -> None:
    for page in PAGES:
        text = page.read_text()
        for target in re.findall(r"\]\(([^)\s]+)\)", text):
            if target.startswith(("http://", "https://")):
                continue
            path, _, anchor = target.partition("#")
            file = (page.parent / path).resolve() if path else page
            assert file.exists(), f"{page.relative_to(ROOT)}: {target}"
            if anchor and file.suffix == ".md":
                assert anchor in anchors(file.read_text()), f"{page.relative_to(ROOT)}: {target}"


def test_the_exit_codes_of_the_page_are_the_code_s() -> None:
    text = (ROOT / "docs/operations.md").read_text()
    table = dict(re.findall(r"^\| (\d+) \| (.*) \|$", text[text.index("## Exit codes") :], re.MULTILINE))
    for cause, code in errors.EXIT_BY_CAUSE.items():
        assert f"`{cause}`" in table[str(code)], cause
    for code in (errors.EXIT_USAGE, errors.EXIT_GAVE_UP, errors.EXIT_STATE_IN_USE, errors.EXIT_CONFIG):
        assert str(code) in table


def test_the_list_of_presets_is_complete() -> None:
    listed = re.findall(r"^\| `([^`]+)` \| (.*) \|$", (ROOT / "env/README.md").read_text(), re.MULTILINE)
    assert dict(listed) == {name: presets.describe(text) for name, text in presets.read_all().items()}


def test_decisions_are_listed() -> None:
    folder = ROOT / "docs/decisions"
    listed = re.findall(r"\]\((\d{4}-[^)]+)\)", (folder / "README.md").read_text())
    assert listed == sorted(path.name for path in folder.glob("[0-9]*.md"))


def anchors(text: str) -> set[str]:
    """GitHub's anchors of a page's headings."""
    found = set()
    for heading in re.findall(r"^#+ (.+)$", text, re.MULTILINE):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        found.add(re.sub(r"[^\w\- ]", "", plain).replace(" ", "-"))
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_name_verbs_and_hosts_that_there_are(page: Path) -> None:
    """A command in a page can be pasted: its verb exists, and curl gets an address with a host."""
    parser = cli._parser()
    verbs = next(set(action.choices) for action in parser._actions if action.choices and "serve" in action.choices)
    code = "\n".join(_code(page.read_text()))
    for verb in re.findall(r"(?:^|[ \n])(?:\./)?relaunch ([a-z]+)\b", code):
        assert verb in verbs, f"relaunch {verb}"
    for command in re.findall(r"^curl [^\n]*", code, re.M):
        assert re.search(r"https?://[\w.\[]", command), command


def _code(text: str) -> list[str]:
    """Shell blocks and spans of code."""
    blocks = re.findall(r"^ *```sh\n(.*?)^ *```", text, re.S | re.M)
    return [*blocks, *re.findall(r"`([^`\n]+)`", re.sub(r"^ *```.*?^ *```", "", text, flags=re.S | re.M))]
