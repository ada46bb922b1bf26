"""A checkpoint's tokenizer without transformers: `tokenizer.json`, its chat template, and its end tokens. No torch here."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Final

import jinja2
import jinja2.sandbox
import numpy as np
from tokenizers import Tokenizer

from asyncflow.model_folder import end_token_ids, read_json
from asyncflow.types import Array, UserError

_SPECIALS: Final = ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token", "mask_token")


class CheckpointTokenizer:
    """Text to token ids and back, as the model's folder says."""

    def __init__(self, folder: Path, *, generates: bool = True) -> None:
        """Raises `UserError` when the folder has no tokenizer, or no end token is to be found in it that the model needs: it
        `generates`."""
        file = folder / "tokenizer.json"
        if not file.is_file():
            raise UserError(f"the model {folder} has no tokenizer.json; write it with transformers' save_pretrained")
        self._tokenizer = Tokenizer.from_file(str(file))
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self._settings = read_json(folder / "tokenizer_config.json")
        self.template_source = self._read_template(folder)
        self._template: jinja2.Template | None = None
        self.end_token_ids = end_token_ids(folder)
        if generates and not self.end_token_ids:
            raise UserError(
                f"the model {folder} names no end token: set eos_token_id in its generation_config.json, or responses never end"
            )

    def encode(self, text: str) -> Array:
        """int64 [n], with no special tokens added."""
        return np.array(self._tokenizer.encode(text, add_special_tokens=False).ids, np.int64)

    def encode_chat(self, prompt: str | Sequence[Mapping[str, Any]], options: Mapping[str, Any] | None = None) -> Array:
        """int64 [n]: a conversation, or a text as a user's message, then the start of the answer; `options` are the template's own.

        A conversation that ends in the assistant's own words is continued. Raises `UserError` without a chat template.
        """
        if self.template_source is None:
            way_out = "set data.chat_template=false" if isinstance(prompt, str) else "say by data.prompt_template what they are"
            raise UserError(f"prompts are to go through a chat template, but the model's tokenizer has none; {way_out}")
        messages: list[Mapping[str, Any]] = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
        return self.encode(self._begun(messages, options or {}))

    def render(
        self, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any] | None = None, *, has_answer_begun: bool = True
    ) -> str:
        """Text of a conversation by the chat template, with the start of an answer if `has_answer_begun`.

        `options`: variables of the template's own, `tools` among them. Raises `UserError` if it refuses the messages.
        """
        assert self.template_source is not None, "the tokenizer has no chat template"
        specials = {name: _token_text(self._settings.get(name)) for name in _SPECIALS}
        known = {"tools": None, "documents": None, **specials, **(options or {})}
        try:  # compiled when first used: a template that jinja2 cannot read harms no run that does without
            self._template = self._template or _compile(self.template_source)
            return self._template.render(messages=messages, add_generation_prompt=has_answer_begun, **known)
        except (jinja2.TemplateError, TypeError) as error:
            raise UserError(f"the model's chat template cannot be rendered: {error}") from error

    def _begun(self, messages: list[Mapping[str, Any]], options: Mapping[str, Any]) -> str:
        if messages[-1].get("role") != "assistant":
            return self.render(messages, options)
        begun = str(messages[-1]["content"]).strip()
        text = self.render(messages, options, has_answer_begun=False)
        if not begun or begun not in text:
            raise UserError(
                "the model's chat template cannot be rendered: the answer that the conversation begins is not in its text"
            )
        return text[: text.rindex(begun) + len(begun)]

    def decode(self, ids: Array) -> str:
        """Text without special tokens."""
        return self._tokenizer.decode(ids.tolist(), skip_special_tokens=True)

    def decode_all(self, ids: Array) -> str:
        """Text with special tokens."""
        return self._tokenizer.decode(ids.tolist(), skip_special_tokens=False)

    def text_of(self, token_id: int) -> str:
        """Text of one token as the vocabulary has it, such as `<|im_end|>`; empty if there is no such token."""
        return self._tokenizer.id_to_token(token_id) or ""

    def _read_template(self, folder: Path) -> str | None:
        file = folder / "chat_template.jinja"
        source = file.read_text(encoding="utf-8") if file.is_file() else self._settings.get("chat_template")
        if isinstance(source, list):  # several, by name
            source = {str(each.get("name")): each.get("template") for each in source if isinstance(each, Mapping)}.get("default")
        return source if isinstance(source, str) else None


def _compile(template: str) -> jinja2.Template:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.globals |= {"raise_exception": _raise_template_error, "strftime_now": lambda form: datetime.now().strftime(form)}
    environment.filters["tojson"] = _to_json
    return environment.from_string(template)


def _token_text(token: str | Mapping[str, Any] | None) -> str:
    return str(token["content"]) if isinstance(token, Mapping) else token or ""


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    """JSON as transformers' templates write it: jinja2's own filter escapes what HTML would read."""
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _raise_template_error(message: str) -> None:
    raise jinja2.TemplateError(message)
