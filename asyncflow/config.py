"""Configuration of a run: its sections, their keys and defaults, and which values are possible. settings.py reads them and
describes mistakes.

Unknown or contradictory keys are errors of one sentence.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import psutil
from pydantic import AfterValidator, Field, PositiveFloat, PositiveInt, model_validator

from asyncflow.devices import CUDA, ONE_OF_KINDS, PATTERN, RANGE_PATTERN, devices_of
from asyncflow.settings import Choice, Chosen, Section, apply_override, checked, from_yaml, pop_name, read_yaml, to_yaml
from asyncflow.types import MAX_CANDIDATES, Layout, LoraSpec, Old, UserError


def _device(text: str) -> str:
    if not re.match(PATTERN, text):
        raise ValueError(f"there is no device {text!r}: take {ONE_OF_KINDS}, perhaps with a number, as in {CUDA}:1")
    return text


def _devices(text: str) -> str:
    if not re.match(RANGE_PATTERN, text) or not devices_of(text):
        numbered = f"perhaps with a number, as in {CUDA}:1, or with several, {CUDA}:1-3"
        raise ValueError(f"there is no device {text!r}: take {ONE_OF_KINDS}, {numbered}")
    return text


def _run_name(text: str) -> str:
    if not re.fullmatch(r"\w[\w.-]*", text) or len(text) > MOST_CHARACTERS:
        raise ValueError(
            f"{text!r} is no name of a run: take letters, digits, _, - and ., {MOST_CHARACTERS} at most, beginning with a letter "
            f"or digit; its place is run.dir"
        )
    return text


def _hub_name(text: str) -> str:
    if not re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", text):
        raise ValueError(f"{text!r} is no repository of the Hugging Face Hub: write it as owner/name")
    return text


def _part_name(text: str) -> str:
    if not re.match(r"[A-Za-z][\w-]*$", text):
        raise ValueError(f"{text!r} is no name of a reward: take letters, digits, _ and -, beginning with a letter")
    return text


Device = Annotated[str, AfterValidator(_device)]
"""Device of an engine: cpu, cuda or npu, perhaps with a number (`cuda:1`)."""
WorkerDevices = Annotated[str, AfterValidator(_devices)]
"""Devices of several workers' engines: as `Device`, or on several devices in turn (`cuda:1-3`)."""


Finite = Annotated[float, Field(gt=0, lt=math.inf)]
Weight = Annotated[float, Field(gt=-math.inf, lt=math.inf)]
"""Weight of a reward; below 0 it is a penalty."""
Seed = Annotated[int, Field(ge=0, lt=1 << 63)]
MOST_STEPS = 1_000_000_000
MOST_CHARACTERS = 100
"""Longest name of a run."""
PartName = Annotated[str, AfterValidator(_part_name)]
TAKEN_NAMES = {"mean", "std", "zero_std_groups"}
"""Names that no part of a reward may have: they are those of metrics, `reward/mean` and so on."""
Decay = Annotated[float, Field(ge=0, lt=1)]
"""Share of a running mean that stays at each step."""


def _regular(pattern: str) -> str:
    """Check that a text is a regular expression."""
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"{pattern!r} is no regular expression: {error}") from error
    return pattern


Pattern = Annotated[str, AfterValidator(_regular)]


class RunConfig(Section):
    name: Annotated[str, AfterValidator(_run_name)] = "run"
    """The run's folder below `dir`."""
    dir: Path = Path("runs")
    """The folder of all runs."""
    seed: Seed = 0
    """Decides the order of the data and the sampling noise, unless `data.seed` and `rollout.seed` do."""
    steps: Annotated[int, Field(ge=1, le=MOST_STEPS)] = 100
    """Batches that are generated and trained, each with `train.epochs` x `train.mini_batches` updates (by default one)."""
    overwrite: bool = False
    """Remove an earlier run of the same name first."""
    stall_timeout_seconds: PositiveFloat = 300.0
    """A run in which nothing moves for so long says which process waits for what, and ends."""
    stop_grace_seconds: PositiveFloat = 3.0
    """Time that workers have to end by themselves before they are killed."""


class LowRankConfig(Section):
    """Low-rank adapter, which is trained in the place of the model's own weights (docs/lora.md)."""

    rank: PositiveInt = 16
    """Rank of each pair of matrices."""
    alpha: Finite = 32.0
    """The adapter's product is scaled by alpha / rank."""
    targets: tuple[str, ...] = ()
    """Linear layers that get an adapter, by the last part of their names (`q_proj`); by default all but the output layer."""
    path: str | None = None
    """Folder of PEFT's files that the adapter starts from; by default A is random and B 0, so that the model is its base."""

    @property
    def spec(self) -> LoraSpec:
        """The adapter's options, as engines take them."""
        return LoraSpec(self.rank, self.alpha, self.targets, self.path)


class ModelConfig(Section):
    path: str
    """A folder in Hugging Face format; a name on the Hugging Face Hub, with a revision perhaps (`Qwen/Qwen2.5-0.5B-Instruct@main`);
    a GGUF file, or a folder with one; `random:qwen2-tiny` for a small randomly initialised model; or, for `--dry-run` alone,
    `shapes:FILE`, a model's config.json without the rest."""
    max_context_tokens: PositiveInt | None = None
    """Prompt and response together; by default the longest prompt of the data and `rollout.max_new_tokens`."""
    lora: LowRankConfig | None = None
    """Train a low-rank adapter instead of the weights; the model at `path` is its base."""
    push_to_hub: Annotated[str, AfterValidator(_hub_name)] | None = None
    """A repository of the Hugging Face Hub, `owner/name`: the final model goes there, with a model card, when the run is done."""
    private: bool = True
    """Whether that repository is private, where it has to be made."""


