"""The scorers that look at more than a number."""

from __future__ import annotations

import contextlib
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from asyncflow.registry import load
from asyncflow.rewards import REWARDS
from asyncflow.rewards.base import Sample
from asyncflow.rewards.exact_match import ExactMatch
from asyncflow.rewards.format import Format
from asyncflow.rewards.length import Length
from asyncflow.rewards.multiple_choice import MultipleChoice
from asyncflow.rewards.reasoning_gym import ReasoningGym
from asyncflow.rewards.regex import Regex


def sample(response: str, answer: Any = "", *, ids: int = 0, is_finished: bool = True) -> Sample:
    return Sample("", response, {"answer": answer}, is_finished, [0] * ids)


@pytest.mark.parametrize(
    ("response", "answer", "options", "reward"),
    [
        (" Paris\n", "Paris", {}, 1.0),
        ("paris", "Paris", {}, 0.0),
        ("paris", "Paris", {"ignore_case": True}, 1.0),
        ("New  York", "New York", {}, 0.0),
        ("New  York", "New York", {"ignore_spaces": True}, 1.0),
        ("Paris", ["London", "Paris"], {}, 1.0),
        ("It is Paris", "Paris", {}, 0.0),
        ("<answer>Paris</answer>", "Paris", {"marks": ["tag"]}, 1.0),
        ("Paris", "Paris", {"marks": ["tag"]}, 0.0),
        ("7", 7, {}, 1.0),
    ],
)
def test_exact_match(response: str, answer: Any, options: dict[str, Any], reward: float) -> None:
    assert ExactMatch(**options)(sample(response, answer)) == reward


@pytest.mark.parametrize(
    ("response", "reward"),
    [
        ("C", 1.0),
        ("(C)", 1.0),
        ("c.", 1.0),
        ("The answer is C.", 1.0),
        ("The answer is (C) the third.", 1.0),
        (r"\boxed{C}", 1.0),
        (r"\boxed{\text{C}}", 1.0),
        ("Answer: **C**", 1.0),
        ("the answer is option C", 1.0),
        ("<answer>C</answer>", 1.0),
        ("B", 0.0),
        (r"\boxed{\mathrm{C}}", 1.0),
        (r"\boxed{\mathbf{C}}", 1.0),
        (r"\boxed{\textrm{(C)}}", 1.0),
        ("The answer is C, not D", 1.0),
        ("The answer is C, a cat", 1.0),
        (r"\boxed{C, D}", 0.0),
        (r"\boxed{\text{C}, \text{D}}", 0.0),
        (r"\boxed{(C), (D)}", 0.0),
        (r"\boxed{C/D}", 0.0),
        (r"\boxed{C, D, and E}", 0.0),
        (r"\boxed{(C) or (D)}", 0.0),
        ("#### C - A and B", 1.0),
        ("#### **C** - A or B", 1.0),
        ("#### C, A and B are wrong", 1.0),
        ("The answer is B, not C", 0.0),
        ("C and D", 0.0),
        ("Cats", 0.0),
        ("The answer is Cats", 0.0),
        ("", 0.0),
        ("The answer is a cat", 0.0),
        ("I like C best of all", 0.0),
        ("The answer is F", 0.0),
    ],
)
def test_multiple_choice(response: str, reward: float) -> None:
    assert MultipleChoice()(sample(response, "C")) == reward
    assert MultipleChoice()(sample(response, 2)) == reward and MultipleChoice()(sample(response, "(C)")) == reward


@pytest.mark.parametrize("answer", ["F", "C, D", 7, True, None, "", ["C"]])
def test_a_reference_that_is_no_choice_is_an_error(answer: Any) -> None:
    with pytest.raises(ValueError, match="none of the choices"):
        MultipleChoice()(sample("C", answer))


@pytest.mark.parametrize(
    ("response", "options", "reward"),
    [
        ("a 12 b", {"pattern": r"\d+"}, 1.0),
        ("a b", {"pattern": r"\d+"}, 0.0),
        ("a 12 b", {"pattern": r"\d+", "match": "full"}, 0.0),
        (" 12\n", {"pattern": r"\d+", "match": "full"}, 1.0),
        ("A", {"pattern": "a"}, 0.0),
        ("A", {"pattern": "a", "ignore_case": True}, 1.0),
        ("x\ny", {"pattern": "x.y"}, 1.0),
        ("x\ny", {"pattern": "x.y", "dot_all": False}, 0.0),
        ("x\ny", {"pattern": "^y"}, 0.0),
        ("x\ny", {"pattern": "^y", "multiline": True}, 1.0),
    ],
)
def test_regex(response: str, options: dict[str, Any], reward: float) -> None:
    assert Regex(**options)(sample(response)) == reward


