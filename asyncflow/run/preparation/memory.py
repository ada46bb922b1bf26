"""Memory that a run takes of its devices, by arithmetic: `asyncflow train CONFIG --dry-run` prints it. No torch, and no model.

    shapes (config.json) + layout, dtypes, lengths (the configuration) --> bytes by what they are for, per device of each kind

The formulas are in docs/memory.md. Weights, sums and states are exact; activations are an estimate for transformers' own modules,
and what a backend keeps for itself (a CUDA context, fragments, NCCL's buffers) is not in it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from asyncflow.config import Config, LayoutConfig
from asyncflow.devices import CPU, kind_of
from asyncflow.engines.families import DECODED, Family, head_dim
from asyncflow.loops.samples import VALUES_TASK
from asyncflow.model_folder import read_json
from asyncflow.run.factories import critic_folder, make_algorithm, max_retained, tasks_before_training, tokens_per_pass
from asyncflow.run.helper_devices import num_critic_helpers, num_on_devices, num_passing
from asyncflow.types import LoraSpec, UserError

_BYTES: Final = {"float32": 4, "bfloat16": 2}
_LOGIT_COPIES: Final = 3
"""Logits, their probabilities and their gradient."""
GIB: Final = 1 << 30
COPIED_BYTES: Final = GIB
"""Largest copy of keys and values in the embedded engine on an accelerator, unless one slot has more
(`engines/rollout/device_cache.py`)."""


@dataclass(frozen=True, slots=True)
class Shapes:
    """Shapes of a causal language model. `vocabulary` V, `hidden` d, `layers` L, `heads` h, `kv_heads` k, `head_dim` c, `wide`
    f."""

    vocabulary: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    wide: int
    is_tied: bool
    has_qkv_bias: bool
    has_qk_norm: bool
    counted: int | None = None
    """Parameters of the model itself, where somebody has counted them: the formulas are those of Llama and its like."""
    counted_adapter: int | None = None
    """Parameters of the adapter, likewise."""
    is_fused: bool = False
    """Whether q, k and v are one matrix, and gate and up another."""

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> Shapes:
        """Shapes of a model from the fields of its `config.json`. Raises `UserError` naming a field that is not there."""
        needed = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "model_type")
        if missing := [name for name in needed if name not in fields]:
            raise UserError(f"the model's config.json has no {', '.join(missing)}, which its size follows from")
        heads = fields["num_attention_heads"]
        family = DECODED.get(fields["model_type"], Family("another"))  # one that a user's own engine trains
        return cls(
            vocabulary=fields["vocab_size"],
            hidden=fields["hidden_size"],
            layers=fields["num_hidden_layers"],
            heads=heads,
            kv_heads=fields.get("num_key_value_heads") or heads,
            head_dim=head_dim(fields),
            wide=fields["intermediate_size"],
            is_tied=bool(fields.get("tie_word_embeddings", False)),
            has_qkv_bias=family.has_qkv_bias or bool(fields.get("attention_bias", False)),
            has_qk_norm=family.has_qk_norm,
            is_fused=family.is_fused,
        )

    @property
    def of_layer(self) -> int:
        """Parameters of one layer: attention's four matrices, the MLP's three, two norms; biases and norms of heads if any."""
        queries, others = self.heads * self.head_dim, self.kv_heads * self.head_dim
        matrices = 2 * self.hidden * queries + 2 * self.hidden * others + 3 * self.hidden * self.wide
        biases = (queries + 2 * others) * self.has_qkv_bias
        return matrices + biases + 2 * self.hidden + 2 * self.head_dim * self.has_qk_norm

    @property
    def of_vocabulary(self) -> int:
        """Parameters of the embedding, and of the head as many where it is another matrix."""
        return self.vocabulary * self.hidden

    @property
    def parameters(self) -> int:
        """Number of parameters; a tied head counts once."""
        if self.counted is not None:
            return self.counted
        return self.layers * self.of_layer + self.of_vocabulary * (1 if self.is_tied else 2) + self.hidden

    def of_adapter(self, lora: LoraSpec) -> int:
        """Parameters of a low-rank adapter: rank x (inputs + outputs) of each target."""
        if self.counted_adapter is not None:
            return self.counted_adapter
        queries, others = self.heads * self.head_dim, self.kv_heads * self.head_dim
        sides = {"o_proj": queries + self.hidden, "down_proj": self.wide + self.hidden}
        if self.is_fused:
            sides |= {"qkv_proj": self.hidden + queries + 2 * others, "gate_up_proj": self.hidden + 2 * self.wide}
        else:
            sides |= {"q_proj": self.hidden + queries} | dict.fromkeys(("k_proj", "v_proj"), self.hidden + others)
            sides |= dict.fromkeys(("gate_proj", "up_proj"), self.hidden + self.wide)
        names = {name.rpartition(".")[2] for name in lora.targets} or set(sides)
        return self.layers * lora.rank * sum(size for name, size in sides.items() if name in names)

    def of_stage(self, num_stages: int) -> int:
        """Parameters of the largest stage of a pipeline: ceil(L / stages) layers, and the embedding or the head."""
        if num_stages == 1:
            return self.parameters
        return -(-self.layers // num_stages) * self.of_layer + self.of_vocabulary + self.hidden

    def kv_bytes_per_token(self, num_bytes: int) -> int:
        """Keys and values of all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * num_bytes


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Bytes on each device of a kind, and how they come about."""

    name: str
    num_bytes: float
    how: str


def training_parts(config: Config, shapes: Shapes, prompt_tokens: int) -> list[MemoryUse]:
    """Per device that trains, for the built-in engine. `prompt_tokens`: of the longest prompt."""
    train, layout, algorithm = config.train, config.layout, make_algorithm(config)
    stage = shapes.of_stage(layout.pp)
    mine = stage / (layout.tp * layout.dp)
    share = f"{stage:,} / (tp {layout.tp} x dp {layout.dp}) = {mine:,.0f} parameters"
    sum_bytes = 8 if train.accumulate == "exact" else 4
    parts = []
    if (lora := config.lora) is None:
        parts.append(MemoryUse("weights", 4 * mine, f"4 B x {share}"))
    else:
        b, of_stage = _BYTES[train.dtype], shapes.of_adapter(lora) * -(-shapes.layers // layout.pp) / shapes.layers
        parts.append(MemoryUse("base", b * mine, f"{b} B x {share}, which old policy and reference share"))
        mine = of_stage / (layout.tp * layout.dp)
        parts.append(MemoryUse("weights", 4 * mine, f"4 B x {mine:,.0f} parameters of the adapter"))
    parts += [
        MemoryUse("gradient sums", sum_bytes * mine, f"{sum_bytes} B each (train.accumulate: {train.accumulate})"),
    ]
    if train.offload_optimizer:
        parts.append(MemoryUse("optimiser state", 0.0, f"in host memory: {8 * mine / GIB:.1f} GiB a device"))
    else:
        parts.append(MemoryUse("optimiser state", 8 * mine, "AdamW's two moments, 8 B each"))
    frozen_bytes = _BYTES[train.frozen_dtype or train.dtype]
    names = ["old policy"] * (train.old in ("step_start", "previous"))
    names += ["reference"] * (algorithm.needs_reference and train.reference == "fused")
    for name in names if lora is None else ():
        at = 0.0 if train.offload else frozen_bytes * mine
        parts.append(MemoryUse(name, at, "in host memory (train.offload)" if train.offload else f"{frozen_bytes} B each"))
    tokens = longest_pass_tokens(config, shapes, prompt_tokens)
    chunk = min(tokens, train.log_prob_chunk_tokens)
    logits = _LOGIT_COPIES * 4 * chunk * shapes.vocabulary / layout.tp
    parts.append(_computed_weights(config, shapes, stage))
    of_pass = [
        _activations(config, shapes, tokens),
        MemoryUse("logits", logits, f"{_LOGIT_COPIES} x 4 B x {chunk:,} tokens x {shapes.vocabulary:,} / tp {layout.tp}"),
    ]
    return _with_helpers(parts + of_pass, num_passing(config) - num_on_devices(config))


def _with_helpers(parts: list[MemoryUse], count: int) -> list[MemoryUse]:
    """Parts of a device, and of so many helpers on its cores: each has sums of its own, and computes a pass."""
    each = sum(part.num_bytes for part in parts if part.name in ("gradient sums", "activations", "logits"))
    why = f"{count} x gradient sums and what a pass takes (train.helpers)"
    return parts + [MemoryUse("helpers", count * each, why)] * (count > 0)


def helper_parts(config: Config, shapes: Shapes, prompt_tokens: int) -> list[MemoryUse]:
    """Per device of a helper that is on another one than the trainer: its weights, sums and passes, without an optimiser."""
    return [part for part in training_parts(config, shapes, prompt_tokens) if part.name != "optimiser state"]


def micro_batch_tokens(config: Config, prompt_tokens: int) -> int:
    """Tokens of the longest micro-batch: the prompt once, where it is shared, and its responses at full length."""
    pieces = config.train.responses_per_micro_batch or config.rollout.group_size
    return prompt_tokens + pieces * config.rollout.max_new_tokens


def longest_pass_tokens(config: Config, shapes: Shapes, prompt_tokens: int) -> int:
    """Tokens of the longest pass: the longest micro-batch, or as many of those of a step as a pass takes."""
    longest, most = micro_batch_tokens(config, prompt_tokens), tokens_per_pass(config, {"hidden_size": shapes.hidden})
    pieces = -(-config.rollout.group_size // (config.train.responses_per_micro_batch or config.rollout.group_size))
    return max(longest, min(most or 0, config.train.prompts_per_step * pieces * longest))


def _computed_weights(config: Config, shapes: Shapes, stage: int) -> MemoryUse:
    """Copy of the weights that passes compute with, where it is not the weights themselves."""
    train, layout = config.train, config.layout
    b = _BYTES[train.dtype]
    largest = max(shapes.of_layer, shapes.of_vocabulary) / layout.tp
    if layout.dp > 1:
        ends = 1 if shapes.is_tied or layout.pp > 1 else 2  # embedding and head are one unit
        largest = max(shapes.of_layer, ends * shapes.of_vocabulary) / layout.tp
        gathered = f"2 gathered units of {largest:,.0f} parameters in {train.dtype} (FSDP), and "
        if train.accumulate == "exact":
            how = "of one the gradient, its exact sums, and as many float64 on their way to other ranks"
            return MemoryUse("gathered weights", (3 * b + 16) * largest, gathered + how)
        return MemoryUse("gathered weights", (2 * b + 4) * largest, gathered + "the gradient of one in float32")
    if train.dtype == "float32":
        return MemoryUse("gathered weights", 0.0, "none: dp 1 computes with the weights themselves")
    if layout.size > 1 and train.activation_checkpointing:
        return MemoryUse("weights in bfloat16", b * largest, "the largest unit's (train.activation_checkpointing)")
    return MemoryUse("weights in bfloat16", b * stage / layout.tp, f"a copy, cast once an update, {b} B each")


def _activations(config: Config, shapes: Shapes, tokens: int) -> MemoryUse:
    """Bytes that the backward pass of the longest micro-batch needs."""
    train, layout = config.train, config.layout
    b, layers = _BYTES[train.dtype], -(-shapes.layers // layout.pp)
    queries, others = shapes.heads * shapes.head_dim, shapes.kv_heads * shapes.head_dim
    whole = 6 * shapes.hidden + (3 * queries + 4 * others + 4 * shapes.wide) / layout.tp
    pieces = -(-config.rollout.group_size // (train.responses_per_micro_batch or config.rollout.group_size))
    together = -(-train.pipeline_micro_batches // pieces) * pieces  # whole groups
    in_flight = min(layout.pp, together) if layout.pp > 1 else 1
    if train.activation_checkpointing:
        num_bytes = b * tokens * (in_flight * layers * shapes.hidden + whole)
        how = f"{b} B x {tokens:,} tokens x ({in_flight} x {layers} layers x {shapes.hidden:,} + one layer's {whole:,.0f})"
    else:
        num_bytes = b * tokens * in_flight * layers * whole
        how = f"{b} B x {tokens:,} tokens x {in_flight} x {layers} layers x {whole:,.0f}"
    return MemoryUse("activations", num_bytes, how)


def rollout_parts(config: Config, shapes: Shapes, context: int) -> list[MemoryUse]:
    """Per device that generates, all slots being at the end of their context."""
    rollout, chosen = config.rollout, config.rollout.engine
    is_sharded = chosen.name == "vllm"
    tp = int(chosen.options.get("tensor_parallel", 1)) if is_sharded else 1
    instances = int(chosen.options.get("instances", 1)) if is_sharded else 1
    b, slots = _BYTES[rollout.dtype], -(-(rollout.num_slots + config.num_parked) // instances)
    kv = shapes.kv_bytes_per_token(b) / min(tp, shapes.kv_heads)
    how = f"{kv:,.0f} B a token x {slots:,} slots x {context:,} tokens"
    parts = [
        MemoryUse("weights", b * shapes.parameters / tp, f"{b} B x {shapes.parameters:,} / tensor_parallel {tp}"),
        MemoryUse("keys and values", kv * slots * context, how + (": at most; vLLM takes what there is" if is_sharded else "")),
    ]
    if chosen.name == "slots" and kind_of(rollout.device) != CPU:
        of_row = kv / shapes.layers * context
        copied = min(of_row * rollout.num_slots, max(of_row, COPIED_BYTES))
        how = f"of one layer's, which a decode step attends to: {rollout.num_slots:,} slots' {of_row:,.0f} B, or {COPIED_BYTES:,} B"
        parts.append(MemoryUse("copies of these", copied, how))
    return parts


def reference_parts(config: Config, shapes: Shapes, prompt_tokens: int) -> list[MemoryUse]:
    """Per device of a reference that is a task of its own, which is not sharded. `prompt_tokens`: of the longest prompt."""
    train = config.train
    b, tokens = _BYTES[train.frozen_dtype or train.dtype], micro_batch_tokens(config, prompt_tokens)
    width, chunk = _width(shapes), min(tokens, train.log_prob_chunk_tokens)
    kept = MemoryUse("weights", b * shapes.parameters, f"{b} B x {shapes.parameters:,}")
    if train.offload:
        largest = max(shapes.of_layer, shapes.of_vocabulary)
        kept = MemoryUse("weights", b * largest, f"in host memory (train.offload), but for the largest unit's {largest:,}")
    return [
        kept,
        MemoryUse("activations", b * tokens * width, f"{b} B x {tokens:,} tokens x one layer's {width:,}"),
        MemoryUse("logits", 4 * chunk * shapes.vocabulary, f"4 B x {chunk:,} tokens x {shapes.vocabulary:,}"),
    ]


def critic_parts(config: Config, shapes: Shapes, prompt_tokens: int) -> list[MemoryUse]:
    """Per device of a critic, which is trained on one and has no frozen models. `shapes`: of its own model, whose output layer it
    has not unless that is the embedding. `prompt_tokens`: of the longest prompt."""
    plan = {"train": LayoutConfig(), "shares": {}}
    train = {"old": "current", "reference": "task", "helpers": 0, "device": config.train.critic.device}
    alone = config.changed(train=train, model={"lora": None}, plan=plan)
    parts = [part for part in training_parts(alone, replace(shapes, is_tied=True), prompt_tokens) if part.name != "logits"]
    return _with_helpers(parts, num_critic_helpers(config))


def values_parts(config: Config, shapes: Shapes, prompt_tokens: int) -> list[MemoryUse]:
    """Per device of a worker of the critic's values, which has a copy of it. Arguments as of `critic_parts`."""
    tokens, width = micro_batch_tokens(config, prompt_tokens), _width(shapes)
    size = replace(shapes, is_tied=True).parameters
    return [
        MemoryUse("weights", 4 * size, f"4 B x {size:,}"),
        *([MemoryUse("weights in bfloat16", 2 * size, f"2 B x {size:,}")] if config.train.dtype == "bfloat16" else []),
        MemoryUse("activations", 4 * tokens * width, f"4 B x {tokens:,} tokens x one layer's {width:,}"),
    ]


