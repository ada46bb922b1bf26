"""Trainers that die in the midst of a run: the run is resumed from its newest checkpoint, and trains what it would have trained."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from asyncflow.cluster.base import WorkerDied
from asyncflow.config import parse
from asyncflow.run.attempt import Attempt
from asyncflow.run.job import Job, Listener
from asyncflow.run.state.saving import places_of
from asyncflow.telemetry.certificate import read_certificate
from tests.conftest import merged
from tests.depth import deep, in_gate
from tests.e2e.commands import rows
from tests.e2e.test_resume import STEPS, check_each_once, check_same, tree
from tests.patience import patience
from tests.vllm.servers import fake_python

PERIODIC: dict[str, Any] = {
    "schedule": "periodic",
    "checkpoint": {"every_steps": 3, "in_memory": True},
    "telemetry": {"flush_seconds": 0.02},  # a checkpoint is whole when the metrics of its last step are written
}
DELAYED = merged(PERIODIC, {"schedule": "delayed", "train": {"old": "previous"}})
TWO_RANKS = merged(PERIODIC, {"plan": {"train": {"dp": 2}}})
CRITIC = merged(PERIODIC, {"algorithm": "ppo"})
CUT = merged(PERIODIC, {"plan": {"train": {"tp": 2}}})
ADAPTER = merged(DELAYED, {"model": {"lora": {"rank": 4}}})
MANY = merged(DELAYED, {"rollout": {"num_workers": 2}, "eval": {"num_workers": 1}})
ON_DISK: dict[str, Any] = {"checkpoint": {"in_memory": False}}


class Killer(Listener):
    """Observer that kills workers: the `kills`, each after a step, the first time that it is committed. Where there are checkpoints
    in memory, it waits for one of all that is committed; `open`: the steps that were open at each kill."""

    def __init__(self, config: Mapping[str, Any], kills: Mapping[int, str]) -> None:
        self.said: list[str] = []
        self.steps: list[int] = []
        self.open: list[int] = []
        self.rollouts: list[int] = []  # processes at each step
        self._kills = dict(kills)
        self.job = Job(parse(config), self)

    def log(self, text: str) -> None:
        self.said.append(text)

    def step(self, step: int, row: Mapping[str, float]) -> None:
        self.steps.append(step)
        self.rollouts.append(self.job.attempt.cluster.pids().get("rollout/0", 0) if self.job.attempt is not None else 0)
        if (worker := self._kills.pop(step, None)) is not None:
            self._killed: set[str] = set()
            self._killing = asyncio.ensure_future(self._kill(worker))

    async def _kill(self, worker: str) -> None:
        held = 0.5
        while not self._has_killed(worker):
            with self._nothing_generated():  # or the trainer may be ahead of its checkpoints to the run's end
                over = asyncio.get_running_loop().time() + patience(held)
                while not self._has_killed(worker) and asyncio.get_running_loop().time() < over:
                    await asyncio.sleep(0.002)
            held = min(2 * held, 4.0)  # a step that ends while a checkpoint is written has none; or the writing takes so long
            await asyncio.sleep(0.02)

    def _has_killed(self, worker: str) -> bool:
        """Kill it, if there is a checkpoint of all that is committed; or it has been."""
        if worker in self._killed:
            return True
        driver, memory = self.job.driver, self.job._folder.memory
        assert driver is not None
        committed = driver.ledger.ledger.committed
        if memory is None or any(committed in place.versions() for place in places_of(self.job.config, memory).values()):
            self.open.append(committed)
            self.job.kill(worker)
            self._killed.add(worker)
        return worker in self._killed

    @contextmanager
    def _nothing_generated(self) -> Iterator[None]:
        assert self.job.attempt is not None
        processes = [psutil.Process(pid) for name, pid in self.job.attempt.cluster.pids().items() if name.startswith("rollout/")]
        for process in processes:
            process.suspend()
        try:
            yield
        finally:
            for process in processes:
                with suppress(psutil.NoSuchProcess):
                    process.resume()

    def run(self) -> bool:
        async def main() -> bool:
            async with asyncio.timeout(patience(120.0)):
                return await self.job.run()

        return asyncio.run(main())


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[dict[str, Any]], Path]:
    """Folder of a run in a mode that nothing has disturbed, one for all tests."""
    made: dict[str, Path] = {}

    def of(mode: dict[str, Any]) -> Path:
        if (key := repr(mode)) not in made:
            whole = Killer(tree(tmp_path_factory.mktemp("whole"), mode), {})
            assert whole.run(), whole.said
            made[key] = whole.job.config.run_dir
        return made[key]

    return of


@pytest.mark.parametrize(
    ("mode", "kills"),
    in_gate(
        (DELAYED, {0: "trainer/0", 4: "trainer/0"}),
        of=[
            (DELAYED, {0: "trainer/0", 4: "trainer/0"}),
            (merged(DELAYED, ON_DISK), {0: "trainer/0", 4: "trainer/0"}),
            (PERIODIC, {2: "trainer/0", 3: "trainer/0", 6: "trainer/0"}),
            (TWO_RANKS, {0: "trainer/1", 4: "trainer/0"}),
            (CUT, {0: "trainer/1", 4: "trainer/0"}),
            (CRITIC, {2: "critic", 4: "trainer/0"}),
            (merged(CRITIC, ON_DISK), {4: "critic", 6: "trainer/0"}),
            (ADAPTER, {2: "trainer/0", 4: "trainer/0"}),
            (MANY, {1: "trainer/0"}),
        ],
    ),
)
def test_a_run_whose_trainers_die_comes_to_the_bits_of_one_that_nothing_disturbed(
    mode: dict[str, Any], kills: dict[int, str], tmp_path: Path, undisturbed: Callable[[dict[str, Any]], Path]
) -> None:
    killer = Killer(tree(tmp_path / "killed", mode), kills)
    assert killer.run(), killer.said
    run_dir = killer.job.config.run_dir
    check_same(run_dir, undisturbed(mode))
    if mode is not TWO_RANKS:  # each rank has fingerprints of its own groups
        check_each_once(run_dir)
    told = [line for line in killer.said if "the run is resumed from its newest checkpoint in" in line]
    assert len(told) == len(kills) and all("SIGKILL" in line for line in told), killer.said
    certificate = read_certificate(run_dir)
    assert certificate is not None and not certificate.voided and certificate.steps == STEPS
    if mode["checkpoint"]["in_memory"]:
        assert certificate.resumed_at == killer.open and killer.steps == list(range(STEPS))  # nothing is trained twice
        assert not list(Path("/dev/shm").glob(f"asyncflow-{os.getpid()}-*"))
    else:
        assert len(certificate.resumed_at) == sum(step >= 3 for step in kills)  # before the first checkpoint it begins anew
    assert len(set(killer.rollouts)) == 1, "a rollout worker stays, with its engine"
    assert killer.steps[-1] == STEPS - 1 and len(killer.job.rows) == STEPS
    assert killer.job.evaluations == rows(run_dir / "eval.jsonl")


class Waiting(Killer):
    """Observer that kills the rollout worker, too, while it waits for the next attempt."""

    async def _kill(self, worker: str) -> None:
        assert self.job.attempt is not None
        self._rollout = self.job.attempt.cluster.pids()["rollout/0"]
        await super()._kill(worker)

    def log(self, text: str) -> None:
        super().log(text)
        if text.startswith("resumed from "):  # before the next attempt has a driver: a worker that met it would generate
            os.kill(self._rollout, signal.SIGKILL)


@pytest.mark.parametrize("mode", in_gate(DELAYED, of=[PERIODIC, DELAYED]), ids=["periodic", "delayed"])
def test_a_rollout_worker_that_dies_while_it_waits_for_the_next_attempt_is_started_again(
    mode: dict[str, Any], tmp_path: Path, undisturbed: Callable[[dict[str, Any]], Path]
) -> None:
    killer = Waiting(tree(tmp_path / "killed", mode), {2: "trainer/0"})
    assert killer.run(), killer.said
    check_same(killer.job.config.run_dir, undisturbed(mode))
    before, after = dict.fromkeys(killer.rollouts)
    assert before and after and killer.steps == list(range(STEPS))


class Servers(Killer):
    """Observer that also notes the processes of the rollout worker's vLLM servers."""

    def __init__(self, config: Mapping[str, Any], kills: Mapping[int, str]) -> None:
        super().__init__(config, kills)
        self.servers: list[set[int]] = []
        self._python = str(config["rollout"]["engine"]["python"])

    def step(self, step: int, row: Mapping[str, float]) -> None:
        super().step(step, row)
        below = psutil.Process(self.rollouts[-1]).children(recursive=True)
        self.servers.append({process.pid for process in below if self._python in process.cmdline()})


