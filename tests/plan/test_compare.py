"""Two plan documents side by side: what is named, in which part, and what is left out."""

from __future__ import annotations

from typing import Any

from entrypoint.plan import compare

PLAN: dict[str, Any] = {
    "feasible": True,
    "model": {"id": "org/model", "revision": "a", "bytes": 10},
    "parallel": {"tp": 8},
    "max_total_tokens": 1000,
    "per_gpu": [{"kv_bytes": 5}, {"kv_bytes": 7}],
    "decisions": [{"setting": "max_total_tokens", "value": 1000, "source": "computed", "reason": "what is left"}],
    "warnings": [],
    "engine": {
        "argv": ["/a/.venv/bin/python", "-m", "sglang.launch_server", "--tp-size", "8", "--enable-metrics"],
        "env": {"PATH": "/a/.venv/bin:/bin"},
    },
}


def changed(**parts: Any) -> list[tuple[str, str, Any, Any]]:
    found = compare.plans(PLAN, PLAN | parts)
    return [(row.part, row.name, row.before, row.after) for row in found]


def test_a_plan_is_the_same_as_itself() -> None:
    assert changed() == []


def test_the_place_of_an_installation_is_no_difference() -> None:
    engine = {
        "argv": ["/b/.venv/bin/python", *PLAN["engine"]["argv"][1:]],
        "env": {"PATH": "/b/.venv/bin:/bin"},
    }
    assert changed(engine=engine) == []


def test_flags_are_compared_by_name_with_all_their_values() -> None:
    engine = {"argv": ["python", "--tp-size", "4", "--cuda-graph-bs", "1", "-2"], "env": {}}
    assert changed(engine=engine) == [
        ("flags", "--tp-size", "8", "4"),
        ("flags", "--enable-metrics", True, None),
        ("flags", "--cuda-graph-bs", None, "1 -2"),
        ("environment", "PATH", "VENV/bin:/bin", None),
    ]


def test_a_changed_value_has_the_later_plans_reason() -> None:
    decisions = [PLAN["decisions"][0] | {"value": 900, "reason": "a larger margin"}]
    (row,) = compare.plans(PLAN, PLAN | {"max_total_tokens": 900, "decisions": decisions})
    assert row.document() == {
        "part": "plan",
        "name": "max_total_tokens",
        "from": 1000,
        "to": 900,
        "reason": "a larger margin",
    }


def test_memory_is_that_of_the_fullest_gpu() -> None:
    assert changed(per_gpu=[{"kv_bytes": 6}, {"kv_bytes": 7}]) == []
    assert changed(per_gpu=[{"kv_bytes": 8}, {"kv_bytes": 7}]) == [("memory", "kv_bytes", 7, 8)]


def test_warnings_come_and_go() -> None:
    assert changed(warnings=["slow"]) == [("warnings", "warning", None, "slow")]
    assert [row.before for row in compare.plans(PLAN | {"warnings": ["slow"]}, PLAN)] == ["slow"]


def test_a_document_of_an_older_version_may_lack_any_part() -> None:
    rows = compare.plans({"feasible": True, "engine": {}}, PLAN)
    assert {"model", "plan", "memory", "flags", "environment"} == {row.part for row in rows}
    assert all(row.before is None for row in rows)


def test_settings_that_one_version_alone_knows_and_changed_defaults_are_named() -> None:
    old = {"settings": [{"name": "RELAUNCH_OLD", "value": 1}, {"name": "RELAUNCH_PORT", "value": 30000}]}
    new = {"settings": [{"name": "RELAUNCH_PORT", "value": 30001}, {"name": "RELAUNCH_NEW", "value": "on"}]}
    rows = [(row.part, row.name, row.before, row.after) for row in compare.settings(old, new)]
    assert rows == [
        ("settings", "RELAUNCH_OLD", 1, None),
        ("settings", "RELAUNCH_PORT", 30000, 30001),
        ("settings", "RELAUNCH_NEW", None, "on"),
    ]
