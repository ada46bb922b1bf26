"""A run takes what the planner has chosen for it: pools of every task, with the processes of each."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from asyncflow.config import load
from asyncflow.planner.plan import find_plan, request, tree
from asyncflow.planner.search import Plan
from asyncflow.run.device_shares import num_devices
from asyncflow.settings import to_yaml
from asyncflow.telemetry.trace import read_spans
from tests.conftest import MODEL
from tests.depth import deep
from tests.e2e.commands import rows, run_command, write_config
from tests.e2e.test_resume import prints

Small = Callable[..., dict[str, Any]]
SCORER = """
import os
from pathlib import Path

def score(sample, file):
    with Path(file).open("a") as seen:
        seen.write(f"{os.getppid()}\\n")
    return float(len(sample.response) % 2)
"""
"""A scorer that writes which process scores: it is called in a fork of that."""


def planned(config: Path, devices: int, measured: Mapping[str, float], plan: Path) -> Plan:
    """The best plan of a configuration in which some work takes so many seconds, with its file."""

    async def found() -> Plan:
        asked = await request(load(config), devices=devices, device="cpu-core")
        asked = replace(asked, model=replace(asked.model, measured=measured))
        best = await find_plan(asked, processes=1, rows=300)
        plan.write_text(to_yaml(tree(best, asked)))
        return best.plans[0]

    return asyncio.run(found())


@deep
def test_a_run_has_the_reward_workers_and_processes_that_were_planned(small: Small, tmp_path: Path) -> None:
    (tmp_path / "scorer.py").write_text(SCORER)
    seen = tmp_path / "seen.txt"
    scorer = {"path": f"{tmp_path / 'scorer.py'}:score", "file": str(seen)}
    config = write_config(tmp_path, small(reward={"place": "task", "scorer": scorer}))
    best = planned(config, 3, {"reward_seconds": 1.0}, tmp_path / "plan.yaml")
    workers, processes = best.config.plan.reward.num_workers, best.config.reward.num_workers
    assert workers * processes > 1, "rewards are what binds"
    command = run_command("train", config, f"plan={tmp_path / 'plan.yaml'}")
    assert command.returncode == 0, command.stderr
    spans = read_spans(next((tmp_path / "runs").iterdir()) / "spans.jsonl")
    assert {span.worker for span in spans if span.task == "reward"} == {f"reward/{i}" for i in range(workers)}
    assert len(set(seen.read_text().split())) == workers * processes


def test_a_run_has_the_storage_units_that_were_planned(small: Small, tmp_path: Path) -> None:
    config = write_config(tmp_path, small(queue={"place": "workers"}))
    units = planned(config, 2, {"unit_seconds": 2.0}, tmp_path / "plan.yaml").config.queue.num_units
    assert units > 1, "units are what binds"
    command = run_command("train", config, f"plan={tmp_path / 'plan.yaml'}")
    assert command.returncode == 0, command.stderr
    (run_dir,) = (tmp_path / "runs").iterdir()
    assert {log.name for log in (run_dir / "logs").glob("storage-*.log")} == {f"storage-{i}.log" for i in range(units)}


def test_a_run_has_the_tasks_on_shared_devices_that_were_planned_with_the_same_bits(small: Small, tmp_path: Path) -> None:
    tree = small(algorithm={"name": "grpo", "kl_coefficient": 0.1}, train={"reference": "task", "accumulate": "exact"})
    config = write_config(tmp_path, tree)
    best = planned(config, 2, {"reference_token_seconds": 1e-9}, tmp_path / "plan.yaml")
    assert best.devices == num_devices(best.config) == 2 and best.config.plan.shares == {"reference": "train"}
    alone, shared = tmp_path / "runs" / "alone", tmp_path / "runs" / "shared"
    kept = [f"train.responses_per_micro_batch={best.config.train.responses_per_micro_batch}"]
    for run_dir, given in ((alone, kept), (shared, [f"plan={tmp_path / 'plan.yaml'}"])):
        command = run_command("train", config, f"run.name={run_dir.name}", *given)
        assert command.returncode == 0, command.stderr
    assert load(shared / "config.yaml").plan.shares == {"reference": "train"}
    spans = read_spans(shared / "spans.jsonl")
    assert {span.worker for span in spans if span.task == "reference" and span.rows} == {"reference/0"}
    found = [rows(run_dir / "metrics.jsonl") for run_dir in (alone, shared)]
    assert [row["policy/kl"] for row in found[0]] == [row["policy/kl"] for row in found[1]]


@deep
def test_every_task_on_the_trainers_device_leaves_the_bits(small: Small, tmp_path: Path, reward_model: Path) -> None:
    """Critic, values, reference and reward model, each a worker of its own."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(MODEL / name, reward_model / name)
    tree = small(
        algorithm={"name": "ppo", "kl_coefficient": 0.05},
        train={"reference": "task", "accumulate": "exact"},
        reward={"model": {"path": str(reward_model)}, "place": "task"},
        plan={"values": {"num_workers": 1}},
        telemetry={"fingerprints": True},
    )
    config, shares = write_config(tmp_path, tree), dict.fromkeys(("reference", "critic", "values", "reward"), "train")
    found = []
    for name, given, devices in (("alone", [], 6), ("shared", [f"plan.shares={to_yaml(shares)}"], 2)):
        command = run_command("train", config, f"run.name={name}", *given)
        assert command.returncode == 0, command.stderr
        run_dir = tmp_path / "runs" / name
        assert num_devices(load(run_dir / "config.yaml")) == devices
        workers = {span.worker for span in read_spans(run_dir / "spans.jsonl") if span.rows}
        assert workers >= {"reference/0", "critic", "values/0", "reward/0", "trainer/0"}
        found.append((prints(run_dir), rows(run_dir / "fingerprints.critic.jsonl")[-1]["tensors"]))
    assert found[0] == found[1]
