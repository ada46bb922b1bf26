"""Captured calls: which sequence each belongs to, token by token, and what a client is answered."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx2
import msgspec
import numpy as np
import pytest

from asyncflow.data.tokenizer import CheckpointTokenizer
from asyncflow.environments.base import Message
from asyncflow.environments.capture.endpoint import CaptureEndpoint
from asyncflow.environments.capture.episode import CapturedEpisode
from asyncflow.environments.capture.transcript import CallTranscript, CapturedCall, CapturedSequence
from asyncflow.environments.capture.wire import answer_message
from asyncflow.environments.joints import Joints, JointsByTools
from tests.chat_families import FAMILIES, save_family

TOOLS = [
    {"type": "function", "function": {"name": "add", "description": "Add.", "parameters": {"type": "object", "properties": {}}}}
]


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, CheckpointTokenizer]:
    folder: Path = tmp_path_factory.mktemp("families")
    return {family.name: save_family(family, folder / family.name) for family in FAMILIES}


class Script:
    """An engine that says what it is told, and keeps a record of its own of every call."""

    def __init__(self, tokenizer: CheckpointTokenizer, answers: list[str]) -> None:
        self.tokenizer, self.answers = tokenizer, answers
        self.record: list[tuple[Any, ...]] = []
        self.version = 3

    def sample(self, text: str) -> Any:
        ids = np.append(self.tokenizer.encode(text), self.tokenizer.end_token_ids[0])
        logprobs = -np.arange(1, len(ids) + 1, dtype=np.float32) / 8
        return SimpleNamespace(token_ids=ids, logprobs=logprobs, version_spans=np.array([[0, self.version]]), finish_reason="stop")

    async def __call__(self, call: CapturedCall, limit: int, stops: tuple[str, ...]) -> Any:
        response = self.sample(self.answers.pop(0))
        self.record.append((np.concatenate([call.prompt_ids, call.after]).tolist(), response.token_ids.tolist(), limit, stops))
        await asyncio.sleep(0.01)
        return response


def user(content: str) -> Message:
    return {"role": "user", "content": content}


def say(transcript: CallTranscript, joints: Joints, messages: list[Message], script: Script, text: str) -> list[Message]:
    """One call; the conversation with its answer."""
    call = transcript.begin(messages, joints)
    response = script.sample(text)
    script.record.append((np.concatenate([call.prompt_ids, call.after]).tolist(), response.token_ids.tolist()))
    answer = {"role": "assistant", "content": text}
    transcript.end(call, response, answer)
    return [*messages, answer]


def contexts(sequences: list[CapturedSequence]) -> list[tuple[list[int], list[int]]]:
    """What stood before each sampled token's piece, and the piece: as the engine's own record has it."""
    found = []
    for sequence in sequences:
        before = sequence.prompt_ids.tolist()
        for ids, _, spans in sequence.pieces:
            if len(spans):
                found.append((list(before), ids.tolist()))
            before += ids.tolist()
    return found


def test_calls_that_extend_what_came_before_are_one_sequence(tokenizers: dict[str, CheckpointTokenizer]) -> None:
    tokenizer = tokenizers["qwen2.5"]
    script, transcript, joints = Script(tokenizer, []), CallTranscript(), Joints(tokenizer)
    talk = say(transcript, joints, [user("One?")], script, "1")
    script.version = 4
    talk = say(transcript, joints, [*talk, user("Two?")], script, "2")
    say(transcript, joints, [*talk, user("Three?")], script, "3")
    (sequence,) = transcript.trained()
    assert contexts([sequence]) == script.record
    text = tokenizer.decode_all(sequence.token_ids)
    assert text.startswith("1<|im_end|>\n<|im_start|>user\nTwo?<|im_end|>\n<|im_start|>assistant\n2<|im_end|>")
    assert tokenizer.decode_all(sequence.token_ids[sequence.loss_mask == 1]) == "1<|im_end|>2<|im_end|>3<|im_end|>"
    assert (sequence.logprobs[sequence.loss_mask == 0] == 0).all() and (sequence.logprobs[sequence.loss_mask == 1] < 0).all()
    second = script.record[1][0]
    begin = len(second) - len(sequence.prompt_ids)
    assert sequence.version_spans.tolist()[:2] == [[0, 3], [begin, 4]]
    assert sequence.loss_mask.dtype == np.uint8 and sequence.logprobs.dtype == np.float32


def test_other_calls_are_branches_with_the_tokens_that_they_go_on_from(tokenizers: dict[str, CheckpointTokenizer]) -> None:
    tokenizer = tokenizers["qwen2.5"]
    script, transcript, joints = Script(tokenizer, []), CallTranscript(), Joints(tokenizer)
    talk = say(transcript, joints, [user("One?")], script, "1")
    say(transcript, joints, [*talk, user("Two?")], script, "2")
    say(transcript, joints, [*talk, user("Or three?")], script, "3")  # from the same place
    say(transcript, joints, [user("Another?")], script, "4")
    say(transcript, joints, [user("One?"), {"role": "assistant", "content": "10"}, user("Two?")], script, "5")  # not what was said
    first, branch, other, changed = transcript.trained()
    assert sorted(contexts([first, branch, other, changed])) == sorted(script.record)
    shared = [*first.prompt_ids, *first.token_ids[: len(tokenizer.encode("1")) + 1]]
    assert branch.prompt_ids[: len(shared)].tolist() == [int(one) for one in shared]
    assert [tokenizer.decode(each.token_ids[each.loss_mask == 1]) for each in (first, branch, other, changed)] == [
        "12",
        "3",
        "4",
        "5",
    ]


def test_a_template_that_changes_earlier_turns_starts_a_branch(tokenizers: dict[str, CheckpointTokenizer]) -> None:
    tokenizer = tokenizers["qwen3"]
    script, transcript, joints = Script(tokenizer, []), CallTranscript(), Joints(tokenizer)
    talk = say(transcript, joints, [user("One?")], script, "<think>\nhm\n</think>\n\n1")
    say(transcript, joints, [*talk, user("Two?")], script, "2")
    first, second = transcript.trained()
    assert "hm" in tokenizer.decode_all(first.token_ids) and "hm" not in tokenizer.decode_all(second.prompt_ids)


def test_calls_side_by_side_and_calls_that_fail_leave_no_token_in_two_places(tokenizers: dict[str, CheckpointTokenizer]) -> None:
    tokenizer = tokenizers["llama3"]
    script, transcript, joints = Script(tokenizer, []), CallTranscript(), Joints(tokenizer)
    talk = say(transcript, joints, [user("One?")], script, "1")
    begun = [transcript.begin([*talk, user("Next?")], joints) for _ in range(3)]
    assert len({call.sequence.number for call in begun}) == 3
    assert len({(*call.prompt_ids, *call.after) for call in begun}) == 1
    for call, text in zip(begun[1:], ("2", "3"), strict=True):  # the first one never ends
        transcript.end(call, script.sample(text), {"role": "assistant", "content": text})
    assert [tokenizer.decode(each.token_ids) for each in transcript.trained()] == ["1", "2", "3"]


def test_a_client_may_spell_its_conversation_in_its_own_way(tokenizers: dict[str, CheckpointTokenizer]) -> None:
    """Parts of text for text, null for an empty content, other ids and spaces in a call's arguments."""
    tokenizer = tokenizers["qwen2.5"]
    script, transcript, joints = Script(tokenizer, []), CallTranscript(), Joints(tokenizer, {"tools": TOOLS})
    call = transcript.begin([user("Add.")], joints)
    text = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
    made = {"id": "x", "type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": 2}'}}
    transcript.end(call, script.sample(text), {"role": "assistant", "content": None, "tool_calls": [made]})
    told = {"id": "y", "type": "function", "function": {"name": "add", "arguments": '{"b":2,"a":1}'}}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "Add."}]},
        {"role": "assistant", "content": "", "tool_calls": [told]},
        {"role": "tool", "tool_call_id": "y", "content": "3"},
    ]
    again = transcript.begin(messages, joints)
    assert again.sequence is call.sequence
    assert tokenizer.decode_all(again.after).startswith(f"{text}<|im_end|>\n<|im_start|>user\n<tool_response>\n3\n</tool_response>")


