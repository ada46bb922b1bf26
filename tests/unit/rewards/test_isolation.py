"""A reward is a function of its sample: nothing that scoring one does reaches another, and every part is told by its name."""

from __future__ import annotations

import asyncio
import os
import subprocess
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from asyncflow.rewards import REWARDS
from asyncflow.rewards.base import RewardFailure, RewardPart, Sample, Score, weighted
from asyncflow.rewards.pool import RewardPool
from asyncflow.rewards.scorings import with_fallback
from asyncflow.sandbox import limits
from asyncflow.sandbox.limits import ProcessLimits
from tests.patience import patience
from tests.processes import below, is_alive, words_of

# What a response says is run: the payload of a reward hacker. The grader keeps state of its own, too.
GRADER = """
import math, os, sys, threading, time
seen = []

def keeps_state(sample):
    seen.append(sample.response)
    return float(len(seen))

def runs_it(sample):
    exec(sample.response, {"grader": sys.modules[__name__]})
    return math.sqrt(float(sample.example["answer"]))

def loud(sample):
    print("x" * int(sample.response)); return 1.0

def writes(sample):
    with open(sample.example["file"], "wb") as file: file.write(b"x" * int(sample.response))
    return 1.0

async def patient(sample):
    import asyncio
    await asyncio.sleep(0.01)
    return float(sample.response)

def choosy(sample, only="number"):
    word, _, rest = sample.response.partition(" ")
    return float(rest) if word == only else None

def trl(prompts, completions, answer, **columns):
    assert len(prompts) == len(completions) == len(answer) == 1 and "prompt" not in columns
    return [float(completions[0] == answer[0]) if columns.get("level", ["easy"]) == ["easy"] else None]

async def trl_async(completions, completion_ids, scale=1.0, **kwargs):
    return [scale * len(completion_ids[0])]

def trl_chat(prompts, completions):
    assert prompts[0][-1]["role"] == "user"
    return [float(completions[0][0]["content"] == prompts[0][-1]["content"] and completions[0][0]["role"] == "assistant")]

class Helped:
    def __init__(self):
        import subprocess
        self.helper = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def __call__(self, sample):
        self.helper.stdin.write(sample.response.encode() + b"\\n")
        self.helper.stdin.flush()
        return float(self.helper.stdout.readline() == sample.response.encode() + b"\\n")

def trl_two(completions, **kwargs):
    return [1.0, 2.0]

def trl_says(prompts, completions, **columns):
    is_chat = completions[0] == [{"role": "assistant", "content": "x"}]
    return [float(repr(prompts) == columns["expected"][0] and is_chat == isinstance(prompts[0], list))]

def trl_ids(completion_ids, **kwargs):
    return [-float(len(ids) > 3) for ids in completion_ids]

class TrlOverlong:
    def __init__(self, most):
        self.most = most

    def __call__(self, completion_ids, **kwargs):
        return [-float(len(ids) > self.most) for ids in completion_ids]

async def trl_prompts(prompts, answer):
    return [float(prompts == ["why?"] and answer == ["9"])]

def trl_logs(completions, trainer_state, log_extra=None, log_metric=None):
    log_extra("completion", list(completions))
    log_metric("length", 1.0)
    return [float(trainer_state is None)]

def trl_kwargs(completions, **kwargs):
    kwargs["log_extra"]("completion", list(completions)), kwargs["log_metric"]("length", 1.0)
    return [float(kwargs["trainer_state"] is None and set(kwargs) - {"answer"} ==
            {"prompts", "completion_ids", "trainer_state", "log_extra", "log_metric"})]

def few_shot(sample, prompts):
    return float(sample.prompt in prompts)

def returns(completions, **columns):
    import numpy as np
    return eval(completions[0])

def gives(sample):
    import numpy as np
    return eval(sample.response)

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": float(solution_str == ground_truth) + extra_info["index"], "acc": 1.0, "source": data_source}

def compute_bare(solution_str, ground_truth, bonus=0.0):
    return (solution_str == ground_truth) + bonus

async def compute_async(data_source, solution_str, ground_truth, extra_info):
    return float(solution_str == ground_truth and data_source == "gsm8k")
"""

Open = Callable[..., Awaitable[RewardPool]]


