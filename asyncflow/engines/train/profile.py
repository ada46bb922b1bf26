"""Timings of one layer of a model on this rank of a layout, and of the rank's other work. Weights and data are random.

    layer_forward, layer_backward       by packed tokens of a micro-batch, on this rank's part of the matrices
    head_loss                           output layer, loss and their gradients, by response tokens
    accumulate, optim_step              by bytes of float32 parameters
    tp/..., dp/..., pp/send             all-reduce, all-gather, reduce-scatter; a message to the next stage and one back; by bytes

consumes: a model's config.json
waits for: the other ranks, at each collective
is unblocked by: the other ranks' arrival there, or the group's deadline

Each piece of work is done once as `warm_up`, and then measured `repeats` times, alone. A run overlaps some pieces, such as FSDP's
gathers with computing; the user of these timings has to consider that.

Left out: the embedding, casting the weights to `train.dtype`, frozen models.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from asyncflow.engines.base import TrainEngineOptions
from asyncflow.engines.devices import check_device
from asyncflow.engines.families import check_family
from asyncflow.engines.train.accumulate import make_accumulator
from asyncflow.engines.train.model import micro_step
from asyncflow.engines.train.model.attention import ATTENTION_NAME
from asyncflow.engines.train.model.log_probs import Head
from asyncflow.engines.train.model.packing import Packed, pack_thrifty
from asyncflow.engines.train.optimizer import Optimizer
from asyncflow.engines.train.parallel.fsdp import local_part
from asyncflow.engines.train.parallel.ranks import Ranks
from asyncflow.engines.train.parallel.tensor import head_shard, shard_model
from asyncflow.types import Objective, Ragged

# P packed tokens, T response tokens, R responses, H hidden elements, V tokens of the vocabulary.

MESSAGE_BYTES: Final = (4 << 10, 1 << 20, 16 << 20)
"""Message sizes that collectives are timed with: the smallest shows the cost of a call, the largest the cost of a byte."""

Measure = Callable[..., AbstractContextManager[object]]
"""Function `measure(task, tokens=..., bytes=...)` that returns a context whose time is recorded (`Recorder.busy`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Amount:
    """Amount of work to measure: one micro-batch for each entry of `tokens`, its size in packed tokens (about).

    A micro-batch is a prompt and `num_responses` responses, all of equal length. Each piece of work is measured `repeats` times.
    """

    tokens: tuple[int, ...]
    num_responses: int
    repeats: int


def profile_layer(
    model_path: Path, options: TrainEngineOptions, objective: Objective, *, has_reference: bool, amount: Amount, measure: Measure
) -> Mapping[str, Tensor]:
    """Measure one layer of the model on this rank, and return the layer's random weights, float32, whole, on the CPU.

    All ranks of the layout call it with the same arguments. `has_reference`: the objective uses a reference's log-probs.
    `measure` records the times, see `Measure`. Raises `UserError` if a train engine cannot run here.
    """
    check_device(options.device, "train.device")
    torch.set_num_threads(options.num_threads)
    torch.manual_seed(options.seed)
    ranks = Ranks(options.layout, options.device) if options.layout.size > 1 else None
    try:
        device = torch.device(options.device) if ranks is None else ranks.device
        module = _one_layer(model_path)
        weights = {name: parameter.detach().clone() for name, parameter in module.base_model.layers[0].named_parameters()}
        module.to(device, getattr(torch, options.dtype))
        watch = Stopwatch(measure, device, amount.repeats, ranks)
        if ranks is not None and options.layout.tp > 1:
            shard_model(module, ranks.mesh["tp"])
        for num_tokens in amount.tokens:
            packed = _packed(num_tokens, amount.num_responses, module.config.vocab_size, device)
            _time_layer(watch, module, packed)
            _time_head(watch, module, packed, options, objective, has_reference)
        _time_optimizer(watch, module.base_model.layers[0], options)
        if ranks is not None:
            for axis in ("tp", "dp", "pp"):
                _time_collectives(watch, axis, ranks.group(axis), device)
    finally:
        if ranks is not None:
            ranks.leave()
    return weights


class Stopwatch:
    """Stopwatch for work on a device: from the end of all earlier work until the end of the measured work."""

    def __init__(self, measure: Measure, device: torch.device, repeats: int, ranks: Ranks | None) -> None:
        self._measure, self._repeats, self._ranks = measure, repeats, ranks
        self._has_queue = device.type != "cpu"

    def rounds(self) -> range:
        """Numbers of the rounds; round 0 is the warm-up."""
        return range(self._repeats + 1)

    @contextmanager
    def timed(self, task: str, number: int, **counts: int) -> Iterator[None]:
        """Measure the block inside as `task`, or as `warm_up` in round 0; all ranks begin together.

        `number`: the number of the round. `counts`: amounts that are recorded with the time, such as tokens or bytes.
        """
        self._wait()
        with nullcontext() if self._ranks is None else self._ranks.named(f"timing {task}"):
            if self._ranks is not None:
                dist.barrier()
            with self._measure(task if number else "warm_up", **counts):
                yield
                self._wait()

    def time(self, task: str, work: Callable[[], object], **counts: int) -> None:
        """Measure `work` in every round, as `timed` does."""
        for number in self.rounds():
            with self.timed(task, number, **counts):
                work()

    def _wait(self) -> None:
        if self._has_queue:
            torch.accelerator.synchronize()


def _one_layer(model_path: Path) -> Any:
    """Model with the config at the path, but with one layer only and with random weights."""
    config = AutoConfig.from_pretrained(model_path)
    check_family(config.to_dict())
    config.num_hidden_layers = 1
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:1]
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=ATTENTION_NAME).eval()


