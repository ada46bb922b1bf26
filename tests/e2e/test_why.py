"""Hangs that are planted in real processes: `asyncflow why` names them, of a live run, a killed one and one that has ended."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.depth import deep, in_gate
from tests.e2e.commands import processes_of, rows, run_command, wait_for, write_config
from tests.forked import Command
from tests.patience import patience
from tests.processes import words_of
from tests.vllm.servers import fake_python

Small = Callable[..., dict[str, Any]]
Background = Callable[..., Command]
Long = Callable[..., tuple[Path, Path]]
Stop = Callable[[int], None]

SLEEPS = "import time\ndef score(sample):\n    time.sleep(1000)\n    return 0.0\n"

LOCKED = """
import threading
from asyncflow.algorithms.grpo import GRPO

class Locked(GRPO):
    def __init__(self, **options):
        super().__init__(**options)
        self.lock, self.calls = threading.Lock(), 0

    def loss(self, batch):
        self.calls += 1
        if self.calls == 9:
            threading.Thread(target=self.lock.acquire).start()
        if self.calls >= 9:
            self.wait_for_the_lock()
        return super().loss(batch)

    def wait_for_the_lock(self):
        with self.lock:
            return None
"""

NEVER_ENDS = 600.0
"""A stall timeout that no test reaches."""


def why(run_dir: Path) -> str:
    answer = run_command("why", run_dir)
    assert answer.returncode == 0, answer.stderr
    return answer.stdout


def named(run_dir: Path, command: Command, *words: str) -> str:
    """What `asyncflow why` says, once it says all of these."""

    def has_all() -> str | None:
        if not (run_dir / "now.json").exists():
            return None
        said = why(run_dir)
        return said if all(re.search(word, said) for word in words) else None

    said: str = wait_for(has_all, command)
    return said


def worker_of(run_dir: Path, name: str) -> psutil.Process:
    (process,) = [process for process in processes_of(run_dir) if name in words_of(process)]
    return process


@pytest.fixture
def stop(background: Background) -> Iterator[Stop]:
    """Stops processes by SIGSTOP. They go on at the end, before the run is killed: a stopped one would outlive it."""
    stopped: list[int] = []

    def send(pid: int) -> None:
        os.kill(pid, signal.SIGSTOP)
        stopped.append(pid)

    yield send
    for pid in stopped:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


@pytest.fixture
def long(small: Small, tmp_path: Path) -> Long:
    """Configuration and folder of a run of many steps, in which nothing is declared dead for a while."""

    def build(**changes: Any) -> tuple[Path, Path]:
        tree = small(**{"run": {"steps": 400, "stall_timeout_seconds": NEVER_ENDS}, **changes})
        return write_config(tmp_path, tree), tmp_path / "runs" / "test"

    return build


@pytest.mark.parametrize("name", in_gate("rollout/0", of=["rollout/0", "trainer/0"]))
def test_a_stopped_process_is_named_live_and_after_the_driver_was_killed(
    name: str, long: Long, background: Background, stop: Stop
) -> None:
    config, run_dir = long()
    command = background("train", config)
    wait_for(lambda: (run_dir / "metrics.jsonl").exists() and len(rows(run_dir / "metrics.jsonl")) >= 1, command)
    stopped = worker_of(run_dir, name)
    stop(stopped.pid)
    chain = rf"{name} does nothing: its process {stopped.pid} is stopped \(SIGSTOP\)"
    said = named(run_dir, command, chain)
    assert "nothing has moved for" in said and "400 steps are committed" in said
    ends = r"\[at the latest until: (queue.lease_seconds|run.stall_timeout_seconds) \(\d+ s\)\]$"
    assert re.search(rf"{chain}.*{ends}", said, re.MULTILINE)
    command.kill()
    command.wait()
    said = why(run_dir)
    gone = r"its driver \(process \d+\) is gone without a word: it was killed, .* \d+ s ago or later"
    assert re.search(gone, said) and re.search(chain, said)


@deep
def test_a_driver_that_is_stopped_is_named_from_its_file_alone(long: Long, background: Background, stop: Stop) -> None:
    config, run_dir = long()
    command = background("train", config)
    wait_for(lambda: (run_dir / "now.json").exists(), command)
    stop(command.pid)
    named(run_dir, command, rf"its driver \(process {command.pid}, stopped\) has written nothing for \d+ s")


@deep
def test_a_reward_that_sleeps_is_named_with_its_process_and_its_deadline(
    long: Long, tmp_path: Path, background: Background, stop: Stop
) -> None:
    (tmp_path / "slow.py").write_text(SLEEPS)
    scorer = {"path": f"{tmp_path / 'slow.py'}:score"}
    config, run_dir = long(reward={"scorer": scorer, "deadline_seconds": 500, "num_workers": 1})
    command = background("train", config)
    words = [r"trainer/0 waits for group 0 of step 0", r"rollout/0 has it for task rollout"]
    said = named(run_dir, command, *words, r"rollout/0 waits for reward worker \d+, since [\d.]+ s", r"its deadline, in \d+ s")
    pid = int(re.findall(r"reward worker (\d+)", said)[0])
    assert psutil.Process(pid).is_running()
    stop(pid)
    named(run_dir, command, rf"reward worker {pid}, since [\d.]+ s, which is stopped")


@deep
def test_a_lock_that_a_thread_holds_is_named_by_its_line(long: Long, tmp_path: Path, background: Background) -> None:
    (tmp_path / "locked.py").write_text(LOCKED)
    config, run_dir = long(algorithm={"path": f"{tmp_path / 'locked.py'}:Locked"})
    command = background("train", config)
    line = next(number for number, text in enumerate(LOCKED.splitlines(), 1) if "with self.lock" in text)
    named(
        run_dir, command, rf"trainer/0 is in forward_backward, since [\d.]+ s, in thread .*wait_for_the_lock \(locked.py:{line}\)"
    )


@deep
def test_a_storage_unit_that_is_stopped_is_named(long: Long, background: Background, stop: Stop) -> None:
    config, run_dir = long(queue={"place": "workers"})
    command = background("train", config)
    wait_for(lambda: (run_dir / "metrics.jsonl").exists() and len(rows(run_dir / "metrics.jsonl")) >= 1, command)
    stop(worker_of(run_dir, "storage/0").pid)
    named(run_dir, command, r"storage/0 does nothing: its process \d+ is stopped")


@deep
def test_a_vllm_server_that_is_stopped_is_named(long: Long, tmp_path: Path, background: Background, stop: Stop) -> None:
    engine = {"name": "vllm", "python": str(fake_python(tmp_path))}
    config, run_dir = long(rollout={"engine": engine})
    command = background("train", config)
    wait_for(lambda: (run_dir / "metrics.jsonl").exists() and len(rows(run_dir / "metrics.jsonl")) >= 1, command)
    for process in processes_of(run_dir):
        if any(word.endswith("fake_vllm.py") for word in words_of(process)):
            stop(process.pid)
    named(run_dir, command, r"trainer/0 waits for group \d+", r"rollout/0 waits for vLLM 0, since [\d.]+ s")


@deep
def test_a_vllm_server_that_is_dead_is_named_until_it_has_come_back(long: Long, tmp_path: Path, background: Background) -> None:
    python = fake_python(tmp_path)
    config, run_dir = long(rollout={"engine": {"name": "vllm", "python": str(python), "start_seconds": 333.0}})
    command = background("train", config)
    wait_for(lambda: (run_dir / "metrics.jsonl").exists() and len(rows(run_dir / "metrics.jsonl")) >= 1, command)
    serves, comes = python.read_text(), tmp_path / "comes"
    comes.write_text(f'#!/bin/sh\n[ "$1" = -c ] && exit\nwhile [ ! -e {tmp_path / "may-serve"} ]; do sleep 0.1; done\n{serves}')
    comes.chmod(0o700)
    comes.replace(python)  # from now on servers come, and do not serve
    for process in processes_of(run_dir):
        if any(word.endswith("fake_vllm.py") for word in words_of(process)):
            process.kill()
    lost = r"rollout/0 waits for a vLLM server that serves: vLLM 0 was lost \(.*\), since [\d.]+ s"
    ends = r"\[at the latest until: start_seconds of rollout.engine, in 3[0-3]\d s\]"
    named(run_dir, command, r"trainer/0 waits for group \d+", rf"{lost} {ends}")
    num_steps = len(rows(run_dir / "metrics.jsonl"))
    (tmp_path / "may-serve").touch()
    wait_for(lambda: len(rows(run_dir / "metrics.jsonl")) > num_steps + 1, command)


FILES = {
    "trainer/0": ("trainer/shard-00001-model-00001-of-00001.safetensors", r"trainer/0 waits for {files}{thread}"),
    "the driver": (
        "driver.msgpack",
        r"trainer/0 waits for the driver to make checkpoint 4 whole, .*\n +-> the driver waits for {files}{thread}",
    ),
}


@deep
@pytest.mark.parametrize("writer", FILES)
def test_a_disk_that_hangs_under_a_checkpoint_is_named_by_the_file_operation(
    writer: str, long: Long, background: Background
) -> None:
    """A pipe that nobody reads lies where a file is to be written: whoever opens it stands in the kernel, as with a dead disk."""
    config, run_dir = long(checkpoint={"every_steps": 4})
    command = background("train", config)
    wait_for(lambda: (run_dir / "now.json").exists(), command)  # what lay there before is removed by then
    name, chain = FILES[writer]
    folder = run_dir / "checkpoints" / "step-000004.partial"
    (folder / name).parent.mkdir(parents=True)
    os.mkfifo(folder / name)
    files = rf"files of checkpoint 4 to be written, in {folder}, since [\d.]+ s"
    said = named(run_dir, command, chain.format(files=files, thread=r", in thread checkpoint: .* > open \(pathlib.py:\d+\)"))
    assert ": 8 of 400 steps are committed" in said  # at the checkpoint after it
    assert re.search(r"open \(pathlib.py:\d+\) \[at the latest until: run.stall_timeout_seconds \(600 s\)\]$", said, re.MULTILINE)
    os.close(os.open(folder / name, os.O_RDONLY | os.O_NONBLOCK))  # it goes on


@deep
def test_a_disk_that_hangs_under_the_situation_is_named_by_the_age_of_its_file(long: Long, background: Background) -> None:
    config, run_dir = long()
    command = background("train", config)
    wait_for(lambda: (run_dir / "metrics.jsonl").exists() and len(rows(run_dir / "metrics.jsonl")) >= 1, command)
    wait_for(lambda: _is_made(run_dir / "now.json.partial"), command)
    num_steps = len(rows(run_dir / "metrics.jsonl"))
    named(run_dir, command, rf"its driver \(process {command.pid}, \w+\) has written nothing for \d+ s")
    wait_for(lambda: len(rows(run_dir / "metrics.jsonl")) > num_steps + 1, command)  # nothing else waits for it


def _is_made(pipe: Path) -> bool:
    with contextlib.suppress(FileExistsError):
        os.mkfifo(pipe)
        return True
    return False


STALLS = """
import asyncio
from asyncflow.transport import remote
from asyncflow.types import Array
from asyncflow.weight_sync.base import WeightSyncFacts

