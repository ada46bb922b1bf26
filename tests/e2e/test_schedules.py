"""Every mode as a user runs it, with two rollout workers: what was trained is what the schedule promises."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

from asyncflow.control import SCHEDULES
from asyncflow.control.schedule import Schedule
from asyncflow.registry import build
from asyncflow.telemetry.certificate import read_certificate
from asyncflow.telemetry.fingerprints import read_fingerprints
from asyncflow.telemetry.trace import read_spans
from tests.conftest import merged
from tests.depth import deep
from tests.e2e.commands import processes_of, run_command, write_config

Small = Callable[..., dict[str, Any]]
STEPS, PROMPTS, GROUP_SIZE, GROUP_BITS = 6, 4, 4, 2
SLOW_ENGINE = """
import time
from asyncflow.engines.rollout.engine import SlotEngine

class Slow(SlotEngine):
    def __init__(self, model_path, **options):
        super().__init__(model_path, **options)
        step = self._slots.step

        def slowly():
            time.sleep({seconds})
            step()

        self._slots.step = slowly
"""

UNEVEN_ENGINE = """
import asyncio
from pathlib import Path
from asyncflow.engines.rollout.engine import SlotEngine

class Uneven(SlotEngine):
    async def generate(self, prompt_ids, *, key, **options):
        steps = Path("{run_dir}/fingerprints.jsonl")  # a line for each that is over
        while key.prompt_index in (1, 5) and (not steps.exists() or len(steps.read_text().splitlines()) <= key.prompt_index // 4):
            await asyncio.sleep(0.05)
        async for response in super().generate(prompt_ids, key=key, **options):
            yield response
"""


def trained(small: Small, tmp_path: Path, name: str, schedule: Any, **changes: Any) -> Path:
    """A run's folder, when it has ended well."""
    sections: dict[str, Any] = {
        "run": {"steps": STEPS, "name": name},
        "rollout": {"num_workers": 2, "num_slots": 16},
        "train": {"prompts_per_step": PROMPTS},
        "telemetry": {"fingerprints": True},
        "schedule": schedule,
    }
    folder = tmp_path / f"config-{name}"
    folder.mkdir()
    command = run_command("train", write_config(folder, small(**merged(sections, changes))))
    assert command.returncode == 0, command.stdout + command.stderr
    run_dir = tmp_path / "runs" / name
    assert not processes_of(run_dir)
    return run_dir


def versions_of(run_dir: Path) -> list[dict[int, list[int]]]:
    """By step, the versions that made each trained row, in the order of its tokens."""
    return [
        {row.row: row.spans[1::2] for group in step.groups for row in group.rows}
        for step in read_fingerprints(run_dir / "fingerprints.jsonl")
    ]


def own_rows(step: int) -> set[int]:
    groups = range(step * PROMPTS, (step + 1) * PROMPTS)
    return {(group << GROUP_BITS) + sample for group in groups for sample in range(GROUP_SIZE)}


def differs(first: Path, second: Path) -> bool:
    one, two = (load_file(run_dir / "model" / "model.safetensors") for run_dir in (first, second))
    return one.keys() != two.keys() or any((one[name] != two[name]).any() for name in one)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        pytest.param("synchronous", {}, id="synchronous", marks=deep),
        pytest.param("periodic", {}, id="periodic", marks=deep),
        pytest.param("delayed", {}, id="delayed", marks=deep),
        pytest.param("sub_step", {}, id="sub_step"),
        pytest.param("bounded", {"max_staleness": 1}, id="bounded", marks=deep),
        pytest.param("bounded", {"max_staleness": 2, "membership": "first_come"}, id="first_come"),
    ],
)
def test_a_run_keeps_what_its_schedule_promises(small: Small, tmp_path: Path, name: str, options: dict[str, Any]) -> None:
    run_dir = trained(small, tmp_path, "run", {"name": name, **options})
    schedule: Schedule = build("schedule", name, options, SCHEDULES)
    made = versions_of(run_dir)
    assert len(made) == STEPS
    for step, by_row in enumerate(made):
        assert len(by_row) == PROMPTS * GROUP_SIZE
        if schedule.membership == "strict":
            assert by_row.keys() == own_rows(step)
        for row, versions in by_row.items():
            admitted = (row >> GROUP_BITS) // PROMPTS
            assert all(version in schedule.interval(admitted) for version in versions), (step, row, versions)
            assert versions == sorted(set(versions)) and step - schedule.max_staleness <= versions[0] <= versions[-1] <= step
            assert len(versions) == 1 or schedule.installs_in_flight
    assert set().union(*made) == set().union(*map(own_rows, range(STEPS)))  # each once: there are as many

    certificate = read_certificate(run_dir)
    assert certificate is not None and certificate.voided == [] and certificate.schedule == name
    staleness = max(step - min(versions) for step, by_row in enumerate(made) for versions in by_row.values())
    spans = max(len(versions) for by_row in made for versions in by_row.values())
    assert (certificate.steps, certificate.max_staleness, certificate.max_spans) == (STEPS, staleness, spans)
    assert staleness <= schedule.max_staleness and certificate.rows_redelivered == 0
    assert name != "synchronous" or certificate.overlapped_steps == 0

    served = read_spans(run_dir / "spans.jsonl")
    for worker in ("rollout/0", "rollout/1"):
        spans = [span for span in served if span.worker == worker and span.task == "install"]
        # A flush may cut a span in two: the second half begins where the first one ends.
        installed = [span.version for span in spans if not any(span.start == other.end for other in spans)]
        assert installed == sorted(set(installed)) and installed, "nobody is called back in a run in which nobody dies"
    if name == "delayed":  # the old weights go on generating while the update is made: that is what it is for
        assert {step - version for step, by_row in enumerate(made[1:], 1) for (version,) in by_row.values()} == {1}


