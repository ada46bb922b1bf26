"""Runs that end in any way, and are resumed: what they train in the end is what they would have trained."""

from __future__ import annotations

import contextlib
import hashlib
import json
import random
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import psutil
import pytest
from safetensors.numpy import load_file

from asyncflow.config import parse
from asyncflow.data.order import SeededOrder
from asyncflow.run.preparation.prompts import read_source
from asyncflow.run.state.driver_state import read_driver
from asyncflow.telemetry.certificate import read_certificate
from asyncflow.telemetry.fingerprints import read_fingerprints
from asyncflow.telemetry.trace import join_pieces, read_spans
from asyncflow.trainer import Trainer
from asyncflow.types import Batch, RunError
from tests.conftest import MODEL, merged
from tests.depth import deep, few, in_gate
from tests.e2e.attempts import AttemptProcess
from tests.e2e.commands import rows, run_command, wait_for, write_config
from tests.forked import Command
from tests.patience import patience

STEPS, PROMPTS, GROUP = 8, 4, 4
DATA_SEED = 5  # another one than the run's: it is what decides the order
UNSTEADY = f"{Path(__file__).with_name('unsteady.py')}:UnsteadySlots"
MODES: dict[str, dict[str, Any]] = {
    "periodic": {"schedule": "periodic"},
    "delayed": {"schedule": "delayed", "train": {"old": "previous"}},
}


def tree(folder: Path, *changes: dict[str, Any]) -> dict[str, Any]:
    """A run of 8 steps, with a checkpoint after every one and an evaluation after every second."""
    base: dict[str, Any] = {
        "run": {"name": "test", "dir": str(folder), "steps": STEPS, "stall_timeout_seconds": 60},
        "model": {"path": str(MODEL)},
        "data": {"path": "generated:arithmetic", "limit": 64, "seed": DATA_SEED},
        "rollout": {"num_slots": 16, "group_size": GROUP, "max_new_tokens": 24},
        "train": {"prompts_per_step": PROMPTS, "learning_rate": 1e-3, "accumulate": "exact"},
        "eval": {"path": "generated:arithmetic", "num_prompts": 2, "every_steps": 2},
        "telemetry": {"trackers": [], "fingerprints": True},
        "checkpoint": {"every_steps": 1},
    }
    for change in changes:
        base = merged(base, change)
    return base


@pytest.fixture(scope="module", params=in_gate("delayed", of=MODES))
def whole(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[dict[str, Any], Path]]:
    """A mode, and the folder of a run in it that nothing has disturbed."""
    mode = MODES[request.param]
    attempt = AttemptProcess(tree(tmp_path_factory.mktemp("whole"), mode), resume=False)
    assert attempt.end(seconds=120) == 0, attempt.said()
    yield mode, attempt.run_dir


def check_same(run_dir: Path, whole: Path) -> None:
    """The run has come to what the undisturbed one has, bit by bit, and tells the same story."""
    weights, expected = (load_file(next((folder / "model").glob("*model.safetensors"))) for folder in (run_dir, whole))
    assert weights.keys() == expected.keys() and all(np.array_equal(weights[name], expected[name]) for name in expected)
    assert (run_dir / "eval.jsonl").read_text() == (whole / "eval.jsonl").read_text()
    assert prints(run_dir) == prints(whole)  # every row's tokens, log-probs, reward and versions; every step's tensors
    for name in ("metrics.jsonl", "samples.jsonl"):
        what = [sorted((row["step"], row.get("row", -1)) for row in rows(folder / name)) for folder in (run_dir, whole)]
        assert what[0] == what[1], name
    check_spans(run_dir)


def prints(run_dir: Path) -> list[dict[str, Any]]:
    """The fingerprints, of all ranks, without the order in which groups came."""
    found = msgspec.to_builtins(read_fingerprints(run_dir / "fingerprints.jsonl"))
    return [{**step, "groups": sorted(step["groups"], key=lambda group: group["group"])} for step in found]


def check_spans(run_dir: Path) -> None:
    """One trainer's lane: states one after another, every step's update once, in order."""
    spans = join_pieces(read_spans(run_dir / "spans.jsonl"))
    lane = [span for span in spans if span.worker == "trainer/0" and span.is_lane]
    assert all(before.end <= after.start + 1e-6 for before, after in pairwise(lane))
    assert [span.step for span in lane if span.task == "optim_step"] == list(range(STEPS))


