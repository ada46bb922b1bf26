"""One simulated run.

consumes: a configuration, what things cost, what goes wrong
waits for: virtual time
is unblocked by: the virtual loop
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import random
import shutil
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np

from asyncflow.cluster.base import Cluster, WorkerSpec
from asyncflow.cluster.clock import VirtualLoop
from asyncflow.cluster.faults import HANG_SECONDS, Faults, Resize
from asyncflow.cluster.simulated import Main, SimulatedCluster
from asyncflow.cluster.wire import SimulatedPeer, Wire
from asyncflow.config import CheckpointConfig, Config, parse
from asyncflow.engines.cores import CRITIC, REFERENCE, TRAIN, Cores, SharedDevices
from asyncflow.engines.costs import Costs
from asyncflow.engines.sleeping.rollout import SleepingRolloutEngine
from asyncflow.engines.sleeping.train import SleepingCritic, SleepingPasses, SleepingTrainEngine
from asyncflow.environments.sleeping import SleepingEnvironments, SleepingFormat
from asyncflow.loops.episode import EpisodePlayer
from asyncflow.loops.evaluation import EVALUATORS, EvaluationRow, is_evaluator
from asyncflow.loops.rollout import ServedWeights
from asyncflow.loops.samples import VALUES_TASK, Prompt
from asyncflow.model_folder import read_json
from asyncflow.rewards.base import RewardFailure, Sample, Score
from asyncflow.rewards.scorings import delay_seconds
from asyncflow.run.device_shares import shared_devices, workers_with_devices
from asyncflow.run.driver import Driver
from asyncflow.run.factories import critic_fields, critic_tokens_per_pass, episode_limits, make_schedule, shape_of, tokens_per_pass
from asyncflow.run.helper_devices import num_on_cores, num_passing
from asyncflow.run.in_worker.connection import RunConnection, background, joined
from asyncflow.run.job import Job, Listener
from asyncflow.run.preparation.checks import check_choices
from asyncflow.run.preparation.prepare import Prepared
from asyncflow.run.services.cores import lend
from asyncflow.run.state.driver_state import Resumed
from asyncflow.run.worker_start import MAINS
from asyncflow.run.workers import add_log_probs, compute_values, critic_steps, leave, roll_out, score_groups, train_steps
from asyncflow.simulation.audit import Audit
from asyncflow.simulation.storage import SleepingStorage
from asyncflow.telemetry.spans import Span
from asyncflow.telemetry.trace import SPANS_FILE, read_spans
from asyncflow.transport import Peer, Server
from asyncflow.types import Array, RunError, UserError, first_error
from asyncflow.waits import PROCESS, waiting
from asyncflow.weight_sync.sleeping import SleepingWeightSync

LATE_REWARD = 50.0
"""Factor by which a late reward takes longer."""
STOP_SECONDS = 60.0 + max(HANG_SECONDS)
"""Virtual seconds that workers have to end. They cost nothing, so a slow worker may end what it is at, a fetch that hangs included;
one that has not ended by then never will."""
NO_FAULTS = Faults()
NO_CHECKPOINTS: Mapping[str, Any] = {"keep": 0}


@dataclass(frozen=True, slots=True)
class Simulated:
    """A simulated run. `seconds` are virtual, as all times in `rows` (metrics by step) and `spans`; `counts`: what has happened."""

    seed: int
    seconds: float
    rows: Mapping[int, Mapping[str, float]]
    evaluations: list[EvaluationRow]
    spans: list[Span]
    counts: Counter[str]
    violations: list[str]


def simulate(
    config: Config,
    *,
    costs: Costs | None = None,
    faults: Faults = NO_FAULTS,
    seed: int = 0,
    run_dir: Path | None = None,
    listener: Listener | None = None,
    ends: Sequence[float] = (),
) -> Simulated:
    """Run a configuration to its end under a virtual clock.

    `seed` is added to the run's and decides what is late. `run_dir`: where the run's files and its report are kept, over an earlier
    run's; without it nothing is kept. Raises `UserError` for a configuration that no run could start with.

    `ends`: there are several attempts; each of them but the last is over after so many virtual seconds, all at once, as when the
    power fails, and the next one resumes from what is on the disk. A checkpoint is written after every step, unless the
    configuration says how often. The laws are those of one run: what an attempt trained beyond the checkpoint that the next one
    resumes from does not count. The result is that of the last attempt.
    """
    check_choices(config)
    with tempfile.TemporaryDirectory(prefix="asyncflow-") as scratch:
        run_dirs = [*(Path(scratch) / str(attempt) / "run" for attempt in range(len(ends))), run_dir or Path(scratch) / "run"]
        audit: Audit | None = None
        for own, end, following in zip(run_dirs, [*ends, None], [*run_dirs[1:], None], strict=True):
            variant = _variant(config, costs, seed, own, _how_often(config) if ends else NO_CHECKPOINTS)
            loop = VirtualLoop()
            job = SimulatedJob(variant, costs or Costs(), faults, loop, listener, keeps_report=own == run_dir, audit=audit)
            job.has_units_apart = config.queue.place == "workers"
            audit = job.audit
            try:
                _run(loop, job, end)
                spans, rows = read_spans(own / SPANS_FILE), job.rows.since(0)
                if following is not None:
                    shutil.copytree(own, following)  # before anything else is written there
            finally:
                loop.finish()
    return Simulated(seed, loop.now, rows, job.evaluations, spans, job.audit.counts, job.audit.violations)


def _how_often(config: Config) -> Mapping[str, Any]:
    """Interval of the checkpoints, by the configuration; after every step, where it does not say."""
    own = config.checkpoint.model_dump(include={"every_steps", "every_minutes"})
    return {"every_steps": 1} if own == CheckpointConfig().model_dump(include=set(own)) else own


def _run(loop: VirtualLoop, job: SimulatedJob, end: float | None = None) -> None:
    """Run to the end, or until the clock shows `end`. Whatever ends a run before its time, other than a mistake of the user's, is a
    violation."""
    running = loop.create_task(job.run(), name="run")
    try:
        if end is not None:
            loop.run_until_complete(asyncio.wait([running], timeout=end))
            if not running.done():
                return
        loop.run_until_complete(running)
    except UserError:
        raise
    except RunError as failure:
        job.audit.violated(str(failure))
    except Exception as failure:
        error = first_error(failure)
        job.audit.violated(f"the run ended with {type(error).__name__}: {error}")
    else:
        job.look_at_the_end()


def drawn_faults(config: Config, costs: Costs, seed: int) -> Faults:
    """Faults of a seed's run, from when the first worker serves until about the run's end without any fault."""
    rollout = config.rollout
    step = min(rollout.max_new_tokens, 3 * costs.lengths.response_median) * costs.decode_step(rollout.num_slots)
    workers, begin = [f"rollout/{i}" for i in range(rollout.num_workers)], 2 * costs.load_seconds
    evaluators = [f"{EVALUATORS}/{i}" for i in range(config.eval.num_workers)]
    prompts, least = config.train.prompts_per_step, config.weight_sync.min_healthy_workers
    sizes = range(least, min(prompts, 2 * rollout.num_workers + 2) + 1)
    end = begin + config.run.steps * step
    drawn = Faults.drawn(config.run.seed + seed, [*workers, *evaluators[1:]], begin, end, sizes=sizes)
    rng = random.Random(f"{config.run.seed + seed}/evaluator")  # the first of them may die, but not stand still for ever
    deaths = tuple((rng.uniform(begin, 2 * end), worker) for worker in evaluators[:1] for _ in range(rng.randint(0, 2)))
    rng = random.Random(f"{config.run.seed + seed}/values")  # none of them may die
    pool = [f"{VALUES_TASK}/{i}" for i in range(config.plan.values.num_workers)]
    slow = {worker: rng.uniform(1.5, 8.0) for worker in pool if rng.random() < 0.25}
    stalls = tuple((rng.uniform(begin, end), worker, rng.uniform(0, end / 2)) for worker in pool if rng.random() < 0.5)
    return replace(drawn, deaths=drawn.deaths + deaths, slow={**drawn.slow, **slow}, stalls=drawn.stalls + stalls)


def _variant(config: Config, costs: Costs | None, seed: int, run_dir: Path, checkpoint: Mapping[str, Any]) -> Config:
    """Configuration with what the simulation chooses itself: where files go, and what would need a machine."""
    tree = config.model_dump(mode="json")
    tree["run"] |= {"seed": config.run.seed + seed, "dir": str(run_dir.parent), "name": run_dir.name, "overwrite": True}
    tree["run"]["stop_grace_seconds"] = STOP_SECONDS
    if num_on_cores(config) and (costs is None or costs.contention is None):
        tree["train"] |= {"helpers": 0}  # on cores they cost the others something, or would be free
    tree["model"] |= {"push_to_hub": None}
    tree["telemetry"] |= {"trackers": [], "flush_seconds": 0.9}
    tree["queue"] |= {"storage": "memory", "place": "driver", "listen": None}
    tree["weight_sync"] = {key: tree["weight_sync"][key] for key in ("deadline_seconds", "min_healthy_workers")}  # of workers
    return parse(tree | {"checkpoint": {"in_memory": config.checkpoint.in_memory is True, **checkpoint}})


class SimulatedJob(Job):
    """A `Job` whose workers, wires and engines are simulated."""

    def __init__(
        self,
        config: Config,
        costs: Costs,
        faults: Faults,
        loop: VirtualLoop,
        listener: Listener | None,
        *,
        keeps_report: bool,
        audit: Audit | None = None,
    ) -> None:
        """`audit`: of the attempts before this one, which this one resumes."""
        super().__init__(config, listener, resume=audit is not None)
        schedule = make_schedule(config)
        self.audit = audit or Audit(schedule, shape_of(config))
        self._costs, self._faults, self._virtual, self._keeps_report = costs, faults, loop, keeps_report
        shared = shared_devices(config)
        self._shares_devices = bool(shared) and costs.contention is None  # else workers share all cores of a machine
        self._cores = Cores(costs.contention)
        self._devices = Cores(_shared_devices(config, shared)) if self._shares_devices else self._cores
        self._scorers = [part.scorer.name for part in config.reward.parts.values()]
        self._rng = random.Random(f"{config.run.seed}/wire")
        self._hangs_rng = random.Random(
            f"{config.run.seed}/hangs"
        )  # of its own, so that the rest of a run's draws stay as they are
        travel: dict[str, Any] = {
            "num_bytes": costs.weight_bytes,
            "publish_seconds": costs.publish(),
            "fetch_seconds": costs.fetch(),
        }
        self._sync = SleepingWeightSync(keep=schedule.max_staleness + 2, fails=self._fetch_fails, hangs=self._fetch_hangs, **travel)
        self._critic_sync = SleepingWeightSync(keep=2, **travel)

    has_units_apart = False
    """Whether each storage unit has a process of its own, and so a time of its own."""

    def look_at_the_end(self) -> None:
        """Check what must be true after the run."""
        audit, cluster = self.audit, self._simulated
        audit.finished(self.config.run.steps, sum(int(row["rows/dead"]) for row in self.rows.values()))
        for name in cluster.late:
            audit.violated(f"worker {name} did not end within {self.config.run.stop_grace_seconds:g} s")
        for failure in cluster.failures:
            audit.violated(failure)
        if self.certificate is not None:
            for why in self.certificate.voided:
                audit.violated(f"the certificate is void: {why}")
        gc.collect()  # what nobody took is told when it is collected
        for task in self._virtual.living():
            audit.violated(f"a task is left: {task.get_name()}")
        for error in self._virtual.errors:
            audit.violated(f"{error.get('message')}: {error.get('exception')!r}")
        audit.counts["deaths"] += cluster.num_deaths
        audit.counts["stalls"] += cluster.num_stalls
        audit.counts["leavers that were cut short"] += cluster.num_cut_short

    _writes_situations = False  # virtual time has no threads

    # -- in the places of what a machine has --------------------------------------------------------------------------------

    async def _inputs(self, scratch: Path, resumed: Resumed | None) -> Prepared:
        if self._resume:
            version, rows = (0, None) if resumed is None else (resumed.state.version, resumed.rows)
            self.audit.go_back(version, set() if rows is None else set(rows.indices.tolist()))
        return await super()._inputs(scratch, resumed)

    async def _prepare(self, scratch: Path, resumed: Resumed | None) -> Prepared:
        config, length = self.config, self._costs.lengths.prompt
        self.audit.data = prompts = [_prompt(number, length) for number in range(4 * config.train.prompts_per_step)]
        held_out = [_prompt(number, length) for number in range((config.eval.num_prompts or 256) if config.eval.path else 0)]
        return Prepared(Path(config.model.path), prompts, held_out, length + config.rollout.max_new_tokens)

    def _fleet(self, weights_dir: Path) -> list[WorkerSpec]:
        return [replace(spec, may_stay=False) for spec in super()._fleet(weights_dir)]

    def _place(self, driver: Driver, weights_dir: Path) -> tuple[Server, Cluster]:
        if self._costs.unit(1, 1):
            lock = asyncio.Lock()
            for unit in driver.transfer_queue.units:
                own = asyncio.Lock() if self.has_units_apart else lock
                unit.unit_store.storage = SleepingStorage(unit.unit_store.storage, self._costs, own)
        wire = Wire(self._virtual, driver.services, driver.disconnected, rng=self._rng, on_reply=self.audit.reply)
        mains: dict[str, Main] = {
            "rollout_worker": self._rollout_worker,
            "reward_worker": self._reward_worker,
            "reference_worker": self._reference_worker,
            "train_worker": self._train_worker,
            "critic_worker": self._critic_worker,
            "values_worker": self._values_worker,
        }
        mains = {f"{MAINS}:{name}": main for name, main in mains.items()}
        self._simulated = SimulatedCluster(wire, mains, self._faults)
        self._ranks = asyncio.Barrier(self.config.layout.dp)
        if not self._restarts.num:
            for resize in self._faults.resizes:
                self._virtual.call_at(resize.when, self._change_size, resize)
            for when in self._faults.calls:
                self._virtual.call_at(when, self._call_for_weights)
        return cast(Server, wire), self._simulated

    def _save_published_model(self, driver: Driver) -> None:
        """Do nothing: there is no model to be saved."""

    def _write_report(self) -> None:
        if self._keeps_report:
            super()._write_report()

    def _change_size(self, resize: Resize) -> None:
        attempt = self.attempt
        if attempt is None:
            return  # over already

        async def change(driver: Driver) -> None:
            before = set(driver.versions.workers.members)
            with contextlib.suppress(RunError):  # it is ending
                await attempt.scaling.scale("rollout", resize.size, resize.grace_seconds)
            after = set(driver.versions.workers.members)
            self.audit.counts["joined"] += len(after - before)
            self.audit.counts["left"] += len(before - after)

        attempt.driver.background.start(change(attempt.driver))

    def _call_for_weights(self) -> None:
        if self.driver is not None:
            self.driver.versions.call_for(self.driver.ledger.ledger.committed)

    def _place_of(self, name: str, pool: str) -> dict[str, Any]:
        """Pool and cores of an engine: on devices of its own that others may share, or on a machine's cores."""
        return {"pool": name, "cores": self._devices} if self._shares_devices else {"pool": pool, "cores": self._cores}

    # -- workers ------------------------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def _joined(self, name: str, peer: SimulatedPeer) -> AsyncIterator[RunConnection]:
        async with joined(cast(Peer, peer), name, self.config, self._folder.job, "simulated") as run:
            run.reporter.recorder.enter("load")
            await asyncio.sleep(self._costs_of(name).load_seconds)
            yield run

    async def _rollout_worker(self, name: str, peer: SimulatedPeer) -> None:
        async with self._joined(name, peer) as run:
            rollout = self.config.rollout
            engine = SleepingRolloutEngine(
                self._costs_of(name),
                num_slots=rollout.num_slots,
                max_context=run.job.max_context,
                kv_on_install=rollout.kv_on_install,
                num_parked=self.config.num_parked,
                cores=self._cores,
            )
            score, episodes = _SleepingScorer(self, name).score, self._episodes(name, engine)
            weights = ServedWeights(self._sync.receiver(name), dict)
            await roll_out(run, engine, weights, score, _decode, episodes, evaluates=is_evaluator(name))
            await engine.close()

    def _episodes(self, name: str, engine: SleepingRolloutEngine) -> EpisodePlayer | None:
        if self.config.environment is None:
            return None
        costs = self._costs_of(name)
        environments = SleepingEnvironments(
            seconds=costs.environment_seconds,
            sigma=costs.environment_sigma,
            turns=costs.environment_turns,
            deadline_seconds=self.config.episodes.deadline_seconds,
        )
        return EpisodePlayer(engine, environments, SleepingFormat(costs.observed_tokens), episode_limits(self.config))

    async def _reward_worker(self, name: str, peer: SimulatedPeer) -> None:
        async with self._joined(name, peer) as run:
            await score_groups(run, _SleepingScorer(self, name).score, _decode)

    async def _reference_worker(self, name: str, peer: SimulatedPeer) -> None:
        async with self._joined(name, peer) as run:
            await add_log_probs(run, SleepingTrainEngine(self._costs_of(name), **self._place_of(name, REFERENCE)))

    async def _train_worker(self, name: str, peer: SimulatedPeer) -> None:
        async with self._joined(name, peer) as run:
            layout = self.config.layout
            rank, follows = divmod(int(name.rpartition("/")[2]), layout.tp * layout.pp)
            if follows:  # what the leader takes is what all of them take
                return
            fields = read_json(Path(self.config.model.path) / "config.json")
            num_parts = self.config.train.pipeline_micro_batches if layout.pp > 1 else 1
            passes = SleepingPasses(tokens_per_pass(self.config, fields), num_passing(self.config), num_parts)
            engine = SleepingTrainEngine(
                self._costs_of(name),
                learning_rate=self.config.train.learning_rate,
                data_parallel_rank=rank,
                ranks=self._ranks,
                passes=passes,
                **self._place_of(name, TRAIN),
            )
            sender = self._sync.sender(name) if rank == 0 else None
            lending = [lend(run.cores, "trainer", passes, run.reporter.recorder)] if num_passing(self.config) else []
            async with background(*lending):
                saving = await train_steps(run, engine, sender)
            await saving.written()
            await leave(run, sender, engine)

    async def _critic_worker(self, name: str, peer: SimulatedPeer) -> None:
        async with self._joined(name, peer) as run:
            learning_rate = self.config.train.critic.learning_rate
            most = critic_tokens_per_pass(self.config, critic_fields(self.config))
            engine = SleepingCritic(
                self._costs_of(name),
                learning_rate=learning_rate,
                passes=SleepingPasses(most),
                **self._place_of(name, CRITIC),
            )
            sender = self._critic_sync.sender(name) if self.config.plan.values.num_workers else None
            saving, _ = await critic_steps(run, engine, sender)
            await saving.written()
            await leave(run, sender, engine)

    async def _values_worker(self, name: str, peer: SimulatedPeer) -> None:
        async with self._joined(name, peer) as run:
            engine = SleepingCritic(self._costs_of(name), **self._place_of(name, CRITIC))
            await compute_values(run, engine, self._critic_sync.receiver(name))

    def _costs_of(self, name: str) -> Costs:
        return self._costs.slowed(self._faults.slow.get(name, 1.0))

    def _fetch_fails(self, name: str) -> bool:
        return name in self._faults.broken_fetches and self._rng.random() < self._faults.broken_fetches[name]

    def _fetch_hangs(self, name: str) -> float:
        hangs = self._faults.hanging_fetches.get(name)
        if hangs is None or self._hangs_rng.random() >= hangs.share:
            return 0.0
        self.audit.counts["hanging fetches"] += 1
        return hangs.seconds

    def reward(self, sample: Sample) -> float:
        """Reward of a sample, 0 or 1: by its response, or for some prompts the same for all."""
        of_prompt = random.Random(f"{self.config.run.seed}/equal/{sample.prompt}").random()
        return 0.0 if of_prompt < self._costs.equal_groups else float(int(sample.response) % 2)

    def reward_seconds(self, name: str, sample: Sample) -> float:
        """Seconds that a process of this worker takes to score a sample: a function of the sample, but for the worker's speed."""
        rewards = self._costs_of(name).rewards(self._scorers, has_model=self.config.reward.model is not None)
        mean = rewards + self.config.reward.delays.mean_seconds
        seconds = delay_seconds(sample, mean, self.config.reward.delays.salt)
        is_late = random.Random(f"{self.config.run.seed}/{sample.response}").random() < self._faults.late_rewards
        return seconds * (LATE_REWARD if is_late else 1.0)

    def reward_model_seconds(self, name: str, sample: Sample) -> float:
        """Seconds of this worker's reward model for a sample; 0: it has none, or nothing is known of it."""
        if self.config.reward.model is None:
            return 0.0
        return self._costs_of(name).reward_model_token_seconds * (len(sample.prompt_ids) + len(sample.token_ids))

    async def computed(self, name: str, seconds: float) -> None:
        """A reward model's work, on a device that others may share."""
        if self._shares_devices:
            await self._devices.compute(name, seconds)
        else:
            await asyncio.sleep(seconds)


