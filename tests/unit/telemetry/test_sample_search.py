import pytest

from asyncflow.telemetry.hub import UnscoredResponse
from asyncflow.telemetry.sample_search import SampleQuery, find, groups_by_step

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


def test_groups_are_those_of_training_of_which_there_are_several_rows_each_once():
    def sample(row, group, purpose="train", step=3):
        return {"step": step, "purpose": purpose, "row": row, "group": group}

    again = sample(17, 4) | {"response": "made again"}
    kept = [
        sample(18, 4),
        sample(17, 4),
        sample(20, 5),
        again,
        sample(1, 0, "eval"),
        sample(2, 0, "eval"),
        {**SAMPLES[0], "row": 1},
    ]
    assert groups_by_step([*kept, sample(33, 8, step=4), sample(32, 8, step=4)]) == {
        3: {4: [again, sample(18, 4)]},
        4: {8: [sample(32, 8, step=4), sample(33, 8, step=4)]},
    }


def test_a_response_that_could_not_be_scored_says_why():
    (found,) = find([], UNSCORED, SampleQuery())
    assert found["why"] == "trace" and found["finish_reason"] == "failed"