class Stalls:
    facts = WeightSyncFacts(has_door=True, needs_key=True, is_broadcast=False)

    def __init__(self, options):
        from asyncflow.weight_sync.network import Network
        self._network = Network(options)

    def receiver(self, name):
        return self._network.receiver(name)

    def sender(self, incarnation):
        from asyncflow.weight_sync.network import NetworkSender
        read = NetworkSender.read

        @remote
        async def stalls(self, incarnation: str, version: int, begin: int, end: int) -> Array:
            if version:
                await asyncio.sleep(1000)
            return await read(self, incarnation, version, begin, end)

        NetworkSender.read = stalls
        return self._network.sender(incarnation)
"""


@deep
def test_a_fetch_at_0_bytes_is_named_with_its_sender_and_its_deadline(long: Long, tmp_path: Path, background: Background) -> None:
    (tmp_path / "stalls.py").write_text(STALLS)
    config, run_dir = long(weight_sync={"path": f"{tmp_path / 'stalls.py'}:Stalls", "deadline_seconds": 100})
    command = background("train", config)
    named(
        run_dir,
        command,
        r"trainer/0 waits for group \d+ of step 1",
        r"group \d+ lies ready .*version 1, which no worker serves \(rollout/0 serves 0\)",
        r"rollout/0 waits for bytes of version 1 from the trainer's sender at tls:127.0.0.1:\d+, since [\d.]+ s: 0 bytes have "
        r"come, none for [\d.]+ s; .* \[at the latest until: weight_sync.deadline_seconds \(100 s\)\]",
    )


HELD_UP = """
import time
from asyncflow.algorithms.grpo import GRPO

