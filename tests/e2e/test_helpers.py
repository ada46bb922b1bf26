"""Helpers in whole runs: no bit depends on them, whoever is killed or stands still, and they compute while rollout is idle."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest

from asyncflow.config import parse
from asyncflow.engines.train.frozen_engine import FrozenEngine
from asyncflow.engines.train.training import Training
from asyncflow.run.services import cores
from asyncflow.run.state.resume import CRITIC_FINGERPRINTS
from asyncflow.telemetry.certificate import read_certificate
from asyncflow.telemetry.fingerprints import read_fingerprints
from asyncflow.telemetry.trace import read_spans
from asyncflow.threads import num_cores
from asyncflow.trainer import Trainer
from tests.conftest import merged
from tests.depth import deep, in_gate
from tests.e2e.test_parallel import of_metric
from tests.e2e.test_restarts import CRITIC, TWO_RANKS, Killer
from tests.e2e.test_resume import STEPS, prints, tree
from tests.patience import patience

HELPED: dict[str, Any] = {
    "train": {"helpers": 2},
    "rollout": {"num_workers": 2, "max_restarts": 100},
    "queue": {"lease_seconds": 5},
}
MODES = ("synchronous", "periodic", "delayed")


class Disturber(Killer):
    """Observer that kills workers, and has them stand still for a while, after steps that a seed draws. The trainer too."""

    def __init__(self, config: Mapping[str, Any], seed: int | None) -> None:
        super().__init__(config, {})
        self._rng = None if seed is None else random.Random(seed)

    def group(self, step: int) -> None:
        """While a step is trained, too."""
        if self._rng is not None and self._rng.random() < 0.15:
            self._disturb(self._rng.choice(["rollout/0", "rollout/1", "trainer/0"]), self._rng)

    def _disturb(self, worker: str, rng: random.Random) -> None:
        states = self.job.driver.hub.states if self.job.driver is not None else {}
        if worker not in states:
            return
        pid, loop = states[worker].pid, asyncio.get_running_loop()
        with suppress(ProcessLookupError):  # it was killed before, and nobody has noticed yet
            if worker != "trainer/0" and rng.random() < 0.4:
                os.kill(pid, signal.SIGKILL)
            else:
                os.kill(pid, signal.SIGSTOP)
                loop.call_later(rng.uniform(0.05, 0.6), _goes_on, pid)


def _goes_on(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)


@pytest.mark.parametrize(("mode", "seed"), in_gate(("synchronous", 1), of=[(mode, seed) for mode in MODES for seed in range(1, 4)]))
def test_helpers_leave_no_trace_whoever_is_killed_or_stands_still(mode: str, seed: int, tmp_path: Path) -> None:
    train = {"responses_per_micro_batch": 2, **({"old": "previous"} if mode == "delayed" else {})}
    schedule = {"schedule": mode, "train": train}  # a group is two passes, so that helpers can take part in every round
    alone = Disturber(tree(tmp_path / "alone", schedule, {"train": {"helpers": 0}}), None)
    assert alone.run(), alone.said
    helped = Disturber(tree(tmp_path / "helped", schedule, HELPED), seed)
    assert helped.run(), helped.said
    # A worker that is killed takes its samples with it; what was trained, and what came of it, is the same.
    assert prints(helped.job.config.run_dir) == prints(alone.job.config.run_dir)
    spans = {name: read_spans(run.job.config.run_dir / "spans.jsonl") for name, run in (("alone", alone), ("helped", helped))}
    assert not any(span.task == "helper_pass" for span in spans["alone"])
    passes = [span for span in spans["helped"] if span.task == "helper_pass"]
    assert len(helped.steps) == STEPS
    assert all(span.worker == "trainer/0" and not span.is_lane for span in passes)
    if mode == "synchronous" and num_cores() > 1:  # nothing is generated while a step is trained
        assert passes


def test_helpers_of_ranks_and_of_a_critic_leave_no_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver lends as on a machine of 64 cores, so that these may compute at any time."""
    monkeypatch.setattr(cores, "num_cores", lambda: 64)
    sections = {
        "algorithm": "ppo",
        "run": {"steps": 3},
        "plan": {"train": {"dp": 2}},
        "train": {"responses_per_micro_batch": 2, "tokens_per_micro_batch": 200, "skip_zero_advantages": False},
    }
    made = []
    for name, count in (("alone", 0), ("helped", 1)):
        run = Disturber(tree(tmp_path / name, sections, {"train": {"helpers": count}}), None)
        assert run.run(), run.said
        run_dir = run.job.config.run_dir
        critic = msgspec.to_builtins(read_fingerprints(run_dir / CRITIC_FINGERPRINTS))
        made.append((prints(run_dir), [step["tensors"] for step in critic]))
        spans = [span for span in read_spans(run_dir / "spans.jsonl") if span.task == "helper_pass"]
        assert {span.worker for span in spans} == ({"trainer/0", "trainer/1", "critic"} if count else set())
        assert not any(span.is_lane for span in spans)
    assert made[0] == made[1] and len(made[0][0]) == len(made[0][1]) == 3


