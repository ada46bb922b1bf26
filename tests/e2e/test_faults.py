"""What goes wrong while a run runs: rewards, losses, workers, the disk, the user's Ctrl-C. Nothing hangs."""

from __future__ import annotations

import asyncio
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from asyncflow.config import parse
from asyncflow.run.job import Job, Listener
from asyncflow.telemetry.certificate import read_certificate
from asyncflow.types import RunError
from tests.depth import deep, in_gate
from tests.e2e.commands import processes_of, rows, run_command, wait_for, write_config
from tests.forked import Command
from tests.patience import patience
from tests.processes import alive, words_of

Small = Callable[..., dict[str, Any]]
Background = Callable[..., Command]

LOCKED_GAME = """class Game:
    def reset(self, example, seed):
        raise RuntimeError("the door 3 is locked")

    def step(self, action):
        return None, 1.0, True, {}
"""
BAD_REWARD = """
import os, time
def score(sample, *, how):
    if sum(sample.prompt.encode()) % 3:
        return float(len(sample.response) % 2)
    if how == "raises":
        raise ZeroDivisionError("the grader's own bug")
    if how == "hangs":
        time.sleep(1000)
    if how == "exits":
        os._exit(3)
    if how == "nan":
        return float("nan")
    if how == "eats":
        hoard = bytearray(4 << 30)
        return float(len(hoard))
"""

BAD_LOSS = """
import time
import torch
from asyncflow.algorithms.grpo import GRPO

class Sometimes(GRPO):
    def __init__(self, *, bad_calls=(), bad_gradients=(), sleep_from=10**9, **options):
        super().__init__(**options)
        self.bad_gradients = set(bad_gradients)
        self.calls, self.bad_calls, self.sleep_from = 0, set(bad_calls), sleep_from

    def loss(self, batch):
        sums = super().loss(batch)
        self.calls += 1
        if self.calls > self.sleep_from:
            open(__file__ + ".sleeps", "w").close()
            time.sleep(60)
        if self.calls in self.bad_calls:
            return type(sums)(sums.loss * float("nan"), sums.metrics)
        if self.calls in self.bad_gradients:  # finite itself, but its derivative is 0 / 0
            return type(sums)(sums.loss + torch.sqrt(0 * batch.logprobs_T).sum(), sums.metrics)
        return sums
"""

BAD_CRITIC = """
from asyncflow.algorithms.ppo import PPO

class Broken(PPO):
    def __init__(self, **options):
        super().__init__(**options)
        of_critic = self.critic.loss
        def loss(batch):
            sums = of_critic(batch)
            return type(sums)(sums.loss * float("nan"), sums.metrics)
        self.critic.loss = loss
"""

BAD_ENGINE = """
import dataclasses
import numpy as np
from asyncflow.engines.rollout.engine import SlotEngine

class Sometimes(SlotEngine):
    def __init__(self, model_path, *, how, **options):
        super().__init__(model_path, **options)
        self.how = how

    async def generate(self, prompt_ids, **options):
        async for response in super().generate(prompt_ids, **options):
            if response.sample == 1 and self.how == "empty":
                response = dataclasses.replace(response, token_ids=response.token_ids[:0], logprobs=response.logprobs[:0])
            elif response.sample == 1:
                response = dataclasses.replace(response, logprobs=np.full_like(response.logprobs, np.nan))
            yield response
"""


class Recorded(Listener):
    def __init__(self) -> None:
        self.said: list[str] = []

    def log(self, text: str) -> None:
        self.said.append(text)


def run_inline(tree: Mapping[str, Any], *, resume: bool = False, recorded: Recorded | None = None) -> tuple[Job, list[str]]:
    """A whole run in this process, and what it said."""
    recorded = Recorded() if recorded is None else recorded

    async def main() -> Job:
        job = Job(parse({**tree, "cluster": "inline"}), recorded, resume=resume)
        assert await job.run()
        return job

    return asyncio.run(main()), recorded.said


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("raises", "ZeroDivisionError"),
        ("hangs", " s"),
        ("exits", "exit"),
        ("eats", "memory"),
        ("nan", "returned nan, which is no finite number"),
    ],
)
def test_a_reward_that_fails_costs_its_rows_and_is_named(small: Small, tmp_path: Path, how: str, words: str) -> None:
    (tmp_path / "bad.py").write_text(BAD_REWARD)
    scorer = {"path": f"{tmp_path / 'bad.py'}:score", "how": how}
    deadline = round(patience(1.0), 1) if how == "hangs" else 60.0  # nothing else may be late, however busy the machine is
    words = f"{deadline:g} s" if how == "hangs" else words
    tree = small(run={"steps": 1}, train={"prompts_per_step": 8}, rollout={"group_size": 2})
    tree["reward"] = {"scorer": scorer, "num_workers": 2, "deadline_seconds": deadline, "max_attempts": 2}
    job, said = run_inline(tree)
    row = job.rows[0]
    assert 0 < row["rows/dead"] < 16 and row["rows/trained"] == 16 - row["rows/dead"]
    assert row["rows/redelivered"] == row["rows/dead"]  # each failed once more before
    failed = [text for text in said if "failed for good" in text]
    assert len(failed) == row["rows/dead"] and all(words in text and "unscored.jsonl" in text for text in failed), failed
    kind = {"raises": "raised", "hangs": "timeout", "exits": "exited", "eats": "memory", "nan": "invalid"}[how]
    certificate = read_certificate(tmp_path / "runs" / "test")
    assert certificate is not None and certificate == job.certificate
    assert certificate.rows_dead == certificate.rows_redelivered == row["rows/dead"]
    assert certificate.reward_failures == {kind: 2 * row["rows/dead"]}
    assert bool(certificate.reward_timeouts) == bool(certificate.voided) == (how == "hangs")


