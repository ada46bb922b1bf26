"""Programs that speak to the capture endpoint by real SDKs: each token as the engine's own record has it, and their rewards."""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from asyncflow.data.tokenizer import CheckpointTokenizer
from asyncflow.environments import ENVIRONMENTS
from asyncflow.environments.agent import Endpoint
from asyncflow.environments.base import Action, TurnResult
from asyncflow.environments.capture.endpoint import CaptureEndpoint
from asyncflow.environments.capture.episode import CapturedEpisode
from asyncflow.environments.capture.transcript import CapturedCall, CapturedSequence
from asyncflow.environments.joints import JointsByTools
from asyncflow.registry import build
from tests.chat_families import FAMILIES, save_family

CALL = '<tool_call>\n{"name": "multiply", "arguments": {"a": 6, "b": 7}}\n</tool_call>'


class Recorded:
    """An engine that answers by a rule, and keeps a record of its own: context and answer of every call."""

    def __init__(self, tokenizer: CheckpointTokenizer, rule: Callable[[str], str]) -> None:
        self.tokenizer, self.rule = tokenizer, rule
        self.record: list[tuple[list[int], list[int]]] = []

    async def __call__(self, call: CapturedCall, limit: int, stops: tuple[str, ...]) -> Any:
        context = np.concatenate([call.prompt_ids, call.after])
        ids = np.append(self.tokenizer.encode(self.rule(self.tokenizer.decode_all(context))), self.tokenizer.end_token_ids[0])
        self.record.append((context.tolist(), ids.tolist()))
        await asyncio.sleep(0.01)
        spans = np.array([[0, 1]])
        return SimpleNamespace(token_ids=ids, logprobs=-np.ones(len(ids), np.float32), version_spans=spans, finish_reason="stop")


def answered(text: str) -> str:
    """CapturedCall the tool, then say what it gave."""
    return "It is 42." if "tool_response>\n42" in text else CALL


def captured(sequences: list[CapturedSequence]) -> list[tuple[list[int], list[int]]]:
    """Context and answer of each captured call."""
    found = []
    for sequence in sequences:
        before = sequence.prompt_ids.tolist()
        for ids, _, spans in sequence.pieces:
            if len(spans):
                found.append((list(before), ids.tolist()))
            before += ids.tolist()
    return sorted(found)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> CheckpointTokenizer:
    return save_family(FAMILIES[0], tmp_path_factory.mktemp("qwen"))


@pytest.fixture
async def endpoint() -> AsyncIterator[CaptureEndpoint]:
    served = CaptureEndpoint()
    await served.start()
    yield served
    await served.stop()


async def played(
    endpoint: CaptureEndpoint, engine: Recorded, example: dict[str, Any], name: str = "agent", **options: Any
) -> tuple[TurnResult, list[CapturedSequence]]:
    """One episode, whose captured tokens are compared with the engine's record."""
    episode = CapturedEpisode(JointsByTools(engine.tokenizer), engine, max_tokens=2000, max_calls=20)
    program = build("environment", name, options, ENVIRONMENTS)
    program.reset(example, 0)
    with endpoint.serving(episode) as key:
        result = await program.step(Action(msgspec.json.encode(Endpoint(endpoint.base_url, key)).decode()))
    sequences = episode.end()
    assert captured(sequences) == sorted(engine.record)
    return result, sequences


OPENAI_AGENT = """
import json

from openai import AsyncOpenAI

TOOLS = [{"type": "function", "function": {"name": "multiply", "description": "Multiply.", "parameters": {
    "type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}, "required": ["a", "b"]}}}]


async def whole(client, asked):
    return (await client.chat.completions.create(**asked)).choices[0].message.model_dump(exclude_none=True)


async def streamed(client, asked):
    reply = {"role": "assistant", "content": "", "tool_calls": []}
    async for chunk in await client.chat.completions.create(**asked, stream=True):
        for choice in chunk.choices:
            reply["content"] += choice.delta.content or ""
            for call in choice.delta.tool_calls or ():
                reply["tool_calls"].append({"id": call.id, "type": "function", "function": call.function.model_dump()})
    return reply if reply["tool_calls"] else {"role": "assistant", "content": reply["content"]}


async def run(example, base_url, api_key, streams=False):
    client = AsyncOpenAI(base_url=base_url, api_key=api_key)
    messages = [{"role": "user", "content": example["question"]}]
    while True:
        asked = {"model": "policy", "messages": messages, "tools": TOOLS}
        reply = await (streamed if streams else whole)(client, asked)
        messages.append(reply)
        if not reply.get("tool_calls"):
            return float(str(example["answer"]) in reply["content"])
        for call in reply["tool_calls"]:
            arguments = json.loads(call["function"]["arguments"])
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": str(arguments["a"] * arguments["b"])})
"""


