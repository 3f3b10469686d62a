"""What a standby holds of the host's memory stands in the plan."""

from __future__ import annotations

from dataclasses import replace

import planned

MIB = 1 << 20


def test_one_process_for_each_rank_of_the_node_and_two_more() -> None:
    off, on = (planned.make("glm-5-nvfp4", planned.rtx(), STANDBY=state) for state in ("off", "on"))
    assert "standby_bytes" not in (off.host or {})
    assert on.host == {**(off.host or {}), "standby_bytes": 10 * 890 * MIB}
    assert on.warnings == off.warnings


def test_a_host_that_cannot_carry_it_is_warned_and_served() -> None:
    box = replace(planned.rtx(), host_memory_bytes=16 << 30)
    made = planned.make("glm-5-nvfp4", box, STANDBY="on")
    assert made.feasible
    assert any("RELAUNCH_STANDBY=on" in warning and "8.69 GiB" in warning for warning in made.warnings), made.warnings
