"""PPO with a critic on the command line: six tasks on the queue, and neither timing nor who computes the values changes a bit of
either model."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from asyncflow.run_dir import RunDir
from asyncflow.telemetry.trace import read_spans
from tests.conftest import MODEL, ROOT
from tests.depth import deep
from tests.e2e.commands import rows, run_command, write_config

TASKS = {"generate", "reward", "reference", "values", "forward_backward", "critic_update"}


def test_ppo_is_six_tasks_and_the_same_run_however_it_is_timed(small: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    prints: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for schedule, num_valuing in (("periodic", 0), ("synchronous", 2)):
        tree = small(
            run={"name": schedule, "steps": 3},
            schedule=schedule,
            reward={"place": "task"},
            train={
                "accumulate": "exact", "reference": "task", "old": "step_start", "epochs": 2, "mini_batches": 2,
                "critic": {"learning_rate": 1e-3},
            },
            telemetry={"fingerprints": True, "trackers": []},
            algorithm={"name": "ppo", "kl_coefficient": 0.05, "held_steps": 1},
            plan={"values": {"num_workers": num_valuing}},
        )  # fmt: skip
        folder = tmp_path / f"config-{schedule}"
        folder.mkdir()
        command = run_command("train", write_config(folder, tree))
        assert command.returncode == 0, command.stderr
        run_dir = tmp_path / "runs" / schedule
        prints[schedule] = {name: lines(run_dir / name) for name in ("fingerprints.jsonl", "fingerprints.critic.jsonl")}
    assert prints["periodic"] == prints["synchronous"]
    policy, critic = (prints["periodic"][name] for name in ("fingerprints.jsonl", "fingerprints.critic.jsonl"))
    assert [line["step"] for line in policy] == [line["step"] for line in critic] == [0, 1, 2]
    assert all(len(group["losses"]) == 2 for line in policy for group in line["groups"])  # an epoch each
    weights = [{n: h for n, h in line["tensors"].items() if n.startswith("weights/")} for line in (*policy, *critic)]
    assert weights[0] != weights[1] != weights[2] and weights[3] != weights[4] != weights[5]

    models = [weights_of(RunDir(tmp_path / "runs" / schedule)) for schedule in prints]
    assert models[0] == models[1]

    for schedule, workers in (("periodic", {"critic"}), ("synchronous", {"values/0", "values/1"})):
        run_dir = tmp_path / "runs" / schedule
        assert traced(run_dir) >= TASKS
        spans = read_spans(run_dir / "spans.jsonl")
        valued = sorted((s.step, s.version, s.group) for s in spans if s.task == "values" and s.rows)
        assert [(step, version) for step, version, _ in valued] == [(step, step) for step, _, _ in valued]  # before its update
        assert len({group for _, _, group in valued}) == 3 * tree["train"]["prompts_per_step"]
        assert {span.worker for span in spans if span.task == "values" and span.rows} == workers
        attested = {(span.worker, span.version) for span in spans if span.task == "attest" and span.worker in workers}
        assert attested == {(span.worker, span.version) for span in spans if span.task == "install" and span.worker in workers}
    metrics = rows(run_dir / "metrics.jsonl")
    assert [row["policy/grad_norm"] > 0 for row in metrics] == [False, True, True]  # the policy is held for a step
    assert all(row["critic/grad_norm"] > 0 for row in metrics) and metrics[0]["critic/value"] == 0 != metrics[2]["critic/value"]
    assert (run_dir / "critic" / "value_head.safetensors").is_file() and (run_dir / "critic" / "config.json").is_file()


@deep
def test_ppo_from_a_users_file_is_the_same_six_tasks_and_the_same_run(small: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    """Nothing but its own file says what PPO asks of the dataflow: as a stranger's it comes to the same weights, bit for bit."""
    own = tmp_path / "own" / "ppo.py"
    own.parent.mkdir()
    shutil.copy(ROOT / "asyncflow" / "algorithms" / "ppo.py", own)
    models: dict[str, dict[str, bytes]] = {}
    for name, choice in {"known": {"name": "ppo"}, "own": {"path": f"{own}:PPO"}}.items():
        tree = small(
            run={"name": name},
            reward={"place": "task"},
            train={"accumulate": "exact", "reference": "task", "critic": {"learning_rate": 1e-3}},
            algorithm={**choice, "kl_coefficient": 0.05},
        )
        command = run_command("train", write_config(tmp_path, tree))
        assert command.returncode == 0, command.stderr
        run_dir = RunDir(tmp_path / "runs" / name)
        assert traced(run_dir.path) >= TASKS
        models[name] = weights_of(run_dir)
    assert models["own"] == models["known"]
    assert models["own"].keys() == {"model/model.safetensors", "critic/model.safetensors", "critic/value_head.safetensors"}
    assert models["own"]["model/model.safetensors"] != (MODEL / "model.safetensors").read_bytes()


@deep
def test_a_run_with_a_critic_goes_on_as_if_it_had_not_ended(small: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    def run(name: str, steps: int, *options: str, num_valuing: int = 0) -> list[list[dict[str, Any]]]:
        tree = small(
            run={"name": name, "steps": steps},
            train={"accumulate": "exact", "critic": {"learning_rate": 1e-3}},
            telemetry={"fingerprints": True, "trackers": []},
            checkpoint={"keep": 1},
            algorithm="ppo",
            plan={"values": {"num_workers": num_valuing}},
        )
        command = run_command("train", write_config(tmp_path, tree), *options)
        assert command.returncode == 0, command.stderr
        run_dir = tmp_path / "runs" / name
        return [lines(run_dir / file) for file in ("fingerprints.jsonl", "fingerprints.critic.jsonl")]

    whole = run("whole", 3)
    assert run("parts", 2) == [each[:2] for each in whole]
    assert [*(tmp_path / "runs" / "parts" / "checkpoints" / "step-000002" / "critic").glob("*.safetensors")]
    assert run("parts", 3, "--resume") == whole
    assert run("pool", 2, num_valuing=2) == [each[:2] for each in whole]
    assert run("pool", 3, "--resume", num_valuing=2) == whole

    folder = RunDir(tmp_path / "runs" / "parts")
    assert folder.critic_version == folder.model_version == 3
    shutil.rmtree(folder.critic)  # its worker was killed before it could save, say
    assert run("parts", 3, "--resume") == whole and folder.critic_version == 3


def weights_of(run_dir: RunDir) -> dict[str, bytes]:
    """What the run has left of policy and critic, by file."""
    return {
        f"{folder.name}/{file.name}": file.read_bytes()
        for folder in (run_dir.model, run_dir.critic)
        for file in folder.glob("*.safetensors")
    }


def traced(run_dir: Path) -> set[str]:
    """What the run's trace has intervals of."""
    events = json.loads((run_dir / "trace.json").read_text())["traceEvents"]
    return {event["name"] for event in events if event["ph"] == "X"}


def lines(path: Path) -> list[dict[str, Any]]:
    """Of fingerprints, the groups of each in the order of their numbers."""
    found = rows(path)
    for line in found:
        line["groups"].sort(key=lambda group: group["group"])
    return found
