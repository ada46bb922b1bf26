"""The reward pool against scorers that misbehave: every mistake is its own failure, and nobody else's."""

import asyncio
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from asyncflow.cluster.fork_server import TITLE
from asyncflow.rewards import REWARDS
from asyncflow.rewards.base import RewardFailure, RewardPart, Sample
from asyncflow.rewards.messages import Scored
from asyncflow.rewards.pool import RewardPool
from asyncflow.sandbox.frames import TOKEN_BYTES, frame
from asyncflow.sandbox.limits import ProcessLimits
from asyncflow.sandbox.pool import NUM_STARTS
from asyncflow.sandbox.process import SandboxProcess
from asyncflow.types import RunError, UserError
from tests.depth import in_gate
from tests.patience import patience
from tests.processes import below, is_alive, name_of, words_of

MEMORY_BYTES = 256 << 20
DEADLINE_SECONDS = 60.0  # for scorers that should answer: generous, the machine may be busy
SHORT_SECONDS = 2.0  # for scorers that hang, in a pool whose others have to answer

# One scorer for all tests: the response says how to misbehave.
SCORER = """
import ctypes, os, re, signal, subprocess, sys, time

class Score:
    def __init__(self, scale=1.0):
        self.scale = scale

    def __call__(self, sample):
        what, _, rest = sample.response.partition(" ")
        return getattr(self, "do_" + what)(rest)

    def do_number(self, rest): return self.scale * float(rest)
    def do_pid(self, rest): return os.getpid()
    def do_worker(self, rest): return os.getppid()
    def do_imported(self, rest): return rest in sys.modules
    def do_raise(self, rest): raise KeyError("a column " + rest)
    def do_spin(self, rest):
        print("about to spin")
        while True: pass
    def do_sleep(self, rest): time.sleep(float(rest)); return 7
    def do_wait(self, rest):
        open(rest + ".begun", "w").write("1")
        while not os.path.exists(rest): time.sleep(0.01)
        return 7
    def do_hold(self, rest): ctypes.PyDLL(None).sleep(60)  # C code that keeps the interpreter lock
    def do_exit(self, rest): print("bye, said the scorer"); os._exit(int(rest))
    def do_sysexit(self, rest): sys.exit(int(rest))
    def do_kill(self, rest): os.kill(os.getpid(), signal.SIGKILL)
    def do_eat(self, rest): eaten = [b"x" * (64 << 20) for _ in range(64)]; return 1
    def do_return(self, rest): return eval(rest)
    def do_print(self, rest):
        print("garbage " * 1000); sys.stdout.flush()
        os.write(1, b"\\x00\\x00\\x00\\x05right" * 100); sys.stderr.write("more"); return float(rest)
    def do_garble(self, rest):
        for fd in range(3, 20):
            try: os.write(fd, b"\\x00\\x00\\x00\\x05right")
            except OSError: pass
        time.sleep(60)
    def do_forge(self, rest):  # an answer in its worker's own pipe, which the true one follows later
        import fcntl, stat
        from asyncflow.rewards.messages import Scored
        from asyncflow.sandbox.frames import frame
        above = sys._getframe()
        while "token" not in above.f_locals: above = above.f_back
        for fd in os.listdir(f"/proc/{os.getppid()}/fd"):
            path = f"/proc/{os.getppid()}/fd/{fd}"
            flags = int(re.search("flags:[ \\t]*([0-7]+)", open(f"/proc/{os.getppid()}/fdinfo/{fd}").read())[1], 8)
            if int(fd) > 2 and stat.S_ISFIFO(os.stat(path).st_mode) and flags & os.O_ACCMODE == os.O_WRONLY:
                with open(path, "wb") as pipe: pipe.write(above.f_locals["token"] + frame(Scored(99.0, [99.0])))
        time.sleep(0.3)
        return 3
    def do_temporary(self, rest):
        import tempfile
        place = tempfile.mkdtemp()
        open(place + "/left", "w").write("x")
        open(rest, "w").write(place); os._exit(3)
    def do_parent(self, rest): os.kill(os.getppid(), signal.SIGKILL); time.sleep(60)
    def do_input(self, rest): return len(sys.stdin.read())
    def do_fork(self, rest):
        if os.fork() == 0: return 99  # comes back with an answer of its own
        os.wait(); return 5
    def do_children(self, rest):  # one that os.fork made, one that holds all pipes it was given, then hang
        forked = os.fork()
        if forked == 0: time.sleep(60); os._exit(0)
        other = subprocess.Popen(["sleep", "60"])
        open(rest, "w").write(f"{os.getpid()} {forked} {other.pid}")
        time.sleep(60)
    def do_leave(self, rest, **options):
        open(rest, "w").write(str(subprocess.Popen(["sleep", "60"], **options).pid)); os._exit(3)
    def do_escape(self, rest): self.do_leave(rest, start_new_session=True)

def scaled(sample, scale): return scale * len(sample.response)
not_callable = 3
"""


