"""A model of values beside the policy: what it expects of every response, and its training on the same rows.

    complete groups --values--> a number for each token --> advantages, of the policy's training and of its own
                    --critic_update--> gradient sums --> update --> the values of the next step

consumes: complete groups of a step, first without values, then with them
waits for: its own update of the step before; such groups; the end of the step
is unblocked by: the tasks before it; itself

The values of step s are those of version s of the critic, whatever version of the policy made the rows: it has been updated in s
steps, and not again until all of the step is there with its values. Either the two loops share a process and an engine, whose calls
take their turn; or values are computed by a pool of workers, to which the critic's weights travel as the policy's do.
"""

from __future__ import annotations

import itertools
from collections.abc import Awaitable, Callable
from functools import partial

from asyncflow.algorithms.base import Critic
from asyncflow.attestation import fault_of
from asyncflow.control.critic_versions import CriticVersions
from asyncflow.control.policy_versions import Target
from asyncflow.engines.base import CriticEngine
from asyncflow.loops.algorithm1 import Keeper, update
from asyncflow.loops.context import LoopContext
from asyncflow.loops.rounds import Rounds
from asyncflow.loops.samples import UPDATE_TASK, VALUES_COLUMN, VALUES_TASK, token_outputs
from asyncflow.loops.training_batches import pieces
from asyncflow.telemetry.fingerprints import StepLog
from asyncflow.telemetry.spans import Recorder
from asyncflow.transfer_queue.leases import Want
from asyncflow.weight_sync.base import WeightReceiver, WeightSender, WeightSyncError


async def add_values(
    context: LoopContext, engine: CriticEngine, versions: CriticVersions, receiver: WeightReceiver | None = None
) -> None:
    """Add values to each step's groups, by the critic's version of that step, in the pieces that training uses, until the run
    stops. `receiver`: of versions that this process has not trained itself."""
    queue, shape, step = context.queue, context.shape, 0
    while (target := await versions.reaches(step)) is not None:
        step = target.version
        if target.manifest is not None:
            assert receiver is not None, "a worker that does not train the critic has a receiver"
            if not await _install(target, engine, versions, receiver, context.spans):
                continue
        if not await context.ledger.may_start(VALUES_TASK, step):
            return
        while (leased := await queue.lease(VALUES_TASK, Want(partition=step))) is not None:
            batch = leased.batch
            prompt_ids, response_ids = batch.ragged("prompt_ids")[0], batch.ragged("response_ids")
            of_group = {"step": step, "version": step, "group": int(batch.groups[0])}
            with context.spans.busy(VALUES_TASK, **of_group, rows=len(batch), tokens=len(response_ids.values)):
                cut = pieces(len(batch), shape.rows_per_micro_batch)
                values = [await engine.values(prompt_ids, response_ids.take(piece)) for piece in cut]
            await queue.complete(leased.lease, token_outputs(batch, VALUES_COLUMN, values))
        step += 1


async def _install(
    target: Target, engine: CriticEngine, versions: CriticVersions, receiver: WeightReceiver, spans: Recorder
) -> bool:
    """Fetch a version and install it. False: a later one has taken its place meanwhile, or the run is stopping. Raises
    `WeightSyncError` if it cannot be had although it is the newest, or if the engine then has anything else."""
    assert target.manifest is not None, "version 0 is in the worker's own files"
    try:
        with spans.held("weights"):
            tensors = await receiver.fetch(target.manifest)
    except WeightSyncError:
        if await versions.reaches(target.version) == target:
            raise
        return False
    with spans.busy("install", step=target.version, version=target.version):
        await engine.install(tensors)
    await receiver.release()
    if sums := target.manifest.sums:
        start = spans.clock()
        if fault := fault_of(await engine.attest(), target.version, sums):
            raise WeightSyncError(f"a worker would compute values by other weights than the critic's: {fault}")
        spans.off_lane("attest", start, version=target.version)
    return True


async def publish_critic(
    version: int, engine: CriticEngine, sender: WeightSender | None, versions: CriticVersions, spans: Recorder
) -> None:
    """Let the values of step `version` be computed: by this process, or, with a `sender`, by the workers that have its receivers.
    They are all that the critic waits for, so this is not done beside anything else."""
    if sender is None:
        await versions.publish(version, None)
        return
    with spans.held("publish"):
        await versions.publish(version, await sender.publish(version, await engine.export_weights()))


async def train_critic(
    context: LoopContext,
    engine: CriticEngine,
    critic: Critic,
    fingerprints: StepLog,
    keeper: Keeper,
    publish: Callable[[int], Awaitable[None]],
    first: int,
) -> int:
    """Train the critic from step `first` on, as `train` trains the policy; `publish` each version (`publish_critic`). Returns the
    version of the weights."""
    ledger, spans = context.ledger, context.spans
    for step in itertools.count(first):
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
        asked = await ledger.commit(step, updates, UPDATE_TASK)
        await publish(step + 1)
        await keeper.committed(step + 1, asked)
    raise AssertionError("steps do not end")
