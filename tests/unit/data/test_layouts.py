"""Each layout of docs/data.md as a small file, from its rows to the reward of a response: JSONL and Parquet."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from asyncflow.config import parse
from asyncflow.data.datasets import load_rows
from asyncflow.rewards.base import Sample
from asyncflow.rewards.maths import Maths
from asyncflow.run.preparation.prompts import read_source, tokenize
from tests.conftest import MODEL
from tests.unit.data.test_columns import LAYOUTS
from tests.unit.run.test_prompts import Chatty

RESPONSES = {
    "GSM8K": ("1 + 1 = 2\n#### 2.0", "1 + 1 = 3\n#### 3"),
    "DeepScaleR": (r"So $x = \boxed{-\frac{4}{6}}$.", r"So $x = \boxed{\frac{2}{3}}$."),
    "AIME, as Maxwell-Jia has it": (r"$m+n = \boxed{033}$", r"$m+n = \boxed{34}$"),
    "AIME, as HuggingFaceH4 has it": (r"$m+n = \boxed{33}$", r"$m+n = \boxed{330}$"),
    "AIME, as math-ai has it": (r"\boxed{21 + 49 = 70}", r"\boxed{21 + 49 = 71}"),
    "TRL, text": (r"\boxed{blue}", r"\boxed{green}"),
    "TRL, a conversation": ("The answer is 2.", "The answer is 4."),
    "verl": ("#### 72", "#### 27"),
    "labels": (r"\boxed{0}", r"\boxed{1}"),
}
"""By layout: a response that is right, though not in the reference's spelling where that is a number, and one that is wrong."""


@pytest.fixture(scope="module")
def maths() -> Maths:
    return Maths()


def as_jsonl(path: Path, rows: list[dict[str, Any]]) -> Path:
    path = path.with_suffix(".jsonl")
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def as_parquet(path: Path, rows: list[dict[str, Any]]) -> Path:
    pyarrow = pytest.importorskip("pyarrow")
    path = path.with_suffix(".parquet")
    pytest.importorskip("pyarrow.parquet").write_table(pyarrow.Table.from_pylist(rows), path)
    return path


@pytest.mark.parametrize("write", [as_jsonl, as_parquet])
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_file_is_read_made_prompts_of_and_scored(
    tmp_path: Path, maths: Maths, name: str, write: Callable[[Path, list[dict[str, Any]]], Path]
) -> None:
    row, prompt, answer = LAYOUTS[name]
    path = write(tmp_path / "rows", [row, row])
    assert load_rows(str(path), seed=0, split="train") == [row, row]
    config = parse({"model": {"path": str(MODEL)}, "data": {"path": str(path)}})
    tokenizer = Chatty()
    prompts = tokenize(config, tokenizer, read_source(config, "train"))
    shown = prompt if isinstance(prompt, str) else "".join(f"{m['role']}: {m['content']}\n" for m in prompt) + "assistant:"
    assert [tokenizer.decode(each.ids) for each in prompts] == [shown, shown]
    for each in prompts:
        assert each.example == (row if answer is None else {**row, "answer": answer})
        if answer is None:
            with pytest.raises(ValueError, match="no column 'answer'"):
                maths(Sample(shown, r"\boxed{1}", each.example, is_finished=True))
            continue
        right, wrong = RESPONSES[name]
        rewards = [maths(Sample(shown, response, each.example, is_finished=True)) for response in (right, wrong)]
        assert rewards == [1.0, 0.0]