def check_each_once(run_dir: Path) -> None:
    """No prompt was skipped, and none was trained twice: by the groups' numbers, and by the texts, in the data's order."""
    steps = prints(run_dir)
    trained = Counter(row["row"] for step in steps for group in step["groups"] for row in group["rows"])
    groups = {row >> 2 for row in trained}
    assert [step["step"] for step in steps] == list(range(STEPS))
    assert set(trained.values()) == {1} and len(trained) == STEPS * PROMPTS * GROUP and groups == set(range(STEPS * PROMPTS))
    told = samples_of(run_dir)  # of each group the first row
    assert [told[group * GROUP]["prompt"] for group in sorted(groups)] == data_order(len(groups))


def data_order(count: int) -> list[str]:
    """The texts of the first prompts of `tree`'s data."""
    source = read_source(parse(tree(Path())), "train")
    texts = [str(source.columns.prompt_of(row)) for row in source.rows]
    assert len(set(texts)) == len(texts) == 64
    return SeededOrder(texts, seed=DATA_SEED).take(count)


@deep
def test_killed_at_random_moments(whole: tuple[dict[str, Any], Path], tmp_path: Path) -> None:
    mode, undisturbed = whole
    config, rng, starts = tree(tmp_path, mode), random.Random(17), []
    for _ in range(4):
        attempt = AttemptProcess(config)
        attempt.wait_for_steps(attempt.num_steps() + 1)
        time.sleep(rng.uniform(0, 0.5))
        assert attempt.end(signal.SIGKILL) in (137, 0)
        starts.append(attempt.said())
    last = AttemptProcess(config)
    assert last.end() == 0, last.said()
    assert "resumed from" in last.said() or "is finished already" in last.said()  # the fourth attempt may have come to the end
    assert "passed over" not in "".join(starts)
    check_same(last.run_dir, undisturbed)
    certificate = read_certificate(last.run_dir)
    assert certificate is not None and not certificate.voided and certificate.steps == STEPS
    assert certificate.resumed_at == sorted(certificate.resumed_at) and certificate.resumed_at
    assert "resumed at step" in certificate.line
    assert rows(last.run_dir / "metrics.jsonl")[-1].get("run/num_resumes", 0) == sum(
        step < STEPS for step in certificate.resumed_at
    )
    newest = max((last.run_dir / "checkpoints").glob("step-??????"))
    record = read_driver(newest).state.record
    assert record.resumed_at and not record.made_again_at  # by engines that make the same again: no later attempt has to know


@deep
def test_terminated_while_a_checkpoint_is_written(whole: tuple[dict[str, Any], Path], tmp_path: Path) -> None:
    mode, undisturbed = whole
    config = tree(tmp_path, mode, {"checkpoint": {"every_steps": 3}})
    attempt = AttemptProcess(config, harm=("term", 2))
    assert attempt.end() == 143, attempt.said()
    assert not [*(attempt.run_dir / "checkpoints").glob("*.partial")]
    last = AttemptProcess(config)
    assert last.end() == 0, last.said()
    assert "resumed from" in last.said()
    check_same(last.run_dir, undisturbed)


def test_killed_at_a_write(whole: tuple[dict[str, Any], Path], tmp_path: Path) -> None:
    """tests/unit/checkpoint kills at every one of them."""
    mode, undisturbed = whole
    config = tree(tmp_path, mode)
    for how, number in few([("after", 7)], [("kill", 0), ("after", 7), ("kill", 19)]):
        attempt = AttemptProcess(config, harm=(how, number))
        assert attempt.end() == 137, attempt.said()
    last = AttemptProcess(config)
    assert last.end() == 0, last.said()
    check_same(last.run_dir, undisturbed)


def test_killed_before_the_first_checkpoint_a_run_begins_anew_if_it_is_this_one(tmp_path: Path) -> None:
    config = tree(tmp_path, {"run": {"steps": 3}, "checkpoint": {"every_steps": None}, "eval": {"path": None, "every_steps": None}})
    attempt = AttemptProcess(config, killed_after=1)
    assert attempt.end() == 137 and attempt.num_steps()
    before = contents(attempt.run_dir)
    for change, words in (
        ({"train": {"learning_rate": 1e-4}}, "train.learning_rate was 0.001"),
        ({"run": {"seed": 1}}, "run.seed was 0"),
    ):
        other = AttemptProcess(merged(config, change))
        assert other.end() == 2 and words in other.said() and "run.overwrite=true" in other.said(), other.said()
    assert contents(attempt.run_dir) == before
    last = AttemptProcess(config)
    assert last.end() == 0, last.said()
    assert f"there is no whole checkpoint yet in {last.run_dir / 'checkpoints'}: beginning anew" in last.said()
    assert [row["step"] for row in rows(last.run_dir / "metrics.jsonl")] == [0, 1, 2]
    certificate = read_certificate(last.run_dir)
    assert certificate is not None and not certificate.resumed_at and not certificate.voided