class Pool(RewardPool):
    """One whose rewards are plain numbers."""

    async def score(self, sample: Sample) -> float:  # type: ignore[override]
        return (await super().score(sample)).reward


Open = Callable[..., Awaitable[Pool]]


def own_children() -> list[psutil.Process]:
    """The processes below this one, but for the servers that other tests share, and multiprocessing's own, which stay."""
    shared = ("redis", "mooncake", "resource_tracker", "multiprocessing.forkserver")
    comm = TITLE[:15]  # all that Linux keeps of a name; the command line of one that has just ended is gone
    children = [child for child in below(os.getpid()) if not name_of(child).startswith(comm)]
    return [child for child in children if not any(name in " ".join([name_of(child), *words_of(child)]) for name in shared)]


@pytest.fixture
def scorer_file(tmp_path: Path) -> Path:
    file = tmp_path / "my_scorer.py"
    file.write_text(SCORER)
    return file


@pytest.fixture
async def open_pool(scorer_file: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Open]:
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    pools: list[Pool] = []

    async def open_pool(seconds: float = DEADLINE_SECONDS, workers: int = 1, path: str = "", **options: Any) -> Pool:
        pool = Pool(
            [RewardPart("test", path or f"{scorer_file}:Score", options)],
            ProcessLimits(seconds, MEMORY_BYTES, start_seconds=120.0),
            num_workers=workers,
            name="test",
        )
        pools.append(pool)
        await pool.start()
        return pool

    yield open_pool
    for pool in pools:
        await pool.close()


def sample(response: str) -> Sample:
    return Sample(prompt="", response=response, example={"answer": "9"}, is_finished=True)


async def failure(pool: Pool, response: str) -> RewardFailure:
    with pytest.raises(RewardFailure) as caught:
        await pool.score(sample(response))
    return caught.value


def living(pids: list[int]) -> list[int]:
    """Those that are processes and not merely waiting to be reaped by somebody."""
    return [pid for pid in pids if is_alive(pid)]


def pids_in(file: Path, seconds: float = 60.0) -> list[int]:
    """What a scorer wrote there; waits for it to appear."""
    deadline = time.monotonic() + patience(seconds)
    while not (file.exists() and (text := file.read_text())):
        assert time.monotonic() < deadline, f"{file} was not written"
        time.sleep(0.01)
    return [int(word) for word in text.split()]


def wait_until_gone(pids: list[int], seconds: float = 60.0) -> list[int]:
    deadline = time.monotonic() + patience(seconds)
    while living(pids) and time.monotonic() < deadline:
        time.sleep(0.01)
    return living(pids)


async def test_a_class_is_built_with_the_options_and_a_function_gets_them(open_pool: Open, scorer_file: Path) -> None:
    built = await open_pool(scale=2.0)
    assert await built.score(sample("number 1.5")) == 3.0
    bound = await open_pool(path=f"{scorer_file}:scaled", scale=10)
    assert await bound.score(sample("four")) == 40.0


