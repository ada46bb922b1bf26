"""From data sets to prompts: what becomes of rows, and what is too long and left out."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from asyncflow.config import Config, parse
from asyncflow.data.tokenizer import CheckpointTokenizer
from asyncflow.rewards.base import Sample
from asyncflow.run.factories import reward_pool
from asyncflow.run.preparation.prepare import prepare
from asyncflow.run.preparation.prompts import left_out_lines, read_source, short_enough, source_of, tokenize
from asyncflow.types import UserError
from tests.conftest import MODEL

Small = Callable[..., dict[str, Any]]
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"


class Chatty(CheckpointTokenizer):
    """The shipped model's, with a chat template."""

    def __init__(self) -> None:
        super().__init__(MODEL)
        self.template_source = TEMPLATE


def config_of(tmp_path: Path, rows: list[dict[str, Any]], **data: Any) -> Config:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return parse({"model": {"path": str(MODEL)}, "data": {"path": str(path), **data}})


def texts(config: Config, tokenizer: CheckpointTokenizer) -> list[str]:
    return [tokenizer.decode(prompt.ids) for prompt in tokenize(config, tokenizer, read_source(config, "train"))]


async def test_a_trl_function_gets_what_the_configuration_calls_the_prompt(tmp_path: Path) -> None:
    (tmp_path / "judge.py").write_text("def judge(prompts, completions): return [float(prompts == ['How many?'])]")
    for data in ({"prompt_column": "text"}, {"prompt_template": "{text}"}):
        given = {"model": {"path": str(MODEL)}, "data": {"path": "rows.jsonl", **data}}
        config = parse({**given, "reward": {"scorer": {"path": f"{tmp_path}/judge.py:judge"}}})
        pool = reward_pool(config, "test")
        await pool.start()
        try:
            assert (await pool.score(Sample("", "", {"prompt": "no", "text": "How many?"}, True))).reward == 1.0
        finally:
            await pool.close()


def test_text_is_taken_as_it_is_and_messages_go_through_the_chat_template(tmp_path: Path) -> None:
    rows = [{"prompt": "How many?"}, {"prompt": [{"role": "user", "content": "How many?"}]}]
    assert texts(config_of(tmp_path, rows), Chatty()) == ["How many?", "user: How many?\nassistant:"]
    assert texts(config_of(tmp_path, rows[:1], chat_template=True), Chatty()) == ["user: How many?\nassistant:"]
    with pytest.raises(UserError, match=r"the model's tokenizer has none; say by data\.prompt_template what they are"):
        texts(config_of(tmp_path, rows), CheckpointTokenizer(MODEL))


def test_the_scorer_gets_every_column_and_the_answer(tmp_path: Path) -> None:
    row = {"prompt": "p", "data_source": "gsm8k", "reward_model": {"ground_truth": "7"}, "extra_info": {"index": 3}}
    config = config_of(tmp_path, [row])
    assert tokenize(config, Chatty(), read_source(config, "train"))[0].example == {**row, "answer": "7"}


def test_prompts_that_are_too_long_are_left_out_and_counted(tmp_path: Path) -> None:
    rows = [{"question": "one " * n} for n in (9, 1, 5, 3)]
    config = config_of(tmp_path, rows, max_prompt_tokens=20)
    prompts = tokenize(config, Chatty(), read_source(config, "train"))
    lengths = [len(prompt.ids) for prompt in prompts]
    most = sorted(lengths)[1]
    config = config_of(tmp_path, rows, max_prompt_tokens=most)
    kept = short_enough(config, prompts, "d")
    assert [len(prompt.ids) for prompt in kept] == [n for n in lengths if n <= most] and len(kept) == 2
    assert list(left_out_lines(config, (2, 0), (2, 5))) == [
        f"2 of 4 prompts have more than data.max_prompt_tokens = {most} tokens: left out"
    ]
    first, *_ = left_out_lines(config, (0, 1), (2, 5))
    assert first.startswith("1 of 6 held-out prompts have more than")
    config = config_of(tmp_path, rows, max_prompt_tokens=1)
    with pytest.raises(
        UserError, match=rf"every prompt of d is longer than data.max_prompt_tokens = 1: the shortest has {min(lengths)}"
    ):
        short_enough(config, prompts, "d")


async def test_a_run_is_prepared_without_them(small: Small, tmp_path: Path) -> None:
    rows = [{"question": "one " * (30 if n % 3 == 0 else 2), "answer": "1"} for n in range(12)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {"path": str(tmp_path / "rows.jsonl"), "max_prompt_tokens": 20, "limit": None}
    prepared = await prepare(parse(small(data=data, eval={"path": data["path"], "num_prompts": 4})), tmp_path)
    assert (len(prepared.prompts), len(prepared.held_out), prepared.num_left_out) == (8, 2, (4, 2))
    with pytest.raises(UserError, match=r"has 8 short enough prompts, and a step takes train\.prompts_per_step = 9"):
        await prepare(parse(small(data=data, train={"prompts_per_step": 9})), tmp_path)
    with pytest.raises(UserError, match=r"leave out longer ones by data\.max_prompt_tokens=12"):
        await prepare(parse(small(data={**data, "max_prompt_tokens": None}, model={"max_context_tokens": 60})), tmp_path)


def test_pushed_rows_are_read_as_the_data_is(tmp_path: Path) -> None:
    config = config_of(tmp_path, [{"problem": "a", "final": "1"}], answer_column="final")
    source = source_of(config, [{"problem": "b", "final": "2"}], "the pushed prompts")
    assert tokenize(config, Chatty(), source)[0].example["answer"] == "2"
    with pytest.raises(UserError, match="row 1 of the pushed prompts has no column 'final'"):
        source_of(config, [{"problem": "b"}], "the pushed prompts")


def test_a_prompt_without_a_token_is_refused_by_its_row(tmp_path: Path) -> None:
    """Nothing could be generated behind it: the run would end much later."""
    config = config_of(tmp_path, [{"prompt": "one"}, {"prompt": ""}])
    with pytest.raises(UserError, match=r"the prompt of row 2 of .*rows\.jsonl has no tokens: leave such rows out"):
        tokenize(config, Chatty(), read_source(config, "train"))
    pushed = source_of(config, [{"prompt": ""}], "the pushed prompts")
    with pytest.raises(UserError, match="the prompt of row 1 of the pushed prompts has no tokens"):
        tokenize(config, Chatty(), pushed)


def test_an_empty_template_is_the_token_that_chats_begin_with_where_an_environment_brings_them(
    small: Small, tmp_path: Path
) -> None:
    (tmp_path / "rows.jsonl").write_text('{"game": 1}\n{"game": 2}\n')
    data = {"path": str(tmp_path / "rows.jsonl"), "prompt_template": "", "limit": None}
    chats = {"environment": "my_file.py:Game", "episodes": {"format": "chat"}}
    config = parse(small(data=data, **chats))
    [one, other] = tokenize(config, Chatty(), read_source(config, "train"))
    assert one.ids.tolist() == other.ids.tolist() == Chatty().encode_chat("Anything.")[:1].tolist()
    config = parse(small(data=data, environment=chats["environment"]))  # text stands behind the prompt
    with pytest.raises(UserError, match="has no tokens"):
        tokenize(config, Chatty(), read_source(config, "train"))
