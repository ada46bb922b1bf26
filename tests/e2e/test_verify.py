"""`asyncflow verify`: the same bits whatever the timing, by real processes; and no proof where there is nothing to prove."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from asyncflow.cli.verbs import app
from asyncflow.cli.verify import variants
from asyncflow.config import parse
from asyncflow.run.job import Job, Listener
from asyncflow.run.preparation.checks import check_choices
from asyncflow.telemetry.idle import busy_and_idle
from asyncflow.telemetry.trace import read_spans
from asyncflow.threads import num_cores
from asyncflow.types import RunError, UserError
from tests.conftest import ROOT
from tests.depth import deep
from tests.e2e.commands import processes_of, rows, run_command, verified, write_config

Small = Callable[..., dict[str, Any]]


def small_config(small: Small, tmp_path: Path) -> Path:
    tree = small(
        run={"steps": 500},
        rollout={"num_slots": 16},
        train={"prompts_per_step": 8, "warmup_steps": 0},
        eval={"path": "generated:arithmetic"},
    )
    return write_config(tmp_path, tree)


@deep
def test_periodic_equals_synchronous_over_tensor_parallel_ranks(small: Small, tmp_path: Path) -> None:
    """In the synchronous run all groups of a step share passes; in the other one those that are there when one begins."""
    config = small_config(small, tmp_path)
    verified(config, "train.accumulate=exact", "plan.train.tp=2", steps=4)


def test_periodic_equals_synchronous(small: Small, tmp_path: Path) -> None:
    config = small_config(small, tmp_path)
    said = verified(config, "train.accumulate=exact", steps=4)
    for words in (
        "staleness 0, spans per row 1",
        "Kendall distance",
    ):
        assert words in said

    folder = tmp_path / "runs" / "test-verify"
    given = json.loads((folder / "certificate.json").read_text())
    assert given["verdict"] == "equal" and given["steps"] == 4 and given["weights_hash"][0] == given["weights_hash"][1]
    shown = run_command("train", config, "train.accumulate=exact", "--print-config").stdout
    assert given["config_hash"] == hashlib.sha256(shown.encode()).hexdigest()
    assert given["reordered_steps"] >= 3 and 0.0 < given["order_distance"] < 1.0
    assert given["logprobs"][0] > 0 and 0.0 <= given["logprobs"][2] < 1e-3
    runs = equal_runs(folder, ("synchronous", "periodic"))
    assert [run["schedule"] for run in runs] == ["synchronous", "periodic"] and given["runs"] == runs
    assert runs[0]["overlapped_steps"] == 0 and runs[1]["overlapped_steps"] >= 2
    assert given["overlapped_steps"] >= runs[1]["overlapped_steps"] and given["overlap_seconds"] > 0.0
    lost_a_worker(folder / "periodic", given, said)
    if num_cores() > 1:  # all rows are there when a synchronous step is trained: the rollout workers' cores are free
        assert any(span.task == "helper_pass" for span in read_spans(folder / "synchronous" / "spans.jsonl"))


NOTES_DIFFERENCES = """
import asyncflow.weight_sync.differences as own

made = own.difference

def noted(*chunks):
    found = made(*chunks)
    if found is not None:
        with open({file!r}, "a") as file:
            print(len(found), len(chunks[0]), file=file)
    return found