@pytest.fixture
async def open_pool(tmp_path: Path) -> AsyncIterator[Open]:
    file = tmp_path / "grader.py"
    file.write_text(GRADER)
    pools: list[RewardPool] = []

    async def open_pool(
        *parts: str | RewardPart, seconds: float = 5.0, workers: int = 1, data: dict[str, str] | None = None, **options: Any
    ) -> RewardPool:
        path = {**REWARDS}
        named = [
            part if isinstance(part, RewardPart) else RewardPart(part, path.get(part, f"{file}:{part}"), options) for part in parts
        ]
        named = [RewardPart(p.name, path.get(p.scorer, p.scorer.replace("GRADER", str(file))), p.options, p.weight) for p in named]
        pool = RewardPool(
            named,
            ProcessLimits(seconds, 256 << 20, 10_000),
            num_workers=workers,
            name="test",
            **(data or {}),
        )
        pools.append(pool)
        await pool.start()
        return pool

    yield open_pool
    for pool in pools:
        await pool.close()


def sample(response: str, *, ids: int = 3, **example: Any) -> Sample:
    return Sample("what?", response, example, True, list(range(ids)))


async def kind(pool: RewardPool, response: str, **example: Any) -> str:
    with pytest.raises(RewardFailure) as caught:
        await pool.score(sample(response, **example))
    return caught.value.kind


async def test_a_grader_that_keeps_state_meets_every_sample_as_it_was_built(open_pool: Open) -> None:
    pool = await open_pool("keeps_state")
    assert [(await pool.score(sample(str(i)))).reward for i in range(5)] == [1.0] * 5


@pytest.mark.parametrize(
    "payload",
    [
        "import math; math.sqrt = lambda x: 99.0",
        "grader.runs_it = lambda sample: 99.0",
        "grader.math.sqrt = lambda x: 99.0",
        "import builtins; builtins.float = lambda x: 9801",
        "import asyncflow.rewards.worker as w; w.answer = lambda *a: None; import msgspec; msgspec.msgpack.encode = None",
        "import sys; sys.modules['math'] = None; sys.path.clear()",
        "import os; os.environ['PYTHONPATH'] = '/nowhere'; os.chdir('/')",
        "import threading, time; threading.Thread(target=time.sleep, args=(60,)).start()",
        "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); signal.alarm(1)",
        "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))",
        "import os, sys; [os.close(fd) for fd in range(3, 200) if fd != 5] if 0 else None; sys.setrecursionlimit(50)",
        "import random, gc; random.seed(1); gc.disable()",
        "import sys; sys.exit(0)",
        "import os; os._exit(0)",
        "raise KeyboardInterrupt",
    ],
)
async def test_the_payload_of_one_sample_does_not_change_the_score_of_another(open_pool: Open, payload: str) -> None:
    pool = await open_pool("runs_it")
    honest = sample("pass", answer="4")
    assert (await pool.score(honest)).reward == 2.0
    try:
        await pool.score(sample(payload, answer="4"))
    except RewardFailure as failure:
        assert failure.kind in ("raised", "exited", "invalid")
    assert (await pool.score(honest)).reward == 2.0


async def test_what_a_sample_has_started_ends_with_it(open_pool: Open, tmp_path: Path) -> None:
    pool = await open_pool("runs_it")
    started = f"import subprocess; open({str(tmp_path / 'pid')!r}, 'w').write(str(subprocess.Popen(['sleep', '60']).pid))"
    assert (await pool.score(sample(started, answer="9"))).reward == 3.0
    pid, deadline = int((tmp_path / "pid").read_text()), time.monotonic() + patience(60.0)
    while is_alive(pid) and time.monotonic() < deadline:
        await asyncio.sleep(0.01)
    assert not is_alive(pid)


# A daemon with a child: each in a session of its own, and neither anybody's child.
DAEMON = """
import os, subprocess, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        helper = subprocess.Popen(["sleep", "61"], start_new_session=True, stdout=2, stderr=2)
        open({place!r} + "/pids", "w").write(f"{{os.getpid()}} {{helper.pid}}")
        os.rename({place!r} + "/pids", {place!r} + "/daemon")
        time.sleep(60)
    os._exit(0)
os.wait()
while not os.path.exists({place!r} + "/daemon"): time.sleep(0.001)
"""


def helpers(pid: int) -> list[str]:
    """The command lines of what is below a process."""
    return [" ".join(words_of(process)) for process in below(pid)]