def reward_model_parts(config: Config, shapes: Shapes, context: int) -> list[MemoryUse]:
    """Per device of a reward model, which reads a prompt with its response, `context` tokens at most. `shapes`: its own."""
    assert config.reward.model is not None, "the run has a reward model"
    b, width, size = _BYTES[config.reward.model.dtype], _width(shapes), replace(shapes, is_tied=True).parameters
    return [
        MemoryUse("weights", b * size, f"{b} B x {size:,}"),
        MemoryUse("activations", b * context * width, f"{b} B x {context:,} tokens x one layer's {width:,}"),
    ]


def _width(shapes: Shapes) -> int:
    """Elements of a token that one layer's forward pass holds."""
    queries, others = shapes.heads * shapes.head_dim, shapes.kv_heads * shapes.head_dim
    return 6 * shapes.hidden + 3 * queries + 4 * others + 4 * shapes.wide


def host_parts(config: Config, shapes: Shapes, max_staleness: int) -> list[MemoryUse]:
    """Parts of the memory of the first trainer's machine, and of each machine that generates."""
    b = _BYTES[config.weight_sync.dtype or "float32"]
    kept = max_staleness + 2 + max_retained(config)
    size = shapes.parameters if config.lora is None else shapes.of_adapter(config.lora)
    return [MemoryUse("published weights", b * size * kept, f"{b} B x {size:,} x {kept} versions")]


