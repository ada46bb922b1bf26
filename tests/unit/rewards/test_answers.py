"""Where the answer is, and what counts as the same number."""

from __future__ import annotations

import contextlib
import importlib
import json
import time
from typing import Any

import pytest

from asyncflow.rewards.answers import MARKS, answer_in, reference, reference_answer
from asyncflow.rewards.base import Sample, Scorer
from asyncflow.rewards.final_answer import FinalAnswer
from asyncflow.rewards.maths import Maths
from asyncflow.rewards.multiple_choice import MultipleChoice
from asyncflow.rewards.number_parsing import plain, quantity
from asyncflow.rewards.numeric import Numeric
from tests.conftest import gsm8k_folder
from tests.unit.rewards import spellings


def scored(scorer: Scorer, response: str, answer: Any) -> float | None:
    return scorer(Sample("", response, {"answer": answer}, True))


@pytest.fixture(scope="module")
def maths() -> Maths:
    return Maths()


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("#### 72", "72"),
        ("so\n#### 72 eggs\nor not", "72 eggs"),
        ("#### 1\n#### 2", "2"),
        (r"it is \boxed{72}.", "72"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed 5", "5"),
        (r"\fbox{5}", "5"),
        (r"\boxed{1} and \boxed{2}", "2"),
        (r"\boxed{1} then #### 2", "2"),
        (r"#### 2 then \boxed{1}", "1"),
        (r"\boxed{never closed", None),
        (r"\boxed{}", ""),
        ("####", ""),
        ("<answer> 72 </answer>", "72"),
        ("<answer>1</answer><answer>2</answer>", "2"),
        ("<answer>1<answer>2</answer>", "2"),
        ("The answer is 72.", "72"),
        ("The answer is: 3.5. Yes.", "3.5"),
        ("**Answer:** 72", "** 72"),
        ("the answer is 1. No, the answer is 2", "2"),
        (r"the answer is 1, or \boxed{2}, so the answer is 3", "2"),
        ("72", None),
        ("", None),
    ],
)
def test_what_is_marked_as_the_answer(text: str, answer: str | None) -> None:
    assert answer_in(text) == answer


def test_only_the_marks_that_are_asked_for_count() -> None:
    text = r"#### 1 \boxed{2} <answer>3</answer> the answer is 4"
    assert [answer_in(text, [mark]) for mark in MARKS] == [r"1 \boxed{2} <answer>3</answer> the answer is 4", "2", "3", "4"]
    assert answer_in("the answer is 4", ["hash", "boxed"]) is None


@pytest.mark.parametrize(
    ("example", "answer"),
    [
        ({"answer": "1", "solution": "2"}, "1"),
        ({"solution": "2", "label": "3"}, "2"),
        ({"label": 3}, 3),
        ({"ground_truth": "4"}, "4"),
        ({"reward_model": {"style": "rule", "ground_truth": "5"}, "label": "6"}, "5"),
    ],
)
def test_the_reference_is_found_by_its_column(example: dict[str, Any], answer: Any) -> None:
    assert reference(Sample("", "", example, True)) == answer


def test_a_row_without_an_answer_is_an_error_that_shows_it() -> None:
    with pytest.raises(ValueError, match=r"no column 'answer'.*how many"):
        reference(Sample("", "", {"question": "how many?"}, True))
    with pytest.raises(ValueError, match="no column 'mine'"):
        reference(Sample("", "", {"answer": "1"}, True), "mine")


@pytest.mark.parametrize("value", [None, True, {"a": 1}, [1, 2]])
def test_a_reference_that_is_no_text_is_an_error(value: Any) -> None:
    with pytest.raises(ValueError, match="no text"):
        reference_answer(value)


def test_there_are_200_awkward_spellings() -> None:
    assert len(spellings.ALL) >= 200 and len(set(spellings.ALL)) == len(spellings.ALL)
    assert 60 < sum(is_right for *_, is_right in spellings.ALL) < len(spellings.ALL) - 60


@pytest.mark.parametrize(("answer", "right", "is_right"), spellings.ALL)
def test_awkward_spellings(maths: Maths, answer: str, right: str, is_right: bool) -> None:
    assert scored(maths, f"So it is.\n#### {answer}", right) == float(is_right)
    if answer.count("{") == answer.count("}"):
        assert scored(maths, rf"So it is \boxed{{{answer}}}.", right) == float(is_right)


@pytest.mark.parametrize(("answer", "right", "is_right"), spellings.NUMBERS)
def test_awkward_spellings_of_numbers_without_sympy(answer: str, right: str, is_right: bool) -> None:
    assert scored(Numeric(), f"So it is.\n#### {answer}", right) == float(is_right)


