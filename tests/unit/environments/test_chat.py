"""`ChatFormat`: what the episode's coroutine asks of a chat template."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from asyncflow.data.tokenizer import CheckpointTokenizer
from asyncflow.environments.base import EnvironmentFailure
from asyncflow.environments.chat import ChatFormat
from asyncflow.environments.tool_schema import specification
from tests.chat_families import FAMILIES, save_family


def double(n: int) -> int:
    """Double a number.

    Args:
        n: the number
    """
    return 2 * n


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> CheckpointTokenizer:
    folder: Path = tmp_path_factory.mktemp("qwen")
    return save_family(FAMILIES[0], folder)


def test_a_turn_and_what_follows_it(tokenizer: CheckpointTokenizer) -> None:
    form, (end, other) = ChatFormat(tokenizer), tokenizer.end_token_ids
    turn = np.append(tokenizer.encode('<tool_call>{"name": "double"}</tool_call>'), end)
    action = form.action(turn, is_finished=True)
    assert action == '<tool_call>{"name": "double"}</tool_call>' and action.is_finished
    assert action.token_ids == turn.tolist()
    said = tokenizer.decode_all(form.between(turn, [{"role": "tool", "content": "4"}], is_finished=True))
    assert said == "\n<|im_start|>user\n<tool_response>\n4\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    turn[-1] = other
    assert tokenizer.decode_all(form.between(turn, "More.", is_finished=True)).startswith("\n<|im_start|>user\nMore.")
    cut = form.between(turn[:-1], None, is_finished=False)
    assert tokenizer.decode_all(cut) == "<|im_end|>\n<|im_start|>assistant\n"
    assert form.notes == []


def test_a_beginning_is_the_whole_conversation_behind_the_prompt(tokenizer: CheckpointTokenizer) -> None:
    form, tools = ChatFormat(tokenizer), [specification(double)]
    messages = [{"role": "user", "content": "Double 2."}]
    whole = tokenizer.encode(tokenizer.render(messages, {"tools": tools}))
    assert form.opening(whole[:3], messages, tools).tolist() == whole[3:].tolist()
    assert form.opening(whole[:3], messages, tools).tolist() == whole[3:].tolist()  # again, of what is known by now
    with pytest.raises(EnvironmentFailure, match="do not begin with the data's prompt"):
        form.opening(tokenizer.encode("Hello"), messages, tools)
    with pytest.raises(EnvironmentFailure, match="no text can stand behind"):
        form.opening(whole, "More.", tools)


def test_a_changed_conversation_is_a_branch_behind_the_same_beginning(tmp_path: Path) -> None:
    """Qwen 3 without its thoughts: the prompt's own tokens, then the rest as the template has it now."""
    tokenizer = save_family(next(family for family in FAMILIES if family.name == "qwen3"), tmp_path)
    form, end = ChatFormat(tokenizer), tokenizer.end_token_ids[0]
    begins = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2 + 2?"}]
    prompt = tokenizer.encode(tokenizer.render(begins))
    thinking = np.append(tokenizer.encode("<think>\nhm\n</think>\n\n4"), end)
    plain = np.append(tokenizer.encode("4"), end)
    assert form.branch(prompt, [(plain, "And 3 + 3?")]) is None
    assert form.branch(prompt, [(thinking, [{"role": "tool", "content": "4"}])]) is None
    assert form.branch(prompt, [(thinking, None)]) is None
    branch = form.branch(prompt, [(plain, "And 3 + 3?"), (thinking, "And 4 + 4?")])
    assert branch is not None and branch[: len(prompt)].tolist() == prompt.tolist()
    answers = [{"role": "assistant", "content": "4"}, {"role": "assistant", "content": "<think>\nhm\n</think>\n\n4"}]
    asked = [{"role": "user", "content": "And 3 + 3?"}, {"role": "user", "content": "And 4 + 4?"}]
    whole = tokenizer.render([*begins, answers[0], asked[0], answers[1], asked[1]])
    assert tokenizer.decode_all(branch) == whole and "hm" not in whole
    assert form.notes[0].startswith("the chat template may change earlier turns when a user message follows")
    assert form.may_branch
    plainly = ChatFormat(tokenizer, branches=False)
    assert plainly.branch(prompt, [(thinking, "And 4 + 4?")]) is None and not plainly.may_branch and plainly.notes == []