async def test_a_scorer_of_the_registry(open_pool: Open) -> None:
    pool = await open_pool(path=REWARDS["final_answer"])
    assert await pool.score(sample("#### 9")) == 1.0
    assert await pool.score(sample("#### 8")) == 0.0
    with pytest.raises(RewardFailure, match="no number to compare with"):
        await pool.score(Sample(prompt="", response="#### 9", example={"answer": "many"}, is_finished=True))


async def test_scorers_that_fail_say_how_and_the_next_sample_is_scored(open_pool: Open) -> None:
    pool = await open_pool()
    raised = await failure(pool, "raise it")
    assert raised.kind == "raised"
    assert "KeyError" in str(raised) and "a column it" in str(raised) and "my_scorer.py:Score" in str(raised)

    exited = await failure(pool, "exit 3")
    assert exited.kind == "exited"
    assert "status 3" in str(exited) and "bye, said the scorer" in str(exited) and "my_scorer.py:Score" in str(exited)

    assert (await failure(pool, "sysexit 4")).kind == "exited"
    assert (await failure(pool, "kill")).kind == "memory"  # a SIGKILL that is not ours is the kernel's
    assert await pool.score(sample("number 2")) == 2.0
    assert pool.failures == {"raised": 1, "exited": 2, "memory": 1}


@pytest.mark.parametrize("value", ["float('nan')", "float('inf')", "'1.0'", "10 ** 400", "1j", "[1.0]"])
async def test_what_is_no_finite_number_is_invalid(open_pool: Open, value: str) -> None:
    pool = await open_pool()
    assert (await failure(pool, f"return {value}")).kind == "invalid"
    assert await pool.score(sample("return True")) == 1.0


async def test_eating_memory_is_a_failure_of_its_own_kind(open_pool: Open) -> None:
    pool = await open_pool()
    before = await pool.score(sample("worker"))
    assert (await failure(pool, "eat")).kind == "memory"
    assert await pool.score(sample("number 3")) == 3.0
    assert await pool.score(sample("worker")) == before, "the sample's own process ate it, and is gone"


@pytest.mark.parametrize("how", ["spin", "sleep 60", "hold"])
async def test_a_hanging_scorer_is_killed_at_its_deadline(open_pool: Open, how: str) -> None:
    pool = await open_pool(SHORT_SECONDS)
    before = await pool.score(sample("worker"))
    start = time.monotonic()
    late = await failure(pool, how)
    seconds = time.monotonic() - start
    assert late.kind == "timeout"
    assert SHORT_SECONDS <= seconds < DEADLINE_SECONDS
    assert len(own_children()) == 2, "the worker and the guard"
    assert await pool.score(sample("worker")) == before, "nothing has to be built again"
    if how == "spin":
        assert "about to spin" in str(late)
    assert await pool.score(sample("number 4")) == 4.0


async def test_what_a_scorer_prints_never_reaches_the_answers(open_pool: Open) -> None:
    pool = await open_pool()
    for value in (1.0, 2.0, 3.0):
        assert await pool.score(sample(f"print {value}")) == value
    assert await pool.score(sample("input")) == 0.0
    assert await pool.score(sample("fork")) == 5.0
    assert await pool.score(sample("number 6")) == 6.0


async def test_last_words_are_bounded(open_pool: Open, tmp_path: Path) -> None:
    file = tmp_path / "talker.py"
    file.write_text("import os\ndef talk(sample):\n    print('x' * 100_000 + 'the end')\n    os._exit(1)\n")
    message = str(await failure(await open_pool(path=f"{file}:talk"), ""))
    assert "the end" in message and len(message) < 4096 + 500


async def test_processes_of_a_hanging_scorer_go_with_it(open_pool: Open, tmp_path: Path) -> None:
    pool = await open_pool(SHORT_SECONDS)
    start = time.monotonic()
    assert (await failure(pool, f"children {tmp_path}/pids")).kind == "timeout"
    assert time.monotonic() - start < DEADLINE_SECONDS, "what it has started sleeps for as long"
    assert wait_until_gone(pids_in(tmp_path / "pids")) == []


