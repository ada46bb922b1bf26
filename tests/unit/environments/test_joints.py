"""Joints: over the templates of six families what is sampled is trained, token by token, and nothing else is."""

from __future__ import annotations

import json
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from asyncflow.data.tokenizer import CheckpointTokenizer
from asyncflow.environments.base import Message
from asyncflow.environments.capture.transcript import CallTranscript, CapturedSequence
from asyncflow.environments.joints import Joints
from asyncflow.types import Array, UserError
from tests.chat_families import FAMILIES, Family, save_family
from tests.conftest import MODEL
from tests.depth import few

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
PIECES = [
    "It is 17.",
    " \n",
    "<tool_call>",
    "né",
    "☃",
    "</think>",
    "<think>",
    "\n\n",
    '{"name": "add"}',
    "  ",
    "0",
    "ok",
    "\t.",
    "Zürich",
]

OBSERVED = ["17", "Zürich", "a  b", '{"x": 1}']


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("families")


@pytest.fixture(scope="module")
def tokenizers(folder: Path) -> dict[str, CheckpointTokenizer]:
    return {family.name: save_family(family, folder / family.name) for family in FAMILIES}


def tool_message(content: str) -> Message:
    return {"role": "tool", "name": "add", "tool_call_id": "abcdef123", "content": content}


class Talk:
    """A conversation whose answers are sampled. `sequences`: as a row has them."""

    def __init__(self, tokenizer: CheckpointTokenizer, joints: Joints, question: str) -> None:
        self.messages: list[Message] = [{"role": "user", "content": question}]
        self._tokenizer, self._joints, self._transcript = tokenizer, joints, CallTranscript()
        self.call = self._transcript.begin(self.messages, joints)

    @property
    def sequences(self) -> list[CapturedSequence]:
        return self._transcript.sequences

    def answered(self, ids: Array) -> None:
        answer = {"role": "assistant", "content": self._tokenizer.decode_all(ids)}
        sampled: Any = SimpleNamespace(token_ids=ids, logprobs=np.zeros(len(ids), np.float32), version_spans=np.array([[0, 0]]))
        self._transcript.end(self.call, sampled, answer)
        self.messages.append(answer)

    def observed(self, observation: str | list[Message]) -> tuple[Array, bool]:
        """Tokens before the next answer, and whether they are the prompt of a branch."""
        sequence, known = self.call.sequence, len(self.call.sequence.token_ids)
        self.messages += [{"role": "user", "content": observation}] if isinstance(observation, str) else observation
        self.call = self._transcript.begin(self.messages, self._joints)
        is_branch = self.call.sequence is not sequence
        return (self.call.prompt_ids if is_branch else self.call.after[known:]), is_branch


def random_answer(draw: random.Random, tokenizer: CheckpointTokenizer) -> Array:
    """What a model may sample: text, pieces that no text is encoded to, and the end of the turn or none."""
    size = tokenizer.encode("a").max() + 300
    parts = [tokenizer.encode(draw.choice(PIECES)) for _ in range(draw.randint(0, 5))]
    parts += [np.array([draw.randrange(int(size))]) for _ in range(draw.randint(0, 3))]
    draw.shuffle(parts)
    ids = np.concatenate([np.empty(0, np.int64), *parts])
    return np.append(ids, draw.choice(tokenizer.end_token_ids)) if draw.random() < 0.8 or not len(ids) else ids


def random_observation(draw: random.Random, family: Family) -> str | list[Message]:
    text = f"{draw.choice(OBSERVED)} {draw.randrange(10**6)}"
    if draw.random() < 0.5:
        return text
    several = [tool_message(f"{text} {i}") for i in range(draw.randint(1, 3))]
    return several if family.name != "mistral" or len(several) == 1 else several[:1]


def test_random_episodes_train_what_was_sampled_and_nothing_else(tokenizers: dict[str, CheckpointTokenizer]) -> None:
    """Also: no observation is lost, and a branch begins with the conversation as the template renders it."""
    draw, branches = random.Random(7), 0
    episodes = few(90, 10_000)
    settings: list[dict[str, Any]] = [{}, {"tools": TOOLS}, {"enable_thinking": False}]
    joints = {(f.name, i): Joints(tokenizers[f.name], option) for f in FAMILIES for i, option in enumerate(settings)}
    for number in range(episodes):
        family, tokenizer = FAMILIES[number % len(FAMILIES)], tokenizers[FAMILIES[number % len(FAMILIES)].name]
        of_family = joints[family.name, draw.randrange(3)]
        talk, sampled = Talk(tokenizer, of_family, f"How many? {draw.randrange(100)}"), []
        for _ in range(draw.randint(1, 6)):
            answer = random_answer(draw, tokenizer)
            talk.answered(answer)
            sampled += answer.tolist()
            observation = random_observation(draw, family)
            joint, is_branch = talk.observed(observation)
            said = [observation] if isinstance(observation, str) else [str(message["content"]) for message in observation]
            text = tokenizer.decode_all(joint).replace('\\"', '"').replace("\\u00fc", "ü")
            assert all(one in text for one in said), (family.name, said, text)
            if is_branch:
                branches += 1
                assert joint.tolist() == of_family.prompt_ids(talk.call.messages).tolist()
        trained = [sequence.token_ids[sequence.loss_mask > 0] for sequence in talk.sequences]
        assert np.concatenate(trained).tolist() == sampled, family.name
    assert branches > episodes / 30


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
@pytest.mark.parametrize("options", [{}, {"tools": TOOLS}], ids=["plain", "tools"])
def test_a_sequence_is_the_conversation_as_transformers_renders_it(
    folder: Path, tokenizers: dict[str, CheckpointTokenizer], family: Family, options: dict[str, Any]
) -> None:
    """For answers that a template leaves as they are: to the token, over four turns."""
    tokenizer, theirs = tokenizers[family.name], AutoTokenizer.from_pretrained(folder / family.name)
    joints = Joints(tokenizer, options)
    talk = Talk(tokenizer, joints, "What is the weather?")
    ids = talk.call.prompt_ids.tolist()
    start = " " if family.name == "mistral" else ""  # its template puts it there, other models sample none
    for turn in range(4):
        answer = np.append(tokenizer.encode(f"{start}The answer is {turn}."), tokenizer.end_token_ids[0])
        talk.answered(answer)
        observation: Any = [tool_message(f"rain {turn}")] if "tool" not in joints.survey.refused else f"rain {turn}"
        joint, is_branch = talk.observed(observation)
        assert not is_branch
        ids += [*answer.tolist(), *joint.tolist()]
    text = theirs.apply_chat_template(talk.call.messages, tokenize=False, add_generation_prompt=True, **options)
    assert tokenizer.decode_all(np.array(ids)) == tokenizer.decode_all(tokenizer.encode(text))
    assert ids == tokenizer.encode(text).tolist()