def test_vllm_servers_stay_when_a_trainer_dies(tmp_path: Path) -> None:
    """What takes longest to start goes on: the servers, with the weights that they have."""
    engine = {"name": "vllm", "python": str(fake_python(tmp_path))}
    mode = merged(PERIODIC, {"rollout": {"engine": engine}, "eval": {"path": None, "every_steps": None}})
    killer = Servers(tree(tmp_path, mode), {1: "trainer/0"})
    assert killer.run(), killer.said
    assert killer.steps == list(range(STEPS)) and len(set(killer.rollouts)) == 1
    (servers,) = set(map(frozenset, killer.servers))
    assert servers
    assert killer.job.certificate is not None and killer.job.certificate.resumed_at == killer.open


class Again(Killer):
    """Observer that kills the trainer of each attempt that follows on a death, before it has trained a step."""

    def log(self, text: str) -> None:
        super().log(text)
        if "is resumed from its newest checkpoint" in text:
            self._killing_next = asyncio.ensure_future(self._kill_next(self.job.attempt))

    async def _kill_next(self, before: Attempt | None) -> None:
        while (attempt := self.job.attempt) is None or attempt is before or "trainer/0" not in attempt.cluster.pids():
            await asyncio.sleep(0.002)
        self.job.kill("trainer/0")


