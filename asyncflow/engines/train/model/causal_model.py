"""Causal language model on packed tokens: hidden states that predict response tokens, and log-probs of these tokens.

    Packed (packing.py) -> the model's layers (attention.py, own_rows.py) -> hidden_TH -> log-probs (log_probs.py)

The model's code is transformers' own: the layout reaches it as an extra argument, and the attention by its registered name. Where a
model is not known to hand the layout through, its rows are sequences of their own (own_rows.py), with its own attention. The model
stays in evaluation mode: with dropout the ratio of new to old log-probs would not be 1 for equal weights.
"""

from __future__ import annotations

import copy
import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from asyncflow.devices import CPU
from asyncflow.engines.base import TrainEngineOptions
from asyncflow.engines.families import check_family, why_alone, why_not_packed
from asyncflow.engines.lora import initial_lora
from asyncflow.engines.train.model.attention import ATTENTION_NAME
from asyncflow.engines.train.model.cast_weights import CastWeights
from asyncflow.engines.train.model.log_probs import Head, log_probs_and_entropy
from asyncflow.engines.train.model.lora import RowsOfAdapter, SharedBase, add_lora, shapes_for
from asyncflow.engines.train.model.own_rows import Way, forget_rows, row_states
from asyncflow.engines.train.model.packing import INERT_TOKENS, Packed, filled_up, pack_thrifty
from asyncflow.engines.train.model.products import adopt
from asyncflow.types import Array, Ragged, UserError

_bases: WeakValueDictionary[Any, Any] = WeakValueDictionary()  # of adapters, by files, dtype and device
_SHARING = threading.Lock()  # so that nobody loads what somebody is loading
_LOADING = threading.Lock()  # a load changes global state of transformers: two at the same time may lose tied weights

# P packed tokens, T response tokens, H hidden elements, V tokens of the vocabulary.


def frozen_options(options: TrainEngineOptions) -> TrainEngineOptions:
    """Options of a model that is not trained: an old policy, or the reference."""
    return replace(options, dtype=options.frozen_dtype or options.dtype, activation_checkpointing=False, lora=None)


