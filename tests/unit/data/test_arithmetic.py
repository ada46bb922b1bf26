"""The word problems: what they promise about their numbers, their sentences and their splits."""

import re
from collections import Counter
from itertools import islice

import pytest

from asyncflow.data.arithmetic import (
    MAX_COUNT,
    MAX_EVENTS,
    MAX_STEP,
    PROMPT_TEMPLATE,
    Problem,
    ProblemSplit,
    as_examples,
    problems,
    split_of,
)
from tests.depth import few

SPLITS: tuple[ProblemSplit, ...] = ("train", "heldout", "warmstart")
EQUATION = re.compile(r"(\d+)([+-])(\d+)=(\d+)")
GAIN_VERBS = {"finds", "buys", "gets", "wins", "picks"}
LOSS_VERBS = {"gives", "loses", "sells", "drops", "eats"}


def draw(split: ProblemSplit, count: int, seed: int = 0) -> list[Problem]:
    return list(islice(problems(seed, split), count))


def read_story(question: str) -> tuple[str, list[int]]:
    """The person asked about, and the count at the start followed by each signed change, from the words alone."""
    *sentences, last = re.findall(r"[^.?]+[.?]", question)
    name = re.fullmatch(r" How many \w+ does (\w+) have\?", last)
    assert name is not None
    numbers = []
    for sentence in sentences:
        subject, verb = sentence.split()[:2]
        assert subject == name[1], f"someone else acts in {question!r}"
        (number,) = re.findall(r"\d+", sentence)
        assert verb in GAIN_VERBS | LOSS_VERBS | {"has"}
        numbers.append(-int(number) if verb in LOSS_VERBS else int(number))
    return name[1], numbers


@pytest.mark.parametrize("split", SPLITS)
def test_equations_follow_the_story_and_reach_the_answer(split: ProblemSplit) -> None:
    for problem in draw(split, few(500, 2000)):
        _, (count, *changes) = read_story(problem.question)
        *lines, last = problem.response.split("\n")
        assert len(lines) == len(changes)
        for line, change in zip(lines, changes, strict=True):
            parts = EQUATION.fullmatch(line)
            assert parts is not None, line
            left, sign, step, result = parts.groups()
            assert int(left) == count
            assert (int(step) if sign == "+" else -int(step)) == change
            count += change
            assert int(result) == count
        assert last == f"#### {count}"
        assert problem.answer == str(count)


@pytest.mark.parametrize("split", SPLITS)
def test_counts_steps_and_events_stay_in_bounds_and_reach_them(split: ProblemSplit) -> None:
    counts, steps, events = set(), set(), set()
    for problem in draw(split, 5000):
        _, (count, *changes) = read_story(problem.question)
        counts.add(count)
        for change in changes:
            count += change
            counts.add(count)
            steps.add(abs(change))
        events.add(len(changes))
    assert counts == set(range(MAX_COUNT + 1))
    assert steps == set(range(1, MAX_STEP + 1))
    assert events == set(range(1, MAX_EVENTS + 1))


def test_nobody_else_is_ever_the_one_who_gives() -> None:
    for split in SPLITS:
        for problem in draw(split, 3000):
            name, _ = read_story(problem.question)
            assert all(giver == name for giver in re.findall(r"(\w+) gives", problem.question))


def test_splits_share_no_question_under_any_seed() -> None:
    questions = {split: {p.question for seed in range(few(2, 4)) for p in draw(split, few(1500, 3000), seed)} for split in SPLITS}
    assert not questions["train"] & questions["heldout"]
    assert not questions["train"] & questions["warmstart"]
    assert not questions["heldout"] & questions["warmstart"]
    for split, own in questions.items():
        assert all(split_of(question) == split for question in own)


def test_split_of_a_question_is_fixed_for_good() -> None:
    # A shipped model was trained on the warm-start split: moving a question out of it would leak it into the others.
    story = "Tom has 7 coins. Tom finds {}. How many coins does Tom have?"
    assert [split_of(story.format(step)) for step in (1, 2, 3)] == ["train", "warmstart", "heldout"]
    shares = Counter(split_of(f"question {number}") for number in range(10_000))
    assert shares == {"train": 6007, "heldout": 975, "warmstart": 3018}


def test_a_seed_gives_the_same_stream_and_another_seed_another() -> None:
    assert draw("train", 500, seed=3) == draw("train", 500, seed=3)
    assert draw("train", 500, seed=3) != draw("train", 500, seed=4)


def test_an_unknown_split_is_refused_at_the_call() -> None:
    with pytest.raises(ValueError, match="no split 'test'; there are train, heldout, warmstart"):
        problems(0, "test")  # type: ignore[arg-type]


def test_the_prompt_is_the_question_and_a_line_end() -> None:
    (problem,) = draw("train", 1)
    assert PROMPT_TEMPLATE.format(question=problem.question) == problem.question + "\n"
    assert "\n" not in problem.question


def test_the_dataset_gives_questions_and_plain_answers() -> None:
    assert as_examples(1, "train", 20) == [{"question": p.question, "answer": p.answer} for p in draw("train", 20, seed=1)]