@pytest.mark.smoke
@pytest.mark.parametrize("streams", [False, True])
async def test_the_openai_sdk(endpoint: CaptureEndpoint, tokenizer: CheckpointTokenizer, tmp_path: Path, streams: bool) -> None:
    pytest.importorskip("openai")
    (tmp_path / "agent.py").write_text(OPENAI_AGENT)
    engine, example = Recorded(tokenizer, answered), {"question": "6 x 7?", "answer": 42}
    result, (sequence,) = await played(endpoint, engine, example, run=f"{tmp_path / 'agent.py'}:run", streams=streams)
    assert result == TurnResult(None, 1.0, True, {}) and len(engine.record) == 2
    sampled = tokenizer.decode_all(sequence.token_ids[sequence.loss_mask == 1])
    assert sampled == f"{CALL}<|im_end|>It is 42.<|im_end|>"


GRAPH_AGENT = '''
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.prebuilt import create_react_agent


@tool
def multiply(a: int, b: int) -> int:
    """Multiply."""
    return a * b


async def run(example, base_url, api_key):
    graph = create_react_agent(ChatOpenAI(model="policy", base_url=base_url, api_key=api_key), [multiply])
    state = await graph.ainvoke({"messages": [("user", example["question"])]})
    return float(str(example["answer"]) in state["messages"][-1].content)
'''


@pytest.mark.filterwarnings("ignore")
async def test_a_graph_library(endpoint: CaptureEndpoint, tokenizer: CheckpointTokenizer, tmp_path: Path) -> None:
    pytest.importorskip("langgraph")
    (tmp_path / "graph.py").write_text(GRAPH_AGENT)
    engine = Recorded(tokenizer, answered)
    result, sequences = await played(endpoint, engine, {"question": "6 x 7?", "answer": 42}, run=f"{tmp_path / 'graph.py'}:run")
    assert result.reward == 1.0 and len(engine.record) == 2 and len(sequences) == 1


SUBAGENTS = """
import asyncio

from openai import AsyncOpenAI


async def run(example, base_url, api_key):
    client = AsyncOpenAI(base_url=base_url, api_key=api_key)

    async def ask(messages):
        reply = await client.chat.completions.create(model="policy", messages=messages)
        return [*messages, {"role": "assistant", "content": reply.choices[0].message.content}]

    plan = await ask([{"role": "user", "content": "Plan."}])
    parts = await asyncio.gather(*(ask([*plan, {"role": "user", "content": f"Part {i}."}]) for i in range(3)))
    await ask([*plan, {"role": "user", "content": " ".join(part[-1]["content"] for part in parts)}])
"""


@pytest.mark.smoke
async def test_sub_agents_side_by_side_are_branches(
    endpoint: CaptureEndpoint, tokenizer: CheckpointTokenizer, tmp_path: Path
) -> None:
    pytest.importorskip("openai")
    (tmp_path / "parts.py").write_text(SUBAGENTS)
    engine = Recorded(tokenizer, lambda text: f"{len(text)}.")
    result, sequences = await played(endpoint, engine, {}, run=f"{tmp_path / 'parts.py'}:run")
    assert result.reward is None and len(engine.record) == 5 and len(sequences) == 4
    assert sum(int(sequence.loss_mask.sum()) for sequence in sequences) == sum(len(ids) for _, ids in engine.record)


PROGRAM = """
import json, os, sys, urllib.request

example = json.load(sys.stdin)
body = json.dumps({"messages": [{"role": "user", "content": example["question"]}]}).encode()
headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
text = json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]
print("it said", text)
if example["fails"]:
    sys.exit("broken")
print(len(text) / 10)
"""