class CausalModel:
    """Causal language model: its weights, and the device and dtype that its passes compute in."""

    def __init__(
        self, path: Path | str, options: TrainEngineOptions, *, is_trained: bool = True, first: CausalModel | None = None
    ) -> None:
        """Load the model at `path` (Hugging Face format).

        Every pass computes in the dtype and on the device of `options`. Weights that are trained are kept in float32, others in
        that dtype, and with `offload` in host memory. Passes of another dtype have copies, each made once after the weight has
        changed (`CastWeights`); with `offload` each pass makes its own and drops it at its end. A copy has the same numbers as a
        rollout engine of that dtype. Gradients are added to the kept weights.

        With `lora` the model has a low-rank adapter, whose first values `seed` decides. It alone is trained, and is in
        `parameters`. Models with adapters over the same files have the memory of their bases in common.
        `first`: compute in the way of that one, and if the weights of both are on one device, with that one's, whatever becomes of
        them: then nothing is loaded. Gradients stay apart.

        Raises `UserError` if there is no such model, or it cannot be trained here.
        """
        dtype, lora = getattr(torch, options.dtype), options.lora
        place = self._place = CPU if options.offload and not is_trained else options.device
        shared = first if first is not None and first._place == place else None
        self.is_copy = first is not None and shared is None
        """Whether its weights are a copy of the first one's, on another device."""
        # As it was loaded, to make others of the same memory; an adapter's base stays as long as an adapter of it is here.
        weights_dtype = torch.float32 if is_trained and lora is None else dtype
        self._loaded: Any = shared._loaded if shared else (base_of if lora else load_module)(path, weights_dtype, place)
        own = {id(w): w if lora else nn.Parameter(w.data, w.requires_grad) for w in self._loaded.parameters()}
        self.module = copy.deepcopy(self._loaded, own).eval()
        self._chunk_tokens, self._are_bits_free = options.log_prob_chunk_tokens, options.accumulate == "fp32"
        self.device, self.dtype, self.temperature = torch.device(options.device), dtype, options.temperature
        self._logit_scale, self._logit_cap = logit_scale(self.module.config), logit_cap(self.module.config)
        is_packed = self.module.config._attn_implementation == ATTENTION_NAME
        own_way: Way = "alone" if why_alone(self.module.config.to_dict()) else "batched"
        self.way: Way = first.way if first else "packed" if is_packed else own_way
        """Way of micro-batches through the model: packed where that is known to be right, else as `own_rows.probe` finds."""
        forget_rows(self.module)
        shapes = {} if lora is None else shapes_for(self.module, lora)
        self.lora = None if lora is None else add_lora(self.module, shapes, lora)
        self.scaling = 0.0 if lora is None else lora.scaling
        adopt(self.module)
        # Each tied weight comes once, under the name that a checkpoint has it by.
        self._weights: dict[str, nn.Parameter] = dict(self.module.named_parameters())
        self.parameters = self._weights if lora is None else {name: w for name, w in self._weights.items() if w.requires_grad}
        if shared is not None:
            for name, parameter in self.parameters.items():
                parameter.data = shared._weights[name].data
        elif lora is not None:
            for name, tensor in initial_lora(shapes, lora, options.seed).items():
                self.parameters[name].data.copy_(tensor)
        head_VH = self.module.get_output_embeddings().weight
        self._head_name = next(name for name, parameter in self._weights.items() if parameter is head_VH)
        bias_V = self.module.get_output_embeddings().bias
        self._bias_name = next((name for name, parameter in self._weights.items() if parameter is bias_V), None)
        self._others: Mapping[str, Tensor] = {}  # values that passes compute with instead of the weights of these names
        self._copies = None
        if torch.device(place) == self.device:
            self._copies = shared._copies if shared else CastWeights(self._weights, dtype)
        layers = list(layers_of(self.module)) if options.activation_checkpointing else []
        # Such a layer takes its copies itself, in each of its passes: the second one is in the backward pass.
        self._cast_by_layer = {id(parameter) for layer in layers for parameter in layer.parameters()}
        names = {id(parameter): name for name, parameter in self._weights.items()}
        for layer in layers:
            of_layer = [
                (module, name, names[id(parameter)])
                for module in layer.modules()
                for name, parameter in module.named_parameters(recurse=False)
            ]
            recompute_activations(layer, partial(self._with_copies, of_layer))

    def pack(self, prompt_ids: Array, responses: Ragged, targets: Ragged | None = None) -> Packed:
        """Pack a prompt and its responses for this model, see `pack_thrifty`; without sharing where it does not take the layout."""
        return pack_thrifty(prompt_ids, responses, self.device, targets, may_share=self.way == "packed")

    def hidden(self, packed: Packed) -> tuple[Tensor, Head]:
        """Hidden states [T, H] that predict the response tokens, and the output layer.

        The hidden states are divided by the temperature, and by what else the model divides its logits by, so that their product
        with its weight gives the logits to sample from (but for the softcap). A bias of the output layer is one more column of it.
        """
        weights, temperature = self._cast(), packed.temperature or self.temperature
        divisor = temperature / self._logit_scale
        hidden_TH, head_VH = self._states(packed, weights, divisor), weights[self._head_name]
        if self._bias_name is not None:
            ones_T1 = hidden_TH.new_full((len(hidden_TH), 1), 1 / divisor)
            hidden_TH, head_VH = torch.cat((hidden_TH, ones_T1), 1), torch.cat((head_VH, weights[self._bias_name][:, None]), 1)
        softcap = None if self._logit_cap is None else self._logit_cap / temperature
        return hidden_TH, Head(head_VH, self._chunk_tokens, softcap=softcap)

    def adapter_weights(self) -> dict[str, Tensor]:
        """Matrices of the adapter by name, on the device and in the dtype of a pass, with gradients that flow to `parameters`."""
        return {name: self._copy(name) for name in self.parameters}

    @contextmanager
    def with_adapter(self, weights: Mapping[str, Tensor]) -> Iterator[None]:
        """Context inside which passes, without gradients, have the adapter of these matrices, float32, by name. Nothing is written
        to the memory of the model's own: versions are read from it beside any pass."""
        self._others = weights
        try:
            yield
        finally:
            self._others = {}

    def mixed(self, rows: Sequence[RowsOfAdapter]) -> AbstractContextManager[None]:
        """See `LoraSwitch.mixed`."""
        assert self.lora is not None, "the model has an adapter"
        return self.lora.mixed(rows)

    def _cast(self) -> dict[str, Tensor]:
        """Weights by name on the device and in the dtype of a pass, without those that a layer casts itself."""
        return {name: self._copy(name) for name, parameter in self._weights.items() if id(parameter) not in self._cast_by_layer}

    def _copy(self, name: str) -> Tensor:
        """A weight on the device and in the dtype of a pass."""
        parameter = self._weights[name]
        if (other := self._others.get(name)) is not None:
            return other.to(self.device, self.dtype)
        return parameter.to(self.device, self.dtype) if self._copies is None else self._copies.of(name, parameter)

    @contextmanager
    def _with_copies(self, own: Sequence[tuple[nn.Module, str, str]]) -> Iterator[None]:
        """Context inside which parameters (module, name in it, name) are their copies, whose gradients flow back to them."""
        for module, name, whole_name in own:
            module._parameters[name] = self._copy(whole_name)  # type: ignore[assignment]
        try:
            yield
        finally:
            for module, name, whole_name in own:
                module._parameters[name] = self._weights[whole_name]

    def _states(self, packed: Packed, weights: Mapping[str, Tensor], divisor: float = 1.0) -> Tensor:
        """Hidden states [T, H] of the last layer, see `Packed.predicting`. `weights`: from `_cast`."""
        base, prefix = self.module.base_model, self.module.base_model_prefix + "."
        state = {name.removeprefix(prefix): weight for name, weight in weights.items() if name.startswith(prefix)}
        state |= {name: buffer.to(self.device) for name, buffer in base.named_buffers()}

        most_with_gradients = getattr(base.config, "max_inference_chunksize", math.inf)  # an xLSTM's

        def states(tokens_RL: Tensor, **others: Any) -> Tensor:
            inputs = {"input_ids": tokens_RL, "use_cache": False, **others}
            if torch.is_grad_enabled() and tokens_RL.shape[1] > most_with_gradients:
                raise UserError(
                    f"a row of {tokens_RL.shape[1]} tokens has no gradients in this {base.config.model_type}, which computes more "
                    f"than {most_with_gradients} in pieces: set max_inference_chunksize in its config.json, or take shorter rows"
                )
            hidden_RLH: Tensor = functional_call(base, state, kwargs=inputs).last_hidden_state
            return hidden_RLH

        if self.way != "packed":
            return packed.predicting(row_states(states, packed, self.way), divisor)
        packed = filled_up(packed, INERT_TOKENS)
        layout = replace(packed.layout, are_bits_free=self._are_bits_free)
        inputs = {"position_ids": packed.positions_P[None], "layout": layout, "attention_mask": None}
        return packed.predicting(states(packed.tokens_P[None], **inputs)[0], divisor)

    def log_probs(self, packed: Packed) -> Tensor:
        """Log-probs (float32 [T]) of the response tokens."""
        hidden_TH, head = self.hidden(packed)
        return log_probs_and_entropy(hidden_TH, head, packed.targets_T, packed.token_counts)[0]

    @torch.no_grad()
    def response_log_probs(
        self, prompt_ids: Array, response_ids: Ragged, target_ids: Ragged | None = None, temperature: float | None = None
    ) -> Ragged:
        """See `LogProbEngine.log_probs`. The layout is the same as in training, so that the bits are the same."""
        packed = replace(self.pack(prompt_ids, response_ids, target_ids), temperature=temperature)
        return Ragged(self.log_probs(packed).cpu().numpy(), response_ids.offsets)


