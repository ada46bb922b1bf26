"""The same run from Python."""

from __future__ import annotations

import gc
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from asyncflow.control.ledger.steps import Ledger
from asyncflow.run.job import Listener
from asyncflow.telemetry.trace import read_spans
from asyncflow.trainer import Trainer
from asyncflow.types import RunError, UserError
from tests.conftest import ROOT, merged
from tests.depth import deep, in_gate
from tests.e2e.commands import kill_trainer, rows, write_config


def test_start_step_push_stop(small: Callable[..., dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree = small(run={"steps": 4}, cluster="inline", telemetry={"samples_per_step": 4})
    with Trainer.from_config(tree) as trainer:
        first = trainer.step()
        assert first is not None and first["rows/trained"] == 16
        assert trainer.weight_sync_notify() == 1
        with pytest.raises(RunError, match=r"version 2 is not served by all within 0\.1 s: rollout/0 serves 1"):
            trainer._call(_too_far(trainer, monkeypatch))
        trainer.put_prompts_data([{"question": f"Quintus has {n} coins. How many?", "answer": str(n)} for n in range(4)])
        with pytest.raises(UserError, match="pushed prompts: none of the columns prompt, question, problem, but answer"):
            trainer.put_prompts_data([{"answer": "1"}])
        with pytest.raises(UserError, match="row 1 of the pushed prompts holds what is no JSON value in column 'id'"):
            trainer.put_prompts_data([{"question": "a", "answer": "1", "id": 2**64}])
        assert [trainer.step() is not None for _ in range(3)] == [True] * 3
        assert trainer.step() is None
    samples = rows(tmp_path / "runs" / "test" / "samples.jsonl")
    pushed = {sample["step"] for sample in samples if "Quintus" in sample["prompt"]}
    assert len(pushed) == 1 and pushed <= {1, 2}  # prompts enter up to one step ahead
    assert len(rows(tmp_path / "runs" / "test" / "metrics.jsonl")) == 4
    assert (tmp_path / "runs" / "test" / "model" / "config.json").is_file()


@pytest.mark.parametrize(
    "schedule", in_gate("sub_step", of=["delayed", "sub_step", {"name": "bounded", "max_staleness": 2}]), ids=str
)
def test_a_call_waits_until_all_workers_serve_the_newest_weights(small: Callable[..., dict[str, Any]], schedule: Any) -> None:
    with Trainer.from_config(small(run={"steps": 3}, cluster="inline", schedule=schedule, rollout={"num_workers": 2})) as trainer:
        for step in range(3):
            assert trainer.step() is not None
            if step < 2:  # after the last one nobody has to make anything
                version = trainer.weight_sync_notify()
                driver = trainer._started.driver
                assert driver is not None and version > step
                assert len(served := driver.versions.serving) == 2 and all(each >= version for each in served.values())


def test_workers_join_and_leave_a_run_by_hand(small: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    with Trainer.from_config(small(run={"steps": 5}, cluster="inline")) as trainer:
        assert trainer.step() is not None
        assert "rollout/1 joins" in trainer.scale_rollout(2)
        assert trainer.weight_sync_notify() == 1  # the joiner serves it too
        driver = trainer._started.driver
        assert driver is not None and driver.versions.serving == {"rollout/0": 1, "rollout/1": 1}
        assert trainer.step() is not None
        with pytest.raises(UserError, match=r"rollout=5 is more than train\.prompts_per_step=4"):
            trainer.scale_rollout(5)
        assert "rollout/1 leaves" in trainer.scale_rollout(1, 0.0)
        assert trainer.step() is not None and trainer.step() is not None
        assert driver.versions.serving.keys() == {"rollout/0"} and driver.versions.workers.leaving == set()
        assert "rollout/1 joins" in trainer.scale_rollout(2)
        assert trainer.step() is not None and trainer.step() is None
    lanes = {span.worker for span in read_spans(tmp_path / "runs" / "test" / "spans.jsonl")}
    assert lanes == {"rollout/0", "rollout/1", "trainer/0"}


async def _too_far(trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = trainer._started.driver
    assert driver is not None
    with monkeypatch.context() as patched:
        patched.setattr(Ledger, "committed", driver.ledger.ledger.committed + 1)
        await trainer._started.weight_sync_notify(0.1)


def test_a_delayed_run_by_hand_is_as_far_ahead_as_one_that_runs_by_itself(
    small: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    """Nobody is called back to an older version, since the next step's prompts are there while this one is trained."""
    tree = small(run={"steps": 4}, cluster="inline", schedule="delayed", rollout={"num_workers": 2})
    with Trainer.from_config(tree) as trainer:
        assert [trainer.step() is not None for _ in range(4)] == [True] * 4
        assert trainer.step() is None
    spans = read_spans(tmp_path / "runs" / "test" / "spans.jsonl")
    for worker in ("rollout/0", "rollout/1"):
        installed = [span.version for span in spans if span.worker == worker and span.task == "install"]
        assert installed == sorted(installed) and installed
    staleness = [row["staleness/mean"] for row in rows(tmp_path / "runs" / "test" / "metrics.jsonl")]
    assert staleness == [0.0, 1.0, 1.0, 1.0]


PUSHED = [{"question": f"Quintus has {n} coins. How many?", "answer": str(n)} for n in range(6)]


def by_hand(trainer: Trainer, between: Callable[[int], object] = lambda step: None) -> dict[str, Any]:
    """A run of four steps; prompts are pushed after the first one. Its evaluation, and the weights of its final model."""
    for step in range(4):
        assert trainer.step() is not None
        if step == 0:
            trainer.put_prompts_data(PUSHED)
        between(step)
    assert trainer.step() is None
    figures = dict(trainer.evaluate())
    trainer.stop()
    return figures | dict(load_file(trainer.config.run_dir / "model" / "model.safetensors"))


def test_a_trainers_death_does_not_end_a_run_by_hand_and_what_was_pushed_is_trained(
    small: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    """It dies between two steps, twice: the next call finds it, whichever it is. Prompts that were pushed are in no checkpoint."""
    evaluated = {"path": "generated:arithmetic", "num_prompts": 4, "every_steps": None}
    tree = small(
        run={"steps": 4},
        schedule="synchronous",
        train={"accumulate": "exact"},
        checkpoint={"in_memory": True},
        eval=evaluated,
        telemetry={"samples_per_step": 4},
    )
    whole = Trainer.from_config(merged(tree, {"run": {"name": "whole"}}))
    whole.start()
    expected = by_hand(whole)
    said: list[str] = []

    class Heard(Listener):
        def log(self, text: str) -> None:
            said.append(text)

    trainer = Trainer.from_config(tree, listener=Heard())
    trainer.start()

    def between(step: int) -> None:
        if step == 0:
            kill_trainer(trainer.config.run_dir)
        elif step == 2:
            kill_trainer(trainer.config.run_dir)
            assert trainer.weight_sync_notify() == 3

    found = by_hand(trainer, between)
    assert sum("the run is resumed from its newest checkpoint" in line for line in said) == 2, "\n".join(said)
    assert found.keys() == expected.keys() and all(np.array_equal(found[name], expected[name]) for name in expected)
    trained = [row["prompt"] for row in rows(trainer.config.run_dir / "samples.jsonl")]
    assert sum("Quintus" in prompt for prompt in trained) >= len(PUSHED)


@deep
def test_a_trainers_death_ends_a_run_by_hand_where_it_may_not_be_started_again_and_it_goes_on_where_it_was(
    small: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    tree = small(
        run={"steps": 4},
        schedule="synchronous",
        train={"accumulate": "exact", "max_restarts": 0},
        checkpoint={"every_steps": 1},
        eval={"path": None},
    )
    whole = merged(tree, {"run": {"name": "whole"}})
    with Trainer.from_config(whole) as trainer:
        while trainer.step() is not None:
            pass
    run_dir = tmp_path / "runs" / "test"
    with Trainer.from_config(tree) as trainer:
        assert trainer.step() is not None and trainer.step() is not None
        kill_trainer(run_dir)
        with pytest.raises(RunError, match=r"trainer/0 .*begin it again with resume, and it continues from its newest checkpoint"):
            trainer.step()
    with Trainer.from_config(tree, resume=True) as trainer:
        done = 0
        while trainer.step() is not None:
            done += 1
        assert 2 <= done <= 3  # the second step may have been committed without its checkpoint
    found, expected = (load_file(tmp_path / "runs" / name / "model" / "model.safetensors") for name in ("test", "whole"))
    assert found.keys() == expected.keys() and all(np.array_equal(found[name], expected[name]) for name in expected)


def test_mistakes(small: Callable[..., dict[str, Any]]) -> None:
    with pytest.raises(UserError, match="nowhere"):
        Trainer.from_config(small(model={"path": "nowhere"}, cluster="inline")).start()
    trainer = Trainer.from_config(small(cluster="inline"))
    with pytest.raises(RunError, match="call start first"):
        trainer.put_prompts_data([])


def score(sample: Any) -> float:
    return 0.0


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (
            lambda tree: Trainer(tree),
            r"write Trainer\.from_config\(\.\.\.\): Trainer itself takes a checked configuration, not a dict",
        ),
        (lambda tree: Trainer("recipe.yaml"), "takes a checked configuration, not a str"),  # type: ignore[arg-type]
        (lambda tree: Trainer.from_config(None), "the path of a YAML file, or nested mappings, not a NoneType"),  # type: ignore[arg-type]
        (lambda tree: Trainer.from_config(tree, ["run.steps=3"]), "text such as 'run.steps=3', one for each key, not a list"),  # type: ignore[arg-type]
        (lambda tree: Trainer.from_config(tree, {"run": 3}), "text such as 'run.steps=3', one for each key, not a dict"),  # type: ignore[arg-type]
        (lambda tree: Trainer.from_config(tree).scale_rollout("2"), "takes a whole number of workers, not a str"),  # type: ignore[arg-type]
        (lambda tree: Trainer.from_config(tree).weight_sync_notify(None), "takes a number of seconds, not a NoneType"),  # type: ignore[arg-type]
        (lambda tree: Trainer.from_config(tree).save(3), "takes the path of a new folder, not a int"),  # type: ignore[arg-type]
        (
            lambda tree: Trainer.from_config(tree | {"reward": {"scorer": score}}),
            "reward.scorer is score itself, .*: write it into a file of its own and name that, {'path': 'my_file.py:score'}",
        ),
        (lambda tree: Trainer.from_config(tree | {"data": [score]}), "data is score itself"),
        (
            lambda tree: Trainer.from_config(tree | {"algorithm": {"name": "grpo", "clip_low": np.float64(0.1)}}),
            "algorithm.clip_low is a float64, which YAML cannot say: write a plain number",
        ),
    ],
)
def test_what_is_no_configuration_is_said(small: Callable[..., dict[str, Any]], call: Callable[[Any], Trainer], words: str) -> None:
    with pytest.raises(UserError, match=words):
        call(small(cluster="inline"))


@pytest.mark.parametrize("num_evaluators", in_gate(1, of=[0, 1]))
def test_a_model_is_evaluated_saved_and_kept_when_one_asks(
    small: Callable[..., dict[str, Any]], tmp_path: Path, num_evaluators: int
) -> None:
    run_dir, heard = tmp_path / "runs" / "test", Heard()
    evaluated = {"path": "generated:arithmetic", "num_prompts": 4, "num_workers": num_evaluators}
    tree = small(run={"steps": 3}, cluster="inline", schedule="delayed", eval=evaluated, checkpoint={"keep": 2})
    with Trainer.from_config(tree, listener=heard) as trainer:
        with pytest.raises(UserError, match="no step is committed yet: the model is still the one in"):
            trainer.save(tmp_path / "early")
        assert trainer.evaluate()["step"] == 0  # a planned one
        assert trainer.step() is not None
        figures = trainer.evaluate()
        assert figures["step"] == 1 and 0 <= figures["accuracy/sampled"] <= 1 and trainer.evaluate() == figures
        assert trainer.save(tmp_path / "saved") == 1
        with pytest.raises(UserError, match="saved is there already: name a new folder"):
            trainer.save(tmp_path / "saved")
        assert trainer.checkpoint() == 2
        assert trainer.step() is not None and trainer.step() is not None
        assert trainer.evaluate()["step"] == 3
        with pytest.raises(UserError, match="all steps of this run are committed"):
            trainer.checkpoint()
    assert [row["step"] for row in rows(run_dir / "eval.jsonl")] == heard.evaluations == [0, 1, 3] and heard.steps == [0, 1, 2]
    assert (run_dir / "checkpoints" / "step-000002").is_dir()
    saved, last = (load_file(folder / "model.safetensors") for folder in (tmp_path / "saved", run_dir / "model"))
    assert saved.keys() == last.keys() and any(not bool((saved[name] == last[name]).all()) for name in saved)
    assert (tmp_path / "saved" / "tokenizer.json").is_file()
    tree = small(run={"steps": 1, "name": "none"}, cluster="inline", checkpoint={"keep": 0})
    with Trainer.from_config(tree) as trainer:
        with pytest.raises(UserError, match=r"set eval\.path"):
            trainer.evaluate()
        with pytest.raises(UserError, match=r"checkpoint\.keep=0"):
            trainer.checkpoint()


def test_a_checkpoint_that_one_asks_for_has_the_critic_too(small: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    tree = small(run={"steps": 3}, cluster="inline", algorithm="ppo", checkpoint={"keep": 2})
    with Trainer.from_config(tree) as trainer:
        assert trainer.step() is not None
        assert trainer.checkpoint() == 2
        assert trainer.step() is not None and trainer.step() is not None
    parts = {path.name for path in (tmp_path / "runs/test/checkpoints/step-000002").iterdir()}
    assert parts >= {"critic", "trainer"}


@pytest.mark.parametrize(
    "schedule",
    in_gate(
        "sub_step", of=["synchronous", "periodic", "sub_step", {"name": "bounded", "max_staleness": 2, "membership": "first_come"}]
    ),
    ids=str,
)
def test_every_step_may_be_evaluated_and_saved(small: Callable[..., dict[str, Any]], tmp_path: Path, schedule: Any) -> None:
    evaluated = {"path": "generated:arithmetic", "num_prompts": 4, "every_steps": 2}
    tree = small(run={"steps": 3}, cluster="inline", schedule=schedule, rollout={"num_workers": 2}, eval=evaluated)
    with Trainer.from_config(tree) as trainer:
        versions = [trainer.evaluate()["step"]]
        while trainer.step() is not None:
            versions.append(trainer.evaluate()["step"])
            assert trainer.save(tmp_path / f"saved-{versions[-1]}") == versions[-1]
    assert versions == [0, 1, 2, 3]
    assert [row["step"] for row in rows(tmp_path / "runs" / "test" / "eval.jsonl")] == versions


def test_the_run_of_the_python_page(
    small: Callable[..., dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "python.md").read_text(), re.DOTALL)[0]
    assert "class Printed" in source
    tree = small(cluster="inline", eval={"path": "generated:arithmetic", "num_prompts": 4}, checkpoint={"keep": 2})
    write_config(tmp_path, tree).rename(tmp_path / "recipe.yaml")
    monkeypatch.chdir(tmp_path)
    exec(source, {"__name__": "page"})
    printed = capsys.readouterr().out
    assert [f"\n{step} " in f"\n{printed}" for step in range(3)] == [True] * 3
    assert (tmp_path / "trained" / "model.safetensors").is_file()
    assert (tmp_path / "runs" / "test" / "checkpoints" / "step-000002").is_dir()


class Heard(Listener):
    """Steps and versions that it is told of."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.evaluations: list[int] = []

    def step(self, step: int, row: Mapping[str, float]) -> None:
        self.steps.append(step)

    def evaluation(self, row: Mapping[str, float]) -> None:
        self.evaluations.append(int(row["step"]))


def test_a_failure_that_comes_when_the_run_is_over_is_not_reported_as_forgotten(
    small: Callable[..., dict[str, Any]], caplog: pytest.LogCaptureFixture
) -> None:
    trainer = Trainer.from_config(small(run={"steps": 1}, cluster="inline"))
    trainer.start()
    assert trainer.step() is not None
    job = trainer._started
    assert job.driver is not None
    driver = job.driver
    trainer._loop.call_soon_threadsafe(driver.background.fail, OSError(28, "No space left on device"))
    trainer.stop()
    del driver, job
    gc.collect()
    assert "never retrieved" not in caplog.text