async def test_processes_that_an_exiting_scorer_leaves_do_not_hold_its_failure_up(open_pool: Open, tmp_path: Path) -> None:
    pool = await open_pool()
    start = time.monotonic()
    assert (await failure(pool, f"leave {tmp_path}/pids")).kind == "exited"
    assert time.monotonic() - start < DEADLINE_SECONDS
    assert wait_until_gone(pids_in(tmp_path / "pids")) == []


async def test_a_process_that_left_the_group_holds_nothing_up(open_pool: Open, tmp_path: Path) -> None:
    pool = await open_pool()
    start = time.monotonic()
    assert (await failure(pool, f"escape {tmp_path}/pids")).kind == "exited"
    assert time.monotonic() - start < DEADLINE_SECONDS
    assert await pool.score(sample("number 1")) == 1.0
    assert wait_until_gone(pids_in(tmp_path / "pids")) == []


async def test_a_scorer_that_finds_the_pipes_of_its_worker_ends_its_worker(open_pool: Open) -> None:
    pool = await open_pool()
    assert (await failure(pool, "garble")).kind == "invalid"
    assert await pool.score(sample("number 1")) == 1.0


async def test_a_sample_that_forges_an_answer_gives_it_to_no_other(open_pool: Open) -> None:
    pool = await open_pool()
    assert await pool.score(sample("forge")) == 99.0, "its own: it could have returned that"
    assert [await pool.score(sample(f"number {i}")) for i in range(3)] == [0.0, 1.0, 2.0]


@pytest.mark.parametrize("piece", [1, 7, 1000])
async def test_answers_that_are_read_together_are_told_apart(piece: int) -> None:
    worker, mine = SandboxProcess(Scored, "worker"), b"n" * TOKEN_BYTES
    reply = worker._asked[mine] = asyncio.get_running_loop().create_future()
    sent = b"o" * TOKEN_BYTES + frame(Scored(3.0, [3.0])) + mine + frame(Scored(1.0, [1.0]))
    for start in range(0, len(sent), piece):
        worker.pipe_data_received(1, sent[start : start + piece])
    assert reply.result() == Scored(1.0, [1.0]) and not worker.is_garbled


async def test_temporary_files_go_with_the_sample_that_made_them(open_pool: Open, tmp_path: Path) -> None:
    pool = await open_pool()
    assert (await failure(pool, f"temporary {tmp_path}/place")).kind == "exited"
    place = Path((tmp_path / "place").read_text())
    assert place.parent.name.startswith("asyncflow-sample-") and not place.parent.exists()


async def test_others_are_scored_while_one_hangs(open_pool: Open) -> None:
    pool = await open_pool(workers=2)
    hanging = asyncio.create_task(failure(pool, "spin"))
    await asyncio.sleep(0)
    rewards = await asyncio.gather(*(pool.score(sample(f"number {i}")) for i in range(20)))
    assert rewards == [float(i) for i in range(20)]
    assert not hanging.done()
    hanging.cancel()


async def test_several_hang_at_once_and_none_is_lost(open_pool: Open) -> None:
    pool = await open_pool(SHORT_SECONDS, workers=2)
    asked = ["spin", "number 1", "sleep 60", "number 2", "exit 3", "number 3"]
    answers = await asyncio.gather(*(pool.score(sample(one)) for one in asked), return_exceptions=True)
    assert [getattr(a, "kind", a) for a in answers] == ["timeout", 1.0, "timeout", 2.0, "exited", 3.0]


async def test_a_cancelled_call_leaves_its_answer_to_nobody(open_pool: Open, tmp_path: Path) -> None:
    pool = await open_pool()
    worker = await pool.score(sample("worker"))
    cancelled = asyncio.create_task(pool.score(sample(f"wait {tmp_path}/go")))
    waiting = asyncio.create_task(pool.score(sample("exit 3")))
    await asyncio.to_thread(pids_in, tmp_path / "go.begun")
    cancelled.cancel()
    waiting.cancel()
    await asyncio.gather(cancelled, waiting, return_exceptions=True)
    (tmp_path / "go").touch()
    assert await pool.score(sample("number 8")) == 8.0
    assert await pool.score(sample("worker")) == worker
    assert not pool.failures, "a scorer that was only slow was killed, or a cancelled sample was scored"