def _shared_devices(config: Config, shared: Mapping[str, str]) -> SharedDevices:
    """Devices of the workers: their own, by their names, or another's. The leader of a data-parallel group stands for its ranks."""
    layout, names = config.layout, itertools.chain(*workers_with_devices(config).values())
    devices = {name: frozenset([shared.get(name, name)]) for name in names}
    each = layout.tp * layout.pp
    for leader in range(0, layout.size, each):
        devices[f"trainer/{leader}"] = frozenset(f"trainer/{rank}" for rank in range(leader, leader + each))
    return SharedDevices(devices)


class _SleepingScorer:
    """A worker's reward processes: `reward.num_workers` of them, with a deadline; and its reward model. The reward is a function of
    the response."""

    def __init__(self, job: SimulatedJob, name: str) -> None:
        self._job, self._name = job, name
        self._deadline_seconds = job.config.reward.deadline_seconds
        self._processes = asyncio.Semaphore(job.config.reward.num_workers)
        self._model = asyncio.Lock()

    async def score(self, sample: Sample) -> Score:
        seconds = self._job.reward_seconds(self._name, sample)
        async with self._processes:
            with waiting(PROCESS, seconds=self._deadline_seconds, process="reward worker", pid=0):
                await asyncio.sleep(min(seconds, self._deadline_seconds))
        if seconds > self._deadline_seconds:
            raise RewardFailure("timeout", f"the scorer had not answered after {self._deadline_seconds:g} s")
        if modelled := self._job.reward_model_seconds(self._name, sample):
            async with self._model:
                await self._job.computed(self._name, modelled)
        return Score(self._job.reward(sample), ())


def _prompt(number: int, length: int) -> Prompt:
    ids = np.zeros(length, np.int64)
    ids[0] = number
    return Prompt(ids, {})


def _decode(ids: Array) -> str:
    """Text of a prompt or a response: its first token, which tells it from others."""
    return str(ids[0])