def test_a_text_that_begins_with_a_completed_one_goes_on_with_it(tokenizers: dict[str, CheckpointTokenizer]) -> None:
    tokenizer = tokenizers["qwen2.5"]
    script, transcript, joints = Script(tokenizer, []), CallTranscript(), Joints(tokenizer, is_chat=False)
    prompt, record = "1 + 1 = ", []
    for text in ("2", "4"):
        call = transcript.begin_text(prompt, joints)
        record.append(tokenizer.decode(np.concatenate([call.prompt_ids, call.after])))
        transcript.end(call, script.sample(text), {"role": "assistant", "content": text})
        prompt += f"{text}\n2 + 2 = "
    assert record == ["1 + 1 = ", "1 + 1 = 2\n2 + 2 = "] and len(transcript.trained()) == 1
    assert transcript.begin_text("3 + 3 = ", joints).sequence.number == 1


# Over HTTP


@pytest.fixture
async def endpoint() -> AsyncIterator[CaptureEndpoint]:
    served = CaptureEndpoint()
    await served.start()
    yield served
    await served.stop()


def episode(tokenizer: CheckpointTokenizer, script: Script, **limits: int) -> CapturedEpisode:
    return CapturedEpisode(JointsByTools(tokenizer), script, **{"max_tokens": 1000, "max_calls": 16, **limits})