class DataConfig(Section):
    path: str | None = None
    """A file of JSON Lines, JSON, CSV, TSV or Parquet, a folder that `datasets` saved or reads, a name on the Hugging Face Hub
    (`openai/gsm8k`), `generated:arithmetic`, or `reasoning_gym:TASK`. None: clients of `asyncflow serve` put the prompts, and the
    run waits for them; `model.max_context_tokens` says how long they may be."""
    subset: str | None = None
    """Part of a data set on the Hub, where it has several (`main`)."""
    split: str = "train"
    """Split of a data set that has splits."""
    prompt_template: str | None = None
    """The prompt, with columns of the data in braces; empty where an environment brings the whole chat. None: what is in
    `prompt_column`."""
    prompt_column: str | None = None
    """A column with a prompt, text or messages, or with a question. None: `prompt`, `question` or `problem`, which is there."""
    answer_column: str | None = None
    """Column that scorers find as `answer`; `a.b` is field b of column a. None: the first that is there of
    `reward_model.ground_truth`, `answer`, `solution`, `label` and `ground_truth`."""
    chat_template: bool = False
    """Send the prompt through the tokenizer's chat template as a user's message. Messages always go through it."""
    chat_template_options: dict[str, Any] = Field(default_factory=dict)
    """Variables that the chat template knows, such as `enable_thinking: false`."""
    max_prompt_tokens: PositiveInt | None = None
    """Leave out rows whose prompt is longer, and say how many. None: a prompt that is too long for the model is an error."""
    limit: PositiveInt | None = None
    """Use only so many rows, from the first on. A generated set has 20,000 rows unless told otherwise."""
    seed: Seed | None = None
    """Decides the order of the data, and what a generated set holds. None: `run.seed`."""

    @model_validator(mode="after")
    def _possible(self) -> DataConfig:
        if self.prompt_template is not None and self.prompt_column is not None:
            raise ValueError("prompt_template and prompt_column both say what the prompt is: take one of them")
        return self


class DelaysConfig(Section):
    """Artificial delays of rewards: `asyncflow verify` sets them, to show that a run's results do not depend on timing. Not for
    training."""

    mean_seconds: Annotated[float, Field(ge=0, lt=math.inf)] = 0.0
    """Each reward is late by a pseudo-random time with this mean; 0: none."""
    salt: int = 0
    """Seed of the delays: another number gives other ones."""


class PartConfig(Section):
    """Part of a reward that has several."""

    scorer: Chosen
    """Scorer, which turns a response into a number."""
    weight: Weight = 1.0
    """Weight of its number in the sum of rewards."""


class RewardModelConfig(Section):
    """A sequence classifier with one label: its logit for prompt and response is the reward. It has a worker of its own."""

    path: str
    """A folder in Hugging Face format."""
    weight: Weight = 1.0
    """Weight of its number in the sum of rewards."""
    template: str | None = None
    """Text that it reads, with {prompt} and {response} in it, by its own tokenizer. None: the very token ids, if it has the
    policy's tokenizer, or else `{prompt}{response}`."""
    device: Device = "cpu"
    """Its device: `cpu`, `cuda`, `cuda:1`."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Floating-point type of its weights and its forward pass."""
    num_threads: PositiveInt | Literal["auto"] = 1
    """Computing threads (CPU). `auto`: as `train.num_threads`."""

    @property
    def least_threads(self) -> int:
        """Computing threads in any case."""
        return 1 if self.num_threads == "auto" else self.num_threads