class FrozenModel(CausalModel):
    """Model that is not trained: an old policy, or the reference."""

    def __init__(self, path: Path | str, options: TrainEngineOptions, *, first: FrozenModel | None = None) -> None:
        """Load the model as `CausalModel` does, with the policy's `options`."""
        super().__init__(path, frozen_options(options), is_trained=False, first=first)
        self.module.requires_grad_(False)

    @torch.no_grad()
    def log_probs(self, packed: Packed) -> Tensor:
        """See `CausalModel.log_probs`. The log-probs carry no gradient."""
        return super().log_probs(packed)

    @torch.no_grad()
    def move_from(self, policy: CausalModel) -> None:
        """Copy the policy's present weights into this model."""
        for name, parameter in self.parameters.items():
            parameter.copy_(policy.parameters[name])


class SharedBaseModel(SharedBase):
    """Model that is not trained, over the base of a policy with an adapter: see `SharedBase`."""

    def __init__(self, policy: CausalModel, *, has_adapter: bool, first: CausalModel | SharedBaseModel | None = None) -> None:
        """`first`: one whose copy of the adapter is taken, whatever becomes of it."""
        assert policy.lora is not None, "the policy has an adapter"
        self.is_copy = policy.is_copy
        super().__init__(policy.parameters, policy.lora, has_adapter=has_adapter)
        if first is not None:
            self.parameters = first.parameters
        self._policy = policy

    @torch.no_grad()
    def log_probs(self, packed: Packed) -> Tensor:
        """See `CausalModel.log_probs`. The log-probs carry no gradient."""
        with self.within():
            return self._policy.log_probs(packed)

    def _with_adapter(self) -> AbstractContextManager[None]:
        return self._policy.with_adapter(self.parameters)