own.difference = noted
"""


@deep
def test_with_drafts_differences_helpers_and_full_passes_the_bits_are_equal(tmp_path: Path) -> None:
    """At a learning rate at which most weights in bfloat16 stay as they are, so that versions come as differences."""
    noted = tmp_path / "differences"
    (tmp_path / "sitecustomize.py").write_text(NOTES_DIFFERENCES.format(file=str(noted)))
    changes = ["rollout.engine.speculation=auto", "weight_sync.name=network", "weight_sync.dtype=bfloat16", "train.helpers=1"]
    changes += ["train.learning_rate=1e-6", f"run.dir={tmp_path / 'runs'}"]
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = run_command("verify", ROOT / "recipes/quickstart.yaml", "--steps", "4", *changes, PYTHONPATH=path)
    assert command.returncode == 0, command.stdout + command.stderr
    assert "EQUAL: synchronous and periodic gave the same bits in 4 steps" in command.stdout
    spans = [read_spans(tmp_path / "runs" / "quickstart-verify" / name / "spans.jsonl") for name in ("synchronous", "periodic")]
    for of_run in spans:
        drafts, accepted = (sum(getattr(span, kind) for span in of_run) for kind in ("drafts", "accepted"))
        assert 0 < accepted < drafts
        assert sum(span.task == "forward_backward" for span in of_run) < 4 * 32  # fewer passes than groups
    assert any(span.task == "helper_pass" for span in spans[0]) or num_cores() == 1
    sizes = [[int(size) for size in line.split()] for line in noted.read_text().splitlines()]
    assert len(sizes) >= 4 and all(made < whole / 2 for made, whole in sizes)  # of two runs, every version but the first


@deep
def test_delayed_equals_itself(small: Small, tmp_path: Path) -> None:
    config = small_config(small, tmp_path)
    said = verified(config, "train.accumulate=exact", "schedule=delayed", names=("delayed-1", "delayed-2"), steps=6)
    assert "staleness 1, spans per row 1" in said
    folder = tmp_path / "runs" / "test-verify"
    given = json.loads((folder / "certificate.json").read_text())
    assert given["verdict"] == "equal" and given["reordered_steps"] >= 3 and given["overlapped_steps"] >= 3
    runs = equal_runs(folder, ("delayed-1", "delayed-2"))
    assert [run["schedule"] for run in runs] == ["delayed", "delayed"] and given["runs"] == runs
    assert [run["max_staleness"] for run in runs] == [1, 1] and runs[0]["rows_redelivered"] == 0
    for number, step in enumerate(rows(folder / "delayed-2" / "fingerprints.jsonl")):
        versions = {version for group in step["groups"] for row in group["rows"] for version in row["spans"][1::2]}
        assert versions == {max(0, number - 1)}
    lost_a_worker(folder / "delayed-2", given, said)


def equal_runs(folder: Path, names: tuple[str, str]) -> list[dict[str, Any]]:
    """The certificates of two runs that have trained the same and learned the same, and left nobody behind."""
    runs = [folder / name for name in names]
    steps = [rows(run / "fingerprints.jsonl") for run in runs]
    for number, (first, second) in enumerate(zip(*steps, strict=True)):
        assert (
            sorted(g["group"] for g in first["groups"])
            == sorted(g["group"] for g in second["groups"])
            == [*range(8 * number, 8 * number + 8)]
        )
        assert first["tensors"] == second["tensors"]
    assert steps[0][0]["tensors"] != steps[0][1]["tensors"]  # something was learned
    kinds = {name.rsplit("/", 1)[-1] for name in steps[0][0]["tensors"] if name.startswith("optimizer/")}
    assert kinds == {"exp_avg", "exp_avg_sq", "step"}
    models = [(run / "model" / "model.safetensors").read_bytes() for run in runs]
    assert models[0] == models[1]
    for run in runs:
        assert {span.worker for span in read_spans(run / "spans.jsonl")} == {"rollout/0", "rollout/1", "trainer/0"}
        assert not processes_of(run) and not rows(run / "eval.jsonl")
    return [json.loads((run / "certificate.json").read_text()) for run in runs]


def lost_a_worker(run: Path, given: dict[str, Any], shown: str) -> None:
    """One rollout worker of this run was killed in the middle of a step with rows in its hands, and these were made again."""
    kill, certificate = given["kill"], json.loads((run / "certificate.json").read_text())
    assert kill["worker"] in ("rollout/0", "rollout/1") and kill["rows"] > 0
    assert given["steps"] // 2 <= kill["step"] < given["steps"]
    assert 0 < certificate["rows_redelivered"] <= kill["rows"]
    assert shown.count("was ended by SIGKILL") == 1 and f"worker {kill['worker']} (process " in shown
    trained = [span for span in read_spans(run / "spans.jsonl") if span.task == "forward_backward" and span.step == kill["step"]]
    assert trained[0].start < kill["at"] < trained[-1].end


def test_sums_in_order_of_arrival_differ_and_the_first_difference_is_named(small: Small, tmp_path: Path) -> None:
    command = run_command("verify", small_config(small, tmp_path), "train.accumulate=fp32", "--steps", "4")
    assert command.returncode == 1, command.stdout + command.stderr
    assert "DIFFERS" in command.stdout and "tensor of weights/" in command.stdout and " against " in command.stdout
    found = json.loads((tmp_path / "runs" / "test-verify" / "certificate.json").read_text())["difference"]
    assert found["what"] == "tensor" and found["values"][0] != found["values"][1]


SLOW = """
import time
from asyncflow.engines.train.torch_engine import TorchEngine

class Slow(TorchEngine):
    def __init__(self, *, seconds, **given):
        time.sleep(seconds)
        super().__init__(**given)