@pytest.mark.parametrize(
    ("response", "right", "reward"),
    [
        ("The answer is $72$ apples.", "72", 1.0),
        ("The answer is $5 each.", "5", 1.0),
        ("<answer>72 is incorrect</answer>", "72", 0.0),
    ],
)
def test_what_stands_beside_a_number_in_a_sentence(response: str, right: str, reward: float) -> None:
    assert scored(Numeric(), response, right) == reward


BOMBS = ["9" * 10_000, "9" * 190, "2^99999", "10^10^10", "(" * 100 + "1" + ")" * 100, "1e999", "-" * 199 + "1"]
BOMBS += ["((((9^64)^64)^64)^64)", "(9^32)^64", "(1/9^32)^64", "*".join(["99^64"] * 12), "/".join(["99^64"] * 13)]
BOMBS += ["+".join(f"1/{prime}^64" for prime in (41, 43, 47, 53, 59, 61, 67, 71, 73, 79, 83, 89))]


@pytest.mark.parametrize("bomb", BOMBS)
def test_a_number_that_would_be_too_large_is_none(bomb: str) -> None:
    start = time.process_time()
    assert quantity(bomb) is None
    assert time.process_time() - start < 0.2


def test_a_number_that_is_only_large_is_one() -> None:
    assert quantity("(9^32)^32") == (9**1024, "", False, "")


LONG = ["\\boxed{", "\\boxed{1}", "{", "}", "<answer>", "</answer>", "#### 1 ", "#", "the answer is ", "answer", "1,", "1 "]