@pytest.mark.smoke
async def test_a_program_of_any_language(endpoint: CaptureEndpoint, tokenizer: CheckpointTokenizer, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    command = [sys.executable, str(tmp_path / "program.py")]
    example = {"question": "2 + 2?", "fails": False}
    result, (sequence,) = await played(endpoint, Recorded(tokenizer, lambda text: "four."), example, command=command)
    assert result.reward == 0.5 and tokenizer.decode(sequence.token_ids) == "four."
    with pytest.raises(RuntimeError, match="exited with status 1: broken"):
        await played(endpoint, Recorded(tokenizer, lambda text: "four."), {**example, "fails": True}, command=command)


TASKSET = """
import verifiers.v1 as vf


class SumTask(vf.Task):
    @vf.reward(weight=0.5)
    async def right(self, trace) -> float:
        return float("4" in (trace.last_reply or ""))

    @vf.reward
    async def short(self, trace) -> float:
        return 1 / len(trace.last_reply or " ")


class Sums(vf.Taskset[SumTask, vf.TasksetConfig]):
    def load(self):
        for i in range(3):
            yield SumTask(vf.TaskData(prompt=f"{i} + {4 - i}?"), self.config.task)


__all__ = ["Sums"]
"""


@pytest.fixture
def tasksets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder whose modules are tasksets, here and in the processes that verifiers starts."""
    pytest.importorskip("verifiers")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    return tmp_path


async def test_verifiers_rewards_are_its_own(
    endpoint: CaptureEndpoint, tokenizer: CheckpointTokenizer, tasksets: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The package's own evaluation of the same answers: the same environment, run by itself against the same endpoint."""
    from verifiers.v1 import EvalClientConfig, ModelContext, SingleAgentEnv, SingleAgentEnvConfig

    (tasksets / "sums_for_test.py").write_text(TASKSET)

    def rule(text: str) -> str:
        return "It is 4." if "1 + 3" in text else "Five."

    own = SingleAgentEnv(
        SingleAgentEnvConfig.model_validate(
            {"taskset": {"id": "sums_for_test"}, "agent": {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}}
        )
    )
    for index in (1, 2):
        engine = Recorded(tokenizer, rule)
        result, (sequence,) = await played(endpoint, engine, {"idx": index}, "verifiers", taskset="sums_for_test")
        episode = CapturedEpisode(JointsByTools(tokenizer), Recorded(tokenizer, rule), max_tokens=2000, max_calls=20)
        with endpoint.serving(episode) as key:
            monkeypatch.setenv("SOME_KEY", key)
            async with own.serving():
                client = EvalClientConfig(base_url=endpoint.base_url, api_key_var="SOME_KEY")
                task = list(own.taskset)[index]
                (trace,) = (await own.run_episode(task, ModelContext(model="policy", client=client))).traces
        assert result.reward == trace.reward > 0
        (same,) = episode.end()
        assert sequence.token_ids.tolist() == same.token_ids.tolist()
    assert json.loads(json.dumps(result.info)) == {}


TOOLS_TASKSET = """
import os

import verifiers.v1 as vf


class Numbers(vf.Toolset[vf.SharedToolsetConfig, vf.State]):
    @vf.tool
    def multiply(self, a: int, b: int) -> str:
        \"\"\"Multiply.\"\"\"
        return f"{a * b} by {os.getpid()}"


class ProductTask(vf.Task):
    @vf.reward
    async def right(self, trace) -> float:
        return float("42" in (trace.last_reply or ""))


class Products(vf.Taskset[ProductTask, vf.TasksetConfig]):
    @classmethod
    def toolsets(cls, config):
        return [Numbers(vf.SharedToolsetConfig())]

    def load(self):
        for i in range(3):
            yield ProductTask(vf.TaskData(prompt=f"{i}: 6 x 7?"), self.config.task)


__all__ = ["Products"]

if __name__ == "__main__":
    Numbers.run()
"""


async def test_the_tool_servers_of_a_taskset_serve_all_its_episodes(
    endpoint: CaptureEndpoint, tokenizer: CheckpointTokenizer, tasksets: Path
) -> None:
    (tasksets / "products_for_test.py").write_text(TOOLS_TASKSET)

    def rule(text: str) -> str:
        name = re.findall(r'"name": "(\w*multiply)"', text)[0]
        return "It is 42." if "tool_response>\n42 by" in text else CALL.replace("multiply", name)

    engines = [Recorded(tokenizer, rule) for _ in range(3)]
    outcomes = [
        await played(endpoint, engine, {"idx": index}, "verifiers", taskset="products_for_test")
        for index, engine in enumerate(engines)
    ]
    assert [result.reward for result, _ in outcomes] == [1.0] * 3
    contexts = [tokenizer.decode_all(np.array(context)) for engine in engines for context, _ in engine.record]
    assert len({each for context in contexts for each in re.findall(r"42 by (\d+)", context)}) == 1
