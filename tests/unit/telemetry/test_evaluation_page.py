"""The result of `asyncflow eval`, as JSON and as a page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from asyncflow.telemetry.accuracy import Z_95, Responses, figures, wilson
from asyncflow.telemetry.evaluation import EvaluationResult, lines_of, result_of, write_evaluation


def result(response: str = "#### 4", **more: float) -> EvaluationResult:
    sampled = [
        Responses(0, np.array([1.0, 0.0]), np.array([5, 25]), np.array([False, True])),
        Responses(1, np.array([0.0, 0.0]), np.array([7, 9]), np.array([False, False])),
    ]
    row = figures("sampled", sampled, correct_from=1.0, num_samples=2)
    kept: dict[str, Any] = {"prompt_number": 0, "kind": "sampled", "prompt": "2+2?", "answer": "4", "response": response}
    samples = [{**kept, "reward": 1.0, "finish_reason": "stop"}]
    return result_of(
        "models/m", "test.jsonl", {"temperature": 0.7, "seed": None}, {"step": 0, **row, **more}, {"sampled": sampled}, samples
    )


def test_the_json_has_every_reward(tmp_path: Path) -> None:
    json_path, _ = write_evaluation(tmp_path / "made" / "here", result(), correct_from=1.0)
    tree = json.loads(json_path.read_text())
    assert tree["prompts"]["sampled"][0] == {"prompt": 0, "rewards": [1.0, 0.0], "lengths": [5, 25], "truncated": [False, True]}
    low, high = wilson(0.5, (Z_95 / 12.706205) ** 2)
    assert tree["figures"]["interval/pass@2/sampled/low"] == low and tree["figures"]["interval/pass@2/sampled/high"] == high
    assert tree["figures"]["pass@2/sampled"] == 0.5 and "step" not in tree["figures"]
    assert tree["intervals"] == {"sampled": "Wilson's interval, with prompts as clusters"}
    assert (tree["model"], tree["data"], tree["settings"]["temperature"]) == ("models/m", "test.jsonl", 0.7)


def test_the_page_shows_figures_lengths_and_samples(tmp_path: Path) -> None:
    page = write_evaluation(tmp_path, result(), correct_from=1.0)[1].read_text()
    for shown in ("models/m on test.jsonl", "0.250", "50.0%", "25.0%", "#### 4", "1 of 2", "its end token", "1 to 3", "25 to 27"):
        assert shown in page, shown
    for value, interval in (("25.0%", "0.1% to 99.0%"), ("50.0%", "0.2% to 99.8%")):
        assert f'<td class="number">{value}<div class="soft">{interval}</div></td>' in page
    assert "http" not in page.replace("http-equiv", "") and "<script" not in page


def test_what_a_model_said_is_text(tmp_path: Path) -> None:
    page = write_evaluation(tmp_path, result("</div><script>alert(1)</script>" + "x" * 5000), correct_from=1.0)[1].read_text()
    assert "<script" not in page and "&lt;script&gt;alert(1)" in page and "characters)" in page


def test_the_terminal_has_a_line_for_each_kind() -> None:
    (line,) = lines_of(result())
    assert line == (
        "sampled  mean@2 0.2500 [0.0012, 0.9897]  pass@1 0.2500 [0.0012, 0.9897]  pass@2 0.5000 [0.0015, 0.9985]"
        "  length 11.5 (at most 25)  truncated 25.0%  of 2 prompts"
    )


def test_greedy_responses_have_no_pass_at_2(tmp_path: Path) -> None:
    both, row = {}, {}
    for kind, n in (("sampled", 2), ("greedy", 1)):
        both[kind] = [Responses(i, np.full(n, float(i)), np.full(n, 5), np.full(n, False)) for i in range(2)]
        row |= figures(kind, both[kind], correct_from=1.0, num_samples=n)
    of_both = result_of("m", "d", {}, row, both, [])
    assert "pass@2" in lines_of(of_both)[0] and "pass@2" not in lines_of(of_both)[1]
    page = write_evaluation(tmp_path, of_both, correct_from=1.0)[1].read_text()
    greedy = page[page.index("<tr><td>greedy</td>") :].partition("</tr>")[0]
    assert "50.0%" in greedy and greedy.endswith('<td class="number"><div class="soft"></div></td>')


def test_what_could_not_be_scored_is_shown(tmp_path: Path) -> None:
    assert "could not be scored" not in write_evaluation(tmp_path, result(), correct_from=1.0)[1].read_text()
    lacking = result(**{"unscored/sampled": 3, "unscored/greedy": 2})
    sampled, greedy = lines_of(lacking)
    assert sampled.endswith("of 2 prompts  3 responses could not be scored")
    assert greedy == "greedy   none of its 2 responses could be scored"
    json_path, page_path = write_evaluation(tmp_path, lacking, correct_from=1.0)
    assert json.loads(json_path.read_text())["figures"]["unscored/sampled"] == 3
    page = page_path.read_text()
    assert "sampled: 3 responses could not be scored" in page and "greedy: 2 responses could not be scored" in page


def test_of_one_prompt_there_may_be_no_interval(tmp_path: Path) -> None:
    one = {"sampled": [Responses(0, np.array([0.5, 0.25], np.float32), np.array([5, 25]), np.array([False, True]))]}
    row = figures("sampled", one["sampled"], correct_from=1.0, num_samples=2)
    of_one = result_of("m", "d", {}, row, one, [])
    assert lines_of(of_one)[0].startswith(
        "sampled  mean@2 0.3750 [no interval of one prompt]  pass@1 0.0000 [0.0000, 0.7935]  pass@2"
    )
    assert "one prompt has no interval" in write_evaluation(tmp_path, of_one, correct_from=1.0)[1].read_text()


def test_the_page_and_the_figures_agree_on_what_is_correct(tmp_path: Path) -> None:
    """The float32 next to 0.7 is less than 0.7."""
    sampled = [Responses(i, np.array([0.7, 0.1], np.float32), np.array([5, 5]), np.array([False, False])) for i in range(2)]
    row = figures("sampled", sampled, correct_from=0.7, num_samples=2)
    kept = {"prompt_number": 0, "kind": "sampled", "prompt": "?", "answer": "4", "response": "4", "reward": 0.7}
    of_both = result_of("m", "d", {}, row, {"sampled": sampled}, [{**kept, "finish_reason": "stop"}])
    assert row["pass@1/sampled"] == 0.5
    assert "1 of 2" in write_evaluation(tmp_path, of_both, correct_from=0.7)[1].read_text()