def test_a_step_of_which_every_row_has_failed_is_skipped(small: Small, tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text("def score(sample):\n    return float('nan')\n")
    reward = {"scorer": {"path": f"{tmp_path / 'bad.py'}:score"}, "max_failed_fraction": 1.0}
    job, said = run_inline(small(run={"steps": 1}, reward=reward))
    assert [text for text in said if "skipped" in text] == [
        "step 0 is skipped, the weights stay as they are: nothing was left to train on"
    ]
    certificate = job.certificate
    assert certificate is not None and (certificate.steps, certificate.rows_dead, certificate.skipped_updates) == (1, 16, 1)
    assert (certificate.max_spans, certificate.overlapped_steps, certificate.voided) == (0, 0, [])


def test_an_environment_that_never_works_ends_the_run_at_its_first_step_and_is_named_a_few_times(
    small: Small, tmp_path: Path
) -> None:
    (tmp_path / "game.py").write_text(LOCKED_GAME)
    recorded = Recorded()
    with pytest.raises(RunError, match="all 16 rows of step 0, the first one, have failed: the messages above say why"):
        run_inline(small(run={"steps": 20}, environment=f"{tmp_path / 'game.py'}:Game"), recorded=recorded)
    failed = [text for text in recorded.said if "failed for good" in text]
    assert len(failed) == 8 and all(f"door 3 is locked ({tmp_path / 'game.py'}:3)" in text for text in failed)
    assert failed[-1].endswith("(8 rows by now; from here on each hundredth is logged)")


@pytest.mark.parametrize(
    ("how", "words"),
    in_gate(
        ("nan", "log-prob of token 0 of the response is nan"),
        of=[("empty", "the response is empty"), ("nan", "log-prob of token 0 of the response is nan")],
    ),
)
def test_a_response_that_cannot_be_trained_on_costs_its_row_and_is_named(
    small: Small, tmp_path: Path, how: str, words: str
) -> None:
    (tmp_path / "engine.py").write_text(BAD_ENGINE)
    tree = small(run={"steps": 1}, rollout={"engine": {"path": f"{tmp_path / 'engine.py'}:Sometimes", "how": how}})
    job, said = run_inline(tree)
    assert (job.rows[0]["rows/dead"], job.rows[0]["rows/trained"]) == (4, 12)  # sample 1 of each of 4 groups
    failed = [text for text in said if "failed for good" in text]
    assert len(failed) == 4 and all(words in text for text in failed), failed


def test_one_step_with_a_loss_that_is_not_finite_is_skipped_and_names_the_rows(small: Small, tmp_path: Path) -> None:
    (tmp_path / "loss.py").write_text(BAD_LOSS)
    job, said = run_inline(
        small(
            algorithm={"path": f"{tmp_path / 'loss.py'}:Sometimes", "bad_calls": [2]},
            run={"steps": 3},
            train={"skip_zero_advantages": False, "tokens_per_micro_batch": 1},
        )
    )
    assert [job.rows[s]["policy/skipped_updates"] for s in range(3)] == [1, 0, 0]
    assert job.rows[0]["policy/non_finite_micro_batches"] == 1
    named = [text for text in said if "step 0 is skipped" in text]
    assert len(named) == 1 and "rows" in named[0] and any(character.isdigit() for character in named[0].split("rows")[1])


@deep
def test_a_gradient_that_is_not_finite_names_the_rows_of_its_step(small: Small, tmp_path: Path) -> None:
    (tmp_path / "loss.py").write_text(BAD_LOSS)
    job, said = run_inline(small(algorithm={"path": f"{tmp_path / 'loss.py'}:Sometimes", "bad_gradients": [6]}, run={"steps": 3}))
    assert [job.rows[s]["policy/skipped_updates"] for s in range(3)] == [0, 1, 0]
    assert [text for text in said if "gradient" in text] == [
        "step 1 is skipped, the weights stay as they are: the gradient of rows 16 to 31 together was not finite"
    ]


def test_three_skipped_steps_in_a_row_end_the_run(small: Small, tmp_path: Path) -> None:
    (tmp_path / "loss.py").write_text(BAD_LOSS)
    with pytest.raises(RunError, match="3 updates in a row"):
        run_inline(small(algorithm={"path": f"{tmp_path / 'loss.py'}:Sometimes", "bad_calls": [*range(99)]}, run={"steps": 9}))


@deep
def test_one_of_several_updates_that_is_skipped_is_named_with_the_rows_of_its_mini_batch(small: Small, tmp_path: Path) -> None:
    (tmp_path / "loss.py").write_text(BAD_LOSS)
    algorithm = {"path": f"{tmp_path / 'loss.py'}:Sometimes", "bad_gradients": [3], "bad_calls": [9]}
    train = {"epochs": 2, "mini_batches": 2, "old": "step_start"}
    job, said = run_inline(small(algorithm=algorithm, run={"steps": 2}, train=train))
    assert [job.rows[s]["policy/skipped_updates"] for s in range(2)] == [1, 1]
    of_gradient, of_loss = (text for text in said if "skipped" in text)
    stay = "is skipped, the weights stay as they are:"
    assert of_gradient == f"update 2 of 4 of step 0 {stay} the gradient of rows 8 to 15 together was not finite"
    assert of_loss.startswith(f"update 1 of 4 of step 1 {stay} the loss of rows ")
    assert {int(row) for row in of_loss.split("rows ")[1].removesuffix(" was not finite").split(", ")} < {*range(16, 24)}


@deep
def test_skipped_updates_of_the_critic_end_the_run_as_the_policys_do_also_over_two_attempts(small: Small, tmp_path: Path) -> None:
    (tmp_path / "critic.py").write_text(BAD_CRITIC)

    def tree(steps: int) -> dict[str, Any]:
        path = f"{tmp_path / 'critic.py'}:Broken"
        return small(algorithm={"path": path}, run={"steps": steps}, checkpoint={"keep": 1}, telemetry={"trackers": []})

    job, said = run_inline(tree(2))
    assert [job.rows[s]["critic/skipped_updates"] for s in range(2)] == [1, 1]
    assert [job.rows[s]["policy/skipped_updates"] for s in range(2)] == [0, 0]
    assert job.certificate is not None and job.certificate.skipped_updates == 0
    skipped = [text for text in said if "skipped" in text]
    is_skipped = "is skipped for the critic, whose weights stay as they are: the loss of"
    assert [text.split(" rows ")[0] for text in skipped] == [f"step {s} {is_skipped}" for s in range(2)]
    with pytest.raises(RunError, match=r"3 updates of the critic in a row .* train\.critic\.learning_rate"):
        run_inline(tree(9), resume=True)
    assert len(rows(tmp_path / "runs" / "test" / "metrics.jsonl")) <= 3  # the one update that was left of the three


def test_a_killed_worker_that_is_not_to_be_started_again_ends_the_run_with_its_name_and_leaves_no_process(
    small: Small, tmp_path: Path, background: Background
) -> None:
    run_dir = tmp_path / "runs" / "test"
    command = background("train", write_config(tmp_path, small(run={"steps": 500}, rollout={"max_restarts": 0})))
    wait_for(lambda: len(metrics(run_dir)) >= 1, command)
    victim = next(p for p in processes_of(run_dir) if "rollout/0" in words_of(p))
    everyone = processes_of(run_dir)
    victim.kill()
    _, errors = command.communicate(timeout=patience(15))
    assert command.returncode == 1
    assert "worker rollout/0" in errors and "SIGKILL" in errors, errors
    wait_for(lambda: not alive(everyone), None, seconds=5)
    assert (run_dir / "report.html").is_file()


def test_a_killed_driver_leaves_no_process(small: Small, tmp_path: Path, background: Background) -> None:
    run_dir = tmp_path / "runs" / "test"
    command = background("train", write_config(tmp_path, small(run={"steps": 500})))
    wait_for(lambda: len(metrics(run_dir)) >= 1, command)
    everyone = processes_of(run_dir)
    assert len(everyone) >= 4  # rollout, trainer, a reward process and its guard
    command.kill()
    wait_for(lambda: not alive(everyone), None, seconds=5)


def test_status_of_a_live_run_and_ctrl_c(small: Small, tmp_path: Path, background: Background) -> None:
    run_dir = tmp_path / "runs" / "test"
    command = background("train", write_config(tmp_path, small(run={"steps": 500})))
    wait_for(lambda: len(metrics(run_dir)) >= 2, command)
    status = run_command("status", run_dir)
    assert status.returncode == 0, status.stderr
    for word in ("of 500 steps", "rollout/0", "trainer/0", "unit/0: ", "task train", "version"):
        assert word in status.stdout
    again = run_command("train", tmp_path / "config.yaml", "run.overwrite=true")
    assert again.returncode == 2 and "a run is live in" in again.stderr
    ends_in_order(command, run_dir)
    assert len(rows(run_dir / "metrics.jsonl")) == len({row["step"] for row in rows(run_dir / "metrics.jsonl")})


def test_ctrl_c_while_a_thread_computes(small: Small, tmp_path: Path, background: Background) -> None:
    (tmp_path / "loss.py").write_text(BAD_LOSS)
    algorithm = {"path": f"{tmp_path / 'loss.py'}:Sometimes", "sleep_from": 9}
    run_dir = tmp_path / "runs" / "test"
    command = background("train", write_config(tmp_path, small(run={"steps": 500}, algorithm=algorithm)))
    wait_for(lambda: len(metrics(run_dir)) >= 2 and (tmp_path / "loss.py.sleeps").exists(), command)
    ends_in_order(command, run_dir)


def ends_in_order(command: Command, run_dir: Path) -> None:
    """Ctrl-C: over soon, with a model that loads and a report."""
    from transformers import AutoModelForCausalLM

    began = time.monotonic()
    command.send_signal(signal.SIGINT)
    output, errors = command.communicate(timeout=patience(15))
    assert time.monotonic() - began < patience(12.0)
    assert command.returncode == 130, errors
    assert "interrupted" in output
    AutoModelForCausalLM.from_pretrained(run_dir / "model")
    assert (run_dir / "report.html").stat().st_size > 1000
    certificate = read_certificate(run_dir)
    assert certificate is not None and 0 < certificate.steps < certificate.planned_steps == 500 and not certificate.voided
    assert not processes_of(run_dir)


def test_a_run_that_stands_still_says_who_waits_for_what(small: Small, tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text("import time\ndef score(sample):\n    time.sleep(60)\n    return 0.0\n")
    tree = small(run={"stall_timeout_seconds": 3.0, "stop_grace_seconds": 1.0})
    tree["reward"] = {"scorer": {"path": f"{tmp_path / 'slow.py'}:score"}, "deadline_seconds": 60}
    with pytest.raises(RunError) as stalled:
        run_inline(tree)
    for words in ("nothing has moved for 3 s", "rollout/0", "reward", "rows without a response", "rollout/0 holds"):
        assert words in str(stalled.value)
    assert str(stalled.value).endswith("is others' after queue.lease_seconds (120): take less than 3")


@pytest.fixture(params=["16k", "64k"])
def tiny_disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """A file system of its own with room for next to nothing: it is full before the first step is written down, or after it."""
    disk = tmp_path / "disk"
    disk.mkdir()
    options = ["-t", "tmpfs", "-o", f"size={request.param}"]
    mount = subprocess.run(["mount", *options, "tmpfs", str(disk)], capture_output=True, check=False)
    if mount.returncode:
        pytest.skip("mounting a small file system takes root")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


def test_a_full_disk_is_one_sentence(small: Small, tmp_path: Path, tiny_disk: Path) -> None:
    command = run_command("train", write_config(tmp_path, small(run={"dir": str(tiny_disk), "steps": 200})))
    assert command.returncode == 1
    assert "No space left on device" in command.stderr and len(command.stderr.strip().splitlines()) == 1, command.stderr
    assert not processes_of(tiny_disk / "test")
    said = run_command("why", tiny_disk / "test").stdout
    # Whatever cannot be written is tried again, so no room is left for the last situation, whatever the disk's size, but where
    # another attempt has cut the run's files back to its checkpoint: there it is one of two by chance.
    no_room = rf"{re.escape(str(tiny_disk / 'test'))} has no room \(\d+ kB\)"
    wordings = [rf"its driver \(process \d+\) is gone without a word: {no_room}, \d+ s ago or later"]
    wordings += [r"it ended \d+ s ago: .*No space left on device"] if "the run is resumed from its newest" in command.stdout else []
    assert re.search(rf"steps are committed; ({'|'.join(wordings)})\. ", said.splitlines()[0]), said
    assert "it ended" in said or "`asyncflow why` knows nothing new of this run: " in command.stdout


def metrics(run_dir: Path) -> list[dict[str, Any]]:
    return rows(run_dir / "metrics.jsonl") if (run_dir / "metrics.jsonl").exists() else []