class RewardConfig(Section):
    scorer: Chosen | None = Choice(name="final_answer")
    """Scorer, which turns a response into a number."""
    scorers: dict[PartName, PartConfig] = Field(default_factory=dict)
    """Several of them, by names of your own, in place of `scorer`: the reward is their weighted sum."""
    environment: Weight | None = None
    """Weight of the environment's own rewards, summed over turns, as one more of them. None: 1 where there is an environment; then
    nothing else scores unless it is named."""
    model: RewardModelConfig | None = None
    """A reward model, as one more of them, or alone; with `place: task`. Its name in the metrics is `model`."""
    place: Literal["rollout", "task"] = "rollout"
    """Place where responses are scored: beside the rollout worker that made them, as each ends, or by a worker of its own."""
    num_workers: PositiveInt = 1
    """Reward processes beside each rollout worker, or below the one that scores: so many responses are scored at once."""
    deadline_seconds: PositiveFloat = 10.0
    """A scorer that has not answered by then is killed, and its row fails. With a reward model that answers nobody for so long, the
    rows that wait for it fail."""
    memory_bytes: PositiveInt = 1 << 30
    """Memory that a reward process may allocate beyond what it had when its scorers were built."""
    output_bytes: PositiveInt = 1 << 20
    """Output that scoring a response may print, and write to a file."""
    max_attempts: PositiveInt = 2
    """Number of times that a row may fail before it fails for good, or has `value_on_failure`."""
    value_on_failure: Annotated[float, Field(gt=-math.inf, lt=math.inf)] | None = None
    """The reward of a response that cannot be scored. None: its row fails, and leaves its group."""
    max_failed_fraction: Annotated[float, Field(ge=0, le=1)] = 0.25
    """Largest share of a step's rows that cannot be scored; above it the run stops."""
    delays: DelaysConfig = DelaysConfig()

    @model_validator(mode="before")
    @classmethod
    def _scorer_or_others(cls, tree: Any) -> Any:
        """Drop the default scorer where other scorers, or a model, are named."""
        if isinstance(tree, Mapping) and (tree.get("scorers") or tree.get("model")) and "scorer" not in tree:
            return {**tree, "scorer": None}
        return tree

    @model_validator(mode="after")
    def _possible(self) -> RewardConfig:
        if self.scorers and self.scorer is not None:
            raise ValueError("scorer and scorers both say what scores: put the one among the others, or leave it out")
        if not self.names:
            raise ValueError("nothing scores: give a scorer, scorers, a model, or an environment")
        if self.model is not None and self.model.template is not None and self.model.template.count("{response}") != 1:
            raise ValueError("model.template must hold {response} once, and should hold {prompt}")
        if clash := (set(self.names) & TAKEN_NAMES) | ({"model", "environment"} & set(self.scorers)):
            raise ValueError(f"scorers: the name {min(clash)!r} is taken: give that scorer another")
        if self.model is not None and self.place != "task":
            raise ValueError("a reward model has a worker of its own: set reward.place=task")
        return self

    @property
    def parts(self) -> dict[str, PartConfig]:
        """Rewards that run in reward processes, by name. A single one without a name is called `scorer`."""
        return dict(self.scorers) if self.scorer is None else {"scorer": PartConfig(scorer=self.scorer)}

    @property
    def names(self) -> list[str]:
        """Names of all rewards, in the order in which a row's are stored."""
        return [*self.weights]

    @property
    def weights(self) -> dict[str, float]:
        """Weights of the rewards, by name."""
        weights = {name: part.weight for name, part in self.parts.items()}
        if self.model is not None:
            weights["model"] = self.model.weight
        if self.environment is not None:
            weights["environment"] = self.environment
        return weights

    @property
    def has_parts(self) -> bool:
        """Whether each reward is stored beside the sum. A row's stored rewards also show whether any scorer gave one."""
        return len(self.names) > 1 or self.value_on_failure is not None


class RolloutConfig(Section):
    engine: Chosen = Choice(name="slots")
    """The engine that generates."""
    num_workers: Annotated[int, Field(ge=0)] = 1
    """Workers that generate, each with an engine of its own. 0: only processes from outside generate (`asyncflow serve`)."""
    num_slots: PositiveInt = 128
    """Responses that a worker generates at once."""
    group_size: Annotated[int, Field(ge=2)] = 8
    """Responses per prompt."""
    temperature: Finite = 1.0
    """Number that logits are divided by before a token is sampled."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Sample from the likeliest tokens alone, as few as have this probability together. 1: from all."""
    top_k: Annotated[int, Field(ge=0)] = 0
    """Sample from so many of the likeliest tokens alone. 0: from all."""
    min_p: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Sample from tokens alone that are at least so many times as likely as the likeliest one. 0: from all."""
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Texts that end a response, besides the model's end tokens. The token that completes one is the response's last."""
    seed: Seed | None = None
    """Decides the sampling noise. None: `run.seed`."""
    max_new_tokens: PositiveInt = 256
    """Tokens of a response at most; one that is cut off there has not finished."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Floating-point type of weights, keys and values while generating."""
    device: WorkerDevices = "cpu"
    """Its device: `cpu`, `cuda`, `cuda:1`. `cuda:1-3`: each worker on one of these, in turn."""
    num_threads: PositiveInt | Literal["auto"] = 1
    """Computing threads of each worker (CPU). `auto`: one, and more while cores of this machine are free; their number shows in the
    bits, so that none are promised."""
    max_restarts: Annotated[int, Field(ge=0)] = 3
    """Number of times that a worker that died is started again, after a pause that doubles each time. 0: its death ends the run."""
    kv_on_install: Literal["keep", "recompute"] = "keep"
    """Whether keys and values of a response under way stay as they are when new weights are installed, or are computed again."""

    @property
    def least_threads(self) -> int:
        """Computing threads of a worker in any case."""
        return 1 if self.num_threads == "auto" else self.num_threads

    @property
    def is_truncated(self) -> bool:
        """Whether tokens are sampled from a part of the model's distribution."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0


class EpisodesConfig(Section):
    """Episodes, in a run with an environment. Tokens of an episode, sampled and observed, are `rollout.max_new_tokens` at most."""

    format: Chosen = Choice(name="text")
    """Format by which observations become tokens and turns actions."""
    max_turns: PositiveInt = 16
    """Turns of the policy."""
    max_turn_tokens: PositiveInt | None = None
    """Tokens of a turn. None: what is left of the episode's."""
    at_once: PositiveInt | None = None
    """Episodes that a rollout worker has under way at a time: of those beyond `rollout.num_slots` some wait for their environments
    while others generate. None: twice as many."""
    num_parked: Annotated[int, Field(ge=0)] | None = None
    """Slots' worth of memory, beyond `rollout.num_slots`, in which keys and values of episodes stay between two turns. What finds
    no room is computed again. None: enough for `at_once`."""
    num_workers: PositiveInt = 1
    """Environment processes beside each rollout worker; each has one episode at a time, or as many as the environment says.
    Episodes beyond that wait for one."""
    python: str | list[str] | None = None
    """Interpreter of these processes, where the environment's packages do not go with AsyncFlow's: of a virtual environment with
    msgspec and numpy. `ssh://HOST/path/to/python`: on another machine. Of several the processes take one after another."""
    deadline_seconds: PositiveFloat = 30.0
    """An environment that has not answered by then is killed, and its episode ends as `timeout`."""
    memory_bytes: PositiveInt = 1 << 30
    """Memory that an episode may allocate beyond what the environment had when it was built; several of one process share it."""
    output_bytes: PositiveInt = 1 << 20
    """Output that an episode may print, and write to a file."""
    on_limit: Literal["score", "fail"] = "score"
    """End of an episode that reaches a limit of turns, tokens or seconds: it is scored with the rewards that it has got until then,
    or its row fails."""