async def test_a_worker_that_died_while_idle_costs_no_sample(open_pool: Open) -> None:
    pool = await open_pool()
    pid = int(await pool.score(sample("worker")))
    (worker,) = pool._living
    os.kill(pid, signal.SIGKILL)
    await asyncio.wait_for(asyncio.shield(worker.ended), patience(DEADLINE_SECONDS))
    assert await pool.score(sample("number 3")) == 3.0
    assert not pool.failures


async def test_workers_import_no_torch_and_no_numpy(open_pool: Open) -> None:
    for path in ("", REWARDS["final_answer"]):
        await open_pool(path=path)
    pool = await open_pool()
    assert await pool.score(sample("imported msgspec")) == 1.0
    assert [await pool.score(sample(f"imported {name}")) for name in ("torch", "numpy")] == [0.0, 0.0]
    heavy = "import sys, asyncflow.rewards.pool, asyncflow.rewards.final_answer; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", heavy], timeout=patience(60), check=False).returncode == 0


WRONG = """
def of_two(a, b): return 1.0

def of_verl(solution_str, ground_truth, style): return 1.0

class Raises:
    def __init__(self):
        {}["key"]

def of_trl(completions, solution): return [1.0]
"""


async def test_a_column_that_is_not_there_is_said_and_not_pythons_words(open_pool: Open, tmp_path: Path) -> None:
    (tmp_path / "wrong.py").write_text(WRONG)
    pool = await open_pool(path=f"{tmp_path / 'wrong.py'}:of_trl")
    with pytest.raises(RewardFailure, match=r"wrong.py:of_trl takes 'solution', and the row has no such column: it has answer"):
        await pool.score(sample("9"))


@pytest.mark.parametrize(
    ("path", "options", "words"),
    [
        ("no.such.module:Name", {}, "cannot be imported: No module named"),
        ("/no/such/file.py:Name", {}, "cannot be imported: there is no file"),
        ("{file}:Nobody", {}, "has no 'Nobody'"),
        ("{file}:Score", {"scael": 2}, "cannot be built: it has no option 'scael': did you mean 'scale'"),
        ("{file}:not_callable", {}, "cannot be called"),
        ("{wrong}:of_two", {}, r"takes \(a, b\), and is called with a sample alone: write it as f\(sample\)"),
        ("{wrong}:of_verl", {}, "needs 'style', which verl's functions are not given"),
        ("{wrong}:Raises", {}, r"cannot be built with the options \{\}: KeyError: 'key' \(.*wrong.py:8\)"),
        (REWARDS["multiple_choice"], {"choices": 4}, "choices must be text, not 4"),
        ("{syntax}:f", {}, r"cannot be imported: invalid syntax \(.*syntax.py:2\)"),
        ("{exits}:f", {}, r"cannot be imported: it ends the program \(.*exits.py:2\)"),
        ("{hangs}:f", {}, "not imported and built within 0.3 s"),
    ],
)
async def test_a_scorer_that_cannot_start_is_one_sentence(
    scorer_file: Path, tmp_path: Path, path: str, options: dict[str, Any], words: str
) -> None:
    (tmp_path / "exits.py").write_text("import sys\nsys.exit(5)")
    (tmp_path / "syntax.py").write_text("\ndef f(:\n")
    (tmp_path / "wrong.py").write_text(WRONG)
    (tmp_path / "hangs.py").write_text("while True: pass")
    path = path.format(file=scorer_file, **{name: tmp_path / f"{name}.py" for name in ("exits", "hangs", "syntax", "wrong")})
    seconds = 0.3 if "hangs" in path else 20.0
    parts = [RewardPart("test", path, options)]
    pool = RewardPool(parts, ProcessLimits(1, MEMORY_BYTES, start_seconds=seconds), num_workers=2, name="test")
    with pytest.raises(UserError, match=words) as caught:
        await pool.start()
    assert "\n" not in str(caught.value) and path in str(caught.value)
    assert own_children() == []
    with pytest.raises(RunError):
        await pool.score(sample("number 1"))