def checkpoint_bytes(config: Config, shapes: Shapes, max_staleness: int) -> int:
    """Bytes of a checkpoint, at most: of each model that is trained the weights, two moments and an old policy in float32; and
    published weights of older versions. Rows are left out."""
    size = shapes.parameters if config.lora is None else shapes.of_adapter(config.lora)
    of_critic = 16 * shapes.parameters if make_algorithm(config).critic is not None else 0
    return (16 + 4 * (max_staleness + max_retained(config))) * size + of_critic


def own_shapes(folder: Path | None, otherwise: Shapes | None) -> Shapes | None:
    """Shapes of the model in a folder, or of another one where there is none."""
    fields = {} if folder is None else read_json(folder / "config.json")
    return Shapes.of(fields) if fields else otherwise


def parts_by_task(config: Config, shapes: Shapes, prompt_tokens: int, context: int) -> dict[str, list[MemoryUse]]:
    """Parts of the memory of each device, by the task that it has. A reward model is left out whose folder is not here."""
    reward, of_critic = config.reward.model, own_shapes(critic_folder(config), shapes) or shapes
    of_reward = None if reward is None else own_shapes(Path(reward.path), None)
    found = {"train": training_parts(config, shapes, prompt_tokens), "rollout": rollout_parts(config, shapes, context)}
    if num_on_devices(config):
        found["helpers"] = helper_parts(config, shapes, prompt_tokens)
    found |= unsharded_parts(config, shapes, of_critic, of_reward, prompt_tokens, context)
    if not config.plan.values.num_workers:
        found.pop("values", None)
    return found