class CriticConfig(Section):
    """Model of values, where the algorithm has one. What is not set here is as for the policy."""

    path: str | None = None
    """Model that it starts from: a folder in Hugging Face format, with a value head if a run has saved it; by default the
    policy's."""
    learning_rate: Finite = 1e-5
    """Learning rate of AdamW, after the warm-up."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Updates over which the learning rate rises linearly; then it goes by `train.learning_rate_schedule`."""
    device: Device = "cpu"
    """Its device: `cpu`, `cuda`, `cuda:1`."""


class TrainConfig(Section):
    engine: Chosen = Choice(name="torch")
    """The engine that trains."""
    prompts_per_step: PositiveInt = 32
    """Groups of a step, whose responses are generated under the same weights."""
    oversampling: Annotated[float, Field(ge=1, lt=math.inf)] = 1.0
    """Prompts that are taken at once, as a multiple of those missing, where the algorithm wants groups whose rewards vary."""
    max_candidates: Annotated[int, Field(ge=1, le=MAX_CANDIDATES)] | None = None
    """There: largest number of prompts that a step may go through before the run stops; by default 10 x `prompts_per_step`."""
    epochs: PositiveInt = 1
    """Number of times that a step goes through its groups."""
    mini_batches: PositiveInt = 1
    """Parts that the groups of a step are cut into, each with an update of its own: a step is `epochs` x `mini_batches` updates."""
    responses_per_micro_batch: PositiveInt | None = None
    """Responses of a group that are computed together and share one copy of their prompt; by default the whole group; 1: none."""
    tokens_per_micro_batch: PositiveInt | Literal["auto"] | None = "auto"
    """Tokens up to which micro-batches that are ready, also of several groups, are computed in one pass; null: each by itself. The
    automatic number goes by the model's width and the device; with `responses_per_micro_batch` it is null."""
    helpers: Annotated[int, Field(ge=0)] | Literal["auto"] = "auto"
    """Threads that take training passes, or pieces of them, beside the trainer's own while cores are free, each with `num_threads`
    (CPU): of each of its ranks, and of the critic. By default as many as fit on the rollout workers' cores, which are free while
    these have nothing to generate. No bit of exact sums depends on them. On accelerators: one on each device of rollout with
    `plan.shares.helpers`, else none."""
    skip_zero_advantages: bool | Literal["auto"] = "auto"
    """Do not compute micro-batches whose advantages are all 0, as those of a group whose rewards are all equal: they count in the
    normaliser, and their gradient is 0. By default where the loss has no gradient there."""
    check_shared_prompt: bool = True
    """At the start, compute one micro-batch with and without sharing the prompt, and stop if they differ."""
    old: Old = "current"
    """The old policy of the probability ratio: the policy itself, its weights at the step's start or before the last update, or the
    engine that sampled."""
    critic: CriticConfig = CriticConfig()
    reference: Literal["fused", "task"] = "fused"
    """Place where a KL term's reference is computed: in the trainer's own micro-step, or by a worker of its own ahead of it."""
    frozen_dtype: Literal["float32", "bfloat16"] | None = None
    """Floating-point type that old policy and reference are kept and computed in; by default `dtype`."""
    offload: bool = False
    """Keep old policy and reference in host memory, and move them to the device for each pass."""
    accumulate: Literal["exact", "fp32"] = "fp32"
    """Way in which a step's gradients add up: `exact` gives the same bits in whatever order groups arrive."""
    learning_rate: Finite = 1e-6
    """Learning rate of AdamW, after the warm-up."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Updates over which the learning rate rises linearly."""
    learning_rate_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """The learning rate after the warm-up: constant, or falling to `min_learning_rate` until the run's last update."""
    min_learning_rate: Annotated[float, Field(ge=0, lt=math.inf)] = 0.0
    """Learning rate at the end of a falling schedule. The critic's ends at the same fraction of its own."""
    betas: tuple[Decay, Decay] = (0.9, 0.95)
    """Decay of AdamW's two moments."""
    epsilon: Finite = 1e-8
    """Epsilon of AdamW: it is added to the root of the second moment, which bounds the update of a parameter with small
    gradients."""
    weight_decay: Annotated[float, Field(ge=0, lt=math.inf)] = 0.0
    """Weight decay of AdamW, decoupled from the gradient."""
    no_weight_decay: tuple[Pattern, ...] | None = None
    """Regular expressions: a parameter in whose name one is found has no weight decay. None: biases and norms have none."""
    max_grad_norm: Finite | None = 1.0
    """A gradient whose norm is larger is scaled down to it. None: none is."""
    pipeline_micro_batches: PositiveInt = 4
    """With `plan.train.pp` above 1: micro-batches that go through the pipeline together, at least: groups are whole; or about so
    many passes of several micro-batches, where more are ready (`tokens_per_micro_batch`)."""
    pipeline_fill: Annotated[float, Field(ge=0, le=1)] = 0.1
    """Largest share of padding in a pipeline's tokens: its micro-batches are brought to one length, by a segment that stands for
    nothing, if that takes no more than this share; else each keeps its own. 1: always; 0: only those that are of one length."""
    log_prob_chunk_tokens: PositiveInt = 2048
    """Log-probs are computed over so many tokens at a time, which bounds their memory."""
    max_skipped_updates: PositiveInt = 3
    """Updates in a row of the policy, or of the critic, that cannot be made (a loss or the gradient is not finite, or no
    row is left) end the run."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Floating-point type of the forward and backward passes; weights, gradient sums and optimiser state are float32 or more."""
    activation_checkpointing: bool = False
    """Keep only what goes into each layer, and compute the layer again in the backward pass: less memory, a third more work."""
    offload_optimizer: bool = False
    """Keep the optimiser's state in host memory, and bring it over piece by piece for each update."""
    device: Device = "cpu"
    """Its device: `cpu`, `cuda`, `cuda:1`. With several devices, rank n of a machine takes number n."""
    num_threads: PositiveInt | Literal["auto"] = 1
    """Computing threads of each rank, and of each worker of a reference and a critic (CPU). `auto`: one, and with
    `accumulate: fp32` the cores of this machine are dealt out after each step by what each pool has computed in it."""
    max_restarts: Annotated[int, Field(ge=0)] = 3
    """Times in a row, with no new step trained between them, that the run is resumed from its newest checkpoint, in the driver's
    own process, when a trainer has died, or another worker that is not started again by itself: after a pause that doubles each
    time. 0: such a death ends the run."""

    @property
    def least_threads(self) -> int:
        """Computing threads of a rank in any case."""
        return 1 if self.num_threads == "auto" else self.num_threads