@deep
@pytest.mark.parametrize(
    ("mode", "kills"),
    [(TWO_RANKS, {0: "trainer/1", 4: "trainer/0"}), (CRITIC, {2: "critic", 4: "trainer/0"})],
    ids=["ranks", "critic"],
)
def test_who_dies_with_its_helpers_has_new_ones_and_the_same_bits(
    mode: dict[str, Any], kills: dict[int, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cores, "num_cores", lambda: 64)
    made, sections = [], merged(mode, {"train": {"skip_zero_advantages": False}})
    for name, count in (("alone", 0), ("helped", 1)):
        run = Killer(tree(tmp_path / name, sections, {"train": {"helpers": count}}), kills if count else {})
        assert run.run(), run.said
        run_dir = run.job.config.run_dir
        made.append(prints(run_dir))
        workers = {span.worker for span in read_spans(run_dir / "spans.jsonl") if span.task == "helper_pass"}
        assert workers >= set(kills.values()) if count else not workers
    assert made[0] == made[1] and len(made[0]) == STEPS


def test_a_rollout_worker_computes_with_what_nobody_else_does(tmp_path: Path) -> None:
    run = Disturber(
        tree(tmp_path, {"rollout": {"num_threads": "auto"}, "run": {"steps": 2}, "train": {"accumulate": "fp32"}}), None
    )
    assert run.run(), run.said
    assert run.job.certificate is not None
    assert run.job.certificate.why_not_deterministic.startswith("rollout.num_threads=auto: the number of threads changes")


def test_cores_are_dealt_to_all_roles_after_each_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine of 64 cores; the numbers of threads of this one are not touched."""
    used: dict[str, list[int]] = {"trainer": [], "reference": []}

    async def use_threads(engine: FrozenEngine, count: int) -> None:
        used["reference"].append(count)

    monkeypatch.setattr(cores, "num_cores", lambda: 64)
    monkeypatch.setattr(Training, "use_threads", lambda training, count: used["trainer"].append(count))
    monkeypatch.setattr(FrozenEngine, "use_threads", use_threads)
    train = {"num_threads": "auto", "accumulate": "fp32", "reference": "task"}
    changes = {"cluster": "inline", "train": train, "run": {"steps": 3}, "algorithm": {"name": "grpo", "kl_coefficient": 0.01}}
    config = tree(tmp_path, changes)
    with Trainer.from_config(config) as trainer:
        assert trainer.step() is not None
        deadline = time.monotonic() + patience(30)
        while not all(used.values()):  # they hear of it beside the steps
            assert time.monotonic() < deadline, used
            time.sleep(0.01)
        while trainer.step() is not None:
            pass
    assert max(used["trainer"]) > 1 and max(used["reference"]) > 1
    run_dir = parse(config).run_dir
    shares = of_metric(run_dir, "perf/threads")
    assert len(shares) == 3 and 3 / 64 <= max(shares) <= 1
    certificate = read_certificate(run_dir)
    assert certificate is not None and "train.num_threads=auto: the number of threads changes" in certificate.why_not_deterministic