def recompute_activations(layer: nn.Module, within: Callable[[], AbstractContextManager[None]] = nullcontext) -> None:
    """Make a layer keep only its inputs, and compute its activations again in the backward pass.

    `within` makes a context; the layer's forward runs inside one each time.
    """
    plain_forward = layer.forward

    def forward(*inputs: Any, **others: Any) -> Any:
        with within():
            return plain_forward(*inputs, **others)

    # The random state need not be kept: in evaluation mode the layer draws no random numbers.
    layer.forward = partial(checkpoint, forward, use_reentrant=False, preserve_rng_state=False)


def load_module(path: Path | str, dtype: torch.dtype, device: str = CPU) -> Any:
    """Load transformers' model at `path` in `dtype`, onto `device`, with packed attention where it hands the layout through.

    Raises `UserError` if there is no model, if it lacks weights, or if it cannot be trained.
    """
    config = _config(path)
    disable_progress_bar()
    with _LOADING:
        attention = {} if why_not_packed(config.to_dict()) else {"attn_implementation": ATTENTION_NAME}
        model, report = AutoModelForCausalLM.from_pretrained(
            path, config=config, dtype=dtype, output_loading_info=True, **attention
        )
    # Transformers would fill what is missing with random numbers and warn.
    if lacking := sorted([*report["missing_keys"], *(key for key, *_ in report["mismatched_keys"])]):
        raise UserError(f"The model at {path} lacks {len(lacking)} of its weights, {lacking[0]} the first: get the files again.")
    if device != CPU:
        model.to(device)
        # Tensors of another class than the CPU's, as an NPU's are, come as a parameter for each name.
        model.tie_weights(recompute_mapping=False)
    return model


def base_of(path: Path | str, dtype: torch.dtype, device: str) -> Any:
    """The model of `load_module` on a device, which must not be changed: the same one for all callers while one has it."""
    files = tuple((file.name, file.stat().st_mtime_ns, file.stat().st_size) for file in sorted(Path(path).glob("*.*")))
    key = (str(Path(path).resolve()), files, dtype, device)
    with _SHARING:
        if (base := _bases.get(key)) is None:
            base = _bases[key] = load_module(path, dtype, device).eval().requires_grad_(False)
        return base


def empty_module(path: Path | str, dtype: torch.dtype) -> Any:
    """Make the model of `load_module` without memory for its weights, which are on the meta device. Reads no weights.

    Buffers that are computed, not read (the rotary frequencies), have no values either: call `compute_buffers` after memory was
    made for the model. Raises `UserError` if there is no model, or if it cannot be trained.
    """
    config = _config(path)
    check_family(config.to_dict())
    with _LOADING, torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=ATTENTION_NAME)
    return model.eval()


def compute_buffers(module: Any, device: torch.device) -> None:
    """Compute a model's buffers (the rotary frequencies) on `device`. Use it after `empty_module`."""
    rotary = module.base_model.rotary_emb
    module.base_model.rotary_emb = type(rotary)(config=module.config).to(device)


def _config(path: Path | str) -> Any:
    try:
        config = AutoConfig.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise UserError(f"There is no model in Hugging Face format at {path}: {str(error).splitlines()[0]}") from error
    if hasattr(config, "rescale_every"):
        config.rescale_every = 0  # rwkv would halve parameters in its first forward pass, and so what is trained and saved
    return config


def logit_scale(config: Any) -> float:
    """Number that a model multiplies its logits by, from its configuration."""
    scale = float(getattr(config, "logit_scale", None) or getattr(config, "lm_head_multiplier", None) or 1.0)
    return scale / float(getattr(config, "logits_scaling", None) or 1.0)


def logit_cap(config: Any) -> float | None:
    """Number c of a model whose logits are c tanh(logits / c), from its configuration."""
    caps = (getattr(config, name, None) for name in ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap"))
    return next((float(cap) for cap in caps if cap is not None), None)


def layers_of(module: Any) -> nn.ModuleList:
    """Layers of a model, whatever they are called. Raises `UserError` if they are not found."""
    count = module.config.num_hidden_layers
    for part in module.base_model.modules():
        if isinstance(part, nn.ModuleList) and len(part) == count:
            return part
    raise UserError(f"the layers of a {type(module).__name__} are not found: set train.activation_checkpointing=false")
