"""A checkpoint's tokenizer, from a tiny one made here."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from tokenizers.processors import TemplateProcessing

from asyncflow.data.tokenizer import CheckpointTokenizer
from asyncflow.types import UserError

WORDS = ["<unk>", "<bos>", "<end>", "one", "two", "user:", "answer:"]
TEMPLATE = "{{ bos_token }}{% for m in messages %} {{ m.role }}: {{ m.content }} {{ eos_token }}{% endfor %}" \
    "{% if add_generation_prompt %} answer:{% endif %}"  # fmt: skip


def save(folder: Path, **files: Any) -> Path:
    """A checkpoint's folder; `generation_config={...}` writes that file."""
    tokenizer = Tokenizer(WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.add_special_tokens(["<bos>", "<end>"])
    tokenizer.post_processor = TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 1)])
    tokenizer.enable_padding(length=8)
    tokenizer.enable_truncation(max_length=4)
    tokenizer.save(str(folder / "tokenizer.json"))
    for name, content in ({"generation_config": {"eos_token_id": 2}} | files).items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def test_text_becomes_its_tokens_and_nothing_else(tmp_path: Path) -> None:
    """What the file says of special tokens, padding and truncation is for others."""
    tokenizer = CheckpointTokenizer(save(tmp_path))
    ids = tokenizer.encode("one two one two one two")
    assert ids.dtype == np.int64 and ids.tolist() == [3, 4, 3, 4, 3, 4]
    assert tokenizer.encode("").tolist() == [] and tokenizer.encode("").dtype == np.int64


def test_special_tokens_are_left_out_of_the_text(tmp_path: Path) -> None:
    assert CheckpointTokenizer(save(tmp_path)).decode(np.array([1, 3, 4, 2])) == "one two"


def test_a_model_whose_responses_would_never_end_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"names no end token: set eos_token_id in its generation_config\.json"):
        CheckpointTokenizer(save(tmp_path, generation_config={}))
    assert CheckpointTokenizer(save(tmp_path, generation_config={"eos_token_id": [4, 2]})).end_token_ids == [4, 2]


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"has no tokenizer\.json"):
        CheckpointTokenizer(tmp_path)


@pytest.mark.parametrize("where", ["settings", "file"])
def test_a_chat_template_wraps_the_prompt_and_begins_the_answer(tmp_path: Path, where: str) -> None:
    settings: dict[str, Any] = {"bos_token": "<bos>", "eos_token": {"content": "<end>"}}
    if where == "settings":
        settings["chat_template"] = TEMPLATE
    else:
        settings["chat_template"] = "an older one"
        (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    tokenizer = CheckpointTokenizer(save(tmp_path, tokenizer_config=settings))
    assert tokenizer.encode_chat("one two").tolist() == [1, 5, 3, 4, 2, 6]
    assert tokenizer.encode_chat("two").tolist() == [1, 5, 4, 2, 6]


def test_without_a_chat_template_there_is_no_chat(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"has none; set data\.chat_template=false"):
        CheckpointTokenizer(save(tmp_path)).encode_chat("one")


@pytest.mark.parametrize(
    ("template", "why"),
    [
        ("{{ raise_exception('no system message') }}", "no system message"),
        ("{% generation %}{% endgeneration %}", "unknown tag 'generation'"),
        ("{{ messages[0].absent.name }}", "has no attribute"),
        ("{{ bos_token + 1 }}", "can only concatenate str"),
        ("{{ messages.append(1) }}", "is not safe|unsafe"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
    ],
)
def test_a_template_that_cannot_be_rendered_is_said_when_it_is_used_and_not_before(tmp_path: Path, template: str, why: str) -> None:
    tokenizer = CheckpointTokenizer(save(tmp_path, tokenizer_config={"chat_template": template}))
    assert tokenizer.encode("one").tolist() == [3]
    with pytest.raises(UserError, match=f"chat template cannot be rendered: .*({why})"):
        tokenizer.encode_chat("one")


CHATML = """{%- if tools %}{{- tools | tojson }}{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}
{%- else %}
    {{- '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role != 'system' %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content | trim + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}"""
CONVERSATION = [
    {"role": "system", "content": "Be brief: <b> & \u00fc."},
    {"role": "user", "content": " How many? \n"},
    {"role": "assistant", "content": "Of what?"},
    {"role": "user", "content": "Of {{ them }}."},
]


@pytest.mark.parametrize(
    ("prompt", "options"),
    [
        ("How many?", {}),
        ("How many?", {"enable_thinking": False}),
        (CONVERSATION, {}),
        (CONVERSATION, {"tools": [{"name": "f", "description": "<&'\u00fc"}]}),
        ([*CONVERSATION, {"role": "assistant", "content": "There are"}], {}),
    ],
)
def test_a_chat_is_what_transformers_makes_of_it(tmp_path: Path, prompt: Any, options: dict[str, Any]) -> None:
    transformers = pytest.importorskip("transformers")
    model = Path(__file__).parents[3] / "recipes" / "models" / "tiny-arithmetic"
    for name in ("tokenizer.json", "generation_config.json"):
        shutil.copyfile(model / name, tmp_path / name)
    settings = json.loads((model / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "chat_template.jinja").write_text(CHATML)
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    goes_on = messages[-1]["role"] == "assistant"
    expected = transformers.AutoTokenizer.from_pretrained(str(tmp_path)).apply_chat_template(
        messages, add_generation_prompt=not goes_on, continue_final_message=goes_on, tokenize=False, **options
    )
    tokenizer = CheckpointTokenizer(tmp_path)
    assert tokenizer.encode_chat(prompt, options).tolist() == tokenizer.encode(expected).tolist()
    assert len(expected) > 40


def test_of_several_templates_it_is_the_default_one(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "two"}, {"name": "default", "template": "one"}]
    assert CheckpointTokenizer(save(tmp_path, tokenizer_config={"chat_template": named})).encode_chat("x").tolist() == [3]
    (tmp_path / "b").mkdir()
    tokenizer = CheckpointTokenizer(save(tmp_path / "b", tokenizer_config={"chat_template": named[:1]}))
    with pytest.raises(UserError, match="has none"):
        tokenizer.encode_chat("x")


def test_the_day_and_json_are_at_hand(tmp_path: Path) -> None:
    template = "{% if strftime_now('%Y') | int > 2000 %}one{% endif %} {{ messages[0] | tojson }}"
    tokenizer = CheckpointTokenizer(save(tmp_path, tokenizer_config={"chat_template": template}))
    assert tokenizer.encode_chat("two")[0] == 3


def test_an_answer_that_the_template_leaves_out_cannot_be_continued(tmp_path: Path) -> None:
    tokenizer = CheckpointTokenizer(save(tmp_path, tokenizer_config={"chat_template": "{{ messages[0].content }}"}))
    with pytest.raises(UserError, match="the answer that the conversation begins is not in its text"):
        tokenizer.encode_chat([{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}])
