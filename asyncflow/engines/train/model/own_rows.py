"""Rows of their own: the way of a model whose attention is not ours, or that mixes tokens in other ways than by attention.

    Packed, a prompt for each response --> [R, L], filled up at the right --> the model as it is --> hidden states, packed again

In a causal model no token sees what is behind it, so neither a mask nor positions are needed, and windows, caps, recurrent states
and routers stay the model's own. That a row does not depend on the rows beside it is checked at the start (`probe`); where it
does, each row goes through the model alone. That the model is causal is checked as well. The same check compares with the model's
own logits, so that nothing between hidden states and logits is left out. Where rotary frequencies change with the longest row, far
beyond what a check can try, each row goes alone from the start.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils.rnn import pad_sequence

from asyncflow.engines.families import why_alone
from asyncflow.engines.train.model.check_sharing import TOLERANCES
from asyncflow.engines.train.model.packing import Packed, pack
from asyncflow.types import Ragged, UserError

if TYPE_CHECKING:
    from asyncflow.engines.train.model.causal_model import CausalModel

Way = Literal["packed", "batched", "alone"]
"""Way of a micro-batch through a model: as one packed sequence (attention.py), as a batch of rows, or row by row."""

PROMPT_TOKENS: Final = 5
RESPONSE_TOKENS: Final = (9, 4, 2)
CUT: Final = 4  # tokens of the first response without the rest

# R rows, L tokens of the longest, P tokens of all, T response tokens, H hidden elements, V tokens of the vocabulary.


def row_states(states: Callable[[Tensor], Tensor], packed: Packed, way: Way) -> Tensor:
    """Hidden states [P, H] of a micro-batch without a shared prompt. `states`: of tokens int64 [R, L], [R, L, H]."""
    rows = packed.tokens_P.split_with_sizes(packed.layout.segment_lengths)
    if way == "alone":
        return torch.cat([states(row[None])[0] for row in rows])
    hidden_RLH = states(pad_sequence(list(rows), batch_first=True))
    return torch.cat([hidden_RLH[i, : len(row)] for i, row in enumerate(rows)])


def forget_rows(module: nn.Module) -> None:
    """Make each pass rotate as a model's first one does: under `dynamic` its frequencies would be those of the longest row yet."""
    for part in module.modules():
        kinds = getattr(part, "rope_type", None)  # of all layers, or by type of layer
        if any("dynamic" in str(kind) for kind in (kinds.values() if isinstance(kinds, Mapping) else [kinds])):
            part.register_forward_pre_hook(_forget)


def _forget(rotary: Any, _inputs: object) -> None:
    for layer, kind in rotary.rope_type.items() if isinstance(rotary.rope_type, Mapping) else [("", rotary.rope_type)]:
        if "dynamic" in kind:
            prefix = f"{layer}_" if layer else ""
            setattr(rotary, f"{prefix}max_seq_len_cached", rotary.original_max_seq_len)
            setattr(rotary, f"{prefix}inv_freq", getattr(rotary, f"{prefix}original_inv_freq").clone())


@torch.no_grad()
def probe(model: CausalModel) -> str:
    """Find the way for a model whose attention is not ours, set it, and say what was found: "" for one that is packed.

    Raises `UserError` if not even a row alone has the log-probs that the model itself gives it, or if a token's depend on those
    behind it.
    """
    if model.way == "packed":
        return ""
    vocabulary = model.module.get_input_embeddings().weight.shape[0]
    tokens = np.arange(1, 1 + PROMPT_TOKENS + sum(RESPONSE_TOKENS)) * 7919 % vocabulary
    responses = Ragged(tokens[PROMPT_TOKENS:], np.cumsum([0, *RESPONSE_TOKENS]))
    packed = pack(tokens[:PROMPT_TOKENS], responses, model.device, is_shared=False)
    tolerance = TOLERANCES[model.dtype][0]
    model.way = "batched"
    together_T = model.log_probs(packed)
    model.way = "alone"
    alone_T = model.log_probs(packed)
    own_T = _own_log_probs(model, packed)
    begun = Ragged(responses[0][:CUT], np.array([0, CUT]))
    begun_T = model.log_probs(pack(tokens[:PROMPT_TOKENS], begun, model.device, is_shared=False))
    kind = model.module.config.model_type
    if not (difference := _largest(alone_T - own_T)) <= tolerance:
        raise UserError(
            f"the trainer does not get the log-probs that this model of type {kind!r} gives to a row: they differ by "
            f"{difference:.2g} nats, so what lies between its hidden states and its logits is not known; choose another model"
        )
    if not (difference := _largest(begun_T - alone_T[:CUT])) <= tolerance:
        raise UserError(
            f"this model of type {kind!r} is not causal: log-probs of a response change by {difference:.2g} nats with the tokens "
            f"behind them; choose a causal language model"
        )
    if why := why_alone(model.module.config.to_dict()):
        return f"rows of this {kind} are computed one by one: {why}"
    if (difference := _largest(together_T - alone_T)) <= tolerance:
        model.way = "batched"
        return f"rows of this {kind} are computed in batches: one differs from the same row alone by {difference:.1e} nats"
    return f"rows of this {kind} are computed one by one: in a batch they differ by {difference:.1e} nats"


def _largest(difference_T: Tensor) -> float:
    return float(difference_T.abs().nan_to_num(nan=torch.inf).max())


def _own_log_probs(model: CausalModel, packed: Packed) -> Tensor:
    """Log-probs (float32 [T]) of the response tokens by the model's own forward pass, a row at a time."""
    weights = {name: parameter.to(model.device, model.dtype) for name, parameter in model.parameters.items()}
    weights |= {name: buffer.to(model.device) for name, buffer in model.module.named_buffers()}
    found = []
    for row in packed.tokens_P.split_with_sizes(packed.layout.segment_lengths):
        outputs = functional_call(model.module, weights, kwargs={"input_ids": row[None], "use_cache": False})
        logits_LV = outputs.logits[0, packed.prompt_length - 1 : -1].float() / model.temperature
        found.append(logits_LV.log_softmax(-1).gather(1, row[packed.prompt_length :, None])[:, 0])
    return torch.cat(found)
