"""Environment processes against environments that misbehave: every mistake is its own episode's, and says what happened."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from asyncflow.environments.agent import Agent, Endpoint
from asyncflow.environments.base import Action, EnvironmentFailure, Opening, seed_of
from asyncflow.environments.pool import EnvironmentPool
from asyncflow.sandbox.limits import ProcessLimits
from asyncflow.types import RunError, UserError
from tests.patience import patience, until

# One environment for all tests: the action says how to misbehave.
FILE = """
import os, sys, time, asyncio
seen = []

class Echo:
    tools = [{"type": "function", "function": {"name": "look"}}]
    def __init__(self, greeting="hello"):
        self.greeting, self.turns = greeting, 0
    def reset(self, example, seed):
        seen.append(seed)
        self.seed = seed
        return f"{self.greeting} {example['name']} {len(seen)}"
    def step(self, action):
        self.turns += 1
        what, _, rest = action.partition(" ")
        return getattr(self, "do_" + what)(rest)
    def do_say(self, rest): return f"{rest} {self.turns} {self.seed}", 0.5, self.turns == 3, {"tool_calls": 1}
    def do_raise(self, rest): raise KeyError("no " + rest)
    async def do_cancel(self, rest): raise asyncio.CancelledError("by " + rest)
    def do_exit(self, rest): print("bye, said the environment", flush=True); os._exit(3)
    def do_eat(self, rest): eaten = [b"x" * (64 << 20) for _ in range(64)]; return None, None, True, {}
    def do_sleep(self, rest):
        seconds, _, begun = rest.partition(" ")
        if begun: open(begun, "w").close()
        time.sleep(float(seconds))
        return None, 1, True, {}
    def do_nothing(self, rest): return 3
    def do_nan(self, rest): return None, float("nan"), True, {}
    def do_pid(self, rest): return str(os.getpid()), None, False, None
    def do_child(self, rest):
        import subprocess
        return str(subprocess.Popen(["sleep", "60"], start_new_session=True).pid), None, True, {}

class Many(Echo):
    episodes_per_process = 8
    is_deterministic = False
    async def reset(self, example, seed):
        await asyncio.sleep(0)
        return Echo.reset(self, example, seed)

class Crowd(Echo):
    episodes_per_process = 100

class Chat:
    def reset(self, example, seed):
        from asyncflow.environments.base import Opening
        return Opening([{"role": "user", "content": "q"}], [{"name": "t"}])
    async def step(self, action): return [{"role": "tool", "content": str(action.is_finished)}], None, False, {}
    def close(self): open(os.environ["CLOSED"], "w").write("x")

class Broken:
    def __init__(self): raise ValueError("no such luck")
class NoStep:
    def reset(self, example, seed): return None
