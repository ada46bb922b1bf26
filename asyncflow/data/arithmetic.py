"""Word problems about a running count: a seeded, endless data set that needs no download.

    Tom has 7 coins. Tom finds 5. Tom gives Ann 3. How many coins does Tom have?

    7+5=12
    12-3=9
    #### 9

A small model learns to write the solution in minutes on a CPU, and a program can check the number after `####`, so a
whole reinforcement-learning run fits in a test. The count stays within 0..20 and changes by 1..9 at each of 1 to 5
events.

The splits cannot overlap: a hash of the question's text decides which split it belongs to, whatever the seed. They
differ in their questions, not in their arithmetic: `7+5` turns up in all three, told of other people and other things.

Left out: wrong solutions (the program that makes the starting model writes those), other people's counts, and events
whose subject is anyone but the person asked about.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b
from itertools import islice
from random import Random
from typing import Any, Final, Literal, get_args

ProblemSplit = Literal["train", "heldout", "warmstart"]

PROMPT_TEMPLATE: Final = "{question}\n"
"""Template of a prompt; the response starts on the line after it."""

ANSWER_MARK: Final = "#### "
"""Characters before the final number on the last line of a response."""

MAX_COUNT: Final = 20
MAX_STEP: Final = 9
MAX_EVENTS: Final = 5

# Every problem falls in one of 100 buckets; each split owns a range of them.
_NUM_BUCKETS: Final = 100
_BUCKETS: Final[dict[ProblemSplit, range]] = {
    "heldout": range(0, 10),
    "warmstart": range(10, 40),
    "train": range(40, _NUM_BUCKETS),
}

_NAMES: Final = ("Tom", "Ann", "Sam", "Mia", "Ben", "Eva", "Leo", "Zoe")
_FOODS: Final = ("apples", "plums", "nuts")
_THINGS: Final = ("coins", "cards", "shells", "stamps", "pens")

# {name} is the one asked about and always the subject, so that the verb alone tells a gain from a loss: "Ann gives
# Tom 3" would be a gain for Tom told with the verb of a loss.
_GAINS: Final = (
    "{name} finds {step}.",
    "{name} buys {step} more.",
    "{name} gets {step} from {other}.",
    "{name} wins {step}.",
    "{name} picks {step} up.",
)
_LOSSES: Final = (
    "{name} gives {other} {step}.",
    "{name} loses {step}.",
    "{name} sells {step}.",
    "{name} drops {step}.",
)
_FOOD_LOSSES: Final = (*_LOSSES, "{name} eats {step}.")


@dataclass(frozen=True)
class Problem:
    """Word problem with its clean solution."""

    question: str
    """The story and the question at its end, on one line, without a line end."""
    response: str
    """One equation a line, then `#### ` and the answer; no line end after it."""
    answer: str
    """The final count in decimal digits."""


def problems(seed: int, split: ProblemSplit) -> Iterator[Problem]:
    """Draw problems of one split, for ever, with replacement.

    The same seed and split give the same problems on every machine. A short problem may come twice in some thousands.

    Raises:
        ValueError: `split` is not one of the three.
    """
    if split not in _BUCKETS:
        raise ValueError(f"no split {split!r}; there are {', '.join(get_args(ProblemSplit))}")
    return _draw_split(seed, split)


def as_examples(seed: int, split: ProblemSplit, num_examples: int) -> list[dict[str, Any]]:
    """The first problems of a split as data-set rows: `question`, and `answer` as the plain number."""
    drawn = islice(problems(seed, split), num_examples)
    return [{"question": problem.question, "answer": problem.answer} for problem in drawn]


def split_of(question: str) -> ProblemSplit:
    """The one split that a question belongs to."""
    # Python's own hash() differs from process to process.
    bucket = int.from_bytes(blake2b(question.encode(), digest_size=8).digest(), "big") % _NUM_BUCKETS
    return next(split for split, buckets in _BUCKETS.items() if bucket in buckets)


def _draw_split(seed: int, split: ProblemSplit) -> Iterator[Problem]:
    rng = Random(f"arithmetic/{split}/{seed}")
    while True:
        problem = _draw(rng)
        if split_of(problem.question) == split:
            yield problem


def _draw(rng: Random) -> Problem:
    name, other = rng.sample(_NAMES, 2)
    things = rng.choice(_FOODS + _THINGS)
    losses = _FOOD_LOSSES if things in _FOODS else _LOSSES
    num_events = rng.randint(1, MAX_EVENTS)
    # From 2, because "1 coins" is no English.
    count = rng.randint(2, MAX_COUNT)
    sentences = [f"{name} has {count} {things}."]
    equations = []
    for _ in range(num_events):
        is_gain = count == 0 or (count < MAX_COUNT and rng.random() < 0.5)
        step = rng.randint(1, min(MAX_STEP, MAX_COUNT - count if is_gain else count))
        after = count + step if is_gain else count - step
        sentences.append(rng.choice(_GAINS if is_gain else losses).format(name=name, other=other, step=step))
        equations.append(f"{count}{'+' if is_gain else '-'}{step}={after}\n")
        count = after
    sentences.append(f"How many {things} does {name} have?")
    return Problem(
        question=" ".join(sentences),
        response=f"{''.join(equations)}{ANSWER_MARK}{count}",
        answer=str(count),
    )
