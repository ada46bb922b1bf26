"""Seconds of each piece of a run's work, from the shapes of its model and its sharding: amounts of work, times what a unit takes.

    Config + Model --training, rollout, weights--> Figures: Work x Rates, by field of `Costs` --joined--> Estimate

Everything is a sum, and nothing hides behind anything else but `GATHERS_EXPOSED`, so each cost is a straight line in its amount, as
`engines/sleeping/` has it: a decode step reads the weights once, and keys and values for each token that is attended to; a
micro-batch costs a call and each of its tokens, a round the gathers of its micro-batches. Left out: embeddings, norms, and sampling
beside the matrices.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from statistics import NormalDist, fmean
from typing import Any, Final, Literal

from asyncflow.config import Config, LayoutConfig
from asyncflow.engines.cores import Contention
from asyncflow.engines.costs import Costs, Lengths
from asyncflow.planner.hardware import Hardware, Rates
from asyncflow.run.device_shares import devices_each
from asyncflow.run.factories import make_algorithm
from asyncflow.run.preparation.memory import Shapes

CostOrigin = Literal["analytic", "measured", "hybrid", "assumed"]
WorkAmounts = dict[str, float]
"""Amounts of work by resource (`hardware.RESOURCES`)."""

BYTES: Final = {"float32": 4, "bfloat16": 2}
GATHERS_EXPOSED: Final = 0.5
"""Share of FSDP's gathers and scatters that no computation hides. An assumption."""
OPTIMISER_BYTES: Final = 28
"""AdamW reads weight, gradient and two moments of a parameter, and writes all but the gradient, 4 bytes each."""
BACKWARD: Final = 2.0
"""Backward pass of a matrix product, in forward passes."""
ATTENTION_BACKWARD: Final = 2.5
"""The same of attention, whose scores are computed again."""
ALL_REDUCES: Final = 2
"""All-reduces of a layer under tensor parallelism in a forward pass; a backward pass has as many."""
UNIT: Final = {"unit_seconds": 2.8e-4, "unit_row_seconds": 2.5e-6, "unit_byte_seconds": 2.5e-10}
"""Seconds of a storage unit for a request, each of its rows, and each byte: `benchmarks/transfer_queue.py` on two cores (3,554 puts
of one row a second; 1,024 small rows at 1.6 GB/s; rows of 1 MiB at 4.1 GB/s). Assumptions on any other machine."""
_QUANTILES: Final = 512


@dataclass(frozen=True, slots=True)
class Moments:
    """Means over responses: of their tokens, and of the squares of these."""

    mean: float
    mean_square: float

    @classmethod
    @cache
    def of(cls, lengths: Lengths, most: int) -> Moments:
        """Moments of the distribution that `Lengths.draw` draws from, cut off at `most` tokens."""
        normal = NormalDist(math.log(lengths.response_median), max(lengths.response_sigma, 1e-9))
        drawn = [min(max(1.0, math.exp(normal.inv_cdf((i + 0.5) / _QUANTILES))), most) for i in range(_QUANTILES)]
        return cls(fmean(drawn), fmean(tokens * tokens for tokens in drawn))


@dataclass(frozen=True, slots=True)
class Figure:
    """Number of the costs: its field, its origin, and the work that it stands for."""

    name: str
    seconds: float
    origin: CostOrigin
    work: WorkAmounts = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Estimate:
    """Costs of a run, and where each of their numbers is from."""

    costs: Costs
    figures: tuple[Figure, ...]


@dataclass(frozen=True)
class Model:
    """Inputs of costs besides the configuration: the model's shapes, expected lengths, the hardware, and measurements.

    `profiled`: rates that a profile has given, in place of the hardware's. `factors`: by field, the seconds that a run has
    measured, over those computed for its own layout. `measured`: seconds that do not depend on a layout.
    """

    shapes: Shapes
    lengths: Lengths
    hardware: Hardware
    profiled: Rates = field(default_factory=dict)
    factors: Mapping[str, float] = field(default_factory=dict)
    measured: Mapping[str, float] = field(default_factory=dict)
    contention: Contention | None = None
    of_critic: Shapes | None = None
    """Shapes of a critic's own model; None: those of the policy's."""
    of_reward: Shapes | None = None
    """Shapes of a reward model; None: those of the policy's."""

    def figure(self, name: str, work: WorkAmounts, dtype: str) -> Figure:
        """Seconds of this work, in this dtype, and what they rest on."""
        rates = {**self.hardware.rates(dtype), **self.profiled}
        is_profiled = any(self.profiled.get(resource) and amount for resource, amount in work.items())
        origin: CostOrigin = "hybrid" if is_profiled or name in self.factors else "analytic"
        return Figure(name, seconds(work, rates) * self.factors.get(name, 1.0), origin, work)

    @cached_property
    def attention_flops(self) -> float:
        """Operations of one query and one key over all layers: a score and its part of the output."""
        return self.attention_of(self.shapes)

    @staticmethod
    def attention_of(shapes: Shapes) -> float:
        """See `attention_flops`, of a model with these shapes."""
        return 4.0 * shapes.heads * shapes.head_dim * shapes.layers


