"""Halves of plans: what one pool alone decides, with its costs and memory.

trainer's halves  dp x tp x pp, responses per micro-batch, checkpointing   --+-- `unbeaten`: those that no other half of the
rollout's halves  devices of an instance, instances, slots                 --+   same devices beats in every cost
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from asyncflow.config import Config
from asyncflow.engines.families import check_layout
from asyncflow.planner import cost
from asyncflow.planner.cost import Figure, Model, Moments
from asyncflow.run.helper_devices import num_on_devices, with_helpers
from asyncflow.run.preparation.memory import GIB, helper_parts, rollout_parts, training_parts, unsharded_parts
from asyncflow.settings import Choice
from asyncflow.types import Layout, UserError


@dataclass(frozen=True, slots=True)
class Half:
    """Half of a plan: the configuration with what one pool decides, the devices and workers of the pool, GiB of each device, costs.

    `times`: numbers of which none may be larger in a better half of the same devices and workers. `side_gib`: of each device of a
    task that is not sharded (`reference`, `critic`, `values`, `reward`), by its name; its passes are as long as the
    trainer's. `helper_gib`: of each device of rollout, if the trainer has helpers there.
    """

    config: Config
    devices: int
    workers: int
    memory_gib: float
    figures: tuple[Figure, ...]
    times: tuple[float, ...]
    side_gib: Mapping[str, float] = field(default_factory=dict)
    helper_gib: float = 0.0


def training_halves(config: Config, model: Model, fields: Mapping[str, Any], most: int) -> Iterator[Half]:
    """Layouts of up to `most` devices, each with every size of micro-batch, with and without checkpointing."""
    train, group, prompts = config.train, config.rollout.group_size, config.train.prompts_per_step // config.train.mini_batches
    longest, moments = longest_prompt(config, model), Moments.of(model.lengths, config.rollout.max_new_tokens)
    pieces = [n for n in range(1, group + 1) if group % n == 0]

    @cache
    def side_work(number: int, is_checkpointing: bool) -> tuple[Mapping[str, float], tuple[Figure, ...]]:
        chosen = {"responses_per_micro_batch": number, "activation_checkpointing": is_checkpointing}
        of_pieces = config.changed(train=chosen)
        shapes, context = model.shapes, longest + config.rollout.max_new_tokens
        parts = unsharded_parts(of_pieces, shapes, model.of_critic or shapes, model.of_reward or shapes, longest, context)
        gib = {name: sum(part.num_bytes for part in each) / GIB for name, each in parts.items()}
        return gib, tuple(cost.others(of_pieces, model))

    for layout in _layouts(fields, most, model.hardware.per_node, prompts, train.engine.name):
        for number in pieces:
            for checkpoints in sorted({train.activation_checkpointing, True}):
                chosen = {"responses_per_micro_batch": number, "activation_checkpointing": checkpoints}
                sharding = {"dp": layout.dp, "tp": layout.tp, "pp": layout.pp}
                tried = config.changed(plan={"train": sharding}, train=chosen)
                helped = with_helpers(tried)
                ways = [helped] if "helpers" in config.plan.shares else [tried, helped] if num_on_devices(helped) else [tried]
                tried = ways[0]
                memory = sum(part.num_bytes for part in training_parts(tried, model.shapes, longest)) / GIB
                figures = tuple(cost.training(tried, model))
                fixed, token, gathers, reference, update = (figure.seconds for figure in figures)
                count = group // number
                in_round = -(-train.pipeline_micro_batches // count) if layout.pp > 1 else 1
                whole = count * (fixed + token * model.lengths.prompt) + group * token * moments.mean
                gib, others = side_work(number, checkpoints)
                times = (whole, gathers / in_round, update, reference, in_round, *(figure.seconds for figure in others))
                for each in ways:
                    num = num_on_devices(each)
                    helper_gib = sum(part.num_bytes for part in helper_parts(each, model.shapes, longest)) / GIB if num else 0.0
                    kind = (0, helper_gib) if num else (1, 0.0)  # neither with helpers nor without beats the other
                    yield Half(each, layout.size, layout.dp, memory, (*figures, *others), (*times, *kind), gib, helper_gib)


def _layouts(fields: Mapping[str, Any], most: int, per_node: int, prompts: int, engine: str) -> Iterator[Layout]:
    """Layouts that the model can be sharded by: tensor parallel within a node, stages by powers of two, data parallel by
    numbers with small factors."""
    is_sharded = engine != "deepspeed"  # which has data parallelism alone
    for tp in powers(min(per_node, most)) if is_sharded else [1]:
        for pp in powers(min(16, most // tp)) if is_sharded else [1]:
            try:
                check_layout(fields, Layout(tp=tp, pp=pp))
            except UserError:
                continue
            for dp in _numbers(min(prompts, most // (tp * pp))):
                yield Layout(dp=dp, tp=tp, pp=pp)


def rollout_halves(config: Config, model: Model, num: int) -> Iterator[Half]:
    """Instances of a model on up to `num` devices: a worker for each of them, or for each node; every power of two of slots, up to
    all that a worker generates of a step."""
    rollout, per_node, prompts = config.rollout, model.hardware.per_node, config.train.prompts_per_step
    context = longest_prompt(config, model) + rollout.max_new_tokens
    is_sharded = rollout.engine.name == "vllm"
    for tp in powers(min(per_node, num)) if is_sharded else [1]:
        if model.shapes.heads % tp:
            continue
        for instances in sorted({1, max(1, min(per_node, num) // tp)}) if is_sharded else [1]:
            workers = min(prompts, num // (tp * instances))
            most = -(-prompts // workers) * rollout.group_size
            for slots in sorted({min(instances * n, most) for n in powers(1024)} | {most}):
                options = {**rollout.engine.options, "tensor_parallel": tp, "instances": instances} if is_sharded else None
                engine = rollout.engine if options is None else Choice(name="vllm", options=options)
                tried = config.changed(rollout={"engine": engine, "num_workers": workers, "num_slots": slots})
                memory = sum(part.num_bytes for part in rollout_parts(tried, model.shapes, context)) / GIB
                figures = tuple(cost.rollout(tried, model))
                times = (*(figure.seconds for figure in figures), 1.0 / tp, 1.0 / slots)
                yield Half(tried, workers * tp * instances, workers, memory, figures, times)


def longest_prompt(config: Config, model: Model) -> int:
    """Tokens that the longest prompt may have: what the configuration says, or twice what is expected."""
    return config.data.max_prompt_tokens or 2 * model.lengths.prompt


def grouped(halves: Sequence[Half]) -> list[list[Half]]:
    """Halves by their devices and workers, which divide the work alike."""
    groups: dict[tuple[int, int], list[Half]] = {}
    for half in halves:
        groups.setdefault((half.devices, half.workers), []).append(half)
    return list(groups.values())


def unbeaten(halves: Sequence[Half]) -> list[Half]:
    """Halves that no other one of them beats: none of its times is larger, and one is less, or it comes first."""
    kept: list[Half] = []
    for half in sorted(halves, key=lambda each: each.times):
        if not any(all(a <= b for a, b in zip(other.times, half.times, strict=True)) for other in kept):
            kept.append(half)
    return kept


def powers(most: int) -> list[int]:
    """Powers of two up to `most`."""
    return [1 << i for i in range(most.bit_length()) if 1 << i <= most]


def _numbers(most: int) -> list[int]:
    """Powers of two, three times a power of two, and all numbers up to 8."""
    return sorted(n for n in {*range(1, 9), *powers(most), *(3 * n for n in powers(most))} if n <= most)