def unsharded_parts(
    config: Config, shapes: Shapes, of_critic: Shapes, of_reward: Shapes | None, prompt_tokens: int, context: int
) -> dict[str, list[MemoryUse]]:
    """Parts of the memory of each device, by its task, where that is not sharded. `of_reward`: None: the reward model is
    left out."""
    tasks, found = tasks_before_training(config), dict[str, list[MemoryUse]]()
    if "reference" in tasks:
        found["reference"] = reference_parts(config, shapes, prompt_tokens)
    if VALUES_TASK in tasks:
        found["critic"] = critic_parts(config, of_critic, prompt_tokens)
        found["values"] = values_parts(config, of_critic, prompt_tokens)
    if config.reward.model is not None and of_reward is not None:
        found["reward"] = reward_model_parts(config, of_reward, context)
    return found


def check_shared(config: Config, parts: Mapping[str, Sequence[MemoryUse]], device_bytes: float) -> None:
    """Check that tasks that share devices fit there together. `parts`: of each device, by task. `device_bytes`: that may be used of
    one. Raises `UserError`."""
    for other, together in shared_sums(config, parts).items():
        if together > device_bytes:
            guests = [task for task, host in config.plan.shares.items() if host == other]
            raise UserError(
                f"plan.shares: {' and '.join([other, *guests])} need {together / GIB:.2f} GiB of a device together, and "
                f"{device_bytes / GIB:.2f} GiB can be used: leave {guests[0]} out there"
            )


