"""Algorithm 1 (PA, section 4): the feed, the producers and the consumer, side by side. The numbers are the algorithm's lines.

    feed      consumes: prompts            waits for: the schedule's leave       is unblocked by: commits, the user's prompts
    produce   consumes: an admitted group  waits for: slots, rewards             is unblocked by: the engine, the reward processes
    train     consumes: complete groups    waits for: groups of its step         is unblocked by: producers, the end of the step

One `produce` runs for every group that a rollout worker has taken (rollout.py says when it takes one); what `train` takes is
made ready in rounds.py. Line 20, moving the policy into the old policy, is the engine's, before its update; with staleness 0 and
one update per step it is nothing, since the old policy is the policy itself, detached.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import msgspec
import numpy as np

from asyncflow.algorithms.base import Algorithm, ModelObjective
from asyncflow.attestation import Probe
from asyncflow.control.ledger import LedgerService, StepTotals, Update
from asyncflow.control.policy_versions import PolicyVersions
from asyncflow.control.schedule import Schedule
from asyncflow.engines.base import (
    MicroBatch,
    MicroBatchResult,
    ModelTraining,
    OptimResult,
    Response,
    RolloutEngine,
    SampleKey,
    Sampling,
    TrainEngine,
)
from asyncflow.environments.base import EnvironmentFailure
from asyncflow.loops.admissions import Admissions
from asyncflow.loops.context import LoopContext, ResponseScoring
from asyncflow.loops.episode import EpisodePlayer, EpisodeRow, LimitReached
from asyncflow.loops.evaluation import HeldOut, admit_evaluation
from asyncflow.loops.rounds import Rounds
from asyncflow.loops.samples import (
    GroupRequest,
    ScoredRow,
    Shape,
    UnusableResponse,
    check_response,
    kept_episode,
    outputs,
)
from asyncflow.loops.score_batching import ScoredRows, why_failed
from asyncflow.loops.transcript import Played
from asyncflow.own_metrics import step_scored
from asyncflow.rewards.base import RewardFailure, Sample
from asyncflow.telemetry.fingerprints import StepLog
from asyncflow.telemetry.spans import Recorder
from asyncflow.transfer_queue.client import Leased, TransferQueueClient
from asyncflow.types import CheckpointPlace, Ragged, WeightSource, row_index
from asyncflow.waits import PROMPTS, PUBLISHING, waiting
from asyncflow.weight_sync.base import WeightSender


@dataclass(frozen=True, slots=True)
class Producer:
    """Parts that producing a group needs. `on_played` is called when an episode has ended, or failed, with the number of tokens
    that were sampled; `on_scored` when it is stored, or failed."""

    queue: TransferQueueClient
    engine: RolloutEngine
    episodes: EpisodePlayer
    scoring: ResponseScoring
    shape: Shape
    on_played: Callable[[int], None]
    on_scored: Callable[[], None]


class Keeper(Protocol):
    """Keeps the files that a run can be resumed from."""

    async def committed(
        self, version: int, asked: CheckpointPlace | None, published: Callable[[], Awaitable[None]] | None = None
    ) -> None:
        """Take note that `version` steps are committed; the engine is between two steps. `asked`: where to keep it in any case.
        `published` is waited for before it is kept: `PolicyVersions` knows then which older versions are needed."""


async def feed(
    queue: TransferQueueClient,
    ledger: LedgerService,
    schedule: Schedule,
    admissions: Admissions,
    evaluation: HeldOut | None,
    shape: Shape,
) -> None:
    """Prompts enter the queue as early as the schedule lets them. A resumed run first ends its evaluations. Without
    `evaluation`, evaluators admit theirs (evaluation.py).

    Where steps choose their prompts among candidates, the next step's are known when this one has done so.
    """
    for step in itertools.count(max(0, admissions.first - schedule.max_staleness)):  # 2
        if evaluation is not None and evaluation.is_due(step):
            await admit_evaluation(queue, ledger, evaluation, step, shape)
        if step < admissions.first:
            continue
        if not await ledger.may_admit(step) or not await ledger.until(partial(admissions.has_prompts, step), PROMPTS, step=step):
            return
        # Not behind an evaluation of the version before: that would hold the step up.
        is_behind = evaluation is not None and evaluation.is_planned(step - 1)
        num_newest = 0 if is_behind else ledger.num_newest(shape.prompts_at_first, shape.group_size)
        metas, batch = admissions.step(step, num_newest)  # 4: take B prompts
        await ledger.open(metas)
        ledger.begun(admissions.begun(batch))
        await queue.put(metas, batch, row_bytes=shape.row_bytes)
        while (candidates := await ledger.wanted(step)) is not None:
            if not await ledger.until(partial(admissions.has_prompts, step, candidates), PROMPTS, step=step):
                return
            metas, batch = admissions.more(step, candidates)
            await ledger.add_candidates(metas)
            await queue.put(metas, batch, row_bytes=shape.row_bytes)
        if ledger.is_stopping:
            return


async def produce(by: Producer, leased: Leased, request: GroupRequest, on_generated: Callable[[], None]) -> None:
    """Produce one group: an episode for each row, scored as soon as it ends; enqueue the scored ones."""
    samples = [row - row_index(request.meta.group, 0, by.shape.group_bits) for row in request.rows]
    sampling, key = by.shape.sampling(request.temperature), SampleKey(by.shape.seed, request.meta.group)
    async with asyncio.TaskGroup() as scoring:
        prompt, scored = by.scoring.decode(request.prompt_ids), ScoredRows(len(samples))
        group = ProducedGroup(by, leased, request, sampling, key, prompt, scored, scoring)
        async with asyncio.TaskGroup() as playing:
            async for rows in by.episodes.begin(request, samples, sampling, key):
                for row in rows:
                    if row.failure is not None:
                        group.fail(row.sample, row.failure)
                for of_turn, alike in by.episodes.first(rows, sampling):
                    playing.create_task(_generate(group, of_turn, alike, playing))
        on_generated()


async def _generate(
    group: ProducedGroup, sampling: Sampling | None, rows: Sequence[EpisodeRow], playing: asyncio.TaskGroup
) -> None:
    """First turns of rows that begin alike; each row goes on by itself."""
    by, by_sample, prompt_ids = group.by, {row.sample: row for row in rows}, rows[0].prompt_ids
    if sampling is None:
        for row in rows:
            playing.create_task(_play(group, row, None))
        return
    async for turn in by.engine.generate(prompt_ids, samples=list(by_sample), sampling=sampling, key=group.key):  # 6
        playing.create_task(_play(group, by_sample[turn.sample], turn))


async def _play(group: ProducedGroup, row: EpisodeRow, turn: Response | None) -> None:
    try:
        played = await group.by.episodes.play(row, turn, group.sampling, group.key)
    except (EnvironmentFailure, LimitReached) as failure:
        group.fail(row.sample, failure)
    else:
        group.by.on_played(played.num_sampled)
        group.tasks.create_task(_score_and_enqueue(group, played))


@dataclass(frozen=True, slots=True)
class ProducedGroup:
    """A group that is being produced. `tasks`: what goes on after its episodes."""

    by: Producer
    leased: Leased
    request: GroupRequest
    sampling: Sampling
    key: SampleKey
    prompt: str
    scored: ScoredRows
    tasks: asyncio.TaskGroup

    def fail(self, sample: int, failure: Exception) -> None:
        """A row that has no episode."""
        self.by.on_played(0)
        self.scored.ended()
        self.tasks.create_task(self._fail(row_index(self.request.meta.group, sample, self.by.shape.group_bits), failure))

    async def _fail(self, row: int, failure: Exception) -> None:
        error, is_final = why_failed(failure)
        await self.by.queue.fail(self.leased.lease, [row], error, is_final=is_final)
        self.by.on_scored()


async def _score_and_enqueue(group: ProducedGroup, played: Played) -> None:
    by, request, response = group.by, group.request, played.response
    row = row_index(request.meta.group, response.sample, by.shape.group_bits)
    sample = Sample(
        prompt=group.prompt,
        response=by.scoring.decode(response.token_ids),
        example=request.example,
        is_finished=played.ended == "stop",
        token_ids=response.token_ids.tolist(),
        prompt_ids=request.prompt_ids.tolist(),
        turn_rewards=played.turn_rewards,
    )
    step_scored.set(request.meta.partition if request.meta.topic == "train" else None)
    try:
        check_response(response)
        reward = None if by.scoring.score is None else await by.scoring.score(sample)  # 7
    except (UnusableResponse, RewardFailure) as failure:  # it fails its row; it does not become a 0
        group.scored.ended()
        error, is_final = why_failed(failure)
        await by.queue.fail(group.leased.lease, [row], error, is_final=is_final)
    else:
        rows = await group.scored.to_store(ScoredRow(row, played, sample, reward))
        if rows:
            has = {"has_parts": by.shape.has_reward_parts, "has_episodes": by.shape.max_turns is not None}
            columns = outputs(request.meta.group, rows, **has)
            is_stored = await by.queue.complete(group.leased.lease, columns)  # 8: enqueue
            for one in itertools.compress(rows, is_stored):
                if one.reward is not None:
                    by.scoring.keep_sample(kept_episode(request.meta, one, by.scoring.decode))
    finally:
        by.on_scored()


async def train(
    context: LoopContext,
    engine: TrainEngine,
    algorithm: Algorithm,
    sender: WeightSender | None,
    fingerprints: StepLog,
    keeper: Keeper,
    first: int = 0,
) -> int:
    """The consumer: gradients add up group by group, in the order in which groups complete; then an update, and the next one.

    Each data-parallel group runs this loop, from step `first` on. All call their engines alike; the first one, which has the
    `sender`, commits. Returns the version of the weights: how many steps are committed.
    """
    ledger, spans, rank = context.ledger, context.spans, engine.data_parallel_rank or 0
    async with asyncio.TaskGroup() as background:
        publishing = Publishing(sender, context.versions, spans, background)
        for step in itertools.count(first):
            spans.waiting("batch")
            may_start = await ledger.may_start("train", step)
            await engine.begin_step()
            if not may_start:
                return step
            spans.waiting("rows")
            async with Rounds(context, algorithm, rank, step) as rounds:
                compute = partial(engine.forward_backward, objective=algorithm)
                held, may_change = step < algorithm.held_steps, publishing.ended
                updates = await update(rounds, engine, algorithm, compute, fingerprints, may_change, is_held=held)  # 11-18, 21
            if not updates:
                return step
            await fingerprints.step(step, engine)
            if sender is not None:
                await ledger.commit(step, updates, "train")
            probe = await probed(engine, context, step + 1)
            await publishing.begin(step, await engine.export_weights(), probe)  # 3: the weights of the next step
            await keeper.committed(step + 1, await ledger.released(step), publishing.ended)
    raise AssertionError("steps do not end")


async def update(
    rounds: Rounds,
    engine: ModelTraining,
    objective: ModelObjective,
    compute: Callable[[Sequence[MicroBatch]], Awaitable[list[MicroBatchResult]]],
    fingerprints: StepLog,
    may_change: Callable[[], Awaitable[None]] | None = None,
    *,
    is_held: bool = False,
) -> list[Update]:
    """A step's updates of one model. Empty list: the run is stopping, and the weights are as they were.

    `compute`: a round's micro-batches, whose gradients it adds to the engine's sums. `may_change` is waited for before the weights
    are changed. `is_held`: the model is to stay as it is.
    """
    updates: list[Update] = []
    for number in range(rounds.num_updates):
        async for current in rounds.of(number):  # 11-12: dequeue
            with rounds.computing(current):
                results = await compute(current.micro_batches)  # 13-18: O += gradient
            rounds.trained(current, results, fingerprints)
        totals = await rounds.totals(number)
        if totals is None:
            return []
        if totals.is_left_out:
            with rounds.computing(current := rounds.left_out()):
                rounds.trained(current, await compute(current.micro_batches), fingerprints)
        if may_change is not None:
            await may_change()
        with rounds.updating():
            updates.append(await apply(engine, objective, totals, is_held=is_held))  # 21
    return updates


class Publishing:
    """The weights of one step after another, published beside the computation of the next one, which may not change them until
    that has ended.

        |-- gather, copy --|- hash, tell `PolicyVersions` -|         `publish`, beside the lane
               the trainer | computes the next step ...    | updates      gathers only if the weights lie on several ranks
    """

    def __init__(
        self, sender: WeightSender | None, versions: PolicyVersions, spans: Recorder, background: asyncio.TaskGroup
    ) -> None:
        """`background`: what fails there ends the trainer."""
        self._sender, self._versions, self._spans, self._background = sender, versions, spans, background
        self._under_way: asyncio.Task[None] | None = None

    async def begin(self, step: int, weights: WeightSource, probe: Probe | None) -> None:
        """Publish what a step has made. Returns when the engine may be called again. The publication before has ended."""
        with self._spans.held("publish"):
            self._under_way = self._background.create_task(self._publish(step, weights, probe))
            await weights.gathered()

    async def ended(self) -> None:
        """Wait until the last weights are published: they may change."""
        if self._under_way is not None and not self._under_way.done():
            with self._spans.held("publish"):
                await self._under_way

    async def _publish(self, step: int, weights: WeightSource, probe: Probe | None) -> None:
        began = self._spans.clock()
        with waiting(PUBLISHING, version=step + 1):
            await publish(step + 1, weights, self._sender, self._versions, probe)
        self._spans.off_lane("publish", began, step=step, version=step + 1)


async def probed(engine: TrainEngine, context: LoopContext, version: int) -> Probe | None:
    """The engine's log-probs of the probe under its present weights, as this version will have them, at temperature 1; None: nobody
    compares them. All leaders call alike."""
    token_ids = np.array(await context.versions.probe_ids(version), np.int64)
    if not len(token_ids):
        return None
    with context.spans.busy("probe", version=version):
        # An engine of the user's own need not know of it where nothing is rounded.
        rounded: dict[str, Any] = {} if context.published_dtype is None else {"rounded_to": context.published_dtype}
        response = Ragged.from_arrays([token_ids[1:]], "int64")
        found = (await engine.log_probs(token_ids[:1], response, temperature=1.0, **rounded)).values
    return Probe(token_ids.tolist(), found.tolist()) if np.isfinite(found).all() else None


async def publish(
    version: int, weights: WeightSource, sender: WeightSender | None, versions: PolicyVersions, probe: Probe | None = None
) -> None:
    """Let every rollout worker have a version's weights. Of the leaders one has a `sender`; the others help to gather."""
    if sender is None:
        async for _ in weights.tensors():
            pass
        return
    sender.retain(await versions.retained())
    await versions.publish(msgspec.structs.replace(await sender.publish(version, weights), probe=probe))


async def apply(engine: ModelTraining, objective: ModelObjective, totals: StepTotals, *, is_held: bool = False) -> Update:
    """Make one optimiser step on the sums of a closed update; none when a row's loss was not finite, or when no row is left, or
    when the model is held as it is."""
    counts = {"tokens": totals.tokens, "sequences": totals.sequences}
    normaliser = objective.normaliser if isinstance(objective.normaliser, int) else counts[objective.normaliser]
    if not counts["sequences"]:
        normaliser = 0  # nothing was added that a constant could divide
    if totals.non_finite_rows or normaliser == 0:
        await engine.discard()
        result = OptimResult(grad_norm=float("nan"), learning_rate=0.0, skipped=True)
    elif is_held:
        await engine.discard()
        result = OptimResult(grad_norm=0.0, learning_rate=0.0)
    else:
        result = await engine.optim_step(normaliser)
    return Update(result.grad_norm, result.learning_rate, normaliser, result.skipped, result.fill_tokens)