@deep
def test_a_disk_that_is_full_at_each_write_in_turn(whole: tuple[dict[str, Any], Path], tmp_path: Path) -> None:
    """One of each checkpoint, in an attempt that comes to its end, in another that is killed, and in the next one."""
    mode, undisturbed = whole
    config = tree(tmp_path, mode, {"checkpoint": {"keep": 1}})
    attempt = AttemptProcess(config, harm=("full", 0))
    assert attempt.end() == 0, attempt.said()  # the run goes on without
    assert attempt.said().count("could not be written") >= STEPS - 1 and "No space left on device" in attempt.said()
    check_same(attempt.run_dir, undisturbed)
    for path in (attempt.run_dir / "checkpoints").iterdir():
        assert not path.name.endswith(".partial")

    shutil.rmtree(attempt.run_dir)
    attempt = AttemptProcess(config, harm=("full", 0))
    attempt.wait_for("could not be flushed")  # behind the rename: the first checkpoint that is one
    assert attempt.end(signal.SIGKILL) == 137, attempt.said()
    last = AttemptProcess(config, harm=("full", 0))
    assert last.end() == 0, last.said()
    assert "resumed from" in last.said() and "passed over" not in last.said()
    check_same(last.run_dir, undisturbed)
    writes = rows(tmp_path / "no-room.jsonl")
    failed = {what for what, is_failed in writes if is_failed}
    # Whether older versions go along is a matter of timing: there may have been none in the last checkpoints.
    assert not {what for what, _ in writes if "/versions" not in what} - failed
    assert failed >= {"rename checkpoints/step-n.partial", "sync_folder checkpoints", "sync_folder the folder"}
    assert failed >= {"rename checkpoints/step-n", "rmtree checkpoints/step-n.over"}


@deep
def test_a_damaged_checkpoint_is_passed_over(whole: tuple[dict[str, Any], Path], tmp_path: Path) -> None:
    mode, undisturbed = whole
    config = tree(tmp_path, mode)
    attempt = AttemptProcess(config)
    attempt.wait_for_steps(5)
    assert attempt.end(signal.SIGINT) == 130
    newest = sorted((attempt.run_dir / "checkpoints").glob("step-??????"))[-1]
    file = next((newest / "trainer").iterdir())
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    last = AttemptProcess(config)
    assert last.end() == 0, last.said()
    assert f"{newest} is damaged: trainer/{file.name} is not what was written: it is passed over" in last.said()
    check_same(last.run_dir, undisturbed)


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"schedule": {"name": "sub_step"}}, marks=deep),
        pytest.param({"schedule": {"name": "bounded", "max_staleness": 2}}, marks=deep),
        pytest.param({"schedule": {"name": "bounded", "max_staleness": 2, "membership": "first_come"}}, marks=deep),
        # what each scorer gave is a column of rows that are kept, too
        pytest.param({"schedule": {"name": "bounded", "max_staleness": 2}, "reward": {"value_on_failure": 0.0}}, marks=deep),
    ],
    ids=["sub_step", "bounded", "first_come", "reward_parts"],
)
def test_no_prompt_is_skipped_or_doubled_where_timing_decides_versions(changes: dict[str, Any], tmp_path: Path) -> None:
    config = tree(tmp_path, changes, {"rollout": {"num_slots": 8}})
    kept: list[Path] = []
    for number in (3, 4, 5):
        attempt = AttemptProcess(config)
        attempt.wait_for_steps(number)
        assert attempt.end(signal.SIGKILL if number == 3 else signal.SIGTERM) in (137, 143)
        kept += (attempt.run_dir / "checkpoints").glob("*/rows.afp")
    assert kept  # at one of the two stops a step had rows; at one alone, on a busy machine, it may have had none
    last = AttemptProcess(config)
    assert last.end() == 0, last.said()
    assert "resumed from" in last.said() and "lack a column" not in last.said()
    check_each_once(last.run_dir)
    certificate = read_certificate(last.run_dir)
    assert certificate is not None and not certificate.voided, certificate


