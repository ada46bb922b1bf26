"""The GSM8K answer format: which responses are right, and which references are no references."""

from typing import Any

import pytest

from asyncflow.rewards.base import Sample
from asyncflow.rewards.final_answer import FinalAnswer


def reward(response: str, answer: Any = "9", *, is_finished: bool = True, **options: Any) -> float:
    return FinalAnswer(**options)(Sample(prompt="", response=response, example={"answer": answer}, is_finished=is_finished))


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("so it is\n#### 9", "9"),
        ("####9", "9"),
        ("#### 9.", "9"),
        ("#### 9.00", "9"),
        ("####   9  \n", " 9 "),
        ("#### 9 apples, I think", "9"),
        ("#### 8\nno, wait\n#### 9", "9"),
        ("#### 1,234", "1234"),
        ("#### 1234", "1,234"),
        ("#### 1,234,567.", "1234567"),
        ("#### $18", "18"),
        ("#### 18.00", "$18"),
        ("#### -$3.50", "-3.5"),
        ("#### $-3.5", "-3.5"),
        ("#### $ 7", "7"),
        ("#### +7", "7"),
        ("#### .5", "0.5"),
        ("#### -0", "0"),
        ("#### 72", "He sold 48/2 = <<48/2=24>>24 clips.\nTogether 72.\n#### 72"),
        ("#### 9", 9),
        ("#### 0.1", 0.1),
    ],
)
def test_right(response: str, answer: Any) -> None:
    assert reward(response, answer) == 1.0


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("#### 8", "9"),
        ("9", "9"),
        ("", "9"),
        ("####", "9"),
        ("#### nine", "9"),
        ("#### 9\nno, wait\n#### 8", "9"),
        ("#### 9\n####", "9"),
        ("the answer 9 ####", "9"),
        ("#### 9x", "9"),
        ("#### 9.5.1", "9.5"),
        ("#### 9/1", "9"),
        ("#### --9", "9"),
        ("#### 12,34", "1234"),
        ("#### -9", "9"),
        ("#### 9", "-9"),
        # 2^53 and its neighbour are one number in floating point.
        ("#### 9007199254740993", "9007199254740992"),
        ("#### 0.30000000000000004", "0.3"),
    ],
)
def test_wrong(response: str, answer: Any) -> None:
    assert reward(response, answer) == 0.0


def test_a_response_without_its_end_token_is_wrong_unless_allowed() -> None:
    assert reward("#### 9", is_finished=False) == 0.0
    assert reward("#### 9", is_finished=False, require_end=False) == 1.0


def test_the_answer_column_is_an_option() -> None:
    sample = Sample(prompt="", response="#### 9", example={"answer": "8", "solution": "9"}, is_finished=True)
    assert FinalAnswer(answer_column="solution")(sample) == 1.0


@pytest.mark.parametrize("answer", ["nine apples", "", "#### ", "#### 9 or 8", "12 apples", "1,23", None, True, float("nan"), [9]])
@pytest.mark.parametrize("is_finished", [True, False])
def test_a_reference_without_a_number_is_an_error_that_shows_it(answer: Any, is_finished: bool) -> None:
    with pytest.raises(ValueError, match="no number to compare with") as caught:
        reward("#### 9", answer, is_finished=is_finished)
    assert repr(answer) in str(caught.value)


def test_a_missing_column_is_an_error_that_shows_the_row() -> None:
    with pytest.raises(ValueError, match=r"'answer'.*'question': 'how many\?'"):
        FinalAnswer()(Sample(prompt="", response="#### 9", example={"question": "how many?"}, is_finished=True))