def test_a_trainer_that_dies_more_often_than_it_may_with_no_step_between_ends_the_run(tmp_path: Path) -> None:
    mode = merged(PERIODIC, {"train": {"max_restarts": 1}, "eval": {"path": None, "every_steps": None}})
    killer = Again(tree(tmp_path, mode), {2: "trainer/0"})
    with pytest.raises(WorkerDied, match=r"worker trainer/0 .* was ended by SIGKILL"):
        killer.run()
    assert sum("is resumed from its newest checkpoint" in line for line in killer.said) == 1
    assert (killer.job.config.run_dir / "report.html").exists() and killer.job.certificate is not None
    assert len(killer.job.certificate.resumed_at) == 1


HANGING = """
import os, signal, socket
from pathlib import Path

from asyncflow.engines.train.torch_engine import TorchEngine
from asyncflow.run_dir import control_socket

class Hanging(TorchEngine):
    steps = 0

    async def optim_step(self, *arguments, **named):
        Hanging.steps += 1
        marker = Path(__file__).with_suffix(".once")
        if Hanging.steps == 3 and not marker.exists():
            marker.touch()
            for name in os.listdir("/proc/self/fd"):
                try:
                    link = socket.socket(fileno=os.dup(int(name)))
                    if link.getpeername() == str(control_socket(marker.parent / "killed" / "test")):
                        link.shutdown(socket.SHUT_RDWR)
                except OSError:
                    pass  # no socket, or one without a peer
            os.kill(os.getpid(), signal.SIGSTOP)
        return await super().optim_step(*arguments, **named)
"""


def test_a_trainer_that_has_gone_and_does_not_end_is_killed_and_the_run_goes_on(
    tmp_path: Path, undisturbed: Callable[[dict[str, Any]], Path]
) -> None:
    """It has no connection any more, and its process hangs. With generators outside nothing else would ever notice."""
    (tmp_path / "hanging.py").write_text(HANGING)
    engine = {"train": {"engine": {"path": f"{tmp_path / 'hanging.py'}:Hanging"}}, "queue": {"lease_seconds": 4}}
    observer = Killer(tree(tmp_path / "killed", PERIODIC, engine), {})
    assert observer.run(), observer.said
    (said,) = [line for line in observer.said if "does not end" in line]
    assert re.fullmatch(
        r"worker trainer/0 \(process \d+\) has not been connected for 4 s \(queue.lease_seconds\), and does not end: it is killed",
        said,
    )
    weights, expected = (folder / "model" for folder in (observer.job.config.run_dir, undisturbed(PERIODIC)))
    assert (weights / "model.safetensors").read_bytes() == (expected / "model.safetensors").read_bytes()


FAILING = """
from asyncflow.engines.train.torch_engine import TorchEngine

class Failing(TorchEngine):
    async def forward_backward(self, micro_batches, objective):
        raise LookupError("the wheel came off")
"""


@deep
def test_a_trainer_that_would_fail_again_is_not_started_again(tmp_path: Path) -> None:
    (tmp_path / "engine.py").write_text(FAILING)
    engine = {"path": f"{tmp_path / 'engine.py'}:Failing"}
    killer = Killer(tree(tmp_path, merged(PERIODIC, {"train": {"engine": engine}})), {})
    with pytest.raises(WorkerDied, match="the wheel came off"):
        killer.run()
    assert not [line for line in killer.said if "is resumed" in line]