SHORT = "ImportError('libc.so: failed to map segment from shared object')"
SHORTAGES = {
    "os.kill(os.getpid(), signal.SIGKILL)": "was killed by SIGKILL before the scorer was built, 3 times",
    f"raise {SHORT}": r"cannot be imported: .*failed to map segment.*, 3 times",
    "os.write(2, b'failed to map segment'), os._exit(1)": "exited with status 1 before.*failed to map segment, 3 times",
}


@pytest.mark.parametrize("times", [1, 1000])
@pytest.mark.parametrize(("end", "words"), SHORTAGES.items())
async def test_a_scorer_that_is_killed_before_it_is_built_is_no_mistake_of_the_users(
    tmp_path: Path, times: int, end: str, words: str
) -> None:
    """It may have been the kernel, for want of memory: it is started again, and a pool that cannot is no refused configuration. So
    where memory, or file handles, have only just not sufficed."""
    lines = [
        "import os, signal",
        f"told = {str(tmp_path / 'told')!r}",
        "open(told, 'a').write('x')",
        "def f(sample):",
        "    return 1.0",
    ]
    lines.insert(3, f"if len(open(told).read()) <= {times}: {end}")
    (tmp_path / "killed.py").write_text("\n".join(lines))
    parts = [RewardPart("test", f"{tmp_path / 'killed.py'}:f")]
    pool = RewardPool(parts, ProcessLimits(1, MEMORY_BYTES), num_workers=1, name="test")
    if times == 1:
        await pool.start()
        assert (await pool.score(sample("number 1"))).reward == 1.0
        await pool.close()
    else:
        with pytest.raises(RunError, match=words):
            await pool.start()
    assert own_children() == []


@pytest.mark.parametrize("times", [1, NUM_STARTS])
@pytest.mark.parametrize("limit", ["-n 3", "-v 10240", "-v 16384"])
async def test_an_interpreter_that_ends_before_it_comes_to_the_scorer_is_no_mistake_of_the_users(
    scorer_file: Path, times: int, limit: str
) -> None:
    """Whatever it says then: here of too few file handles, or of too little memory."""
    pool = RewardPool([RewardPart("test", f"{scorer_file}:Score")], ProcessLimits(1, MEMORY_BYTES), num_workers=1, name="test")
    command = next(pool._commands)
    starved = ["/bin/sh", "-c", f'ulimit {limit}; exec "$0" "$@"', *command]
    pool._commands = itertools.chain([starved] * times, [command])  # type: ignore[assignment]
    if times == 1:
        await pool.start()
        await pool.close()
    else:
        with pytest.raises(RunError, match=f"before the scorer was built.*, {NUM_STARTS} times"):
            await pool.start()
    assert own_children() == []


@pytest.mark.parametrize("is_continued", in_gate(True, of=[True, False]))
async def test_a_scorer_that_is_stopped_while_it_is_imported_is_no_mistake_of_the_users(tmp_path: Path, is_continued: bool) -> None:
    """The seconds in which it cannot run do not count, and one that stays so is started again."""
    told = tmp_path / "told"
    (tmp_path / "stopped.py").write_text(
        "import os, pathlib, signal\n"
        f"told = pathlib.Path({str(told)!r})\n"
        "is_first = not told.exists()\n"
        "if is_first:\n"
        "    told.write_text(str(os.getpid()))\n"
        "    os.kill(os.getpid(), signal.SIGSTOP)\n"
        "def f(sample):\n"
        "    return float(is_first)"
    )
    seconds = patience(3)
    limits = ProcessLimits(1, MEMORY_BYTES, start_seconds=seconds)
    pool = RewardPool([RewardPart("test", f"{tmp_path / 'stopped.py'}:f")], limits, num_workers=1, name="test")
    starting = asyncio.create_task(pool.start())
    async with asyncio.timeout(patience(60)):
        while not told.exists() or not told.read_text():
            await asyncio.sleep(0.01)
        if is_continued:
            await asyncio.sleep(1.3 * seconds)
            os.kill(int(told.read_text()), signal.SIGCONT)
        await starting
    assert (await pool.score(sample("number 1"))).reward == float(is_continued), "the same process, or another"
    await pool.close()
    assert own_children() == []