class WeightSyncConfig(Section):
    name: str = "shared_memory"
    """Way of the weights from the trainer to the rollout workers: `shared_memory` (files in memory, one machine), `collective` (a
    broadcast), `network` (TCP to one receiver per machine), or, as `path`, a class of the user's own."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Options of a class of one's own. The built-in ones have none."""
    dtype: Literal["bfloat16"] | None = None
    """Type that floating-point weights travel as; by default as the trainer has them. It halves the bytes, and the workers sample
    from rounded weights."""
    deadline_seconds: PositiveFloat = 60.0
    """An end that sends or takes nothing for so long counts as lost, and is named."""
    min_healthy_workers: PositiveInt = 1
    """Least number of rollout workers that live and have their weights; with fewer the run stops."""
    listen: str | None = None
    """The trainer's door for `collective` and `network`, `tls:HOST:PORT` (port 0: any), where the other machines reach it. None:
    one that only this machine reaches."""

    @model_validator(mode="before")
    @classmethod
    def _chosen(cls, tree: Any) -> Any:
        """Read the section like any other choice: a name alone, a mapping with a name, or a path."""
        if isinstance(tree, str):
            return {"name": tree}
        if not isinstance(tree, Mapping) or "path" not in tree:
            return tree
        others = dict(tree)
        return {"name": pop_name(others), **others}


class QueueConfig(Section):
    storage: Chosen = Choice(name="memory")
    """Storage of the samples."""
    samplers: dict[str, Chosen] = Field(default_factory=dict)
    """Choice of the ready rows that go to a worker, by task (`rollout`, `train`, ...); by default the oldest, to the worker that
    asked first."""
    num_units: PositiveInt = 1
    """Storage units; each group of rows lies on one of them."""
    place: Literal["driver", "workers"] = "driver"
    """Place of the units: in the driver's process, or each in a worker of its own (`storage/0` and on), which a cluster places."""
    lease_seconds: PositiveFloat = 120.0
    """Length of a lease: rows that a worker holds for so long without a heartbeat are given to another."""
    listen: str | None = None
    """A second door for clients on other machines, `tls:HOST:PORT` (port 0: any). The run's key is then `key.pem` in its folder."""
    capacity_rows: PositiveInt | None = None
    """Rows that a storage unit may hold; admission waits for room. None: no limit."""
    capacity_bytes: PositiveInt | None = None
    """Bytes that a storage unit may hold, counted at admission. None: half of this machine's memory, shared by the units."""

    @property
    def unit_capacity_bytes(self) -> int:
        """Bytes that one storage unit may hold."""
        return self.capacity_bytes or psutil.virtual_memory().total // 2 // self.num_units


