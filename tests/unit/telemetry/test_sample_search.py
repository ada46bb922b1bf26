import pytest

from asyncflow.telemetry.hub import UnscoredResponse
from asyncflow.telemetry.sample_search import SampleQuery, find

SAMPLES = [
    {"step": 0, "purpose": "train", "prompt": "2 + 3?", "response": "It is 5.", "reward": 1.0, "finish_reason": "stop"},
    {"step": 1, "purpose": "train", "prompt": "4 + 4?", "response": "hm " * 40, "reward": 0.0, "finish_reason": "length"},
    {"step": 1, "purpose": "eval", "prompt": "2 + 2?", "response": "FOUR", "reward": None, "finish_reason": "stop"},
]
UNSCORED = [UnscoredResponse("raised", "ZeroDivisionError", "trace", "2 / 0?", "nothing", {})]


@pytest.mark.parametrize(
    ("query", "steps"),
    [
        ({}, [1, 1, 0, None]),
        ({"words": "four 2"}, [1]),
        ({"purpose": "train", "first_step": 1}, [1]),
        ({"least_reward": 0.5}, [0]),
        ({"most_reward": 0.5}, [1]),
        ({"least_length": 100}, [1]),
        ({"ended": "length"}, [1]),
        ({"ended": "failed"}, [None]),
        ({"words": "nowhere"}, []),
    ],
)
def test_samples_are_found_by_what_is_asked(query, steps):
    assert [sample["step"] for sample in find(SAMPLES, UNSCORED, SampleQuery(**query))] == steps


def test_a_response_that_could_not_be_scored_says_why():
    (found,) = find([], UNSCORED, SampleQuery())
    assert found["why"] == "trace" and found["finish_reason"] == "failed"