@pytest.mark.parametrize("path", ["final_answer", ":Name", "module:", ""])
def test_a_path_without_a_name_is_refused(path: str) -> None:
    with pytest.raises(UserError, match=r"package\.module:Name"):
        RewardPool([RewardPart("test", path)], ProcessLimits(1, MEMORY_BYTES), num_workers=1, name="test")


async def test_a_scorer_that_is_gone_ends_the_pool_for_all_who_wait(
    open_pool: Open, scorer_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("asyncflow.sandbox.pool.RESTART_PAUSES_SECONDS", (0.01,))
    pool = await open_pool()
    scorer_file.unlink()
    async with asyncio.timeout(patience(60)):
        calls = (pool.score(sample(one)) for one in ("parent", "number 1", "number 2"))
        answers = await asyncio.gather(*calls, return_exceptions=True)
    assert [type(answer) for answer in answers] == [RewardFailure, RunError, RunError]
    with pytest.raises(RunError, match="cannot go on"):
        await pool.score(sample("number 1"))


async def test_close_leaves_no_process_and_nobody_waiting(open_pool: Open) -> None:
    pool = await open_pool(60.0, workers=2)
    waiting = [asyncio.create_task(pool.score(sample("sleep 60"))) for _ in range(4)]
    async with asyncio.timeout(patience(60)):
        while len(own_children()) < 3 + 2:  # two workers with a sample each, and their guard
            await asyncio.sleep(0.01)
    async with asyncio.timeout(patience(30)):  # the samples take twice as long
        await pool.close()
        answers = await asyncio.gather(*waiting, return_exceptions=True)
    assert [type(answer) for answer in answers] == [RunError] * 4
    assert own_children() == []
    with pytest.raises(RunError, match="was closed"):
        await pool.score(sample("number 1"))


PARENT = """
import asyncio, json, sys
from asyncflow.rewards.base import RewardPart, Sample
from asyncflow.rewards.pool import RewardPool
from asyncflow.sandbox.limits import ProcessLimits

async def main(path, responses):
    parts = [RewardPart("test", path)]
    pool = RewardPool(parts, ProcessLimits(60, 1 << 28), num_workers=len(responses), name="orphan")
    await pool.start()
    await asyncio.gather(*(pool.score(Sample(prompt="", response=r, example={}, is_finished=True)) for r in responses))

asyncio.run(main(sys.argv[1], json.loads(sys.argv[2])))
"""


@pytest.mark.parametrize("guard_is_gone", [False, True])
def test_a_parent_killed_with_9_leaves_no_process(scorer_file: Path, tmp_path: Path, guard_is_gone: bool) -> None:
    """A worker with processes of its own, one stuck in C code that holds the interpreter lock, and an idle one.

    Without the guard the workers still end; what they started is then on its own.
    """
    responses = [f"children {tmp_path}/pids", "hold", "number 1"]
    parent = subprocess.Popen([sys.executable, "-c", PARENT, f"{scorer_file}:Score", json.dumps(responses)])
    try:
        pids_in(tmp_path / "pids")
        deadline = time.monotonic() + patience(60.0)
        # Three workers, two samples, two processes of a scorer, the guard; and for a moment the sample that ends.
        while len(processes := [child.pid for child in below(parent.pid)]) != 3 + 2 + 2 + 1:
            assert time.monotonic() < deadline, processes
            time.sleep(0.01)
        started = pids_in(tmp_path / "pids")[1:]
        if guard_is_gone:
            (guard,) = (pid for pid in processes if "guard.py" in psutil.Process(pid).cmdline()[-1])
            os.kill(guard, signal.SIGKILL)
    finally:
        parent.kill()
        parent.wait(patience(5))
    if guard_is_gone:
        processes = [pid for pid in processes if pid not in started]
    left = wait_until_gone(processes)
    for pid in started if guard_is_gone else []:
        os.kill(pid, signal.SIGKILL)
    assert left == []