def _time_layer(watch: Stopwatch, module: Any, packed: Packed) -> None:
    base, layer = module.base_model, module.base_model.layers[0]
    hidden_1PH = torch.randn(
        1, packed.num_tokens, module.config.hidden_size, device=module.device, dtype=module.dtype
    ).requires_grad_()
    positions = packed.positions_P[None]
    rope = base.rotary_emb(hidden_1PH, positions)
    for number in watch.rounds():
        with watch.timed("layer_forward", number, tokens=packed.num_tokens):
            out = layer(hidden_1PH, attention_mask=None, position_ids=positions, position_embeddings=rope, layout=packed.layout)
        gradient = torch.ones_like(out)
        with watch.timed("layer_backward", number, tokens=packed.num_tokens):
            torch.autograd.backward(out, gradient)
        layer.zero_grad()
        hidden_1PH.grad = None


def _time_head(
    watch: Stopwatch, module: Any, packed: Packed, options: TrainEngineOptions, objective: Objective, has_reference: bool
) -> None:
    num_tokens, num_rows = len(packed.targets_T), len(packed.response_lengths)
    device = packed.row_T.device
    hidden_TH = torch.randn(num_tokens, module.config.hidden_size, device=device, dtype=module.dtype).requires_grad_()
    local_VH, shard = head_shard(module.get_output_embeddings().weight)
    head = Head(local_VH.detach().requires_grad_(), options.log_prob_chunk_tokens, shard)
    known = micro_step.Given(
        packed=packed,
        rollout_T=torch.full((num_tokens,), -1.0, device=device),
        mask_T=torch.ones(num_tokens, device=device),
        advantages_T=torch.randn(num_rows, device=device)[packed.row_T],
        row_tokens_R=torch.tensor(packed.response_lengths, device=device, dtype=torch.float32),
        old_T=None,
        is_policy_T=torch.ones(num_tokens, device=device, dtype=torch.bool),
        is_fresh_T=torch.ones(num_tokens, device=device, dtype=torch.bool),
        ref_T=torch.full((num_tokens,), -1.0, device=device) if has_reference else None,
    )
    for number in watch.rounds():
        with watch.timed("head_loss", number, tokens=num_tokens):
            torch.autograd.backward(micro_step.losses([known], objective, hidden_TH, head).total)
        hidden_TH.grad = head.weight_VH.grad = None


def _time_optimizer(watch: Stopwatch, layer: nn.Module, options: TrainEngineOptions) -> None:
    parameters = {name: nn.Parameter(local_part(p).float().clone()) for name, p in layer.named_parameters()}
    num_bytes = sum(parameter.nbytes for parameter in parameters.values())
    sums, optimizer = make_accumulator(options.accumulate, parameters), Optimizer(parameters, options)
    gradients = [torch.randn_like(parameter) for parameter in parameters.values()]
    for number in watch.rounds():
        for parameter, gradient in zip(parameters.values(), gradients, strict=True):
            parameter.grad = gradient.clone()
        with watch.timed("accumulate", number, bytes=num_bytes):
            sums.add()
        with watch.timed("optim_step", number, bytes=num_bytes):
            summed = sums.gradients(1)
            optimizer.update(summed, sums.norm(summed))
            sums.clear()


def _time_collectives(watch: Stopwatch, axis: str, group: dist.ProcessGroup, device: torch.device) -> None:
    """Time the collectives of one axis of the layout, in all its groups at once. Does nothing if a group has one rank."""
    for num_bytes in MESSAGE_BYTES if group.size() > 1 else ():
        part = torch.zeros(-(-num_bytes // 4 // group.size()), device=device)
        whole = torch.zeros(len(part) * group.size(), device=device)
        if axis == "pp":
            watch.time("pp/send", partial(_there_and_back, whole, group), bytes=2 * whole.nbytes)
            continue
        watch.time(f"{axis}/all_reduce", partial(dist.all_reduce, whole, group=group), bytes=whole.nbytes)
        watch.time(f"{axis}/all_gather", partial(dist.all_gather_into_tensor, whole, part, group=group), bytes=whole.nbytes)
        watch.time(f"{axis}/reduce_scatter", partial(dist.reduce_scatter_tensor, part, whole, group=group), bytes=whole.nbytes)


def _there_and_back(message: Tensor, group: dist.ProcessGroup) -> None:
    """Send a message and one back, between ranks 0 and 1, 2 and 3, and so on; a rank without a partner does nothing."""
    rank = group.rank()
    partner = rank ^ 1
    if partner < group.size():
        for is_sender in (rank < partner, rank > partner):
            if is_sender:
                dist.send(message, group=group, group_dst=partner)
            else:
                dist.recv(message, group=group, group_src=partner)


def _packed(num_tokens: int, num_responses: int, vocabulary_size: int, device: torch.device) -> Packed:
    """Packed prompt and responses of equal lengths, with random tokens, about `num_tokens` together."""
    length = max(1, num_tokens // (num_responses + 1))
    rng = np.random.default_rng(0)
    prompt_ids = rng.integers(vocabulary_size, size=length)
    responses = Ragged.from_arrays([rng.integers(vocabulary_size, size=length) for _ in range(num_responses)], "int64")
    return pack_thrifty(prompt_ids, responses, device)