def shared_sums(config: Config, parts: Mapping[str, Sequence[MemoryUse]]) -> dict[str, float]:
    """Bytes of a device that several tasks share, by the task that has it: of each of them one worker is on it, at most."""
    size = {task: sum(part.num_bytes for part in each) for task, each in parts.items()}
    found: dict[str, float] = {}
    for task, other in config.plan.shares.items():
        found[other] = found.get(other, size.get(other, 0.0)) + size.get(task, 0.0)
    return found


def lines(
    config: Config,
    shapes: Shapes,
    *,
    prompt_tokens: int,
    context: int,
    max_staleness: int,
    device_bytes: float | None = None,
) -> list[str]:
    """Lines that `--dry-run` prints: for each kind of device a line for each part, and their sum, in GiB.

    `device_bytes`: that may be used of a device, where it is known. Raises `UserError` where tasks that share one do not fit.
    """
    layout, parts = config.layout, parts_by_task(config, shapes, prompt_tokens, context)
    titles = {
        "train": f"each of {layout.size} that train (dp {layout.dp} x tp {layout.tp} x pp {layout.pp})",
        "rollout": "each that generates",
        "helpers": "each helper of the trainer",
        "reference": "each of the reference",
        "critic": "the critic",
        "values": "each of its values",
        "reward": "each reward model",
    }
    if device_bytes is not None:
        check_shared(config, parts, device_bytes)
    tables = [(titles[task], each) for task, each in parts.items()]
    tables.append(("the host", host_parts(config, shapes, max_staleness)))
    shown = [f"memory     {shapes.parameters:,} parameters; GiB per device, activations estimated (docs/memory.md)"]
    for title, each in tables:
        total = sum(part.num_bytes for part in each)
        shown.append(f"  {total / GIB:8.2f}  {title}")
        shown += [f"    {part.num_bytes / GIB:8.2f}  {part.name}: {part.how}" for part in each]
    for other, together in shared_sums(config, parts).items():
        guests = [task for task, host in config.plan.shares.items() if host == other]
        shown.append(f"  {together / GIB:8.2f}  {' and '.join([other, *guests])} on one device (plan.shares)")
    return shown