@deep
def test_two_delayed_runs_with_other_timing_are_the_same_run_to_the_bit(small: Small, tmp_path: Path) -> None:
    runs = [
        trained(
            small, tmp_path, f"salt-{salt}", "delayed",
            train={"accumulate": "exact"}, reward={"delays": {"mean_seconds": 0.1, "salt": salt}},
        )
        for salt in (1, 2)
    ]  # fmt: skip
    assert versions_of(runs[0]) == versions_of(runs[1])
    orders = [[[g.group for g in step.groups] for step in read_fingerprints(run / "fingerprints.jsonl")] for run in runs]
    assert orders[0] != orders[1], "the delays reordered nothing: this is no proof"
    assert not differs(*runs)


@deep
def test_the_reward_as_a_task_changes_no_bit(small: Small, tmp_path: Path) -> None:
    runs = [
        trained(small, tmp_path, place, "periodic", train={"accumulate": "exact"}, reward={"place": place})
        for place in ("rollout", "task")
    ]
    assert not differs(*runs)
    prints = [
        [
            {row.row: row.reward for group in step.groups for row in group.rows}
            for step in read_fingerprints(run / "fingerprints.jsonl")
        ]
        for run in runs
    ]
    assert prints[0] == prints[1] and len({reward for step in prints[0] for reward in step.values()}) > 1
    scored = [span for span in read_spans(runs[1] / "spans.jsonl") if span.task == "reward"]
    assert sum(span.rows for span in scored) == STEPS * PROMPTS * GROUP_SIZE and {span.worker for span in scored} == {"reward/0"}


def test_new_weights_are_installed_in_mid_response(small: Small, tmp_path: Path) -> None:
    (tmp_path / "engine.py").write_text(SLOW_ENGINE.format(seconds=0.02))
    run_dir = trained(
        small, tmp_path, "run", {"name": "bounded", "max_staleness": 2},
        rollout={"engine": {"path": f"{tmp_path / 'engine.py'}:Slow"}}, reward={"delays": {"mean_seconds": 0.1}},
    )  # fmt: skip
    spans = [versions for by_row in versions_of(run_dir) for versions in by_row.values()]
    assert any(len(versions) == 2 for versions in spans), "no response was made by two versions: this shows nothing"
    certificate = read_certificate(run_dir)
    assert certificate is not None and certificate.voided == [] and certificate.max_spans >= 2


@deep
def test_where_the_first_to_come_are_trained_slow_groups_are_passed_and_none_is_lost(small: Small, tmp_path: Path) -> None:
    """Groups 1 and 5 have no response until their step is over. Rewards are a task of their own, and come later still."""
    (tmp_path / "engine.py").write_text(UNEVEN_ENGINE.format(run_dir=tmp_path / "runs" / "run"))
    run_dir = trained(
        small, tmp_path, "run", {"name": "bounded", "max_staleness": 3, "membership": "first_come"},
        rollout={"engine": {"path": f"{tmp_path / 'engine.py'}:Uneven"}}, reward={"place": "task"},
    )  # fmt: skip
    made = versions_of(run_dir)
    trained_rows = [row for by_row in made for row in by_row]
    assert len(trained_rows) == len(set(trained_rows)) and set(trained_rows) == set().union(*map(own_rows, range(STEPS)))
    assert all(len(by_row) == PROMPTS * GROUP_SIZE for by_row in made)
    trained_in = {row >> GROUP_BITS: step for step, by_row in enumerate(made) for row in by_row}
    assert trained_in[1] > 0 and trained_in[5] > 1
    certificate = read_certificate(run_dir)
    assert certificate is not None and certificate.voided == [] and certificate.max_staleness <= 3