@pytest.mark.parametrize("word", LONG)
def test_a_model_that_repeats_itself_costs_no_time(word: str) -> None:
    text, start = word * (200_000 // len(word)), time.process_time()
    Numeric()(Sample("", text, {"answer": "1"}, True))
    assert time.process_time() - start < 1.0


# A mark, then a run of something, then what does not fit.
RUNS = ["answer is" + "\n" * 50_000, "answer:" + " " * 50_000 + "\n", "answer" + " " * 50_000, "answer is (" + " " * 50_000 + "x"]
RUNS += [
    "#### " + "." * 50_000 + "x",
    "#### ^" + " " * 50_000 + "x",
    "#### " + '"' * 400_000,
    r"\boxed{\text{" + " " * 50_000 + "x}}",
    "#### A" + " ) " * 20_000 + ",",
    "#### A, " + " " * 50_000 + "x",
]


@pytest.mark.parametrize("name", ["numeric", "maths", "multiple_choice"])
@pytest.mark.parametrize("run", RUNS)
def test_a_run_costs_no_time(maths: Maths, name: str, run: str) -> None:
    scorer: Scorer = {"numeric": Numeric(), "maths": maths, "multiple_choice": MultipleChoice()}[name]
    right, start = ("B" if name == "multiple_choice" else "1"), time.process_time()
    assert scored(scorer, run, right) == 0.0
    assert time.process_time() - start < 0.5


@pytest.mark.parametrize("run", ["." * 50_000 + "x", "^" + " " * 50_000 + "x", "^{" + " " * 50_000 + "x"])
def test_plain_looks_at_a_run_once(run: str) -> None:
    start = time.process_time()
    plain(run)
    assert time.process_time() - start < 0.5


@pytest.mark.parametrize(("text", "answer"), [("The answer is 12 because 10 + 3 = 13.", "12"), ("answer: 5 since it is", "5")])
def test_a_reason_is_no_part_of_the_answer(text: str, answer: str) -> None:
    assert answer_in(text) == answer


@pytest.mark.parametrize("several", ["10, 100", "20-30", "I do not know = 5", "4, x = 5"])
def test_a_reference_that_is_not_one_number_is_none(several: str) -> None:
    assert quantity(several, is_reference=True) is None
    with pytest.raises(ValueError, match="no number to compare with"):
        scored(Numeric(), "#### 10100", several)


# What math-verify has no stack for, and says "not equal" of.
DEEP = ["-" * 300 + "x", "|" * 60 + "x" + "|" * 60]


@pytest.mark.parametrize("deep", DEEP)
def test_what_math_verify_has_no_stack_for_is_a_failure_and_no_0(maths: Maths, deep: str) -> None:
    with pytest.raises(RecursionError, match="not equal"):
        scored(maths, rf"\boxed{{{deep}}}", "y")
    assert scored(maths, r"\boxed{x+2}", "y") == 0.0 and scored(maths, r"\boxed{x+1}", "1+x") == 1.0


@pytest.mark.parametrize(
    ("error", "is_failure"), [(RuntimeError, True), (OSError, True), (TypeError, False), (ZeroDivisionError, False)]
)
def test_what_cannot_be_compared_is_not_equal_and_another_error_is_no_0(
    maths: Maths, monkeypatch: pytest.MonkeyPatch, error: type[Exception], is_failure: bool
) -> None:
    def verify(*_: object, **__: object) -> bool:
        raise error("inside sympy")

    monkeypatch.setattr(maths._verifier, "verify", verify)
    with pytest.raises(error, match="inside sympy") if is_failure else contextlib.nullcontext():
        assert scored(maths, r"\boxed{y+x^2}", "x^2+y") == 0.0


def test_what_math_verify_finds_equal_all_the_same_is_right(maths: Maths, monkeypatch: pytest.MonkeyPatch) -> None:
    grader = importlib.import_module("math_verify.grader")

    def no_room(*_: Any) -> Any:
        raise MemoryError

    monkeypatch.setattr(grader, "simplify", no_room)
    assert scored(maths, r"\boxed{x+1}", "1+x") == 1.0
    with pytest.raises(MemoryError):
        scored(maths, r"\boxed{\sin(x)}", r"\cos(x)")


@pytest.mark.parametrize("unit", ["a" * 190, "a b c d e f " * 15, "a/" * 95, "a." * 95, "sq " * 60, "\\frac{" * 28, "\\text{" * 28])
def test_a_long_unit_costs_no_time(unit: str) -> None:
    start = time.process_time()
    quantity("1 " + unit + "!")
    assert time.process_time() - start < 0.2


def test_a_tolerance_is_a_share_of_the_reference() -> None:
    near = Numeric(relative_tolerance=0.01)
    assert [scored(near, f"#### {answer}", "200") for answer in ("201", "198", "202.1", "-200")] == [1.0, 1.0, 0.0, 0.0]
    with pytest.raises(ValueError, match="below 0"):
        Numeric(relative_tolerance=-1)


@pytest.mark.parametrize("scorer", [Numeric(), FinalAnswer()])
def test_a_reference_without_a_number_fails_and_gives_no_0(scorer: Scorer) -> None:
    with pytest.raises(ValueError, match="no number to compare with"):
        scored(scorer, "#### 9", "many")


def test_maths_takes_any_reference_but_an_empty_one(maths: Maths) -> None:
    assert scored(maths, r"\boxed{many}", "many") == 1.0
    with pytest.raises(ValueError, match="nothing to compare with"):
        scored(maths, "#### 9", " ")


@pytest.mark.parametrize("name", ["numeric", "maths"])
def test_a_response_that_was_cut_off_is_wrong(name: str, maths: Maths) -> None:
    cut = Sample("", "#### 9", {"answer": "9"}, False)
    assert (Numeric() if name == "numeric" else maths)(cut) == 0.0
    assert Numeric(require_end=False)(cut) == 1.0


@pytest.fixture(scope="module")
def gsm8k() -> list[str]:
    """The answers of GSM8K's test set."""
    folder = gsm8k_folder()
    if folder is None or not (folder / "test.jsonl").is_file():
        pytest.skip("GSM8K is not here: set ASYNCFLOW_GSM8K to the folder of its train.jsonl and test.jsonl")
    return [json.loads(line)["answer"] for line in (folder / "test.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("name", ["final_answer", "numeric", "maths"])
def test_gsm8k_answers_are_right_against_themselves_and_wrong_against_their_neighbours(
    gsm8k: list[str], maths: Maths, name: str
) -> None:
    scorer: Scorer = {"final_answer": FinalAnswer(), "numeric": Numeric(), "maths": maths}[name]
    assert len(gsm8k) == 1319
    assert [scored(scorer, answer, answer) for answer in gsm8k] == [1.0] * len(gsm8k)
    if name != "final_answer":
        boxed = [rf"So it is $\boxed{{{answer.rpartition('####')[2].strip()}}}$." for answer in gsm8k]
        assert [scored(scorer, response, answer) for response, answer in zip(boxed, gsm8k, strict=True)] == [1.0] * len(gsm8k)
    numbers = [int(answer.rpartition("####")[2].replace(",", "")) for answer in gsm8k]
    for step in (1, -1):
        others = [scored(scorer, f"#### {number + step}", answer) for number, answer in zip(numbers, gsm8k, strict=True)]
        assert others == [0.0] * len(gsm8k), "a number beside the right one"
    neighbours = [(other, answer) for other, answer in zip(gsm8k[1:], gsm8k, strict=False)]
    wrong = [scored(scorer, other, answer) for other, answer in neighbours]
    same = [float(a == b) for a, b in zip(numbers[1:], numbers, strict=False)]
    assert wrong == same and sum(same) < 40, "the answer of the next question"