class TelemetryConfig(Section):
    trackers: tuple[Literal["tensorboard", "wandb"], ...] = ("tensorboard",)
    """Places where metrics go besides `metrics.jsonl`."""
    samples_per_step: Annotated[int, Field(ge=0)] = 4
    """Prompts a step of which one response is kept in `samples.jsonl`, and in `tokens.jsonl` as it was trained, token by token. Of
    the first of them all responses are kept, each with its advantage."""
    flush_seconds: PositiveFloat = 0.2
    """Seconds between two sendings of a worker's spans to the driver. Simulated runs and benchmarks set it; others need not."""
    keep_batches: Annotated[int, Field(ge=0)] = 0
    """Number of the newest steps whose batches stay in `batches/`, for `asyncflow replay`."""
    fingerprints: bool = False
    """Hash every step's rows, losses, weights and optimiser state into `fingerprints.jsonl`, to compare runs bit by bit."""


class EvalConfig(Section):
    path: str | None = None
    """Held-out prompts, read as `data` says; null: no evaluation. `generated:arithmetic` takes problems no training run sees."""
    subset: str | None = None
    """Part of a data set on the Hub. None: `data.subset`."""
    split: str = "test"
    """Split of a data set that has splits."""
    every_steps: PositiveInt | None = None
    """Evaluate after every so many steps, too. None: only before the first step and after the last."""
    num_prompts: PositiveInt | None = 256
    """Use only so many, from the first on. None: all; a generated set has 20,000."""
    samples_per_prompt: PositiveInt = 1
    """Responses to each prompt that are sampled at `rollout.temperature`, for pass@k."""
    greedy: bool = True
    """Generate one greedy response to each prompt as well."""
    correct_from: float = 1.0
    """A response with this reward or more counts as correct in pass@k."""
    num_workers: Annotated[int, Field(ge=0)] = 0
    """Workers that do nothing else, with engines as `rollout` has them: training goes on meanwhile as if nothing were evaluated. 0:
    the rollout workers evaluate, behind training's rows."""
    device: WorkerDevices | None = None
    """Device of each of them, as `rollout.device`. None: that."""

    @model_validator(mode="after")
    def _possible(self) -> EvalConfig:
        if self.path is None and self.every_steps is not None and "path" not in self.model_fields_set:
            raise ValueError("every_steps is set, and path is not: nothing would be evaluated; set eval.path too")
        return self


class CheckpointConfig(Section):
    """Checkpoints, from which a run is resumed with `--resume`."""

    every_steps: PositiveInt | None = None
    """Steps from one checkpoint to the next, besides at the run's end, whatever ends it in order."""
    every_minutes: PositiveFloat | None = 10.0
    """Minutes from one checkpoint to the next, after the step that is under way then: less often where writing one takes
    more than a hundredth of this time. None: never."""
    keep: Annotated[int, Field(ge=0)] = 2
    """Number of checkpoints that stay on the disk, the newest ones. 0: none are written there."""
    in_memory: bool | Literal["auto"] = "auto"
    """Checkpoints in shared memory of this machine as well, between those on the disk, for trainers that die: after every step
    (true), after so many that the trainer waits for them a hundredth of its time at most (auto), or never (false). Only where all
    workers are on one machine, and while there is room."""
    stop_grace_seconds: PositiveFloat = 30.0
    """Time that a run that is ended by SIGTERM has to write one, if that is more than `run.stop_grace_seconds`."""

    @model_validator(mode="after")
    def _possible(self) -> CheckpointConfig:
        if self.keep == 0 and self.every_steps is not None:
            raise ValueError(
                f"keep=0 writes no checkpoints, and every_steps={self.every_steps} asks for some: leave one of them out"
            )
        return self


class LayoutConfig(Section):
    """Layout of training over devices: dp x tp x pp of them."""

    dp: PositiveInt = 1
    """Data-parallel groups, each with its own prompts; parameters, gradients and optimiser state are sharded over them (FSDP)."""
    tp: PositiveInt = 1
    """Devices that share every matrix (tensor parallel)."""
    pp: PositiveInt = 1
    """Stages of a pipeline, each with some of the layers."""


class LengthsConfig(Section):
    """Lengths that `asyncflow plan` expects, in tokens: of all prompts, and of responses, which are lognormally distributed."""

    prompt: PositiveInt
    """Tokens of each prompt."""
    response_median: PositiveFloat
    """Half of the responses are longer. Those above `rollout.max_new_tokens` are cut off there."""
    response_sigma: Annotated[float, Field(ge=0, lt=math.inf)] = 0.6
    """Standard deviation of the logarithm of a response's tokens."""


class PredictedConfig(Section):
    """Prediction of a plan. Settings that are given beside the plan are not considered in it."""

    step_seconds: PositiveFloat
    """Seconds of a step."""
    tpspd: PositiveFloat
    """Trained tokens per second and device."""
    busy: dict[str, Annotated[float, Field(ge=0, le=1)]]
    """Share of time in which the workers of each pool work."""


class PoolConfig(Section):
    """Workers of one task."""

    num_workers: PositiveInt = 1
    """So many workers share the task; each has an engine of its own, or reward processes of its own."""

    @model_validator(mode="before")
    @classmethod
    def _is_not_sharded(cls, given: Any) -> Any:
        if isinstance(given, Mapping) and (axes := [axis for axis in ("dp", "tp", "pp") if axis in given]):
            raise ValueError(f"{axes[0]} shards a model over devices, and a worker of this task computes on one: take num_workers")
        return given