def seconds(work: WorkAmounts, rates: Rates) -> float:
    """Seconds of some work: the sum over resources of amount x seconds of a unit."""
    return sum(amount * rates[resource] for resource, amount in work.items())


def added(*works: WorkAmounts) -> WorkAmounts:
    """Sum of works, by resource."""
    total: WorkAmounts = {}
    for work in works:
        for resource, amount in work.items():
            total[resource] = total.get(resource, 0.0) + amount
    return total


def all_reduce(num_bytes: float, ranks: int) -> WorkAmounts:
    """Ring all-reduce of so many bytes within a node: every rank sends each byte twice, but for its own share."""
    return {"link_bytes": 2 * num_bytes * (ranks - 1) / ranks}


def hops(ranks: int) -> WorkAmounts:
    """Latency of a ring all-reduce, however few bytes it has."""
    return {"messages": 2.0 * (ranks - 1)}


def times(factor: float, work: WorkAmounts) -> WorkAmounts:
    """Work, so many times."""
    return {resource: factor * amount for resource, amount in work.items()}


def estimate(config: Config, model: Model) -> Estimate:
    """Costs of a run of this configuration."""
    return joined(model, [*training(config, model), *rollout(config, model), *weights(config, model), *others(config, model)])


def joined(model: Model, figures: Iterable[Figure]) -> Estimate:
    """Costs made of these figures, of measured ones where there are any, and of assumptions for the rest."""
    kept = [figure for figure in figures if figure.name not in model.measured]
    kept += [Figure(name, value, "measured") for name, value in sorted(model.measured.items())]
    assumed = {"reward_seconds": Costs().reward_seconds, **UNIT}
    kept += [Figure(name, value, "assumed") for name, value in assumed.items() if name not in model.measured]
    values: dict[str, Any] = {figure.name: figure.seconds for figure in kept}
    return Estimate(Costs(**values, lengths=model.lengths, load_seconds=0.0, contention=model.contention), tuple(kept))