@pytest.mark.parametrize(
    ("response", "strict", "loose"),
    [
        ("<think>a</think><answer>b</answer>", 1.0, 1.0),
        (" <think>a</think>\n<answer>b</answer>\n", 1.0, 1.0),
        ("<think>a</think> so <answer>b</answer>", 0.0, 1.0),
        ("<answer>b</answer><think>a</think>", 0.0, 0.0),
        ("<think>a<answer>b</answer></think>", 0.0, 0.0),
        ("<think></think><answer>b</answer>", 0.0, 0.0),
        ("<think>a</think><answer>b</answer><answer>c</answer>", 0.0, 0.0),
        ("<think>a</think><answer>b", 0.0, 0.0),
        ("b", 0.0, 0.0),
    ],
)
def test_format(response: str, strict: float, loose: float) -> None:
    assert Format()(sample(response)) == strict and Format(is_strict=False)(sample(response)) == loose
    assert Format()(sample(response, is_finished=False)) == 0.0


def test_length_is_the_penalty_of_dapo() -> None:
    """L_max 16, L_cache 4: free up to 12, half way at 14, the whole of it from 16 on."""
    penalty = Length(max_tokens=16, soft_tokens=4)
    assert [penalty(sample("", ids=n)) for n in (0, 12, 13, 14, 16, 17)] == [0.0, 0.0, -0.25, -0.5, -1.0, -1.0]
    hard = Length(max_tokens=16, min_tokens=2)
    assert [hard(sample("", ids=n)) for n in (1, 2, 16, 17)] == [-1.0, 0.0, 0.0, -1.0]


@pytest.mark.parametrize(
    ("scorer", "options"),
    [
        (Regex, {"pattern": "("}),
        (Regex, {"pattern": "a", "match": "all"}),
        (Format, {"tags": "think"}),
        (Format, {"tags": ["a", "a"]}),
        (Length, {"max_tokens": 4, "soft_tokens": 5}),
        (Length, {"max_tokens": 4, "min_tokens": 5}),
        (MultipleChoice, {"choices": "A"}),
        (MultipleChoice, {"choices": "AA"}),
        (ExactMatch, {"marks": ["box"]}),
        (ExactMatch, {"marks": "boxed"}),
    ],
)
def test_options_that_make_no_sense_are_refused(scorer: Any, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        scorer(**options)


@pytest.mark.parametrize("scorer", [ExactMatch(), MultipleChoice()])
def test_a_response_that_was_cut_off_is_wrong(scorer: Any) -> None:
    assert scorer(sample("C", "C")) == 1.0 and scorer(sample("C", "C", is_finished=False)) == 0.0


def test_scorers_that_evaluate_what_a_response_says_do_so_in_a_fork() -> None:
    """sympy's parser, and the tasks of reasoning-gym of which some call `eval`: no other may do without one."""
    forked = {name for name, path in REWARDS.items() if not getattr(load("reward", path), "is_stateless", False)}
    assert forked == {"maths", "reasoning_gym"}


@pytest.mark.parametrize(("error", "reward"), [(SyntaxError, 0.0), (MemoryError, None), (RecursionError, None)])
def test_an_answer_that_a_task_cannot_read_is_wrong_and_one_that_it_has_no_memory_for_fails(
    error: type[Exception], reward: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Task:
        def __getitem__(self, index: int) -> dict[str, Any]:
            return {}

        def score_answer(self, answer: str, entry: dict[str, Any]) -> float:
            raise error

    utils = SimpleNamespace(extract_answer=lambda response: response)
    package = SimpleNamespace(utils=utils, create_dataset=lambda name, seed, size: Task())
    monkeypatch.setitem(sys.modules, "reasoning_gym", package)
    row = {"reasoning_gym": {"task": "countdown", "seed": 1, "size": 1, "options": {}, "index": 0}}
    given = Sample("", "((1", row, is_finished=True)
    with contextlib.nullcontext() if reward is not None else pytest.raises(error):
        assert ReasoningGym()(given) == reward
