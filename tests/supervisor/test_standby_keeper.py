"""When a standby is prepared, when it is used, and that anything odd about it means a start without it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import pytest

from entrypoint.control.status import Status
from entrypoint.engine import leftovers
from entrypoint.supervisor import standby_keeper
from entrypoint.supervisor.standby_keeper import Identity, StandbyKeeper


@pytest.fixture(autouse=True)
def short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The directory for temporary files lies in the test's own, however long its name."""
    monkeypatch.setattr(standby_keeper.scratch, "places", lambda state_dir, number, _: [tmp_path / f"scratch-{number}"])


class FakeStandby:
    """What the keeper makes. ``answers``: whether it takes the word; ``problem``: what breaks it while it imports."""

    answers, problem, never_ready = True, None, False
    made: ClassVar[list[FakeStandby]] = []

    def __init__(self, argv: Any, env: Any, cwd: Path, run_id: str, sessions: set[int], children: int) -> None:
        self.argv, self.env, self.run_id, self.children = argv, env, run_id, children
        self.broken: str | None = None
        self.pid, self.killed = 4711, False
        self.tree = SimpleNamespace(ever={4711})
        FakeStandby.made.append(self)

    async def imported(self) -> None:
        if self.never_ready:
            await asyncio.Event().wait()
        self.broken = self.problem

    async def release(self) -> bool:
        return self.answers

    async def kill(self) -> list[object]:
        self.killed = True
        return []


class Rig:
    """A keeper, and what it logs. ``standby`` and the rest are the settings and the plan that it sees."""

    def __init__(self, tmp_path: Path, make: type[FakeStandby] = FakeStandby, **given: Any) -> None:
        self.lines: list[str] = []
        FakeStandby.made.clear()
        self.status = Status()
        self.environ = {"PATH": "/bin"}
        log = cast(Any, SimpleNamespace(info=self.lines.append))
        self.keeper = StandbyKeeper(self.environ, log, self.status, set(), cast(Any, make))
        self.settings = SimpleNamespace(**{"standby": "on", "nnodes": 1, "state_dir": tmp_path} | given)
        self.argv = ("python", "launcher.py", "--tp-size", "1")
        titles = {12: "scheduler", 13: "detokenizer"}
        self.engine = cast(Any, SimpleNamespace(tree=SimpleNamespace(known={11: 0, **titles, 14: 0}, titles=titles)))

    @property
    def planned(self) -> Any:
        run = SimpleNamespace(
            executed=lambda: self.argv,
            environment=lambda environ, mark, _: {**environ, "RELAUNCH_RUN_ID": mark},
        )
        return SimpleNamespace(
            loaded=SimpleNamespace(settings=self.settings),
            plan=SimpleNamespace(parallel={"dp_attention": 1}),
            command=run,
            inventory=SimpleNamespace(gpus=()),
        )

    async def prepared(self, number: int = 2) -> FakeStandby | None:
        self.keeper.prepare(number, self.planned, self.engine)
        if self.keeper._preparing is not None:
            await asyncio.wait({self.keeper._preparing}, timeout=5)
        return FakeStandby.made[-1] if FakeStandby.made else None

    async def take(self, number: int = 2) -> object | None:
        return await self.keeper.take(number, self.planned)


async def test_it_is_the_next_run_with_its_arguments_environment_and_mark(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    made = await rig.prepared()
    assert made is not None and rig.status.standby == "ready"
    assert made.run_id == made.env["RELAUNCH_RUN_ID"] == leftovers.run_id(tmp_path, 2)
    assert made.children == 2, "as many as have a title now: helpers do not count"
    assert await rig.take() is made
    assert (rig.status.standby, made.killed) == ("none", False)
    assert await rig.take() is None, "once"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda rig: setattr(rig, "argv", ("python", "launcher.py", "--tp-size", "2")), "arguments"),
        (lambda rig: rig.environ.update(MOE_NVFP4_DISPATCH="1"), "MOE_NVFP4_DISPATCH"),
        (lambda rig: setattr(FakeStandby.made[-1], "broken", "its scheduler (pid 3) ended"), "its scheduler (pid 3)"),
        (lambda rig: setattr(FakeStandby.made[-1], "answers", False), "it did not answer"),
    ],
)
async def test_whatever_does_not_fit_is_a_start_without_it_said_in_one_line(
    tmp_path: Path, change: Any, said: str
) -> None:
    rig = Rig(tmp_path)
    made = await rig.prepared()
    change(rig)
    assert await rig.take() is None
    assert made is not None and made.killed and rig.status.standby == "none"
    assert not (tmp_path / "scratch-2").exists()
    assert [line for line in rig.lines if said in line] == rig.lines[-1:]


async def test_no_value_of_the_environment_is_logged(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    await rig.prepared()
    rig.environ["HF_TOKEN"] = "secret"
    assert await rig.take() is None
    assert "HF_TOKEN" in rig.lines[-1] and "secret" not in " ".join(rig.lines)


async def test_one_that_is_not_ready_yet_is_ended_and_the_next_run_gets_a_new_one(tmp_path: Path) -> None:
    class Slow(FakeStandby):
        never_ready = True

    rig = Rig(tmp_path, Slow)
    rig.keeper.prepare(2, rig.planned, rig.engine)
    while not FakeStandby.made:
        await asyncio.sleep(0.01)
    assert await rig.take() is None
    assert FakeStandby.made[-1].killed
    rig.keeper.prepare(3, rig.planned, rig.engine)
    while len(FakeStandby.made) < 2:
        await asyncio.sleep(0.01)
    assert FakeStandby.made[-1].run_id.endswith("-3")
    await rig.keeper.drop("")


async def test_one_of_an_earlier_run_is_not_used_for_a_later_one(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    made = await rig.prepared(2)
    assert await rig.take(3) is None
    assert made is not None and made.killed and "RELAUNCH_RUN_ID" in rig.lines[-1]


async def test_one_that_breaks_while_it_imports_is_ended_at_once(tmp_path: Path) -> None:
    class Breaking(FakeStandby):
        problem = "a process of it ended while it imported"

    rig = Rig(tmp_path, Breaking)
    made = await rig.prepared()
    assert made is not None and made.killed
    assert (rig.lines[-1], rig.status.standby) == ("no standby: a process of it ended while it imported", "none")


@pytest.mark.parametrize(
    "given", [{"standby": "off"}, {"nnodes": 2}], ids=["off by default", "a group, whose ports are fixed"]
)
async def test_it_is_not_prepared(tmp_path: Path, given: dict[str, Any]) -> None:
    assert await Rig(tmp_path, **given).prepared() is None


async def test_it_is_not_prepared_where_host_memory_is_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(standby_keeper, "available_bytes", lambda: 3 << 30)
    rig = Rig(tmp_path)
    assert await rig.prepared() is None
    assert "host memory" in rig.lines[-1]


async def test_one_that_the_driver_names_on_a_gpu_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(standby_keeper, "_on_a_gpu", lambda *_: "the driver names its process 4711 on a GPU")
    rig = Rig(tmp_path)
    made = await rig.prepared()
    assert made is not None and made.killed and "4711" in rig.lines[-1]


def test_installed_packages_are_part_of_what_must_be_the_same(tmp_path: Path) -> None:
    one = Identity(("a",), {}, frozenset({("sglang-0.5.23.dist-info", 1.0)}))
    other = Identity(("a",), {}, frozenset({("sglang-0.5.23.dist-info", 2.0)}))
    assert one.differences(other) == ["packages"] and one.differences(one) == []