"""
MEMORY = 256 << 20
Open = Callable[..., Awaitable[EnvironmentPool]]


@pytest.fixture
async def open_pool(tmp_path: Path) -> AsyncIterator[Open]:
    file, pools = tmp_path / "echo.py", []
    file.write_text(FILE)

    async def opened(name: str = "Echo", *, seconds: float = 60.0, workers: int = 1, **options: Any) -> EnvironmentPool:
        pool = EnvironmentPool(f"{file}:{name}", options, ProcessLimits(seconds, MEMORY), num_workers=workers, name="test")
        pools.append(pool)
        await pool.start()
        return pool

    yield opened
    for pool in pools:
        await pool.close()


async def failure(pool: EnvironmentPool, action: str) -> EnvironmentFailure:
    episode, _ = await pool.begin({"name": "x"}, 1)
    with pytest.raises(EnvironmentFailure) as raised:
        await episode.step(Action(action))
    episode.end()
    return raised.value


async def test_an_episode_keeps_its_state_and_the_next_one_meets_none_of_it(open_pool: Open) -> None:
    pool = await open_pool(greeting="hi")
    assert pool.facts.tools == [{"type": "function", "function": {"name": "look"}}] and pool.facts.is_deterministic
    for seed in (5, 7):
        episode, opening = await pool.begin({"name": "Ann"}, seed)
        assert opening == Opening("hi Ann 1"), "a fork of the process as it was built"
        results = [await episode.step(Action("say yes")) for _ in range(3)]
        assert [result.words for result in results] == [f"yes {turn} {seed}" for turn in (1, 2, 3)]
        assert [result.done for result in results] == [False, False, True]
        assert all(result.reward == 0.5 and result.info == {"tool_calls": 1} for result in results)
        episode.end()


async def test_messages_tools_and_the_end_of_a_turn_reach_the_other_side(
    open_pool: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CLOSED", str(tmp_path / "closed"))
    pool = await open_pool("Chat")
    episode, opening = await pool.begin({}, 1)
    assert opening == Opening([{"role": "user", "content": "q"}], [{"name": "t"}])
    assert (await episode.step(Action("cut", is_finished=False))).words == [{"role": "tool", "content": "False"}]
    episode.end()
    async with asyncio.timeout(patience(1)):
        while not (tmp_path / "closed").exists():
            await asyncio.sleep(0.01)


@pytest.mark.parametrize(
    ("action", "kind", "words"),
    [
        ("raise luck", "raised", "raised KeyError: 'no luck'"),
        ("cancel itself", "raised", "raised CancelledError: by itself"),
        ("exit", "exited", "exited with status 3; its last words: bye, said the environment"),
        ("eat", "memory", "ran out of memory"),
        ("nothing", "invalid", r"step returned 3, not \(observation, reward, done, info\)"),
        ("nan", "invalid", "a reward that is no finite number"),
        ("unknown", "raised", "AttributeError"),
    ],
)
@pytest.mark.parametrize("name", ["Echo", "Many"])
async def test_a_mistake_fails_its_episode_with_its_words(open_pool: Open, name: str, action: str, kind: str, words: str) -> None:
    pool = await open_pool(name)
    failed = await failure(pool, action)
    assert failed.kind == kind and pool.failures == {kind: 1}
    with pytest.raises(EnvironmentFailure, match=words):
        raise failed
    episode, _ = await pool.begin({"name": "y"}, 2)  # a process is there again
    assert (await episode.step(Action("say on"))).words == "on 1 2"


async def test_an_environment_that_hangs_is_killed_at_its_deadline(open_pool: Open) -> None:
    pool = await open_pool(seconds=1.0)
    failed = await failure(pool, "sleep 600")
    assert failed.kind == "timeout" and "gave no answer within 1 s and was killed" in str(failed)
    episode, _ = await pool.begin({"name": "y"}, 2)
    assert (await episode.step(Action("say on"))).words == "on 1 2"


async def test_episodes_wait_for_room_in_turn(open_pool: Open) -> None:
    pool = await open_pool(workers=2)
    begun = [asyncio.create_task(pool.begin({"name": str(i)}, i)) for i in range(4)]
    async with asyncio.timeout(patience(5)):
        first = await begun[0]
        await begun[1]
        assert not begun[2].done() and not begun[3].done()
        first[0].end()
        await begun[2]
        assert not begun[3].done()


async def test_many_episodes_share_a_process_that_says_it_can_take_them(open_pool: Open) -> None:
    pool = await open_pool("Many")
    assert not pool.facts.is_deterministic
    episodes = [(await pool.begin({"name": str(i)}, i))[0] for i in range(8)]
    slow = asyncio.create_task(episodes[0].step(Action("sleep 2")))
    pids = await asyncio.gather(*(episode.step(Action("pid")) for episode in episodes[1:]))
    assert len({result.words for result in pids}) == 1 and not slow.done(), "a plain function that waits holds nobody up"
    assert (await slow).reward == 1.0
    again = await asyncio.gather(*(episode.step(Action("say x")) for episode in episodes[1:]))
    assert [result.words for result in again] == [f"x 2 {i}" for i in range(1, 8)], "each has a state of its own"


async def test_plain_functions_of_many_episodes_wait_at_once_within_the_limit_of_memory(open_pool: Open) -> None:
    pool = await open_pool("Crowd")
    episodes = [(await pool.begin({"name": str(i)}, i))[0] for i in range(100)]
    results = await asyncio.gather(*(episode.step(Action("sleep 0.5")) for episode in episodes))
    assert all(result.reward == 1.0 for result in results) and not pool.failures


# A module of its own, which all episodes of the process share: a program's file is read again for each.
MEETING = """
import os, threading
os.cpu_count = os.process_cpu_count = lambda: 2
all_are_here = threading.Barrier({count}, timeout={seconds})
"""
AGENT = """
from the_meeting import all_are_here

def run(example, base_url, api_key):
    all_are_here.wait()
    return 1.0
