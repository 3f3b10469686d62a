"""What a diagnosis asks for is done once."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

from entrypoint.healing import machine
from entrypoint.supervisor.diagnosis import Diagnosis
from entrypoint.supervisor.serve import Supervisor


def test_a_planned_restart_does_not_repair_again() -> None:
    seen = []

    async def recover(prepared: object, diagnosis: Diagnosis) -> object:
        seen.append((diagnosis.repair, diagnosis.clear_jit_cache, diagnosis.wait_for_memory))
        return prepared

    supervisor = cast(Any, Supervisor.__new__(Supervisor))
    supervisor._group = SimpleNamespace(recovering=lambda: None)
    supervisor._launch, supervisor._prepared = SimpleNamespace(recover=recover), object()
    supervisor._diagnosis = Diagnosis(cast(Any, None))
    supervisor._diagnosis.repair, supervisor._diagnosis.clear_jit_cache = (), True
    supervisor._diagnosis.wait_for_memory = True
    for _ in range(2):
        assert asyncio.run(supervisor._recover(0.0)) == machine.Recovered()
    assert seen == [((), True, True), (None, False, False)]