def training(config: Config, model: Model) -> list[Figure]:
    """Micro-batches, log-probs of the reference's task, and the update, for one rank's part under `plan.train`."""
    train, layout, shapes = config.train, config.layout, model.shapes
    b, stage, layers = BYTES[train.dtype], shapes.of_stage(layout.pp), -(-shapes.layers // layout.pp)
    moments = Moments.of(model.lengths, config.rollout.max_new_tokens)
    pieces = train.responses_per_micro_batch or config.rollout.group_size
    prompt, group = model.lengths.prompt, config.rollout.group_size
    tokens = prompt + pieces * moments.mean
    pairs = prompt * prompt / 2 + pieces * (prompt * moments.mean + moments.mean_square / 2)
    has_reference = train.reference == "fused" and make_algorithm(config).needs_reference
    frozen = (train.old in ("step_start", "previous")) + has_reference
    forwards = 1 + train.activation_checkpointing + frozen
    linear = 2.0 * (layers * shapes.of_layer + shapes.of_vocabulary)
    attention = model.attention_flops / layout.pp * pairs / tokens
    token = added(
        {"flops": (linear * (forwards + BACKWARD) + attention * (forwards + ATTENTION_BACKWARD)) / layout.tp},
        times(ALL_REDUCES * layers * (forwards + 1), all_reduce(b * shapes.hidden, layout.tp)),
    )
    fixed = added({"passes": float(forwards + 1)}, times(ALL_REDUCES * layers * (forwards + 1), hops(layout.tp)))
    mine, reach = stage / layout.tp, _reach(layout.size, model.hardware)
    together, bubble = -(-group // pieces), 1.0
    if layout.pp > 1:
        together *= -(-train.pipeline_micro_batches // together)  # whole groups
        bubble = (together + layout.pp - 1) / together
        token = added(token, {reach: 2.0 * b * shapes.hidden / layout.tp})
    exchanged = mine * (layout.dp - 1) / layout.dp  # parameters that a data-parallel rank lacks
    is_sharded = train.engine.name != "megatron"  # which keeps all of them, and exchanges gradients and weights once an update
    gathered = together * (b * (forwards + 1) + 4) * exchanged if is_sharded else 0.0  # by each micro-batch of a round
    owned = mine / layout.dp
    update: WorkAmounts = {"memory_bytes": OPTIMISER_BYTES * owned, "launches": 1.0}
    if not is_sharded and layout.dp > 1:
        update[reach] = (4.0 + b) * exchanged
    if train.offload_optimizer:
        update["host_bytes"] = 16.0 * owned
    reference = {"flops": 2.0 * shapes.parameters + model.attention_flops * pairs / tokens}
    return [
        model.figure("forward_backward_seconds", times(bubble, fixed), train.dtype),
        model.figure("train_token_seconds", times(bubble, token), train.dtype),
        model.figure("collectives_seconds", {reach: GATHERS_EXPOSED * gathered}, train.dtype),
        model.figure("reference_token_seconds", reference, train.dtype),
        model.figure("optim_step_seconds", update, train.dtype),
    ]


def rollout(config: Config, model: Model) -> list[Figure]:
    """Decode steps and prefills of one worker, over its instances, which share its slots evenly."""
    shapes, tp, instances = model.shapes, *devices_of_rollout(config)
    b, dtype = BYTES[config.rollout.dtype], config.rollout.dtype
    prompt = model.lengths.prompt
    exchanged = times(ALL_REDUCES * shapes.layers, all_reduce(b * shapes.hidden, tp))
    step = added({"memory_bytes": b * shapes.parameters / tp, "launches": 1.0}, times(ALL_REDUCES * shapes.layers, hops(tp)))
    slot = added({"flops": 2.0 * shapes.parameters / tp}, exchanged)
    context = {"flops": model.attention_flops / tp, "memory_bytes": shapes.kv_bytes_per_token(b) / min(tp, shapes.kv_heads)}
    prefill = added({"flops": (2.0 * shapes.parameters + model.attention_flops * prompt / 2) / tp}, exchanged)
    return [
        model.figure("decode_step_seconds", step, dtype),
        model.figure("decode_slot_seconds", times(1 / instances, slot), dtype),
        model.figure("decode_context_seconds", times(1 / instances, context), dtype),
        model.figure("prefill_token_seconds", times(1 / instances, prefill), dtype),
    ]


def weights(config: Config, model: Model) -> list[Figure]:
    """Publication, fetch and installation of a version."""
    layout, (tp, _), sync = config.layout, devices_of_rollout(config), config.weight_sync
    version = float(BYTES[sync.dtype or "float32"] * model.shapes.parameters)
    nodes = -(-config.rollout.num_workers * devices_each(config) // model.hardware.per_node)
    publish = added({"host_bytes": version}, {_reach(layout.size, model.hardware): version * (layout.size - 1) / layout.size})
    if sync.name == "shared_memory":
        fetch: WorkAmounts = {"host_bytes": version}  # its hash is computed
    else:  # a broadcast passes each byte on; TCP sends it to one node after another
        fetch = {"network_bytes": version * (1 if sync.name == "collective" else nodes)}
    install = {"host_bytes": BYTES[config.rollout.dtype] * model.shapes.parameters / tp}
    works = {"publish_seconds": publish, "fetch_seconds": fetch, "install_seconds": install}
    return [model.figure(name, work, config.train.dtype) for name, work in works.items()]


def others(config: Config, model: Model) -> list[Figure]:
    """Critic, its values, and the reward model, each on one device: what no layout of the trainer or of rollout decides."""
    figures = []
    if make_algorithm(config).critic is not None:
        shapes = replace(model.of_critic or model.shapes, vocabulary=0)  # the value head is a vector
        alone = config.changed(plan={"train": LayoutConfig()}, train={"old": "current", "reference": "task"})
        names = {
            "forward_backward_seconds": "critic_seconds",
            "train_token_seconds": "critic_token_seconds",
            "reference_token_seconds": "value_token_seconds",
            "optim_step_seconds": "critic_optim_step_seconds",
        }
        works = {each.name: each.work for each in training(alone, replace(model, shapes=shapes))}
        figures += [model.figure(name, works[of], alone.train.dtype) for of, name in names.items()]
    if (reward := config.reward.model) is not None:
        shapes = model.of_reward or model.shapes
        moments = Moments.of(model.lengths, config.rollout.max_new_tokens)
        read = model.lengths.prompt + moments.mean
        pairs = (model.lengths.prompt**2 + 2 * model.lengths.prompt * moments.mean + moments.mean_square) / 2
        attended = model.attention_of(shapes) * pairs / read
        figures.append(model.figure("reward_model_token_seconds", {"flops": 2.0 * shapes.parameters + attended}, reward.dtype))
    return figures


def devices_of_rollout(config: Config) -> tuple[int, int]:
    """Devices of one instance, and instances of one worker."""
    options = config.rollout.engine.options
    return int(options.get("tensor_parallel", 1)), int(options.get("instances", 1))


def _reach(num_devices: int, hardware: Hardware) -> str:
    """Resource that ranks of so many devices exchange bytes over: a node's links, or the network between nodes."""
    return "link_bytes" if num_devices <= hardware.per_node else "network_bytes"