class ValuesPoolConfig(PoolConfig):
    """Workers of the critic's values."""

    num_workers: Annotated[int, Field(ge=0)] = 0
    """So many workers share the task, each with a copy of the critic, whose weights come to it every step; the critic only trains.
    0: the critic computes the values itself."""


SharingTask = Literal["reference", "critic", "values", "reward", "helpers"]
SharedTask = Literal["train", "reference", "critic", "values", "reward", "rollout"]


class PlanConfig(Section):
    """Allocation of devices. Rollout workers: `rollout.num_workers`; evaluators: `eval.num_workers`; storage units:
    `queue.num_units`, with `queue.place` `workers`."""

    train: LayoutConfig = LayoutConfig()
    hardware: str | None = None
    """Hardware that `asyncflow plan` reckons with: a name that it knows, or a YAML file. Of a run `--dry-run` alone
    reads it, and refuses what does not fit."""
    devices: PositiveInt | None = None
    """Number of devices that `asyncflow plan` plans for. None: as many as the configuration takes. A run does not read it."""
    lengths: LengthsConfig | None = None
    """Prompts and responses that `asyncflow plan` expects. None: it assumes some, and says so. A run does not read it."""
    predicted: PredictedConfig | None = None
    """Prediction that comes with `plan=FILE`: the run's report shows it beside what the run measured."""
    reward: PoolConfig = PoolConfig()
    """Workers `reward/0` and on, where `reward.place` is `task`; each has `reward.num_workers` processes, and a reward model of its
    own where there is one."""
    reference: PoolConfig = PoolConfig()
    """Workers `reference/0` and on, where `train.reference` is `task`."""
    values: ValuesPoolConfig = ValuesPoolConfig()
    """Workers `values/0` and on, where the algorithm has a critic. Each is on a device as `train.critic.device` says."""
    shares: dict[SharingTask, SharedTask] = Field(default_factory=dict)
    """Tasks that compute on devices of another task, `{reference: train, critic: train}`, each worker on one of them. What both
    need must fit into its memory, and they take turns. `{helpers: rollout}`: helpers of the trainer, on accelerators
    (`train.helpers`)."""

    @model_validator(mode="after")
    def _possible(self) -> PlanConfig:
        for task, other in self.shares.items():
            if task == other or other in self.shares:
                why = "that is the same task" if task == other else f"{other} has none of its own"
                raise ValueError(f"shares.{task}={other}: {why}: name a task that has devices of its own")
            if (task == "helpers") != (other == "rollout"):
                why = "helpers of the trainer compute on devices of rollout, and nothing else does"
                raise ValueError(f"shares.{task}={other}: {why}: leave it out")
        return self