"""


async def test_a_process_runs_as_many_plain_programs_at_once_as_it_has_episodes(tmp_path: Path) -> None:
    file, count = tmp_path / "program.py", Agent.episodes_per_process
    file.write_text(AGENT)
    file.with_name("the_meeting.py").write_text(MEETING.format(count=count, seconds=patience(3)))
    path, limits = "asyncflow.environments.agent:Agent", ProcessLimits(patience(60), 2 * MEMORY)
    pool = EnvironmentPool(path, {"run": f"{file}:run"}, limits, num_workers=1, name="test")
    try:
        await pool.start()
        episodes = [(await pool.begin({"name": str(i)}, i))[0] for i in range(count)]
        action = Action(msgspec.json.encode(Endpoint("http://127.0.0.1", "key")).decode())
        results = await asyncio.gather(*(episode.step(action) for episode in episodes))
        assert [result.reward for result in results] == [1.0] * count
    finally:
        await pool.close()


async def test_a_hanging_episode_takes_those_of_its_process_with_it_and_no_others(open_pool: Open) -> None:
    pool = await open_pool("Many", seconds=1.5)
    hanging, beside = [(await pool.begin({"name": "x"}, i))[0] for i in range(2)]
    outcomes = await asyncio.gather(hanging.step(Action("sleep 600")), return_exceptions=True)
    assert isinstance(outcomes[0], EnvironmentFailure) and outcomes[0].kind == "timeout"
    with pytest.raises(EnvironmentFailure, match="killed by SIGKILL"):
        await beside.step(Action("say x"))
    episode, _ = await pool.begin({"name": "y"}, 2)
    assert (await episode.step(Action("say on"))).words == "on 1 2"


async def test_what_an_episode_started_ends_with_it(open_pool: Open) -> None:
    pool = await open_pool()
    episode, _ = await pool.begin({"name": "x"}, 1)
    pid = int(str((await episode.step(Action("child"))).words))
    assert psutil.pid_exists(pid)
    episode.end()
    await pool.begin({"name": "y"}, 2)  # the place is free once the other has ended
    assert not psutil.pid_exists(pid)


async def test_a_cancelled_turn_leaves_the_process_to_others(open_pool: Open, tmp_path: Path) -> None:
    pool, begun = await open_pool(), tmp_path / "begun"
    episode, _ = await pool.begin({"name": "x"}, 1)
    turn = asyncio.create_task(episode.step(Action(f"sleep 0.3 {begun}")))
    await until(begun.exists)
    turn.cancel()
    episode.end()
    other, _ = await pool.begin({"name": "y"}, 2)
    assert (await other.step(Action("say on"))).words == "on 1 2" and not pool.failures


@pytest.mark.parametrize(("name", "words"), [("Broken", "no such luck"), ("NoStep", "has no step"), ("Absent", "has no 'Absent'")])
async def test_an_environment_that_cannot_be_built_is_said_before_anything_starts(open_pool: Open, name: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        await open_pool(name)


async def test_a_closed_pool_says_so_and_leaves_no_process(open_pool: Open, tmp_path: Path) -> None:
    others = psutil.Process().children(recursive=True)  # of tests before this one
    pool, begun = await open_pool(), tmp_path / "begun"
    episode, _ = await pool.begin({"name": "x"}, 1)
    turn = asyncio.create_task(episode.step(Action(f"sleep 60 {begun}")))
    await until(begun.exists)
    children = [child for child in psutil.Process().children(recursive=True) if child not in others]
    await pool.close()
    with pytest.raises(RunError, match="was closed"):
        await turn
    assert children and not any(child.is_running() and child.status() != "zombie" for child in children)


def test_the_samples_of_a_prompt_have_one_seed() -> None:
    assert seed_of(0, 5) == seed_of(0, 5) and len({seed_of(seed, prompt) for seed in range(3) for prompt in range(100)}) == 300
    assert all(0 <= seed_of(0, prompt) < 1 << 63 for prompt in range(100))


WHERE = """
import sys

class Where:
    def reset(self, example, seed): return sys.executable
    def step(self, action): return None, 1.0, True, {}
"""


async def test_an_environment_may_have_an_interpreter_of_its_own(tmp_path: Path) -> None:
    """Another executable, which need not know where AsyncFlow is."""
    (tmp_path / "where.py").write_text(WHERE)
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.symlink_to(sys.executable)
    (tmp_path / "pyvenv.cfg").write_text((Path(sys.prefix) / "pyvenv.cfg").read_text())
    (tmp_path / "lib").symlink_to(Path(sys.prefix) / "lib")
    limits = ProcessLimits(deadline_seconds=30, memory_bytes=1 << 30)
    pool = EnvironmentPool(f"{tmp_path / 'where.py'}:Where", {}, limits, num_workers=1, name="test", pythons=[str(python)])
    await pool.start()
    try:
        episode, opening = await pool.begin({}, 0)
        assert opening is not None and opening.words == str(python)
        episode.end()
    finally:
        await pool.close()


async def test_an_episode_that_waits_gets_no_process_that_is_about_to_be_killed(open_pool: Open, tmp_path: Path) -> None:
    pool, begun = await open_pool(seconds=1.5), tmp_path / "begun"
    hanging, _ = await pool.begin({"name": "x"}, 1)
    waiting = asyncio.create_task(pool.begin({"name": "y"}, 2))
    turn = asyncio.create_task(hanging.step(Action(f"sleep 600 {begun}")))
    await until(begun.exists)
    turn.cancel()
    hanging.end()  # it cannot be closed in time, so its process is killed
    episode, _ = await waiting
    assert (await episode.step(Action("say on"))).words == "on 1 2" and pool.failures == {"timeout": 1}