"""


@deep
def test_a_step_that_was_generated_while_the_trainer_loaded_proves_nothing(small: Small, tmp_path: Path) -> None:
    earlier = tmp_path / "runs" / "test-verify" / "periodic"
    earlier.mkdir(parents=True)
    for name in (".asyncflow-run", "fingerprints.jsonl"):  # of an earlier verification, which is overwritten
        (earlier / name).write_text("{}\n")
    (tmp_path / "slow.py").write_text(SLOW)
    engine = f"train.engine={{path: '{tmp_path / 'slow.py'}:Slow', seconds: 5}}"
    command = run_command("verify", small_config(small, tmp_path), "train.accumulate=exact", engine, "--steps", "1")
    assert command.returncode == 2, command.stdout + command.stderr
    assert (
        "VOID, no proof: periodic never trained while responses were made or scored; periodic lost no row with a killed worker"
        in command.stdout
    )
    assert len(rows(earlier / "fingerprints.jsonl")) == 1


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["run.steps=3"], ["verify sets run.steps itself, by --steps"]),
        (["rollout.max_restarts=0"], ["verify sets rollout.max_restarts itself"]),
        (["schedule=sub_step"], ["schedule=sub_step timing may decide", "verify schedule=periodic or schedule=delayed"]),
        (["schedule=bounded", "schedule.max_staleness=2"], ["schedule=bounded timing may decide", "need not be equal"]),
        (["rollout.engine=vllm"], ["no two runs have the same bits", "what else is in its batch", "with rollout.engine=slots"]),
        (["rollout.engine={name: vllm, addresses: ['unix:a']}"], ["no two runs have the same bits"]),
        (["rollout.num_workers=4"], ["verify sets rollout.num_workers itself"]),
        (["train.num_threads=2"], ["verify sets train.num_threads itself"]),
        (["reward.delays.salt=3"], ["verify sets reward.delays itself"]),
        (["train.accumulat=fp32"], ["unknown key 'train.accumulat'", "'accumulate'"]),
        (["train.prompts_per_step=1"], ["rollout.num_workers=2 is more than train.prompts_per_step=1"]),
        (["model.path=nowhere"], ["nowhere"]),
    ],
)
def test_a_wrong_value_is_one_sentence_and_nothing_is_started(
    small: Small, tmp_path: Path, overrides: list[str], words: list[str]
) -> None:
    result = CliRunner().invoke(app, ["verify", str(small_config(small, tmp_path)), *overrides])
    assert isinstance(result.exception, UserError), (result.output, result.exception)
    assert not [word for word in words if word not in str(result.exception)] and "\n" not in str(result.exception)
    assert not (tmp_path / "runs").exists()


def test_a_user_s_schedule_that_leaves_timing_no_choice_is_compared_with_itself(small: Small, tmp_path: Path) -> None:
    (tmp_path / "late.py").write_text(
        "from asyncflow.types import Interval\n"
        "from asyncflow.control.modes import Delayed\n"
        "class TwoLate(Delayed):\n"
        "    def __init__(self, *, late=2):\n"
        "        self.max_staleness = late\n"
        "    def interval(self, step):\n"
        "        return Interval(max(0, step - self.max_staleness), max(0, step - self.max_staleness))\n"
    )
    path = f"{tmp_path / 'late.py'}:TwoLate"
    given = parse(small(schedule={"path": path, "late": 3}, rollout={"num_workers": 4}))
    first, second = variants(given, 7)
    assert (first.run.name, second.run.name) == ("TwoLate-1", "TwoLate-2")
    assert first.schedule == second.schedule == given.schedule and first.reward.delays != second.reward.delays
    assert first.run.steps == 7 and first.rollout.num_workers == 2 and first.run_dir == tmp_path / "runs/test-verify/TwoLate-1"
    on_policy = parse(small(schedule={"path": path, "late": 0}))
    assert [config.schedule.name for config in variants(on_policy, 7)] == ["synchronous", "periodic"]


def test_the_sampler_of_evaluators_is_left_out_with_them(small: Small) -> None:
    samplers = {"rollout": "shortest_queue", "evaluate": "oldest"}
    given = parse(small(eval={"path": "generated:arithmetic", "num_workers": 1}, queue={"samplers": samplers}))
    check_choices(given)
    for config in variants(given, 2):
        check_choices(config)
        assert {task: chosen.name for task, chosen in config.queue.samplers.items()} == {"rollout": "shortest_queue"}


def test_a_worker_in_the_driver_s_own_process_cannot_be_killed(small: Small) -> None:
    class Killer(Listener):
        def __init__(self) -> None:
            self.steps: list[int] = []

        def group(self, step: int) -> None:
            self.steps.append(step)
            with pytest.raises(RunError, match="worker rollout/0 has no process of its own"):
                job.kill("rollout/0")
            assert set(job.held()) <= {"rollout/0"}

    killer = Killer()
    job = Job(parse({**small(), "cluster": "inline"}), killer)
    assert asyncio.run(job.run())
    assert killer.steps == [0] * 4 + [1] * 4


def test_delays_hold_rewards_back(small: Small, tmp_path: Path) -> None:
    tree = small(run={"steps": 1}, reward={"delays": {"mean_seconds": 1.0, "salt": 1}})
    assert run_command("train", write_config(tmp_path, tree)).returncode == 0
    activity = busy_and_idle(read_spans(tmp_path / "runs" / "test" / "spans.jsonl"), "rollout/0")
    assert activity.idle["reward"] > 0.5  # after the last of 16 responses; without delays some milliseconds


def test_a_run_that_fails_is_one_sentence_and_exit_code_2(small: Small, tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text(
        "from asyncflow.algorithms.grpo import GRPO\nclass Bad(GRPO):\n    def loss(self, batch):\n        1 / 0\n"
    )
    config = write_config(tmp_path, small(algorithm={"path": f"{tmp_path / 'bad.py'}:Bad"}))
    command = run_command("verify", config)
    assert command.returncode == 2 and len(command.stderr.strip().splitlines()) == 1, command.stderr
    assert command.stderr.startswith("asyncflow: could not verify: ") and "ZeroDivisionError" in command.stderr
    assert not processes_of(tmp_path / "runs" / "test-verify" / "synchronous")