class Config(Section):
    """Configuration of a run."""

    run: RunConfig = RunConfig()
    model: ModelConfig
    data: DataConfig = DataConfig()
    reward: RewardConfig = RewardConfig()
    algorithm: Chosen = Choice(name="grpo")
    """Algorithm: advantages and a loss, which are what is optimised."""
    schedule: Chosen = Choice(name="periodic")
    """Schedule: when prompts are admitted and weights change."""
    environment: Chosen | None = None
    """Environment that episodes of several turns talk to. None: a response is one turn."""
    episodes: EpisodesConfig = EpisodesConfig()
    rollout: RolloutConfig = RolloutConfig()
    train: TrainConfig = TrainConfig()
    weight_sync: WeightSyncConfig = WeightSyncConfig()
    queue: QueueConfig = QueueConfig()
    cluster: Chosen = Choice(name="local")
    """Place of the workers. `local`: one process per worker on this machine. `inline`: all in this process, for debugging. `ray`:
    placed by Ray, on this machine or on several."""
    telemetry: TelemetryConfig = TelemetryConfig()
    eval: EvalConfig = EvalConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    plan: PlanConfig = PlanConfig()

    @model_validator(mode="before")
    @classmethod
    def _environment_scores(cls, tree: Any) -> Any:
        """Let the environment's own rewards count, and, where nothing else is named, them alone."""
        if not isinstance(tree, Mapping) or not tree.get("environment"):
            return tree
        reward = dict(tree.get("reward") or {})
        if reward.get("environment") is None:
            reward["environment"] = 1.0
        if not {"scorer", "scorers", "model"} & set(reward):
            reward["scorer"] = None
        return {**tree, "reward": reward}

    @model_validator(mode="after")
    def _possible(self) -> Config:
        if self.environment is None and (self.reward.environment is not None or self.episodes != EpisodesConfig()):
            raise ValueError(
                "reward.environment and episodes are for a run with an environment: set environment, or leave them out"
            )
        if self.train.min_learning_rate > self.train.learning_rate:
            raise ValueError(
                f"train.min_learning_rate={self.train.min_learning_rate:g} is more than train.learning_rate="
                f"{self.train.learning_rate:g}, from which the learning rate falls: take less"
            )
        for task, count, key, place in (
            ("reward", self.plan.reward.num_workers, "reward.place", self.reward.place),
            ("reference", self.plan.reference.num_workers, "train.reference", self.train.reference),
        ):
            if count > 1 and place != "task":
                raise ValueError(f"plan.{task}.num_workers={count}, but {key}={place}: set {key}=task, or leave it out")
        pieces, group = self.train.responses_per_micro_batch, self.rollout.group_size
        if pieces is not None and group % pieces:
            raise ValueError(
                f"train.responses_per_micro_batch does not divide rollout.group_size: {group} = {group // pieces} x {pieces} + "
                f"{group % pieces}; take one of {', '.join(str(d) for d in range(1, group + 1) if group % d == 0)}"
            )
        workers, prompts = self.rollout.num_workers, self.train.prompts_per_step
        if 0 < workers < (healthy := self.weight_sync.min_healthy_workers):
            raise ValueError(
                f"weight_sync.min_healthy_workers={healthy} is more than rollout.num_workers={workers}: take {workers} or less"
            )
        if (evaluators := self.eval.num_workers) and self.eval.path is None:
            raise ValueError(f"eval.num_workers={evaluators} have nothing to evaluate: set eval.path, or leave it out")
        epochs, parts = self.train.epochs, self.train.mini_batches
        if prompts % parts:
            raise ValueError(
                f"train.mini_batches does not divide train.prompts_per_step: {prompts} = {prompts // parts} x {parts} + "
                f"{prompts % parts}; take one of {', '.join(str(d) for d in range(1, prompts + 1) if prompts % d == 0)}"
            )
        if prompts // parts < self.plan.train.dp:
            of_what = "a step" if parts == 1 else "a mini-batch"
            raise ValueError(
                f"plan.train.dp={self.plan.train.dp} groups of devices have nothing to share in {of_what} of {prompts // parts} "
                f"prompts: take as many prompts or more"
            )
        if epochs * parts > 1 and self.train.old not in ("step_start", "rollout"):
            raise ValueError(
                f"train.epochs x train.mini_batches = {epochs} x {parts} updates a step, and after the first of them "
                f"train.old={self.train.old} is not the policy that the step began with: take train.old=step_start, which keeps "
                f"those weights, or train.old=rollout, which takes the engine's log-probs"
            )
        if workers > prompts:
            raise ValueError(
                f"rollout.num_workers={workers} is more than train.prompts_per_step={prompts}, so {workers - prompts} of them "
                f"would have nothing to generate: take {prompts} workers or fewer, or more prompts"
            )
        return self

    @property
    def episodes_at_once(self) -> int:
        """Episodes that a rollout worker has under way at a time; responses of one turn: as many as it has slots."""
        slots = self.rollout.num_slots
        return slots if self.environment is None else self.episodes.at_once or 2 * slots

    @property
    def num_parked(self) -> int:
        """Slots of each rollout engine's cache beyond those that generate."""
        kept = self.episodes.num_parked
        return max(0, self.episodes_at_once - self.rollout.num_slots) if kept is None else kept

    @property
    def evaluators_device(self) -> str:
        """Device on which each evaluator generates."""
        return self.eval.device or self.rollout.device

    @property
    def data_seed(self) -> int:
        """Seed of the order of the data."""
        return self.run.seed if self.data.seed is None else self.data.seed

    @property
    def sampling_seed(self) -> int:
        """Seed of the sampling noise."""
        return self.run.seed if self.rollout.seed is None else self.rollout.seed

    @property
    def layout(self) -> Layout:
        """Layout of training over devices."""
        return Layout(**self.plan.train.model_dump())

    @property
    def lora(self) -> LoraSpec | None:
        """Low-rank adapter that is trained; None: the model's own weights are."""
        return None if self.model.lora is None else self.model.lora.spec

    @property
    def run_dir(self) -> Path:
        """Folder of the run."""
        return self.run.dir / self.run.name


def load(path: Path, overrides: Sequence[str] = ()) -> Config:
    """Read a YAML file, apply `key.path=value` overrides (values are YAML), and check the result. Raises `UserError`.

    `plan=FILE` takes the settings of a plan that `asyncflow plan` has written; other overrides go before them.
    """
    return parse(read_yaml(path), overrides)


def _override(tree: dict[str, Any], overrides: Sequence[str]) -> None:
    others = []
    for override in overrides:
        if (file := named_plan(override)) is None:
            others.append(override)
            continue
        if not isinstance(settings := read_yaml(Path(file)).get("settings"), Mapping):
            raise UserError(f"{override}: the file has no settings, so it is no plan that `asyncflow plan` has written")
        _merge(tree, settings)
    for override in others:
        apply_override(tree, override)


def named_plan(override: str) -> str | None:
    """The file, or `auto`, where an override names a plan; None for any other override."""
    key, _, value = override.partition("=")
    return value if key == "plan" and value and not value.lstrip().startswith("{") else None


def _merge(tree: dict[str, Any], settings: Mapping[str, Any]) -> None:
    """Put nested mappings over others. A choice replaces another, with its options."""
    for key, value in settings.items():
        if isinstance(value, Mapping) and "name" not in value and isinstance(below := tree.setdefault(key, {}), dict):
            _merge(below, value)
        else:
            tree[key] = value


def parse(tree: Mapping[str, Any], overrides: Sequence[str] = ()) -> Config:
    """Check a configuration given as nested mappings, with overrides as `load` takes them. Raises `UserError` naming the key and
    what to do."""
    settings = copy.deepcopy(dict(tree))
    _override(settings, overrides)
    return checked(Config, settings)


def parse_dumped(text: str) -> Config:
    """Read a configuration that `dump` wrote. Raises `UserError`."""
    return parse(from_yaml(text))


def dump(config: Config) -> str:
    """Write the resolved configuration as YAML that `load` reads."""
    return to_yaml(config.model_dump(mode="json"))
