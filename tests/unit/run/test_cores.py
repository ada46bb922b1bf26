"""Free cores: how many helpers of the trainer may compute, by what the rollout workers do, and who hears of it."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from asyncflow.config import parse
from asyncflow.control.signal import Signal
from asyncflow.run import helper_devices as module_of_helper_devices
from asyncflow.run.job import Job, Listener
from asyncflow.run.services import cores as module_of_cores
from asyncflow.run.services.cores import FreeCores, Pool, computing_beside, follow_threads, following_threads, lend
from asyncflow.telemetry.spans import Recorder, Span
from tests.patience import patience


def cores_of(monkeypatch: pytest.MonkeyPatch, count: int, busy: set[str], **sections: Any) -> tuple[FreeCores, Signal]:
    monkeypatch.setattr(module_of_cores, "num_cores", lambda: count)
    config, signal = parse({"model": {"path": "model"}, "data": {"path": "data"}, **sections}), Signal()

    def generating() -> set[str]:
        return {name for name in busy if name.startswith(("rollout/", "evaluator/"))}

    def beside() -> Counter[str]:
        return Counter(name.partition("/")[0] for name in busy - generating() - {"trainer"})

    return FreeCores(config, signal, generating, lambda: "trainer" in busy, beside), signal


@pytest.mark.parametrize(
    ("count", "sections", "expected"),
    [
        (2, {"train": {"helpers": 1}}, [1, 0, 0]),
        (3, {"train": {"helpers": 2}, "rollout": {"num_workers": 2}}, [2, 1, 0]),
        (8, {"train": {"helpers": 2}, "rollout": {"num_workers": 2}}, [2, 2, 2]),  # there are cores for all
        (5, {"train": {"helpers": 2}, "rollout": {"num_workers": 2, "num_threads": 2}}, [2, 2, 0]),
        (6, {"train": {"helpers": 2, "num_threads": 2}, "rollout": {"num_workers": 2, "num_threads": 2}}, [2, 1, 0]),
        (3, {"train": {"helpers": 2, "reference": "task"}}, [2, 1, 0]),
        (1, {"train": {"helpers": 1}}, [0, 0, 0]),
        (4, {"train": {"helpers": 0}}, [0, 0, 0]),
    ],
)
def test_a_worker_that_generates_has_its_cores_for_itself(
    count: int, sections: dict[str, Any], expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    busy: set[str] = set()
    cores, _ = cores_of(monkeypatch, count, busy, **sections)
    found = [len(cores.helpers_of("trainer"))]
    for worker in ("rollout/0", "rollout/1"):
        busy.add(worker)
        found.append(len(cores.helpers_of("trainer")))
    assert found == expected


@pytest.mark.parametrize(
    ("sections", "beside"),
    [
        ({"train": {"reference": "task"}}, "reference/0"),
        ({"algorithm": "ppo"}, "critic"),
        ({"algorithm": "ppo"}, "values/0"),
        ({"reward": {"place": "task", "model": {"path": "judge"}}}, "reward/0"),
    ],
)
def test_who_computes_beside_the_trainer_has_its_core_for_itself_while_it_does(
    sections: dict[str, Any], beside: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    busy: set[str] = set()
    cores, _ = cores_of(monkeypatch, 2, busy, **{**sections, "train": {"helpers": 1, **sections.get("train", {})}})
    found = [len(cores.helpers_of("trainer"))]
    for change in (busy.add, busy.discard):
        change(beside)
        found.append(len(cores.helpers_of("trainer")))
    assert found == [1, 0, 1]


def test_each_rank_of_a_trainer_has_as_many_helpers_as_there_are_cores_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    busy: set[str] = set()
    sections = {"plan": {"train": {"dp": 2}}, "train": {"helpers": 2}, "rollout": {"num_workers": 2, "num_threads": "auto"}}
    cores, _ = cores_of(monkeypatch, 7, busy, **sections)
    for working, helpers, threads in (
        ("trainer", 2, 1),
        ("trainer rollout/0", 2, 1),
        ("trainer rollout/0 rollout/1", 1, 1),
        ("rollout/0", 2, 7),
    ):
        busy.clear()
        busy.update(working.split())
        assert (len(cores.helpers_of("trainer")), cores.threads_now) == (helpers, threads), working
        num_generating = len(busy - {"trainer"})
        assert num_generating * threads + ("trainer" in busy) * 2 * (1 + helpers) <= 7


@pytest.mark.parametrize(
    ("count", "working", "of_trainer", "of_critic"),
    [
        (2, "trainer critic", 0, 0),
        (2, "critic", 0, 1),  # on the trainer's core
        (2, "trainer", 1, 0),  # on the critic's
        (4, "trainer critic", 2, 0),  # the trainer's have the first choice
        (4, "critic rollout/0", 1, 2),
        (4, "trainer critic rollout/0", 1, 0),
        (6, "trainer critic rollout/0", 2, 1),
        (4, "critic values/0", 1, 2),
        (8, "trainer critic", 2, 2),
    ],
)
def test_a_critic_has_helpers_on_the_cores_that_the_trainer_and_its_own_leave(
    count: int, working: str, of_trainer: int, of_critic: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    busy, sections = set(working.split()), {"algorithm": "ppo", "train": {"helpers": 2}, "rollout": {"num_threads": "auto"}}
    cores, _ = cores_of(monkeypatch, count, busy, **sections)
    assert (len(cores.helpers_of("trainer")), len(cores.helpers_of("critic"))) == (of_trainer, of_critic)
    helping = of_trainer * ("trainer" in busy) + of_critic * ("critic" in busy)
    generating = len(cores._generating_here)
    assert len(busy) - generating + helping + generating * cores.threads_now <= count
    most = cores.most_given()
    assert most is not None and most * count == len(busy) - generating + helping + generating * cores.threads_now


def test_a_worker_between_two_leases_computes_while_rows_are_ready_for_it() -> None:
    def controller(ready: int, *holders: str) -> Any:
        table = SimpleNamespace(counts=lambda: {"ready": ready})
        return SimpleNamespace(table=table, holders=lambda: dict.fromkeys(holders, 4))

    pools = {name: Pool(2, 1, False, "") for name in ("rollout", "trainer", "reference", "values", "critic")}
    controllers = {"rollout": controller(9, "rollout/0"), "reference": controller(0, "reference/1"), "values": controller(3)}
    assert computing_beside(pools, controllers) == {"reference": 1, "values": 2}
    controllers |= {"values": controller(0), "reward": controller(1)}
    assert computing_beside(pools, controllers) == {"reference": 1, "values": 0}


@pytest.mark.parametrize(
    ("changes", "pool"),
    [({"train": {"reference": "task"}}, "reference"), ({"algorithm": "ppo"}, "critic"), ({"algorithm": "ppo"}, "values")],
)
async def test_a_run_s_driver_knows_who_computes_beside_its_trainer(
    changes: dict[str, Any], pool: str, small: Callable[..., dict[str, Any]]
) -> None:
    """And says so at each change: a watcher sees both."""
    seen = set[int]()

    class Watched(Job):
        def group(self, step: int) -> None:
            if not seen and self.driver is not None:
                driver = self.driver
                driver.signal.watchers.append(lambda: seen.add(driver._beside().get(pool, 0)))
            super().group(step)

    tree = small(cluster="inline", **changes)
    if pool == "reference":
        tree["algorithm"] = {"name": "grpo", "kl_coefficient": 0.1}
    assert await Watched(parse(tree), Listener()).run()
    assert seen == {0, 1}


def test_a_helper_on_a_device_computes_while_that_one_has_nothing_to_generate(monkeypatch: pytest.MonkeyPatch) -> None:
    busy: set[str] = set()
    sections = {
        "train": {"device": "cuda"},
        "rollout": {"device": "cuda:1-3", "num_workers": 3},
        "eval": {"path": "d.jsonl", "num_workers": 1, "device": "cuda:2"},
        "plan": {"shares": {"helpers": "rollout"}},
    }
    cores, _ = cores_of(monkeypatch, 2, busy, **sections)
    assert cores.helpers_of("trainer") == (0, 1, 2)
    busy.add("rollout/0")
    assert cores.helpers_of("trainer") == (1, 2)
    busy.add("rollout/outside-0")  # a client computes elsewhere
    assert cores.helpers_of("trainer") == (1, 2)
    busy.add("evaluator/0")  # on the device of rollout/1
    assert cores.helpers_of("trainer") == (2,)
    assert cores.most_given() is None  # of the machine's cores they take none into account


@pytest.mark.parametrize(
    ("count", "sections", "expected"),
    [
        (2, {}, {"": 2, "trainer": 1, "rollout/0": 2, "trainer rollout/0": 1}),
        (8, {}, {"rollout/0": 8, "trainer rollout/0": 6}),  # of the others one is the trainer's, one a helper's
        (8, {"train": {"helpers": 3}}, {"trainer rollout/0": 4}),
        (8, {"train": {"num_threads": 2}}, {"trainer rollout/0": 6, "trainer": 6}),
        (8, {"rollout": {"num_workers": 3}, "train": {"helpers": 0}}, {"trainer rollout/0 rollout/1 rollout/2": 2, "trainer": 7}),
        (4, {"train": {"reference": "task"}}, {"rollout/0": 3, "trainer rollout/0": 1}),
        (1, {}, {"rollout/0": 1, "trainer rollout/0": 1}),
        (8, {"rollout": {"num_threads": 2}}, {"": 2, "rollout/0": 2, "trainer rollout/0": 2}),
    ],
)
def test_who_generates_has_the_cores_that_nobody_else_computes_on(
    count: int, sections: dict[str, Any], expected: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module_of_helper_devices, "num_cores", lambda: count)
    rollout = {"num_threads": "auto", **sections.get("rollout", {})}
    busy: set[str] = set()
    cores, _ = cores_of(monkeypatch, count, busy, **{**sections, "rollout": rollout})
    for working, threads in expected.items():
        busy.clear()
        busy.update(working.split())
        assert cores.threads_now == threads, working
        num_generating, train_threads = len(busy - {"trainer"}), sections.get("train", {}).get("num_threads", 1)
        used = num_generating * threads + ("trainer" in busy) * train_threads * (1 + len(cores.helpers_of("trainer")))
        assert used <= max(count, len(busy))


@pytest.mark.parametrize("guests", ["", "rollout/outside-0 rollout/outside-1 rollout/outside-2"])
def test_who_generates_on_another_machine_takes_no_core_of_this_one(guests: str, monkeypatch: pytest.MonkeyPatch) -> None:
    busy: set[str] = set()
    rollout = {"num_workers": 2, "num_threads": "auto"}
    cores, _ = cores_of(monkeypatch, 4, busy, rollout=rollout, train={"helpers": 3})
    for working, helpers, threads in (("", 3, 4), ("rollout/0", 2, 4), ("rollout/0 rollout/1", 1, 2)):
        busy.clear()
        busy.update([*working.split(), *guests.split()])
        assert (len(cores.helpers_of("trainer")), cores.threads_now) == (helpers, threads), working


def test_threads_are_counted_in_every_run_on_cores_as_the_workers_change(monkeypatch: pytest.MonkeyPatch) -> None:
    busy: set[str] = set()
    cores, signal = cores_of(monkeypatch, 2, busy, train={"helpers": 0}, rollout={"num_workers": 2})
    assert cores.most_given() == 0
    for working in ({"rollout/0"}, {"rollout/0", "rollout/1", "rollout/outside-0"}, {"trainer"}):  # a client computes elsewhere
        busy.clear()
        busy.update(working)
        signal.notify()
    assert cores.most_given() == 1.0  # not those that compute when the step ends
    assert cores.most_given() == 0.5
    busy.update(("rollout/0", "rollout/1"))
    signal.notify()
    assert cores.most_given() == 1.5
    elsewhere, _ = cores_of(monkeypatch, 2, busy, train={"device": "cuda"}, rollout={"device": "cuda"})
    assert elsewhere.most_given() is None


async def test_a_rollout_engine_uses_more_threads_while_the_trainer_computes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    busy, used, changed = {"trainer", "rollout/0"}, list[int](), asyncio.Event()

    async def use_threads(count: int) -> None:
        used.append(count)
        changed.set()

    cores, signal = cores_of(monkeypatch, 2, busy, rollout={"num_threads": "auto"})
    following = asyncio.create_task(follow_threads(cores, "rollout", use_threads, 1))
    for change, threads in ((busy.discard, 2), (busy.add, 1)):
        change("trainer")
        changed.clear()
        signal.notify()
        await asyncio.sleep(0)
        signal.notify()
        await asyncio.wait_for(changed.wait(), patience(10))
        assert used[-1] == threads
    cores.stop()
    await asyncio.wait_for(following, patience(10))
    assert used == [2, 1]


async def test_helpers_follow_what_the_workers_do_until_the_run_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    class Fake:
        def __init__(self) -> None:
            self.allowed, self.changed = list[int](), asyncio.Event()
            self.on_pass: Any = None

        def allow(self, numbers: Sequence[int]) -> None:
            self.allowed.append(len(numbers))
            self.changed.set()

        async def has(self, allowed: list[int]) -> None:
            while self.allowed != allowed:
                self.changed.clear()
                await asyncio.wait_for(self.changed.wait(), patience(10))

    busy, spans, helpers = {"rollout/0"}, list[Span](), Fake()
    cores, signal = cores_of(monkeypatch, 2, busy, train={"helpers": 1})
    recorder = Recorder("trainer/0", asyncio.get_running_loop().time, spans.append)
    lending = asyncio.create_task(lend(cores, "trainer", cast(Any, helpers), recorder))
    await asyncio.sleep(0)
    assert helpers.allowed == []  # none may, which is how it begins
    busy.clear()
    signal.notify()
    await helpers.has([1])
    threading.Thread(target=helpers.on_pass, args=(1.0, 3.0)).start()
    busy.add("rollout/0")
    signal.notify()
    await helpers.has([1, 0])
    busy.clear()
    signal.notify()
    await helpers.has([1, 0, 1])
    cores.stop()
    await asyncio.wait_for(lending, patience(10))
    assert helpers.allowed[3:] == [0, 0]
    assert [(span.task, span.start, span.end, span.is_lane) for span in spans] == [("helper_pass", 1.0, 3.0, False)]


AUTO: dict[str, Any] = {"rollout": {"num_threads": "auto"}, "train": {"num_threads": "auto", "helpers": 0}}


@pytest.mark.parametrize(
    ("count", "sections", "seconds", "trainer", "rollout"),
    [
        (8, AUTO, {"trainer": 3.0, "rollout": 1.0}, 6, 2),
        (8, AUTO, {"trainer": 1.0, "rollout": 1.0}, 4, 4),
        (8, AUTO, {"trainer": 1.0, "rollout": 100.0}, 1, 7),
        (8, AUTO, {}, 1, 7),  # nothing is known yet
        (2, AUTO, {"trainer": 3.0, "rollout": 1.0}, 1, 1),
        (1, AUTO, {"trainer": 3.0, "rollout": 1.0}, 1, 1),
        (
            8,
            {**AUTO, "rollout": {"num_threads": 3}},
            {"trainer": 1.0, "rollout": 9.0},
            5,
            3,
        ),  # who computes something gets what is left
        (8, {**AUTO, "train": {"num_threads": 2, "helpers": 0}}, {"trainer": 9.0, "rollout": 1.0}, 2, 6),
        (
            8,
            {**AUTO, "train": {**AUTO["train"], "accumulate": "exact"}},
            {"trainer": 9.0, "rollout": 1.0},
            1,
            7,
        ),  # bits are promised
        (8, {**AUTO, "train": {**AUTO["train"], "reference": "task"}}, {"trainer": 3.0, "rollout": 1.0, "reference": 2.0}, 4, 2),
    ],
)
def test_cores_are_dealt_by_what_each_pool_has_computed(
    count: int, sections: dict[str, Any], seconds: dict[str, float], trainer: int, rollout: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module_of_helper_devices, "num_cores", lambda: count)
    cores, _ = cores_of(monkeypatch, count, {"trainer", "rollout/0"}, **sections)
    assert cores.threads_of("trainer") == sections["train"]["num_threads"] if sections["train"]["num_threads"] != "auto" else 1
    cores.deal(seconds)
    assert (cores.threads_of("trainer"), cores.threads_of("rollout")) == (trainer, rollout)
    most = cores.most_given()
    assert most is not None and most * count <= max(count, 2)
    cores.deal({})
    assert cores.threads_of("trainer") == sections["train"]["num_threads"] if sections["train"]["num_threads"] != "auto" else 1


def test_the_seconds_of_pools_count_the_threads_that_they_were_dealt(monkeypatch: pytest.MonkeyPatch) -> None:
    cores, _ = cores_of(monkeypatch, 8, set(), **AUTO)
    lanes = ("rollout/0", "rollout/1", "evaluator/0", "trainer/0", "reward/0", "rollout/outside-0")
    spans = [Span(worker=worker, task="forward_backward", start=1.0, end=2.0) for worker in lanes]
    spans += [
        Span(worker="trainer/0", task="helper_pass", start=1.0, end=1.5, is_lane=False),
        Span(worker="rollout/0", task="wait", start=2.0, end=9.0, cause="rows"),
    ]
    alone = cores.seconds(spans, 0.0, 10.0)
    assert alone == {"reward": 1.0, "rollout": 3.0, "trainer": 1.5}
    cores.deal({"trainer": 3.0, "rollout": 1.0})
    assert cores.seconds(spans, 0.0, 10.0)["trainer"] == 6 * 1.5


def test_no_threads_are_dealt_where_the_number_is_fixed_or_the_engine_cannot_change_it(monkeypatch: pytest.MonkeyPatch) -> None:
    class Engine:
        async def use_threads(self, count: int) -> None: ...

    def why(engine: object, **sections: Any) -> str:
        config = parse({"model": {"path": "model"}, "data": {"path": "data"}, **sections})
        coroutines, said = following_threads(config, cast(Any, None), "trainer", engine)
        for coroutine in coroutines:
            coroutine.close()
        assert bool(coroutines) == bool(said)
        return said

    assert why(Engine(), train=AUTO["train"]).startswith("train.num_threads=auto: ")
    assert why(object(), train=AUTO["train"]) == ""
    assert why(Engine(), train={"num_threads": 4}) == ""
    assert why(Engine(), train={**AUTO["train"], "device": "cuda"}) == ""
    assert why(Engine(), train=AUTO["train"], cluster="ray") == ""
