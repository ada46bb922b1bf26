"""Order in which a pipeline's stages pass over a round's micro-batches (1F1B), and what lies between two passes. Pure.

What a pass sends and what the following one begins with are posted together. No stage then waits for one that waits for it, even
where a send ends only when it is received.
"""

from __future__ import annotations

from typing import Literal, NamedTuple


class StagePass(NamedTuple):
    """A stage's pass over one of a round's micro-batches."""

    kind: Literal["forward", "backward"]
    micro_batch: int


class Crossing(NamedTuple):
    """The hidden states of a micro-batch, or their gradient, between this stage and `stage`."""

    what: Literal["hidden states", "gradient"]
    micro_batch: int
    stage: int


def one_forward_one_backward(stage: int, num_stages: int, num_micro_batches: int) -> list[StagePass]:
    """The order of a stage's passes: some forward until the first gradient can be there, then backward as soon as one can."""
    num_ahead = min(num_stages - 1 - stage, num_micro_batches)
    forwards = [StagePass("forward", i) for i in range(num_micro_batches)]
    backwards = [StagePass("backward", i) for i in range(num_micro_batches)]
    in_turn = [one for both in zip(forwards[num_ahead:], backwards, strict=False) for one in both]
    return [*forwards[:num_ahead], *in_turn, *backwards[num_micro_batches - num_ahead :]]


def crossing(this: StagePass | None, stage: int, num_stages: int, *, is_before: bool) -> Crossing | None:
    """Message that a pass of `stage` begins with (`is_before`), or sends at its end; None if there is no pass or no message."""
    if this is None:
        return None
    is_forward = this.kind == "forward"
    peer = stage - 1 if is_forward == is_before else stage + 1
    what: Literal["hidden states", "gradient"] = "hidden states" if is_forward else "gradient"
    return Crossing(what, this.micro_batch, peer) if 0 <= peer < num_stages else None