@pytest.mark.skipif(not os.path.exists(f"/proc/self/task/{os.getpid()}/children"), reason="this kernel does not tell of children")
async def test_a_daemon_that_a_sample_has_started_ends_with_it(open_pool: Open, tmp_path: Path) -> None:
    pool = await open_pool("runs_it")
    (worker,) = pool._living
    assert (await pool.score(sample(DAEMON.format(place=str(tmp_path)), answer="9"))).reward == 3.0
    assert not any(psutil.pid_exists(int(pid)) for pid in (tmp_path / "daemon").read_text().split())
    assert worker.is_alive and not helpers(worker.pid)
    assert (await pool.score(sample("pass", answer="4"))).reward == 2.0


@pytest.mark.skipif(not os.path.exists(f"/proc/self/task/{os.getpid()}/children"), reason="this kernel does not tell of children")
def test_what_cannot_be_killed_is_an_error_and_no_endless_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    spared = limits.children()
    with subprocess.Popen(["sleep", "60"]) as child:
        with monkeypatch.context() as patch:
            patch.setattr(limits, "END_SECONDS", 0.05)
            patch.setattr(limits.os, "kill", lambda pid, signal: None)
            with pytest.raises(TimeoutError, match=r"^1 processes that were started there are still there"):
                limits.end_children(spared)
        limits.end_children(spared)
        assert not psutil.pid_exists(child.pid)
    assert limits.children() - spared == set()


async def test_what_building_a_scorer_has_started_lives_on(open_pool: Open) -> None:
    pool = await open_pool("Helped")
    (worker,) = pool._living
    for _ in range(3):
        assert (await pool.score(sample("#"))).reward == 1.0
        assert helpers(worker.pid) == ["cat"]


async def test_scorers_of_our_own_without_state_need_no_fork_and_are_killed_in_time(open_pool: Open) -> None:
    pool = await open_pool(RewardPart("slow", "regex", {"pattern": "(a+)+$"}), seconds=0.5)
    assert pool._grace_seconds == 0.0 and (await pool.score(sample("aaaa"))).reward == 1.0
    start = time.monotonic()
    assert await kind(pool, "a" * 60 + "b") == "timeout"  # catastrophic backtracking, in C, with the interpreter lock
    assert time.monotonic() - start < patience(30.0), "backtracking would take years"
    assert (await pool.score(sample("ba"))).reward == 1.0
    assert pool.failures == {"timeout": 1}


async def test_a_pattern_that_backtracks_is_also_ended_in_a_fork(open_pool: Open) -> None:
    pool = await open_pool(RewardPart("slow", "regex", {"pattern": "(a+)+$"}), RewardPart("own", "GRADER:keeps_state"), seconds=0.5)
    assert await kind(pool, "a" * 60 + "b") == "timeout"
    assert (await pool.score(sample("ba"))).parts == (1.0, 1.0)


async def test_who_prints_or_writes_too_much_fails(open_pool: Open, tmp_path: Path) -> None:
    pool = await open_pool("loud")
    assert (await pool.score(sample("5000"))).reward == 1.0
    assert await kind(pool, "100000000") == "output"
    assert (await pool.score(sample("5000"))).reward == 1.0
    writes = await open_pool("writes")
    assert (await writes.score(sample("5000", file=str(tmp_path / "a")))).reward == 1.0
    assert await kind(writes, "50000", file=str(tmp_path / "b")) == "raised"
    assert (tmp_path / "b").stat().st_size <= 10_000


async def test_several_parts_are_weighted_and_told_apart(open_pool: Open) -> None:
    pool = await open_pool(
        RewardPart("correct", "numeric", {}, 1.0), RewardPart("brief", "length", {"max_tokens": 4, "soft_tokens": 2}, 0.5),
        RewardPart("own", "GRADER:choosy", {"only": "#### 9"}, 2.0),
    )  # fmt: skip
    assert await pool.score(sample("#### 9", ids=3, answer="9")) == Score(0.75, (1.0, -0.5, None))
    assert await pool.score(sample("#### 8", ids=9, answer="9")) == Score(-0.5, (0.0, -1.0, None))


async def test_a_part_that_fails_fails_the_sample(open_pool: Open) -> None:
    pool = await open_pool(RewardPart("correct", "numeric"), RewardPart("own", "GRADER:runs_it"))
    with pytest.raises(RewardFailure, match=r"runs_it raised ZeroDivisionError"):
        await pool.score(sample("1/0", answer="9"))