@pytest.mark.parametrize(
    ("text", "content", "arguments"),
    [
        ('A.\n<tool_call>{"name": "add"}</tool_call>', "A.", ["{}"]),
        ('A.\n<tool_call>{"name": "add"}</tool_call><tool_call>{"name</tool_call>', None, ["{}"]),
        ("<tool_call>" + "[" * 2000, None, []),
        ('A.\n<tool_call>{"name": "add", "arguments": {"é": "\\ud800"}}</tool_call>', "A.", ['{"é": "?"}']),
    ],
)
def test_a_client_sees_the_calls_that_can_be_read_and_the_text_of_others(
    text: str, content: str | None, arguments: list[str]
) -> None:
    message = answer_message(text, 1, has_tools=True)
    assert message["content"] == (text if content is None else content)
    assert [each["function"]["arguments"] for each in message.get("tool_calls", ())] == arguments
    msgspec.json.encode(message)


async def test_chat_completions_with_tools_whole_and_streaming(
    endpoint: CaptureEndpoint, tokenizers: dict[str, CheckpointTokenizer]
) -> None:
    tokenizer = tokenizers["qwen2.5"]
    call_text = 'Let me.\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    script = Script(tokenizer, [call_text, "It is 3."])
    captured = episode(tokenizer, script)
    with endpoint.serving(captured) as key:
        async with httpx2.AsyncClient(base_url=endpoint.base_url + "/", headers={"Authorization": f"Bearer {key}"}) as http:
            messages: list[Any] = [user("1 + 2?")]
            asked = {"model": "any", "messages": messages, "tools": TOOLS, "logprobs": True, "max_tokens": 99, "stop": ["END"]}
            reply = (await http.post("chat/completions", json=asked)).raise_for_status().json()
            choice = reply["choices"][0]
            assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] == "Let me."
            (made,) = choice["message"]["tool_calls"]
            assert made["function"] == {"name": "add", "arguments": '{"a": 1}'} and len(made["id"]) == 9
            assert len(choice["logprobs"]["content"]) == reply["usage"]["completion_tokens"] == len(script.record[0][1])
            assert script.record[0][2:] == (99, ("END",))
            messages += [choice["message"], {"role": "tool", "tool_call_id": made["id"], "content": "3"}]
            asked = {"messages": messages, "tools": TOOLS, "stream": True, "stream_options": {"include_usage": True}}
            lines = (await http.post("chat/completions", json=asked)).raise_for_status().text.strip().split("\n\n")
            assert lines[-1] == "data: [DONE]"
            first, last, usage = (json.loads(line.removeprefix("data: ")) for line in lines[:-1])
            assert first["choices"][0]["delta"]["content"] == "It is 3." and last["choices"][0]["finish_reason"] == "stop"
            assert usage["usage"]["prompt_tokens"] == len(script.record[1][0])
            assert (await http.get("models")).json()["data"][0]["id"] == "policy"
    (sequence,) = captured.end()
    assert contexts([sequence]) == [each[:2] for each in script.record]


async def test_completions_and_limits_and_refusals(endpoint: CaptureEndpoint, tokenizers: dict[str, CheckpointTokenizer]) -> None:
    tokenizer = tokenizers["qwen2.5"]
    script = Script(tokenizer, ["2", "two"])
    captured = episode(tokenizer, script, max_calls=5)
    with endpoint.serving(captured) as key:
        headers = {"Authorization": f"Bearer {key}"}
        async with httpx2.AsyncClient(base_url=endpoint.base_url + "/", headers=headers) as http:
            reply = (await http.post("completions", json={"prompt": "1 + 1 = ", "logprobs": 1})).raise_for_status().json()
            assert reply["choices"][0]["text"] == "2" and len(reply["choices"][0]["logprobs"]["tokens"]) == 2

            async def refused(path: str, body: Any, **changed: str) -> tuple[int, str]:
                answer = await http.post(path, json=body, headers={**headers, **changed})
                return answer.status_code, answer.json()["error"]["message"]

            chat = "chat/completions"
            assert await refused(chat, {"messages": []}) == (400, "messages is missing, or empty")
            assert (await refused(chat, {"messages": [user("?")], "n": 2}))[1].startswith("n must be 1")
            assert (await refused(chat, {"messages": [user("?")], "tool_choice": "required"}))[1].startswith("tool_choice")
            assert (await refused(chat, {"messages": [user("?")], "response_format": {"type": "json_object"}}))[0] == 400
            image = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]
            assert (await refused(chat, {"messages": image}))[1].startswith("only text")
            assert (await refused("completions", {"prompt": [1, 2]}))[1] == "prompt must be one text"
            assert (await refused(chat, [1]))[1].startswith("the request cannot be read")
            assert (await refused(chat, {"messages": [user("?")]}, Authorization="Bearer no"))[0] == 401
            for _ in range(4):
                await http.post(chat, json={"messages": [user("?")]}) if script.answers else None
                captured.num_calls += 1
            status, why = await refused(chat, {"messages": [user("?")]})
            assert status == 400 and "episodes.max_turns" in why and captured.has_reached_limit
    async with httpx2.AsyncClient(base_url=endpoint.base_url + "/", headers=headers) as http:
        assert (await http.get("models")).status_code == 401  # the episode is over
    assert len(captured.end()) == 2
