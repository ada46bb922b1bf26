"""Which columns make a prompt and which is the answer, in the layouts that data sets have."""

from __future__ import annotations

from typing import Any

import pytest

from asyncflow.data.columns import find_columns, template_columns
from asyncflow.types import UserError

CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "How many?"}]
LAYOUTS: dict[str, tuple[dict[str, Any], Any, Any]] = {
    "GSM8K": ({"question": "How many?", "answer": "1+1=2\n#### 2"}, "How many?\n", "1+1=2\n#### 2"),
    "DeepScaleR": ({"problem": "Find $x$.", "answer": "-\\frac{2}{3}", "solution": "We ..."}, "Find $x$.\n", "-\\frac{2}{3}"),
    "AIME, as Maxwell-Jia has it": (
        {"ID": "2024-II-4", "Problem": "Find $m+n$.", "Solution": "Let ...", "Answer": 33},
        "Find $m+n$.\n",
        33,
    ),
    "AIME, as HuggingFaceH4 has it": (
        {"id": 60, "problem": "Find $m+n$.", "solution": "Let ...", "answer": "033", "url": "https://x.test", "year": "2024"},
        "Find $m+n$.\n",
        "033",
    ),
    "AIME, as math-ai has it": ({"problem": "Find $b$.", "answer": "70", "id": "0"}, "Find $b$.\n", "70"),
    "TRL, text": ({"prompt": "The sky is", "ground_truth": "blue"}, "The sky is", "blue"),
    "TRL, a conversation": ({"prompt": CHAT, "solution": "$2$"}, CHAT, "$2$"),
    "verl": (
        {
            "data_source": "openai/gsm8k",
            "prompt": CHAT[1:],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": "72"},
            "extra_info": {"split": "train", "index": 0, "answer": "... #### 72"},
        },
        CHAT[1:],
        "72",
    ),
    "labels": ({"prompt": "Is it? ", "label": 0}, "Is it? ", 0),
    "nothing to compare with": ({"prompt": "Go on:"}, "Go on:", None),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_is_found(name: str) -> None:
    row, prompt, answer = LAYOUTS[name]
    columns = find_columns([row, row], "d")
    assert columns.prompt_of(row) == prompt
    example = columns.example_of(row)
    assert example.get("answer") == answer
    assert {key: example[key] for key in row if key != "answer"} == {key: row[key] for key in row if key != "answer"}
    assert set(example) <= {*row, "answer"}, "the scorer sees all columns of the row, and the answer"


def test_a_row_that_has_its_answer_stays_as_it_is() -> None:
    row = {"question": "a", "answer": "1", "solution": "s", "id": 3}
    example = find_columns([row], "d").example_of(row)
    assert example == row and example is not row


def test_what_is_named_comes_before_what_is_found() -> None:
    row = {"prompt": "p", "question": "q", "answer": "1", "meta": {"final": "3", "text": "t"}, "a.b": "4"}
    columns = find_columns([row], "d", prompt="question", answer="meta.final")
    assert columns.prompt_of(row) == "q\n" and columns.example_of(row) == {**row, "answer": "3"}
    assert find_columns([row], "d", prompt="meta.text").prompt_of(row) == "t\n"
    assert find_columns([row], "d", answer="a.b").example_of(row)["answer"] == "4"
    assert find_columns([row], "d", template="{question} or {prompt}?").prompt_of(row) == "q or p?"


@pytest.mark.parametrize(
    ("rows", "named", "sentence"),
    [
        (
            [{"text": "a", "id": 1}],
            {},
            "d: none of the columns prompt, question, problem, but id, text: say by data.prompt_column",
        ),
        ([{"question": "a"}, {"id": 2}, {}], {}, "row 2 of d has no column 'question'; it has id"),
        ([{"question": "a"}, {}], {}, "row 2 of d has no column 'question'; it has none"),
        ([{"question": "a"}], {"template": "{problem}"}, "row 1 of d has no column 'problem'; it has question"),
        ([{"question": "a"}], {"prompt": "meta.text"}, "row 1 of d has no column 'meta.text'; it has question"),
        ([{"question": "a"}], {"answer": "gold"}, "row 1 of d has no column 'gold'; it has question"),
        ([{"question": "a", "answer": 1}, {"question": "a"}], {}, "row 2 of d has no column 'answer'; it has question"),
        (
            [{"question": "a", "answer": 1}, {"question": "a", "answer": None}],
            {},
            "row 2 of d has null .* in column 'answer': leave such rows out, or name another column by data.answer_column",
        ),
        ([{"question": "a", "x": {"y": None}}], {"answer": "x.y"}, "row 1 of d has null .* in column 'x.y'"),
        ([{"question": None}], {}, "row 1 of d has null .* in column 'question': .* by data.prompt_column"),
        (
            [{"question": "a", "hint": "h"}, {"question": "a", "hint": None}],
            {"template": "{question} {hint}"},
            "row 2 of d has null .* in column 'hint': .* by data.prompt_template",
        ),
        ([{"question": 3}], {}, "row 1 of d makes no prompt: column 'question' is neither text nor a list of messages"),
        ([{"prompt": []}], {}, "neither text nor a list of messages"),
        ([{"prompt": [{"role": "user"}]}], {}, "neither text nor a list of messages"),
        ([{"question": "a"}], {"template": "{question:d}"}, "row 1 of d makes no prompt: Unknown format code 'd'"),
    ],
)
def test_what_does_not_fit_is_said_with_the_row(rows: list[dict[str, Any]], named: dict[str, str], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        find_columns(rows, "d", **named)


def test_null_in_a_column_that_nobody_asked_for_is_the_scorers_to_see() -> None:
    row = {"question": "a", "answer": "1", "solution": None, "label": None}
    assert find_columns([row], "d").example_of(row) == row


def test_a_conversation_is_a_copy() -> None:
    row = {"prompt": CHAT}
    prompt = find_columns([row], "d").prompt_of(row)
    assert isinstance(prompt, list)
    prompt[0]["content"] = "changed"
    assert CHAT[0]["content"] == "Be brief."


@pytest.mark.parametrize(
    ("template", "columns"),
    [("{question}\n", ["question"]), ("{a} and {b!r} {{c}}", ["a", "b"]), ("fixed", []), ("{a:>5}", ["a"])],
)
def test_a_template_names_its_columns(template: str, columns: list[str]) -> None:
    assert template_columns(template) == columns


def test_what_is_no_template_is_refused_with_the_way_out() -> None:
    with pytest.raises(UserError, match=r"cannot be parsed: .*; write \{\{ for a literal brace"):
        template_columns("{question")
    for odd in ("{}", "{a.__class__}", "{a[0]}", "\\boxed{0.5}"):
        with pytest.raises(UserError, match=r"which is no column; write \{\{"):
            template_columns(odd)
    for wide in ("{a:>10000000}", "{a:{a}}"):
        with pytest.raises(UserError, match=r"makes column 'a' wider than 1,000 characters: write \{a\}"):
            template_columns(wide)
