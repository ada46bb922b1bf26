"""Costs: seconds of each piece of a run's work, and how long its responses are. Guessed, computed (`planner/cost.py`), or measured
(`planner/measured.py`)."""

from __future__ import annotations

import math
import random
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, cast

import msgspec

from asyncflow.engines.base import SampleKey
from asyncflow.engines.cores import Contention


class Lengths(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Lengths of prompts and responses, in tokens. All prompts have `prompt`; responses are lognormally distributed.

    `response_sigma` is the standard deviation of the logarithm among the responses to one prompt, `prompt_sigma` that of the
    prompts' medians: some prompts have longer responses than others.
    """

    prompt: int = 64
    response_median: float = 128.0
    response_sigma: float = 0.6
    prompt_sigma: float = 0.0

    def draw(self, key: SampleKey, sample: int, most: int, position: int = 0) -> tuple[int, int]:
        """Draw one response: its length in tokens, from 1 to `most`, and a number (31 bits) that identifies it. `position`: of its
        first token in the episode."""
        rng = random.Random(f"{key.seed}/{key.prompt_index}/{sample}" + (f"/{position}" if position else ""))
        mean = math.log(self.response_median)
        if self.prompt_sigma:
            mean += random.Random(f"{key.seed}/{key.prompt_index}").gauss(0.0, self.prompt_sigma)
        tokens = math.ceil(rng.lognormvariate(mean, self.response_sigma))
        return max(1, min(tokens, most)), rng.getrandbits(31)


class Costs(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Seconds of each piece of work, alone on its cores. The engines call the methods; a subclass can give other curves.

    Training's costs are those of one data-parallel group under the run's layout: a micro-batch with what tensor parallelism
    exchanges in it, and with its part of a pipeline's bubbles.
    """

    decode_step_seconds: float = 0.010
    """Seconds of one decode step, which makes a token for every active slot; `decode_slot_seconds` for each slot is added, and
    `decode_context_seconds` for each token that is attended to."""
    decode_slot_seconds: float = 0.0001
    decode_context_seconds: float = 0.0
    prefill_seconds: float = 0.0
    """Seconds of one prefill pass; `prefill_token_seconds` for each of its prompt tokens is added."""
    prefill_token_seconds: float = 0.00005
    forward_backward_seconds: float = 0.005
    """Seconds of one micro-batch; `train_token_seconds` for each of its tokens is added."""
    train_token_seconds: float = 0.00005
    collectives_seconds: float = 0.0
    """Seconds of the collectives of a round between data-parallel ranks, in which all of them meet. 0: they do not meet."""
    reference_seconds: float = 0.0
    """Seconds of the reference's pass over a micro-batch; `reference_token_seconds` for each of its tokens is added."""
    reference_token_seconds: float = 0.00002
    optim_step_seconds: float = 0.050
    critic_seconds: float | None = None
    """Seconds of one micro-batch of the critic; None: as the policy's, as for the next two."""
    critic_token_seconds: float | None = None
    critic_optim_step_seconds: float | None = None
    value_token_seconds: float | None = None
    """Seconds of the critic's values, for each token; None: as the reference's."""
    publish_seconds: float = 0.050
    """Seconds of a publication; `publish_byte_seconds` for each of `weight_bytes` is added, as with fetch and install."""
    publish_byte_seconds: float = 0.0
    fetch_seconds: float = 0.100
    fetch_byte_seconds: float = 0.0
    install_seconds: float = 0.020
    install_byte_seconds: float = 0.0
    reward_seconds: float = 0.010
    """Mean seconds of one reward, by scorers that `scorer_seconds` does not name; the times are exponentially distributed."""
    scorer_seconds: Mapping[str, float] = {}
    reward_model_token_seconds: float = 0.0
    """Seconds of a reward model, for each token of a prompt and its response. A worker has one, which scores one after another."""
    unit_seconds: float = 0.0
    """Seconds in which a storage unit serves one request; `unit_row_seconds` for each of its rows and `unit_byte_seconds` for each
    of their bytes are added. It serves one after another, as all units in the driver's process do together."""
    unit_row_seconds: float = 0.0
    unit_byte_seconds: float = 0.0
    environment_seconds: float = 0.1
    """Median seconds that an environment takes for a turn; the times are lognormally distributed, with this standard deviation of
    their logarithm."""
    environment_sigma: float = 0.6
    environment_turns: int = 4
    """Episodes have 1 to so many turns, all equally often."""
    observed_tokens: int = 8
    """Tokens of an observation."""
    load_seconds: float = 1.0
    """Seconds from a worker's start until it serves."""
    weight_bytes: int = 1_000_000_000
    lengths: Lengths = Lengths()
    equal_groups: float = 0.0
    """Share of the prompts of which all rewards in a group are equal, whatever the responses: there is nothing to train on."""
    contention: Contention | None = None
    """Slowing of workers on the same cores by each other; None: each has cores of its own."""

    def decode_step(self, num_active: int, context_tokens: float = 0.0) -> float:
        """Seconds of one decode step: one token for each of the active slots, which hold `context_tokens` together."""
        return self.decode_step_seconds + num_active * self.decode_slot_seconds + context_tokens * self.decode_context_seconds

    def prefill(self, num_tokens: int) -> float:
        """Seconds of one prefill, of all prompts that get slots at the same time, `num_tokens` together."""
        return self.prefill_seconds + num_tokens * self.prefill_token_seconds

    def forward_backward(self, num_tokens: int) -> float:
        """Seconds of the forward and backward pass of a micro-batch with `num_tokens` packed tokens."""
        return self.forward_backward_seconds + num_tokens * self.train_token_seconds

    def log_probs(self, num_tokens: int) -> float:
        """Seconds of a forward pass of the reference over `num_tokens` packed tokens."""
        return self.reference_seconds + num_tokens * self.reference_token_seconds

    def values(self, num_tokens: int) -> float:
        """Seconds of the critic's forward pass over `num_tokens` packed tokens."""
        return self.log_probs(num_tokens) if self.value_token_seconds is None else num_tokens * self.value_token_seconds

    def of_critic(self) -> Costs:
        """Costs of the critic's training, in the place of the policy's."""
        own = {
            "forward_backward_seconds": self.critic_seconds,
            "train_token_seconds": self.critic_token_seconds,
            "optim_step_seconds": self.critic_optim_step_seconds,
        }
        return msgspec.structs.replace(self, **{name: seconds for name, seconds in own.items() if seconds is not None})

    def publish(self) -> float:
        """Seconds from the end of a step's update until the weights may be fetched."""
        return self.publish_seconds + self.weight_bytes * self.publish_byte_seconds

    def fetch(self) -> float:
        """Seconds in which one rollout worker fetches published weights."""
        return self.fetch_seconds + self.weight_bytes * self.fetch_byte_seconds

    def install(self) -> float:
        """Seconds in which one rollout worker installs fetched weights, and does not generate."""
        return self.install_seconds + self.weight_bytes * self.install_byte_seconds

    def reward(self, scorers: Collection[str]) -> float:
        """Mean seconds of a reward by all of these scorers, one after another."""
        known = [self.scorer_seconds[name] for name in scorers if name in self.scorer_seconds]
        return sum(known, start=self.reward_seconds if len(known) < len(scorers) or not known else 0.0)

    def rewards(self, scorers: Collection[str], *, has_model: bool) -> float:
        """Mean seconds of what is scored without a model: nothing where there is only a model, whose time is known."""
        return 0.0 if has_model and not scorers and self.reward_model_token_seconds else self.reward(scorers)

    def unit(self, num_rows: float, num_bytes: float) -> float:
        """Seconds in which a storage unit stores, or reads, so many rows with so many bytes together."""
        return self.unit_seconds + num_rows * self.unit_row_seconds + num_bytes * self.unit_byte_seconds

    def slowed(self, factor: float) -> Costs:
        """Costs of a machine on which all work takes `factor` times as long."""
        return cast(Costs, _Slowed(self, factor))


@dataclass(frozen=True, slots=True)
class _Slowed:
    """Costs whose methods and `..._seconds` fields give `factor` times as much, methods of a subclass included."""

    costs: Costs
    factor: float

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.costs, name)
        if name == "of_critic":
            return lambda: value().slowed(self.factor)
        if callable(value):
            return lambda *arguments, **named: self.factor * value(*arguments, **named)
        return self.factor * value if name.endswith("_seconds") else value
