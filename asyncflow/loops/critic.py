"""A model of values beside the policy: what it expects of every response, and its training on the same rows.

    complete groups --values--> a number for each token --> advantages, of the policy's training and of its own
                    --critic_update--> gradient sums --> update --> the values of the next step

consumes: complete groups of a step, first without values, then with them
waits for: its own update of the step before; such groups; the end of the step
is unblocked by: the tasks before it; itself

The values of step s are those of version s of the critic, whatever version of the policy made the rows: it has been updated in s
steps, and not again until all of the step is there with its values. The two loops share an engine, whose calls take their turn.
"""

from __future__ import annotations

import itertools
from functools import partial

from asyncflow.algorithms.base import Critic
from asyncflow.control.signal import Signal
from asyncflow.engines.base import CriticEngine
from asyncflow.loops.algorithm1 import Keeper, update
from asyncflow.loops.context import LoopContext
from asyncflow.loops.rounds import Rounds
from asyncflow.loops.samples import UPDATE_TASK, VALUES_COLUMN, VALUES_TASK, pieces, token_outputs
from asyncflow.telemetry.fingerprints import FingerprintLog
from asyncflow.transfer_queue.leases import Want


class Version:
    """The critic's version: the number of steps that it has been trained on."""

    def __init__(self, first: int) -> None:
        self.number, self._signal = first, Signal()

    def rise(self) -> None:
        """Add one: a step is committed."""
        self.number += 1
        self._signal.notify()

    async def reaches(self, number: int) -> None:
        """Wait until the version is `number` or more."""
        await self._signal.until(lambda: self.number >= number)


async def add_values(context: LoopContext, engine: CriticEngine, version: Version) -> None:
    """Add values to each step's groups, by the critic's version of that step, in the pieces that training uses, until the run
    stops."""
    queue, shape = context.queue, context.shape
    for step in itertools.count(version.number):
        await version.reaches(step)
        if not await context.ledger.may_start(VALUES_TASK, step):
            return
        while (leased := await queue.lease(VALUES_TASK, Want(partition=step))) is not None:
            batch = leased.batch
            prompt_ids, response_ids = batch.ragged("prompt_ids")[0], batch.ragged("response_ids")
            of_group = {"step": step, "version": version.number, "group": int(batch.groups[0])}
            with context.spans.busy(VALUES_TASK, **of_group, rows=len(batch), tokens=len(response_ids.values)):
                cut = pieces(len(batch), shape.rows_per_micro_batch)
                values = [await engine.values(prompt_ids, response_ids.take(piece)) for piece in cut]
            await queue.complete(leased.lease, token_outputs(batch, VALUES_COLUMN, values))


async def train_critic(
    context: LoopContext, engine: CriticEngine, critic: Critic, fingerprints: FingerprintLog, keeper: Keeper, version: Version
) -> int:
    """Train the critic, as `train` trains the policy, without publishing. Returns the version of the weights."""
    ledger, spans = context.ledger, context.spans
    for step in itertools.count(version.number):
        spans.waiting("batch")
        may_start = await ledger.may_start(UPDATE_TASK, step)
        await engine.begin_step()
        if not may_start:
            return step
        spans.waiting("rows")
        compute = partial(engine.forward_backward, objective=critic)
        async with Rounds(context, critic, 0, step, UPDATE_TASK) as rounds:
            updates = await update(rounds, engine, critic, compute, fingerprints)
        if not updates:
            return step
        await fingerprints.step(step, engine)
        await ledger.commit(step, updates, UPDATE_TASK)
        version.rise()
        await keeper.committed(step + 1)
    raise AssertionError("steps do not end")