@deep
def test_rows_that_would_not_be_made_again_are_kept(whole: tuple[dict[str, Any], Path], tmp_path: Path) -> None:
    """A run whose engine is not deterministic is stopped: of step 2 two groups are complete, one is in part, and one has no row."""
    mode, undisturbed = whole
    engine = {"path": UNSTEADY, "folder": str(tmp_path)}
    config = tree(tmp_path, mode, {"rollout": {"engine": engine}, "checkpoint": {"every_steps": None}})
    hold(tmp_path, {10: [2, 3], 11: [0, 1, 2, 3]})
    attempt = AttemptProcess(config)
    attempt.wait_for_steps(2)
    wait_for(lambda: {32, 36, 40} <= set(samples_of(attempt.run_dir)))  # of each group with rows the first one
    assert attempt.end(signal.SIGTERM) == 143, attempt.said()
    checkpoint = attempt.run_dir / "checkpoints" / "step-000002"
    kept = read_driver(checkpoint).rows
    assert (checkpoint / "rows.afp").stat().st_size and kept is not None
    numbers = set(kept.indices.tolist())
    assert {*range(32, 41)} <= numbers <= {*range(32, 42)}, numbers
    of_version = {int(spans[1]) for spans in kept.ragged("version_spans")}
    assert of_version == {2 if mode["schedule"] == "periodic" else 1}
    before, num_asked = samples_of(attempt.run_dir), len(asked(tmp_path))

    (tmp_path / "held.json").unlink()
    last = AttemptProcess(config)
    assert last.end() == 0, last.said()
    assert "lack a column" not in last.said()
    check_each_once(last.run_dir)
    check_spans(last.run_dir)
    # Each row has the prompt that it would have had, and what was kept is told of as it was.
    samples = samples_of(last.run_dir)
    assert {row: sample["prompt"] for row, sample in samples.items()} == {
        row: sample["prompt"] for row, sample in samples_of(undisturbed).items()
    }
    assert {row: samples[row] for row in (32, 36, 40)} == {row: before[row] for row in (32, 36, 40)}
    # What is trained of the kept rows has their bits, and nobody was asked for them again; for all others somebody was, once.
    check_kept(kept, trained_rows(last.run_dir))
    assert sorted(asked(tmp_path)[:num_asked]) == [*range(48)]
    assert sorted(asked(tmp_path)[num_asked:]) == [row for row in range(32, STEPS * PROMPTS * GROUP) if row not in numbers]
    certificate = read_certificate(last.run_dir)
    assert certificate is not None and not certificate.is_deterministic and certificate.resumed_at == [2]
    assert certificate.rows_redelivered == 0
    assert len(certificate.voided) == 1 and "at step 2, where the run was resumed" in certificate.voided[0]


@deep
def test_a_certificate_is_void_only_where_rows_were_begun_that_the_checkpoint_has_not(tmp_path: Path) -> None:
    """An engine that is not deterministic has made all of step 0, which is made to its end, and nothing more."""
    engine = {"path": UNSTEADY, "folder": str(tmp_path)}
    changes = {
        "rollout": {"engine": engine},
        "run": {"steps": 3},
        "checkpoint": {"every_steps": None},
        "eval": {"path": None, "every_steps": None},
    }
    config = tree(tmp_path, {"schedule": "periodic"}, changes)
    attempt = AttemptProcess(config, harm=("updates500", signal.SIGTERM))
    assert attempt.end() == 143 and attempt.num_steps() == 1, attempt.said()
    shutil.copytree(tmp_path / "test", tmp_path / "other")
    last = AttemptProcess(config)
    assert last.end() == 0, last.said()
    certificate = read_certificate(last.run_dir)
    assert certificate is not None and certificate.resumed_at == [1] and not certificate.voided, certificate

    other = merged(config, {"run": {"name": "other"}})
    attempt = AttemptProcess(other)
    attempt.wait_for_steps(2)
    attempt.kill()  # there is no newer checkpoint: step 1 was made, and is made again
    last = AttemptProcess(other)
    assert last.end() == 0, last.said()
    certificate = read_certificate(last.run_dir)
    assert certificate is not None and certificate.resumed_at == [1, 1], certificate
    assert len(certificate.voided) == 1 and "at step 1, where the run was resumed" in certificate.voided[0]


BETWEEN = {**MODES, "bounded": {"schedule": {"name": "bounded", "max_staleness": 2}}}


