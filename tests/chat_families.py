"""Small tokenizers and chat templates of six families: the structure of theirs in our own words, and vocabularies trained here.

| family | closes an answer by | tools' results | earlier turns |
|---|---|---|---|
| qwen2.5 | <|im_end|> | user turns, grouped | stay |
| qwen3 | <|im_end|> | user turns, grouped | a new question drops their thoughts |
| llama3 | <|eot_id|> | role ipython | stay |
| smollm2 | <|im_end|> | not rendered | stay |
| mistral | </s> | [TOOL_RESULTS] | a new question takes the tools with it |
| gemma | <end_of_turn> | refused | stay |
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer

from asyncflow.data.tokenizer import CheckpointTokenizer

_HERMES_TOOLS = """{%- if tools %}
{{- '# Tools\\n\\n<tools>' }}{%- for tool in tools %}{{- '\\n' + (tool | tojson) }}{%- endfor %}
{{- '\\n</tools>\\n\\nFor each call write <tool_call>\\n{"name": ..., "arguments": ...}\\n</tool_call>' }}
{%- endif %}"""
_HERMES_RESULTS = """{%- elif m.role == 'tool' %}
  {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
  {{- '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}
  {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}"""

QWEN25 = (
    """{%- if messages[0].role == 'system' %}{%- set head = messages[0].content %}{%- else %}{%- set head = 'A helpful one.' %}
{%- endif %}{{- '<|im_start|>system\\n' + head + ('\\n\\n' if tools else '') }}"""
    + _HERMES_TOOLS
    + """{{- '<|im_end|>\\n' }}
{%- for m in messages %}
{%- if m.role == 'user' or (m.role == 'system' and not loop.first) or (m.role == 'assistant' and not m.tool_calls) %}
  {{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}
{%- elif m.role == 'assistant' %}
  {{- '<|im_start|>assistant' }}{%- if m.content %}{{- '\\n' + m.content }}{%- endif %}
  {%- for call in m.tool_calls %}{%- set f = call.function or call %}
    {{- '\\n<tool_call>\\n{"name": "' + f.name + '", "arguments": ' + (f.arguments | tojson) + '}\\n</tool_call>' }}
  {%- endfor %}{{- '<|im_end|>\\n' }}
"""
    + _HERMES_RESULTS
    + """{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
)

QWEN3 = (
    """{%- if tools or messages[0].role == 'system' %}{{- '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}"""
    + _HERMES_TOOLS
    + """{{- '<|im_end|>\\n' }}{%- endif %}
{%- set ns = namespace(last=0) %}
{%- for m in messages %}{%- if m.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}
{%- for m in messages %}
{%- if m.role == 'user' %}{{- '<|im_start|>user\\n' + m.content + '<|im_end|>\\n' }}
{%- elif m.role == 'assistant' %}
  {%- set content = m.content %}{%- set thought = '' %}
  {%- if '</think>' in content %}
    {%- set thought = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
    {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
  {%- endif %}
  {{- '<|im_start|>assistant\\n' }}
  {%- if loop.index0 > ns.last and (loop.last or thought) %}{{- '<think>\\n' + thought + '\\n</think>\\n\\n' }}{%- endif %}
  {{- content + '<|im_end|>\\n' }}
"""
    + _HERMES_RESULTS
    + """{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}{%- endif %}"""
)

LLAMA3 = """{{- bos_token + '<|start_header_id|>system<|end_header_id|>\\n\\nCutting Knowledge Date: December 2023\\n' }}
{%- if tools %}{{- 'Environment: ipython\\n' }}{%- endif %}
{%- if messages[0].role == 'system' %}{{- messages[0].content | trim }}{%- set messages = messages[1:] %}{%- endif %}
{{- '<|eot_id|>' }}
{%- for m in messages %}
{%- if loop.first and tools %}
  {{- '<|start_header_id|>user<|end_header_id|>\\n\\nCall a function by {"name": ..., "parameters": ...}.\\n\\n' }}
  {%- for tool in tools %}{{- (tool | tojson(indent=4)) + '\\n\\n' }}{%- endfor %}{{- (m.content | trim) + '<|eot_id|>' }}
{%- elif m.role == 'tool' or m.role == 'ipython' %}
  {{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' }}
  {%- if m.content is mapping or m.content is iterable %}{{- m.content | tojson }}{%- else %}{{- m.content }}{%- endif %}
  {{- '<|eot_id|>' }}
{%- else %}{{- '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' + (m.content | trim) + '<|eot_id|>' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}"""

SMOLLM2 = """{% for m in messages %}
{%- if loop.first and m.role != 'system' %}{{ '<|im_start|>system\\nA small one.<|im_end|>\\n' }}{% endif %}
{%- if m.role != 'tool' %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

MISTRAL = """{%- set ns = namespace(last=0) %}
{%- for m in messages %}{%- if m.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}
{{- bos_token }}
{%- for m in messages %}
{%- if m.role == 'user' %}
  {%- if tools and loop.index0 == ns.last %}{{- '[AVAILABLE_TOOLS] ' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}{%- endif %}
  {{- '[INST] ' + m.content + '[/INST]' }}
{%- elif m.role == 'assistant' %}{{- ' ' + (m.content | trim) + eos_token }}
{%- elif m.role == 'tool' %}
  {%- if m.tool_call_id is undefined or m.tool_call_id | length != 9 %}{{- raise_exception('ids have 9 characters') }}{%- endif %}
  {{- '[TOOL_RESULTS] {"content": ' + (m.content | tojson) + ', "call_id": "' + m.tool_call_id + '"}[/TOOL_RESULTS]' }}
{%- else %}{{- raise_exception('no role ' + m.role) }}{%- endif %}
{%- endfor %}"""

GEMMA = """{{ bos_token }}{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}
{%- for m in messages %}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate user/assistant') }}{% endif %}
{%- set role = 'model' if m.role == 'assistant' else m.role %}
{{- '<start_of_turn>' + role + '\\n' + (m.content | trim) + '<end_of_turn>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"""


@dataclass(frozen=True)
class Family:
    """A family: its template, special tokens (the first ends an answer), and whether its vocabulary is one of SentencePiece."""

    name: str
    template: str
    specials: tuple[str, ...]
    bos: str = ""
    is_sentence_piece: bool = False
    other_ends: tuple[str, ...] = ()
    plain: tuple[str, ...] = ()
    """Added tokens that a decoder does not leave out."""


_CHAT_ML = ("<|im_end|>", "<|im_start|>", "<|endoftext|>")
_CALLS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
_LLAMA = ("<|eot_id|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>", "<|python_tag|>")
_MISTRAL = ("</s>", "<s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]")
FAMILIES = (
    Family("qwen2.5", QWEN25, _CHAT_ML, other_ends=("<|endoftext|>",), plain=_CALLS[:2]),
    Family("qwen3", QWEN3, _CHAT_ML, other_ends=("<|endoftext|>",), plain=_CALLS),
    Family("llama3", LLAMA3, _LLAMA, "<|begin_of_text|>", other_ends=("<|eom_id|>",)),
    Family("smollm2", SMOLLM2, _CHAT_ML),
    Family("mistral", MISTRAL, (*_MISTRAL, "[/TOOL_RESULTS]"), "<s>", is_sentence_piece=True),
    Family("gemma", GEMMA, ("<end_of_turn>", "<bos>", "<eos>", "<start_of_turn>"), "<bos>", True, ("<eos>",)),
)
_TEXTS = [
    "What is the weather in Paris and in Zürich today? It is 17 degrees, with some rain.\n\nThe answer is 42.",
    '{"name": "get_weather", "arguments": {"city": "Paris", "unit": "celsius"}}\n{"name": "add", "parameters": {"a": 1, "b": 2}}',
    "def add(a: int, b: int) -> int:\n    return a + b\n\nprint(add(1, 2))\n",
    "user assistant system tool model ipython observation thought answer question    one  two\tthree",
]


def save_family(family: Family, folder: Path) -> CheckpointTokenizer:
    """Write a checkpoint's tokenizer files to a folder, and read them."""
    folder.mkdir(parents=True, exist_ok=True)
    trained = Tokenizer(BPE(byte_fallback=family.is_sentence_piece, unk_token="<unk>" if family.is_sentence_piece else None))
    if family.is_sentence_piece:
        trained.normalizer = normalizers.Replace(" ", "▁")
        trained.pre_tokenizer = pre_tokenizers.Metaspace(
            prepend_scheme="first" if family.name == "mistral" else "never", split=False
        )
        trained.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
        alphabet = sorted({letter for text in _TEXTS for letter in text.replace(" ", "▁")})
        first = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    else:
        trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        trained.decoder = decoders.ByteLevel()
        alphabet, first = pre_tokenizers.ByteLevel.alphabet(), []
    trainer = BpeTrainer(vocab_size=700, special_tokens=first, initial_alphabet=alphabet, show_progress=False)
    trained.train_from_iterator(_TEXTS * 3, trainer)
    trained.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in family.specials])
    trained.add_tokens([AddedToken(token, normalized=False, special=False) for token in family.plain])
    trained.save(str(folder / "tokenizer.json"))
    ends = [trained.token_to_id(token) for token in (family.specials[0], *family.other_ends)]
    settings = {"eos_token": family.specials[0], **({"bos_token": family.bos} if family.bos else {})}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    (folder / "chat_template.jinja").write_text(family.template)
    return CheckpointTokenizer(folder)


def save_model(family: Family, folder: Path, seed: int = 0) -> Path:
    """A checkpoint of a tiny model with random weights, with the family's tokenizer."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    tokenizer = save_family(family, folder)
    vocabulary = Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab_size()
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=vocabulary, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=8192, eos_token_id=tokenizer.end_token_ids, bos_token_id=None,
    )  # fmt: skip
    ends = (folder / "generation_config.json").read_text()
    Qwen2ForCausalLM(config).save_pretrained(folder)
    (folder / "generation_config.json").write_text(ends)
    return folder
