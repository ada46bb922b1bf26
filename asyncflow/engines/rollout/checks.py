"""Checks of every engine that generates: requests, and weights that are not the model's."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from asyncflow.engines.base import NO_TOKENS, Sampling
from asyncflow.types import Array


def check_request(prompt_ids: Array, sampling: Sampling, after: Array = NO_TOKENS, *, vocab_size: int, max_context: int) -> None:
    """Raises `ValueError` for an empty prompt, an unknown token, impossible sampling, or more tokens than the context has."""
    check_tokens(prompt_ids, vocab_size=vocab_size)
    if len(after):
        check_tokens(after, vocab_size=vocab_size)
    for token in sampling.stop_ids or ():
        if not 0 <= token < vocab_size:
            raise ValueError(f"the stop token {token} lies outside 0..{vocab_size - 1}")
    is_possible = 0 < sampling.top_p <= 1 and sampling.top_k >= 0 and 0 <= sampling.min_p < 1 and all(sampling.stop)
    if sampling.max_new_tokens < 1 or not 0 <= sampling.temperature < np.inf or not is_possible:
        raise ValueError(f"impossible sampling: {sampling}")
    if len(prompt_ids) + len(after) + sampling.max_new_tokens > max_context:
        turns = f", {len(after)} tokens after it" if len(after) else ""
        raise ValueError(
            f"a prompt of {len(prompt_ids)}{turns} and a response of {sampling.max_new_tokens} tokens exceed"
            f" the engine's context of {max_context}"
        )


def check_tokens(token_ids: Array, *, vocab_size: int) -> None:
    """Raises `ValueError` for an empty prompt, or an unknown token."""
    if not len(token_ids) or token_ids.min() < 0 or token_ids.max() >= vocab_size:
        raise ValueError(f"the prompt of {len(token_ids)} tokens is empty or has a token outside 0..{vocab_size - 1}")


def why_transformers_is_not_deterministic(**_options: object) -> str:
    """Reason why the engine is not deterministic, whatever the options are."""
    return "transformers' sums may depend on what else is in a batch, so a response that is made again may be another"


def check_tensors(tensors: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]], *, ties_head: bool) -> dict[str, Tensor]:
    """The tensors that a model of these shapes takes. Raises `ValueError` naming what does not fit.

    `ties_head`: the output layer is the embedding; a copy of it is left out.
    """
    given, expected = dict(tensors), dict(shapes)
    if ties_head:
        expected.pop("lm_head.weight", None)
        head = given.pop("lm_head.weight", None)
        if head is not None and not torch.equal(head, given["model.embed_tokens.weight"]):
            raise ValueError("lm_head.weight differs from model.embed_tokens.weight although tie_word_embeddings is true")
    if given.keys() != expected.keys():
        missing, unexpected = sorted(expected.keys() - given.keys()), sorted(given.keys() - expected.keys())
        raise ValueError(f"weights do not fit the model: missing {missing or 'none'}, unexpected {unexpected or 'none'}")
    for name, shape in expected.items():
        if tuple(given[name].shape) != shape:
            raise ValueError(f"{name} has shape {tuple(given[name].shape)}, the model has {shape}")
        if not given[name].is_floating_point():
            raise ValueError(f"{name} has dtype {given[name].dtype}, which is not a floating-point one")
    return given