@pytest.mark.parametrize("mode", in_gate("bounded", of=BETWEEN))
def test_killed_between_two_checkpoints_a_run_goes_on_with_the_rows_of_the_first_one(mode: str, tmp_path: Path) -> None:
    """The next attempt is killed as soon as its files are cut back."""
    config = between(tmp_path, BETWEEN[mode])
    attempt = AttemptProcess(config)
    checkpoint = wait_in_step_5(attempt.run_dir, is_ahead=mode != "periodic")
    attempt.kill()
    num_asked = len(asked(tmp_path))
    before = samples_of(attempt.run_dir)
    kept = read_driver(checkpoint).rows
    assert [path.name for path in checkpoint.parent.iterdir()] == [checkpoint.name] and (kept is None) == (mode == "periodic")
    numbers, of_step_3 = set() if kept is None else set(kept.indices.tolist()), {48, 52, 56, 60}
    assert mode == "periodic" or (of_step_3 <= numbers and not {62, 63} & numbers)

    cut = AttemptProcess(config, harm=("load", signal.SIGKILL))
    assert cut.end() == 137 and "resumed from" in cut.said(), cut.said()
    for name in ("metrics.jsonl", "fingerprints.jsonl"):
        assert [row["step"] for row in rows(cut.run_dir / name)] == [0, 1, 2], name
    assert samples_of(cut.run_dir) == {row: sample for row, sample in before.items() if row < 48 or row in numbers}
    assert {row for row in before if row >= 48} - numbers  # some were there to be cut
    assert all(span.step < 3 for span in read_spans(cut.run_dir / "spans.jsonl"))

    assert len(asked(tmp_path)) == num_asked

    (tmp_path / "held.json").unlink()
    last = AttemptProcess(config)
    assert last.end() == 0, last.said()
    assert "lack a column" not in last.said() and "passed over" not in last.said()
    assert [row["step"] for row in rows(last.run_dir / "metrics.jsonl")] == [*range(STEPS)]
    check_each_once(last.run_dir)
    check_spans(last.run_dir)
    # No prompt has changed its place, and what was kept is told of as it was.
    samples, trained = samples_of(last.run_dir), trained_rows(last.run_dir)
    assert samples.keys() == {row for row in trained if row % GROUP == 0 or row // GROUP % PROMPTS == 0}
    assert {row: samples[row] for row in of_step_3 & numbers} == {row: before[row] for row in of_step_3 & numbers}
    assert all(samples[row]["prompt"] == before[row]["prompt"] for row in before)
    check_kept(kept, trained)
    assert sorted(asked(tmp_path)[num_asked:]) == [row for row in range(48, STEPS * PROMPTS * GROUP) if row not in numbers]
    certificate = read_certificate(last.run_dir)
    assert certificate is not None and not certificate.is_deterministic and certificate.resumed_at == [3, 3]
    assert len(certificate.voided) == 1 and "at step 3, where the run was resumed" in certificate.voided[0]


@deep
def test_killed_with_its_trainers_on_two_ranks_a_run_goes_on_with_the_rows_of_its_checkpoint(
    background: Callable[..., Command], tmp_path: Path
) -> None:
    """Every worker in a process of its own."""
    changes = {"plan": {"train": {"dp": 2}}, "eval": {"path": None, "every_steps": None}}
    path, run_dir = write_config(tmp_path, merged(between(tmp_path, MODES["delayed"]), changes)), tmp_path / "test"
    command = background("train", path)
    checkpoint = wait_in_step_5(run_dir, is_ahead=True)
    everyone = [psutil.Process(command.pid), *psutil.Process(command.pid).children(recursive=True)]
    for process in everyone:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(everyone[1:], 10)
    assert command.wait(patience(10)) == -signal.SIGKILL
    kept, num_asked = read_driver(checkpoint).rows, len(asked(tmp_path))
    assert kept is not None
    numbers = set(kept.indices.tolist())
    assert {48, 52, 56, 60} <= numbers and not {62, 63} & numbers

    (tmp_path / "held.json").unlink()
    last = run_command("train", path, "--resume")
    assert last.returncode == 0 and "resumed from" in last.stdout + last.stderr, last.stdout + last.stderr
    check_each_once(run_dir)
    check_spans(run_dir)
    check_kept(kept, trained_rows(run_dir))
    lanes = {span.worker for span in read_spans(run_dir / "spans.jsonl") if span.task == "forward_backward" and span.rows}
    assert lanes == {"trainer/0", "trainer/1"}
    assert sorted(asked(tmp_path)[num_asked:]) == [row for row in range(48, STEPS * PROMPTS * GROUP) if row not in numbers]
    certificate = read_certificate(run_dir)
    assert certificate is not None and certificate.resumed_at == [3] and len(certificate.voided) == 1


def between(folder: Path, mode: dict[str, Any]) -> dict[str, Any]:
    """A run with an engine that is not deterministic, see `wait_in_step_5`."""
    engine = {"path": UNSTEADY, "folder": str(folder)}
    hold(folder, {11: [3], 15: [2, 3], 23: [3]})
    return tree(folder, mode, {"rollout": {"engine": engine, "num_workers": 2, "num_slots": 8}, "checkpoint": {"every_steps": 3}})


def wait_in_step_5(run_dir: Path, *, is_ahead: bool) -> Path:
    """Until steps 3 and 4 are committed after the checkpoint that is returned, and step 5 is under way.

    `is_ahead`: others than version 3 may make step 3. Then one worker is kept in step 2 until the other one has made step 3 but for
    two rows of group 15; so the checkpoint has its other rows.
    """

    def wait_for_rows(*told: int) -> None:
        wait_for(lambda: run_dir.exists() and set(told) <= samples_of(run_dir).keys(), seconds=90)

    if is_ahead:
        wait_for_rows(48, 52, 56, 60)  # of each group the first row, which is told of
    hold(run_dir.parent, {15: [2, 3], 23: [3]})
    checkpoint = run_dir / "checkpoints" / "step-000003"
    wait_for(checkpoint.exists, seconds=90)
    hold(run_dir.parent, {23: [3]})
    wait_for(lambda: len(rows(run_dir / "metrics.jsonl")) == 5)
    wait_for_rows(80, 84, 88, 92)
    return checkpoint


def hold(folder: Path, samples: dict[int, list[int]]) -> None:
    """Have these of each group not end, see `UnsteadySlots`."""
    (folder / "held.part").write_text(json.dumps(samples))
    (folder / "held.part").rename(folder / "held.json")


def trained_rows(run_dir: Path) -> dict[int, dict[str, Any]]:
    """What fingerprints have of each."""
    return {row["row"]: row for step in prints(run_dir) for group in step["groups"] for row in group["rows"]}


def check_kept(kept: Batch | None, trained: dict[int, dict[str, Any]]) -> None:
    """What was trained of the rows of a checkpoint has their bits."""
    if kept is None:
        return
    for row, response, logprobs in zip(kept.indices.tolist(), *map(kept.ragged, ("response_ids", "rollout_logprobs")), strict=True):
        assert (trained[row]["response"], trained[row]["logprobs"]) == (digest(response), digest(logprobs)), row


def asked(folder: Path) -> list[int]:
    """The rows that `UnsteadySlots` was asked for, training's, in all attempts."""
    lines = [line for line in rows(folder / "asked.jsonl") if line["group"] < 1 << 40]
    return [line["group"] << 2 | sample for line in lines for sample in line["samples"]]


@deep
def test_the_first_checkpoint_knows_already_that_engines_are_not_deterministic(tmp_path: Path) -> None:
    """Whoever reports rarely says that at once."""
    rarely = {"telemetry": {"flush_seconds": 30}, "eval": {"path": None, "every_steps": None}}
    attempt = AttemptProcess(tree(tmp_path, {"run": {"steps": 1}, "rollout": {"num_threads": 2}}, rarely))
    assert attempt.end() == 0, attempt.said()
    record = read_driver(attempt.run_dir / "checkpoints" / "step-000001").state.record
    assert "2 threads" in record.why_not_deterministic


def samples_of(run_dir: Path) -> dict[int, dict[str, Any]]:
    """Training's, by row."""
    path = run_dir / "samples.jsonl"
    lines = path.read_text().rpartition("\n")[0].splitlines() if path.exists() else []  # the last one may be half-written
    samples = [sample for sample in map(json.loads, lines) if sample["purpose"] == "train"]
    assert len({sample["row"] for sample in samples}) == len(samples)
    return {sample["row"]: sample for sample in samples}


def digest(values: Any) -> str:
    """As fingerprints have it."""
    return hashlib.sha256(values.tobytes()).hexdigest()


@pytest.mark.parametrize("by", in_gate(signal.SIGTERM, of=[signal.SIGINT, signal.SIGTERM]), ids=["SIGINT", "SIGTERM"])
def test_a_step_whose_updates_have_begun_is_made_to_its_end_and_kept(by: signal.Signals, tmp_path: Path) -> None:
    """They take longer than workers are given to end in, which begins with the commit."""
    config = tree(tmp_path, {"train": {"epochs": 6, "old": "rollout"}, "run": {"stop_grace_seconds": 2}})
    attempt = AttemptProcess(config, harm=("updates500", by))
    assert attempt.end() == 128 + by, attempt.said()
    assert "is made to its end" in attempt.said() and "did not end" not in attempt.said()
    assert attempt.num_steps() == 1 and [path.name for path in (attempt.run_dir / "checkpoints").iterdir()] == ["step-000001"]


@deep
def test_a_step_is_made_to_its_end_for_as_long_as_something_moves_and_nobody_interrupts_again(tmp_path: Path) -> None:
    config = tree(tmp_path, {"train": {"epochs": 2, "old": "rollout"}, "run": {"stop_grace_seconds": 0.5}})
    began = time.monotonic()
    attempt = AttemptProcess(config, harm=("updates600000", signal.SIGINT))
    attempt.wait_for("interrupt again to end at once")
    assert attempt.end(signal.SIGINT, seconds=20) != 0
    stalled = AttemptProcess(merged(config, {"run": {"stall_timeout_seconds": 8}}), harm=("updates600000", signal.SIGINT))
    assert stalled.end() == 130, stalled.said()
    assert "was not made to its end: nothing has moved for 8 s" in stalled.said()
    assert time.monotonic() - began < patience(200) and attempt.num_steps() == stalled.num_steps() == 0


def test_more_steps_after_a_normal_end_and_what_may_not_change(tmp_path: Path) -> None:
    config = tree(tmp_path, {"run": {"steps": 2}, "cluster": "inline", "checkpoint": {"every_steps": None}})
    assert AttemptProcess(config).end(seconds=120) == 0
    for change, words in (
        ({"run": {"seed": 1}}, "run.seed was 0 when this run began and is 1 now"),
        ({"train": {"learning_rate": 1e-4}}, "train.learning_rate was 0.001"),
        ({"data": {"limit": 32}}, "data.limit was 64"),
        ({"run": {"steps": 1}}, "run.steps is 1, and 2 steps are done"),
    ):
        attempt = AttemptProcess(merged(config, change))
        assert (attempt.end(), words in attempt.said()) == (2, True), attempt.said()
    more = merged(config, {"run": {"steps": 4}})
    with Trainer.from_config(merged(more, {"checkpoint": {"keep": 3}}), resume=True) as trainer:
        first = trainer.step()
        assert first is not None and trainer.step() is not None and trainer.step() is None
    assert [row["step"] for row in rows(tmp_path / "test" / "metrics.jsonl")] == [0, 1, 2, 3]
    assert [row["step"] for row in rows(tmp_path / "test" / "eval.jsonl")][:2] == [0, 2]
    assert (tmp_path / "test" / "model" / "model.safetensors").is_file()


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_finished_run_keeps_its_model_whatever_is_done_to_it(tmp_path: Path) -> None:
    config = tree(tmp_path, {"run": {"steps": 2}, "cluster": "inline", "eval": {"path": None, "every_steps": None}})
    assert AttemptProcess(config).end() == 0
    run_dir = tmp_path / "test"
    before = contents(run_dir)
    attempt = AttemptProcess(config)
    assert attempt.end() == 0 and "is finished already" in attempt.said() and "resumed from" not in attempt.said(), attempt.said()
    assert contents(run_dir) == before
    with Trainer.from_config(config, resume=True) as trainer:
        assert trainer.step() is None
        with pytest.raises(RunError, match="this run is over"):
            trainer.put_prompts_data([{"question": "", "answer": ""}])
    assert contents(run_dir) == before

    hasty = {"run": {"stop_grace_seconds": 1}}  # less than a load takes
    more = merged(merged(config, hasty), {"run": {"steps": 3}})
    attempt = AttemptProcess(more, harm=("load", signal.SIGINT))  # interrupted while the checkpoint is loaded
    assert attempt.end() == 130, attempt.said()
    assert f"{run_dir / 'model'} stays as it was" in attempt.said()
    model = {name: content for name, content in before.items() if name.startswith("model/")}
    assert {name: content for name, content in contents(run_dir).items() if name.startswith("model/")} == model

    for change, harm, status in (({}, 0, 0), ({"run": {"steps": 3}}, signal.SIGTERM, 143)):
        (run_dir / "model" / ".asyncflow-version").unlink()  # as if killed after the model and before the end
        (run_dir / "model" / "model.safetensors").write_bytes(b"of older weights")
        # nothing is trained; the trainer saves the model all the same
        attempt = AttemptProcess(merged(merged(config, hasty), change), harm=("load", harm))
        assert attempt.end() == status and "resumed from" in attempt.said(), attempt.said()
        assert "has saved no model" not in attempt.said()
        assert {name: content for name, content in contents(run_dir).items() if name.startswith("model/")} == model

    shutil.rmtree(run_dir / "checkpoints")
    before = contents(run_dir)
    attempt = AttemptProcess(config)  # as one that writes none
    assert attempt.end() == 0 and "is finished already" in attempt.said(), attempt.said()
    assert contents(run_dir) == before
    attempt = AttemptProcess(merged(config, {"train": {"learning_rate": 1e-4}}))
    assert attempt.end() == 2 and "has no checkpoint to resume from" in attempt.said() and "run.overwrite=true" in attempt.said()
    assert contents(run_dir) == before


def test_a_model_that_was_saved_before_the_first_checkpoint_is_set_aside(tmp_path: Path) -> None:
    """Its trainer was killed after the first step, so the published weights became the run's model; a script that resumes again and
    again gets past it."""
    config = tree(tmp_path, {"run": {"steps": 3}, "cluster": "inline", "eval": {"path": None, "every_steps": None}})
    with Trainer.from_config(merged(config, {"checkpoint": {"every_steps": None, "keep": 0}})) as trainer:
        assert trainer.step() is not None
    run_dir = tmp_path / "test"
    saved = contents(run_dir / "model")
    for _ in range(2):
        with Trainer.from_config(merged(config, {"checkpoint": {"every_steps": None, "keep": 0}}), resume=True) as trainer:
            assert trainer.step() is not None
    assert contents(run_dir / "set-aside-1" / "model") == saved and (run_dir / "set-aside-2" / "model").is_dir()
    with Trainer.from_config(merged(config, {"checkpoint": {"every_steps": None}}), resume=True) as trainer:
        assert [trainer.step() is not None for _ in range(4)] == [True, True, True, False]
    assert (run_dir / "set-aside-3" / "model").is_dir() and (run_dir / "model").is_dir()


def test_prompts_pushed_after_the_last_step_are_trained_by_the_next_attempt(tmp_path: Path) -> None:
    """Where that step has no checkpoint yet, which is written at the stop, and where it has one already."""
    change = {
        "run": {"steps": 4},
        "cluster": "inline",
        "eval": {"path": None, "every_steps": None},
        "telemetry": {"samples_per_step": PROMPTS},
    }
    for step, (name, every_steps) in enumerate((("Quintus", None), ("Sextus", 1)), 1):
        with Trainer.from_config(tree(tmp_path, change, {"checkpoint": {"every_steps": every_steps}}), resume=True) as trainer:
            trainer.step()
            if every_steps:
                wait_for((tmp_path / "test" / "checkpoints" / f"step-{step:06d}").exists)
            trainer.put_prompts_data([{"question": f"{name} has {n} coins. How many?", "answer": str(n)} for n in range(PROMPTS)])
    with Trainer.from_config(tree(tmp_path, change), resume=True) as trainer:
        while trainer.step() is not None:
            pass
    samples = rows(tmp_path / "test" / "samples.jsonl")
    for name in ("Quintus", "Sextus"):
        found = [row for row in samples if name in row["prompt"] and row["row"] % GROUP == 0]
        assert len({row["prompt"] for row in found}) == len(found) == PROMPTS and len({row["step"] for row in found}) == 1


@deep
def test_who_computes_the_references_log_probs_may_change(tmp_path: Path) -> None:
    """Rows that were completed have them, or lack them."""
    config = tree(tmp_path, {"schedule": "sub_step", "run": {"steps": 4}, "eval": {"path": None, "every_steps": None}})
    config = merged(config, {"algorithm": {"name": "grpo", "kl_coefficient": 0.01}, "train": {"learning_rate": 1e-5}})
    for number, reference in enumerate(("task", "fused", "task"), 1):
        attempt = AttemptProcess(merged(config, {"train": {"reference": reference}}))
        attempt.wait_for_steps(number)
        assert attempt.end(signal.SIGTERM if number < 3 else None) == (143 if number < 3 else 0), attempt.said()
        if number < 3:
            assert [*(attempt.run_dir / "checkpoints").glob("*/rows.afp")]
    assert [row["step"] for row in rows(attempt.run_dir / "metrics.jsonl")] == [*range(4)]


def test_the_command_line(tmp_path: Path) -> None:
    config = tree(tmp_path, {"run": {"steps": 2}, "eval": {"path": None, "every_steps": None}})
    path = write_config(tmp_path, config)
    first = run_command("train", path, "--resume")
    assert first.returncode == 0 and "there is no checkpoint" in first.stdout + first.stderr, first.stdout + first.stderr
    again = run_command("train", path)
    assert again.returncode == 2 and "--resume" in again.stderr
    more = run_command("train", path, "run.steps=3", "--resume")
    assert more.returncode == 0 and "resumed from" in more.stdout + more.stderr, more.stdout + more.stderr
    assert "resumed at step 2" in more.stdout
    assert [row["step"] for row in rows(tmp_path / "test" / "metrics.jsonl")] == [0, 1, 2]
