"""The process that scores: builds the scorers, then answers one sample after another until its stdin ends.

consumes: frames on stdin, first a `Setup`, then `Sample`s; answers each with one frame on the stdout it was started with
waits for: the next frame (without end: an idle worker is no fault; the parent holds the deadline of each sample)
is unblocked by: the parent's next frame, or the end of stdin when the parent closes or dies

    scorers, built once --fork--> a child: one sample under its limits --> an answer; the child and what it started are killed
                        --fork--> a child: the next sample                                                      (sandbox/forked.py)

So a sample meets the scorers as they were built, whatever the one before it did to them. Scorers that are all stateless are called
here, without the fork. Imports are few: a killed worker's successor must start quickly.
"""

from __future__ import annotations

import functools
import gc
import inspect
import math
import numbers
import sys
from collections.abc import Sequence
from typing import Any

import msgspec

from asyncflow.errors import UserError
from asyncflow.options import checked_options
from asyncflow.own_metrics import collecting
from asyncflow.rewards.base import RewardPart, Sample, weighted
from asyncflow.rewards.messages import Ready, Scored, Setup
from asyncflow.rewards.signatures import Adapted, MissingColumn, adapted
from asyncflow.sandbox.child import OwnerPipes, trace_of, why_not_built
from asyncflow.sandbox.forked import in_child
from asyncflow.sandbox.frames import Broken, Failed
from asyncflow.sandbox.limits import adopt_orphans, children, die_with_parent, limit_memory, limit_output
from asyncflow.user_file import named, words_of

MAX_REWARD = (2 - 2**-23) * 2.0**127  # the largest of float32


class NoScorer(Exception):
    """Error that says why there is no scorer to be had from a path and its options."""


def build_scorer(
    path: str, options: dict[str, Any], prompt_column: str | None = None, prompt_template: str | None = None
) -> Adapted:
    """The scorer at `package.module:Name` or `/path/file.py:Name`: a class built with the options, or a function bound to them."""
    try:
        target = named(path)
        if callable(target):
            is_class = isinstance(target, type)
            options = checked_options("it", target, options, needs_all=is_class)
            if is_class:
                target, options = target(**options), {}
    except (Exception, SystemExit) as error:  # the user's class may raise anything; it is told to the user by the parent
        raise NoScorer(why_not_built(error, options)) from error
    if not callable(target):
        raise NoScorer("cannot be called: it must be a function, or a class with __call__(self, sample)")
    try:
        return adapted(target, options, prompt_column, prompt_template)
    except UserError as error:
        raise NoScorer(str(error)) from error


def answer(scorers: Sequence[Adapted], parts: Sequence[RewardPart], sample: Sample) -> Scored | Failed:
    """Call the scorers; whatever they do short of ending the process becomes an answer."""
    with collecting() as metrics:
        answered = _answer(scorers, parts, sample)
    return msgspec.structs.replace(answered, metrics=metrics) if isinstance(answered, Scored) else answered


def _answer(scorers: Sequence[Adapted], parts: Sequence[RewardPart], sample: Sample) -> Scored | Failed:
    values: list[float | None] = []
    for scorer, part in zip(scorers, parts, strict=True):
        try:
            value = scorer.reward_in(_awaited(scorer.call(sample)))
        except MemoryError:
            value = MemoryError  # the traceback holds what ate the memory: leave this block before saying anything
        except MissingColumn as error:
            return Failed("raised", f"scorer {part.scorer} {error}")
        except Exception as error:  # the contract: any exception fails the sample, and the sample's owner is told
            return Failed("raised", f"scorer {part.scorer} raised {words_of(error)}", trace_of(error))
        if value is MemoryError:
            return Failed("memory", f"scorer {part.scorer} ran out of memory")
        reward = _finite(value)
        if reward is None and value is not None:
            return Failed("invalid", f"scorer {part.scorer} returned {_shown(value)}, which is no finite number of 32 bits")
        values.append(reward)
    total = weighted(values, [part.weight for part in parts])
    if total is not None and not _is_finite(total):
        return Failed("invalid", f"the weighted sum of the rewards {values} is no finite number of 32 bits")
    return Scored(total, values)


def _awaited(value: Any) -> Any:
    """Result of a value that may have to be awaited. Each sample has an event loop of its own."""
    if not inspect.isawaitable(value):
        return value
    import asyncio  # late: it costs a start some time, and few scorers need it

    async def wait() -> Any:
        return await value

    return asyncio.run(wait())


def _finite(value: Any) -> float | None:
    """A number of Python's, of numpy's, or an array's or tensor's only one."""
    try:
        if not isinstance(value, numbers.Real) and callable(item := getattr(value, "item", None)):
            value = item()
        reward = float(value) if isinstance(value, numbers.Real) else math.nan
    except Exception:  # too large, more than one, or whatever an `item` that is not numpy's raises
        return None
    return reward if _is_finite(reward) else None


def _is_finite(reward: float) -> bool:
    """Rewards are stored as float32, in which larger numbers are infinite."""
    return math.isfinite(reward) and abs(reward) <= MAX_REWARD


def _shown(value: Any) -> str:
    return f"{value!r:.60}" if isinstance(value, float | str | None) else f"a {type(value).__name__}"


def main() -> None:
    """`python -m asyncflow.rewards.worker PARENT_PID`."""
    die_with_parent(int(sys.argv[1]))
    owner = OwnerPipes()
    first = owner.receive(msgspec.msgpack.Decoder(Setup))
    if first is None:
        return
    token, setup = first
    scorers: list[Adapted] = []
    for part in setup.parts:
        try:
            scorers.append(build_scorer(part.scorer, dict(part.options), setup.prompt_column, setup.prompt_template))
        except NoScorer as reason:
            return owner.send(token, Broken(part.scorer, str(reason)))
    is_stateless = all(getattr(scorer.call, "is_stateless", False) for scorer in scorers)
    if is_stateless:
        limit_memory(setup.limits.memory_bytes)
        limit_output(setup.limits.output_bytes)
    else:
        adopt_orphans()
    gc.collect()
    gc.freeze()  # a child's collector leaves what is built alone, and shared
    owner.send(token, Ready(has_deadline=not is_stateless))
    subject = f"scorer {', '.join(part.scorer for part in setup.parts)}"
    own = children()  # what building the scorers has started
    samples = msgspec.msgpack.Decoder(Sample)
    while (asked := owner.receive(samples)) is not None:
        token, sample = asked
        work = functools.partial(answer, scorers, setup.parts, sample)
        owner.send(token, work() if is_stateless else in_child(work, Scored, setup.limits, subject, owner.descriptors, own))


if __name__ == "__main__":
    main()