async def test_none_skips_and_is_no_failure(open_pool: Open) -> None:
    pool = await open_pool("choosy")
    assert await pool.score(sample("number 3")) == Score(3.0, (3.0,))
    assert await kind(pool, "other 3") == "skipped"
    assert not pool.failures


def test_weights() -> None:
    assert weighted([1.0], [1.0]) == 1.0 and weighted([None, 2.0], [5.0, -0.5]) == -1.0
    assert weighted([None, None], [1.0, 1.0]) is None


async def test_scorers_may_be_async(open_pool: Open) -> None:
    pool = await open_pool("patient")
    assert [(await pool.score(sample(str(i)))).reward for i in range(3)] == [0.0, 1.0, 2.0]


async def test_trl_functions_are_taken_as_they_are(open_pool: Open) -> None:
    pool = await open_pool("trl")
    assert (await pool.score(sample("9", answer="9", prompt="what?"))).reward == 1.0
    assert (await pool.score(sample("8", answer="9"))).reward == 0.0
    assert await kind(pool, "9", answer="9", level="hard") == "skipped"
    assert (await (await open_pool("trl_async", scale=2.0)).score(sample("x", ids=5))).reward == 10.0
    chat = await open_pool("trl_chat")
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "say it"}]
    assert (await chat.score(sample("say it", prompt=messages))).reward == 1.0
    assert await kind(await open_pool("trl_two"), "9") == "raised"


async def test_a_trl_function_may_have_one_of_its_parameters_alone(open_pool: Open) -> None:
    for pool in (await open_pool("trl_ids"), await open_pool("TrlOverlong", most=3)):
        assert [(await pool.score(sample("x", ids=ids))).reward for ids in (3, 4)] == [0.0, -1.0]
    prompts = await open_pool("trl_prompts")
    assert [(await prompts.score(sample("x", prompt="why?", answer=answer))).reward for answer in ("9", "8")] == [1.0, 0.0]
    own = await open_pool("few_shot", prompts=["what?"])
    assert (await own.score(sample("x"))).reward == 1.0, "an option of that name makes it none of TRL's"


@pytest.mark.parametrize("name", ["trl_logs", "trl_kwargs"])
async def test_a_trl_function_may_ask_for_the_trainer_s_state_and_log(open_pool: Open, name: str) -> None:
    assert (await (await open_pool(name)).score(sample("x", answer="9"))).reward == 1.0


CHAT = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("data", "row", "prompt"),
    [
        ({}, {"prompt": "The sky is"}, "The sky is"),
        ({}, {"question": "How many?"}, "How many?"),
        ({}, {"Problem": "How many?"}, "How many?"),
        ({}, {"text": "How many?"}, "what?"),
        ({}, {"prompt": None}, "what?"),
        ({}, {"prompt": 3}, "what?"),
        ({"prompt_column": "text"}, {"prompt": CHAT, "text": "How many?"}, "How many?"),
        ({"prompt_column": "meta.text"}, {"meta": {"text": "How many?"}}, "How many?"),
        ({"prompt_template": "{a} or {b}?"}, {"prompt": CHAT, "a": 1, "b": 2}, "1 or 2?"),
        ({}, {"prompt": CHAT}, CHAT),
        ({"prompt_column": "messages"}, {"prompt": "no", "messages": CHAT}, CHAT),
        ({"prompt_column": "meta.messages"}, {"meta": {"messages": CHAT}}, CHAT),
    ],
)
async def test_a_trl_function_gets_the_prompt_that_the_row_has(
    open_pool: Open, data: dict[str, str], row: dict[str, Any], prompt: Any
) -> None:
    pool = await open_pool("trl_says", data=data)
    assert (await pool.score(sample("x", expected=repr([prompt]), **row))).reward == 1.0


async def test_a_reward_may_be_in_an_array_or_be_a_number_of_numpys(open_pool: Open) -> None:
    pool = await open_pool("returns")
    for text in ("[2]", "(2.0,)", "np.array([2])", "np.array([2.0], dtype=np.float16)", "[np.float32(2)]", "[np.array(2)]"):
        assert (await pool.score(sample(text))).reward == 2.0, text
    assert (await pool.score(sample("np.array([True])"))).reward == 1.0
    assert await kind(pool, "np.array([None])") == await kind(pool, "[None]") == "skipped"
    for text in ("np.array(2)", "np.array([1, 2])", "np.array([])", "2", "'2'", "b'2'", "{2: 1}", "None"):
        with pytest.raises(RewardFailure, match="it must return a list of one reward"):
            await pool.score(sample(text))
    for text in ("np.array([[1, 2]])", "['2']", "[np.array('2')]", "[np.nan]", "[1j]"):
        assert await kind(pool, text) == "invalid", text