@pytest.mark.parametrize(
    ("name", "options", "changing", "refused", "begun"),
    [
        ("qwen2.5", {"tools": TOOLS}, set(), set(), ""),
        ("qwen3", {}, {"user"}, set(), ""),
        ("qwen3", {"enable_thinking": False}, {"user", "tool"}, set(), "<think>\n\n</think>\n\n"),
        ("llama3", {"tools": TOOLS}, set(), set(), ""),
        ("smollm2", {}, set(), {"tool"}, ""),
        ("mistral", {}, set(), set(), ""),
        ("mistral", {"tools": TOOLS}, {"user"}, set(), ""),
        ("gemma", {}, set(), {"tool"}, ""),
    ],
)
def test_the_survey_says_which_templates_change_earlier_turns_and_which_know_no_tools(
    tokenizers: dict[str, CheckpointTokenizer],
    name: str,
    options: dict[str, Any],
    changing: set[str],
    refused: set[str],
    begun: str,
) -> None:
    survey = Joints(tokenizers[name], options).survey
    assert survey.changing == changing and set(survey.refused) == refused and survey.begun == begun
    assert survey.closing == next(family.specials[0] for family in FAMILIES if family.name == name)
    assert len(survey.sentences()) == bool(changing) + bool(refused)


def test_a_turn_branches_only_where_it_changes_what_came_before(tokenizers: dict[str, CheckpointTokenizer]) -> None:
    """Qwen 3 drops thoughts when the user asks again, and leaves answers without one as they are."""
    tokenizer = tokenizers["qwen3"]
    for answer, observation, is_branch in (
        ("<think>\nhm\n</think>\n\n4", "And now?", True),
        ("4", "And now?", False),
        ("<think>\nhm\n</think>\n\n4", [tool_message("4")], False),
    ):
        talk = Talk(tokenizer, Joints(tokenizer), "2 + 2?")
        talk.answered(np.append(tokenizer.encode(answer), tokenizer.end_token_ids[0]))
        joint, has_branched = talk.observed(observation)
        assert has_branched == is_branch, answer
        assert ("hm" in tokenizer.decode_all(joint)) is False


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_a_turn_that_was_cut_off_is_closed_by_an_observed_token(tokenizers: dict[str, CheckpointTokenizer], family: Family) -> None:
    tokenizer = tokenizers[family.name]
    joints, observed = Joints(tokenizer), [{"role": "user", "content": "Go on."}]
    (end, word) = tokenizer.end_token_ids[0], int(tokenizer.encode("a")[0])
    closed, cut = joints.between(end, observed).tolist(), joints.between(word, observed).tolist()
    assert cut == [end, *closed] and end not in closed[:1]


def test_without_a_chat_template_what_messages_say_is_appended_as_it_is(tokenizers: dict[str, CheckpointTokenizer]) -> None:
    tokenizer = tokenizers["mistral"]
    joints = Joints(tokenizer, is_chat=False)
    assert joints.prompt_ids(joints.messages_of("2 + 2 =")).tolist() == tokenizer.encode("2 + 2 =").tolist()
    assert tokenizer.decode_all(joints.between(1000, joints.messages_of("\n3 + 3 ="))) == "\n3 + 3 ="


def test_what_cannot_be_rendered_is_said_in_a_sentence(tokenizers: dict[str, CheckpointTokenizer], tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"has none; set data\.chat_template=false"):
        Joints(CheckpointTokenizer(MODEL))
    talk = Talk(tokenizers["gemma"], Joints(tokenizers["gemma"]), "Hello.")
    talk.answered(np.array([tokenizers["gemma"].end_token_ids[0]]))
    with pytest.raises(UserError, match="roles must alternate"):
        talk.observed([{"role": "system", "content": "Stop."}])
    save_family(FAMILIES[0], tmp_path)
    (tmp_path / "chat_template.jinja").write_text(
        "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}"
    )
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": 0}))
    with pytest.raises(UserError, match="leaves out the assistant's messages"):
        Joints(CheckpointTokenizer(tmp_path))