class HeldUp(GRPO):
    def advantages(self, group):
        time.sleep(1000)
"""

STANDS = """
import time

class Stands:
    def reset(self, example, seed):
        return "Go."

    def step(self, action):
        time.sleep(1000)
"""


@deep
def test_code_that_holds_up_an_event_loop_is_named(long: Long, tmp_path: Path, background: Background) -> None:
    (tmp_path / "held_up.py").write_text(HELD_UP)
    config, run_dir = long(algorithm={"path": f"{tmp_path / 'held_up.py'}:HeldUp"})
    command = background("train", config)
    named(run_dir, command, r"trainer/0 has not reported for [\d.]+ s, its process \d+ is sleeping; last heard of ")


@deep
def test_an_environment_that_never_answers_is_named_with_its_process_and_its_deadline(
    long: Long, tmp_path: Path, background: Background
) -> None:
    (tmp_path / "stands.py").write_text(STANDS)
    episodes = {"max_turns": 3, "max_turn_tokens": 8, "num_workers": 1, "deadline_seconds": 500}
    config, run_dir = long(environment=f"{tmp_path / 'stands.py'}:Stands", episodes=episodes)
    command = background("train", config)
    words = [r"trainer/0 waits for group 0 of step 0", r"rollout/0 has it for task rollout"]
    process = r"rollout/0 waits for environment process \d+, since [\d.]+ s(, which is \w+)?"  # which is told after a while
    named(run_dir, command, *words, rf"{process} \[.*: its deadline, in \d+ s\]")


STOPPED: dict[str, tuple[str, dict[str, Any]]] = {
    "a rank of a collective": ("trainer/1", {"plan": {"train": {"dp": 2}}}),
    "a critic": ("critic", {"algorithm": {"name": "ppo"}}),
    "the values of a critic": ("values/0", {"algorithm": {"name": "ppo"}, "plan": {"values": {"num_workers": 1}}}),
    "a reward with a task of its own": ("reward/0", {"reward": {"place": "task"}}),
    "a reference with a task of its own": (
        "reference/0",
        {"algorithm": {"name": "grpo", "kl_coefficient": 0.1}, "train": {"reference": "task"}},
    ),
    "an evaluator": (
        "evaluator/0",
        # Training waits for no evaluation: the run does, when all steps are committed.
        {
            "run": {"steps": 6, "stall_timeout_seconds": NEVER_ENDS},
            "eval": {"path": "generated:arithmetic", "num_prompts": 4, "every_steps": 1, "num_workers": 1},
        },
    ),
    "a receiver of broadcasts": ("rollout/1", {"rollout": {"num_workers": 2}, "weight_sync": {"name": "collective"}}),
}


@deep
@pytest.mark.parametrize("what", STOPPED)
def test_a_stopped_worker_ends_the_chain_of_whoever_works_together_with_it(
    what: str, long: Long, background: Background, stop: Stop
) -> None:
    name, changes = STOPPED[what]
    config, run_dir = long(**changes)
    command = background("train", config)
    wait_for(lambda: (run_dir / "metrics.jsonl").exists() and len(rows(run_dir / "metrics.jsonl")) >= 1, command)
    stopped = worker_of(run_dir, name)
    stop(stopped.pid)

    def chain() -> list[dict[str, Any]] | None:
        found: list[dict[str, Any]] = json.loads(run_command("why", run_dir, "--json").stdout)["chain"]
        return found if found[-1]["text"].startswith(f"{name} does nothing: its process {stopped.pid} is stopped") else None

    links = wait_for(chain, command)
    assert links[0]["who"] == "trainer/0" and links[-2]["on"] == name, links


@deep
def test_a_worker_that_stands_while_others_train_is_named_with_its_process_in_the_log_too(
    long: Long, background: Background, stop: Stop
) -> None:
    _, changes = STOPPED["an evaluator"]
    config, run_dir = long(**{**changes, "run": {"steps": 4000, "stall_timeout_seconds": 40.0}})
    command = background("train", config)
    wait_for(lambda: (run_dir / "metrics.jsonl").exists() and len(rows(run_dir / "metrics.jsonl")) >= 1, command)
    stopped = worker_of(run_dir, "evaluator/0")
    stop(stopped.pid)
    stands = rf"evaluator/0 does nothing: its process {stopped.pid} is stopped \(SIGSTOP\)"
    named(run_dir, command, r"nothing has moved for [01] s:", stands)
    logged = next(line for line in command.stdout if "a worker stands" in line)
    assert re.search(rf"a worker stands, whatever else moves: {stands}", logged)


@deep
def test_a_run_that_ended_says_who_waited_for_whom_in_its_log_and_by_why(
    long: Long, tmp_path: Path, background: Background
) -> None:
    (tmp_path / "slow.py").write_text(SLEEPS)
    scorer = {"path": f"{tmp_path / 'slow.py'}:score"}
    run = {"steps": 400, "stall_timeout_seconds": 8.0}
    config, run_dir = long(run=run, reward={"scorer": scorer, "deadline_seconds": 500})
    command = background("train", config)
    output, errors = command.communicate(timeout=patience(120))
    chain = r"trainer/0 waits for group 0 of step 0 .*; rollout/0 has it .*; rollout/0 waits for reward worker \d+, since"
    assert command.returncode == 1
    assert re.search(rf"nothing has moved for 8 s \(run.stall_timeout_seconds\): {chain}", errors)
    assert re.search(rf"nothing has moved for [0-3] s: {chain}", output)
    assert re.search(r"it ended \d+ s ago: nothing has moved for 8 s", why(run_dir))


def test_a_run_that_was_interrupted_says_so_however_long_it_took_to_end(long: Long, background: Background, stop: Stop) -> None:
    config, run_dir = long()
    command = background("train", config)
    wait_for(lambda: (run_dir / "metrics.jsonl").exists() and len(rows(run_dir / "metrics.jsonl")) >= 1, command)
    stop(worker_of(run_dir, "rollout/0").pid)  # so that it is killed, after run.stop_grace_seconds
    command.send_signal(signal.SIGINT)
    command.communicate(timeout=patience(60.0))
    situation = json.loads(run_command("why", run_dir, "--json").stdout)
    assert situation["situation"]["ended"] == "it was interrupted" and situation["chain"] and situation["graph"]


def test_a_run_that_is_done_says_so_and_no_folder_is_one_sentence(small: Small, tmp_path: Path) -> None:
    done = run_command("train", write_config(tmp_path, small(run={"steps": 1})))
    assert done.returncode == 0, done.stderr
    said = why(tmp_path / "runs" / "test")
    assert "1 of 1 steps are committed; it ended" in said and "it is done" in said
    nowhere = run_command("why", tmp_path)
    assert nowhere.returncode == 2 and "now.json" in nowhere.stderr and len(nowhere.stderr.strip().splitlines()) == 1