async def test_a_reward_is_a_number_of_32_bits(open_pool: Open) -> None:
    pool = await open_pool("gives")
    for text, reward in (("np.bool_(True)", 1.0), ("np.False_", 0.0), ("3.4028234663852886e38", 3.4028234663852886e38)):
        assert (await pool.score(sample(text))).reward == reward
    for text in ("1e39", "-1e39", "3.5e38", "10**400", "np.inf"):
        assert await kind(pool, text) == "invalid", text
    two = await open_pool("gives", RewardPart("again", "GRADER:gives"))
    assert await kind(two, "3e38") == "invalid", "their sum is none"


async def test_verl_functions_are_taken_as_they_are(open_pool: Open) -> None:
    row = {"data_source": "gsm8k", "reward_model": {"style": "rule", "ground_truth": "9"}, "extra_info": {"index": 2}}
    assert (await (await open_pool("compute_score")).score(sample("9", **row))).reward == 3.0
    assert (await (await open_pool("compute_bare", bonus=0.5)).score(sample("9", answer="9"))).reward == 1.5
    asynchronous = await open_pool("compute_async")
    assert [(await asynchronous.score(sample(text, **row))).reward for text in ("9", "8")] == [1.0, 0.0]
    assert await kind(asynchronous, "9", data_source="gsm8k") == "raised", "there is no ground truth"


async def test_maths_is_scored_in_time_and_off_the_main_thread(open_pool: Open, tmp_path: Path) -> None:
    """A worker that is not ours to signal: the pool runs in an event loop of whatever thread."""
    pool = await open_pool("maths", seconds=10.0)

    def in_thread() -> float:
        return (
            asyncio.run_coroutine_threadsafe(pool.score(sample(r"\boxed{\sqrt{8}}", answer=r"2\sqrt{2}")), loop)
            .result(patience(30))
            .reward
        )

    loop = asyncio.get_running_loop()
    assert await asyncio.to_thread(in_thread) == 1.0
    file = tmp_path / "nobody"
    call = f"__import__('pathlib').Path('{file}').touch()"
    for payload in (rf"\boxed{{{call}}}", f"#### {call}", f"So it is ${call}$.", rf"\boxed{{x^2 + {call}}}"):
        assert (await pool.score(sample(payload, answer="x^2"))).reward == 0.0
        assert not file.exists(), payload
    eval(call)
    assert file.exists()  # as it would if any of them were run


async def test_maths_that_takes_too_long_is_a_failure_and_no_0(open_pool: Open) -> None:
    pool = await open_pool("maths", seconds=1.5)
    assert await kind(pool, r"\boxed{(\frac{(x+y+z+w)^{300}}{3})^{40}}", answer=r"(x+y+z+w+1)^{12000}/3^{39}") in (
        "timeout",
        "memory",
    )
    assert (await pool.score(sample(r"\boxed{x+1}", answer="1+x"))).reward == 1.0


async def test_a_value_on_failure_is_given_after_so_many_attempts_and_not_for_what_is_skipped() -> None:
    asked: list[str] = []

    async def score(given: Sample) -> Score:
        asked.append(given.response)
        if given.response == "once" and asked.count("once") == 2:
            return Score(1.0, (1.0, None))
        raise RewardFailure("skipped" if given.response == "skip" else "timeout", "no")

    patient = with_fallback(score, value=-2.0, attempts=3, num_parts=2)
    assert await patient(sample("never")) == Score(-2.0, (None, None)) and asked.count("never") == 3
    assert await patient(sample("once")) == Score(1.0, (1.0, None))
    with pytest.raises(RewardFailure):
        await patient(sample("skip"))
    assert asked.count("skip") == 1


async def test_nothing_is_left_open_after_many_samples(open_pool: Open) -> None:
    pool = await open_pool("keeps_state")
    (worker,) = pool._living
    descriptors = f"/proc/{worker.pid}/fd"
    if not os.path.isdir(descriptors):
        pytest.skip("there is no /proc here")
    await pool.score(sample("x"))
    before = len(os.listdir(descriptors))
    for _ in range(20):
        await pool.score(sample("x"))
    assert len(os.listdir(descriptors)) == before
    assert not psutil.Process(worker.pid).children()
