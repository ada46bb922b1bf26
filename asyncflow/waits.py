"""Waits of the code: every place where it waits for another process or thread, by the wait's name, with the deadline that ends it.

    a wait that is registered here --Signal.until, waiting()--> OpenWait: worker, since when, what has moved --> telemetry/why.py

A test goes through the source: a place that waits, names no wait of these in its call, and is not in `places`, fails it, as does
a place here that is gone. So does a loop that looks again and again, with pauses, unless the test has the reason why it waits for
nobody. Not counted as waits: one pause of a given length (`asyncio.sleep`), work of the process's own threads
(`asyncio.to_thread`), and calls of another process's service, which wait there, under the name that they have there.
"""

from __future__ import annotations

import asyncio
import re
from contextvars import ContextVar
from dataclasses import dataclass
from types import TracebackType
from typing import Final

import msgspec


@dataclass(frozen=True, slots=True)
class Wait:
    """A kind of wait. `what` is waited for, a text with the names of facts in braces; `ends`: what ends it at the latest, a
    configuration key or a constant with its seconds where there is one, by default the watchdog's. `places`: those that do not
    name it in their call, `file:class.function` below `asyncflow/`, separated by blanks; one without a file is in that of the
    place before."""

    name: str
    what: str
    ends: str
    places: str

    def words(self, facts: dict[str, int | str]) -> str:
        """Description of what is waited for; a fact that is not known is left out."""
        return self.what.format_map(_WordFacts(facts))

    @property
    def seconds(self) -> float | None:
        """Deadline that is a constant; None where it is another one."""
        found = re.match(r"[A-Z_]+ \(([\d.]+) s\)", self.ends)
        return None if found is None else float(found[1])


class _WordFacts(dict[str, int | str]):
    def __missing__(self, name: str) -> str:
        return f"some {name}"


class OpenWait(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A wait that has not ended. Ages are in seconds, since the clocks of two machines differ.

    `worker`: its name, where the wait is another process's. `left`: until its deadline, None where it has none of its own. `still`:
    since something has last moved, of what moves in pieces; `moved`: how much has, in bytes.
    """

    name: str
    seconds: float
    worker: str = msgspec.field(default="", name="who")  # the name in the files of earlier runs
    left: float | None = None
    still: float | None = None
    moved: int = 0
    facts: dict[str, int | str] = {}

    @property
    def words(self) -> str:
        """Description of what is waited for."""
        return WAITS[self.name].words(self.facts)


class OpenWaits:
    """Open waits of one worker, or of the driver. `within` makes a block's, and those of the tasks begun in it."""

    def __init__(self) -> None:
        self._open: dict[waiting, None] = {}

    def begin(self) -> None:
        """Record what this task waits for from now on, and the tasks that it begins."""
        _recorded.set(self)

    def now(self, now: float, most: int = 8) -> list[OpenWait]:
        """Waits that are open at this time of the event loop, the oldest first."""
        return [each.at(now) for each in sorted(self._open, key=lambda each: each.since)[:most]]


_recorded: ContextVar[OpenWaits | None] = ContextVar("open_waits", default=None)


class waiting:
    """Context of a wait that is open as long as the block runs. `seconds`: its deadline, from now on.

    Recorded only in a process's `OpenWaits`; a microsecond, so not for what happens at every token.
    """

    __slots__ = ("_open_waits", "_seconds", "bytes", "facts", "moved_at", "since", "wait")

    def __init__(self, wait: Wait, *, seconds: float | None = None, **facts: int | str) -> None:
        self.wait, self.facts, self._seconds = wait, facts, seconds
        self.since, self.bytes = 0.0, 0
        self.moved_at: float | None = None

    def __enter__(self) -> waiting:
        self._open_waits = _recorded.get()
        if self._open_waits is not None:
            self.since = asyncio.get_running_loop().time()
            self._open_waits._open[self] = None
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._open_waits is not None:
            self._open_waits._open.pop(self, None)

    def moved(self, num_bytes: int) -> None:
        """Note that so many bytes more have come."""
        self.bytes += num_bytes
        if self._open_waits is not None:
            self.moved_at = asyncio.get_running_loop().time()

    def at(self, now: float) -> OpenWait:
        """The open wait at this time of the event loop."""
        still = None if self.moved_at is None else now - self.moved_at
        left = None if self._seconds is None else self.since + self._seconds - now
        age = now - self.since
        return OpenWait(name=self.wait.name, seconds=age, left=left, still=still, moved=self.bytes, facts=self.facts)


WAITS: Final[dict[str, Wait]] = {}
"""Kinds of waits, by name."""


def _wait(name: str, what: str, places: str = "", *, ends: str = "run.stall_timeout_seconds") -> Wait:
    assert name not in WAITS, f"two waits are called {name}"
    WAITS[name] = wait = Wait(name, what, ends, places)
    return wait


# -- at the driver: parked requests, which the watchdog ends -------------------------------------------------------------------

MAY_ADMIT: Final = _wait("admission", "the schedule's leave to admit step {step}", "replay.py:ReplayJob._fail_missing")
PROMPTS: Final = _wait("prompts", "prompts for step {step}, which a client has to put")
CANDIDATES: Final = _wait("candidates", "the rewards of the candidates of step {step}")
STEP_START: Final = _wait("start", "the start of step {step} for task {task}")
TAKING: Final = _wait("taking", "a rank that can use one more group of step {step}", "loops/taking.py:Taking.run")
COMMIT: Final = _wait("commit", "the commit of step {step} by task {task}", "run/running.py:Running.finish_step")
READ: Final = _wait("read", "group {number} of step {step}")
STATISTICS: Final = _wait("statistics", "the statistics of all groups of step {step}")
ROUND: Final = _wait("round", "round {number} of step {step}")
EVALUATIONS: Final = _wait(
    "totals",
    "the last groups of step {step}, and evaluations under weights that its update displaces",
    "control/ledger/service.py:LedgerService.until",
)
CONSUMED: Final = _wait("consumed", "the other ranks to train the last groups of step {step}")
RELEASED: Final = _wait("released", "the other models that train step {step} to commit it")
JOINING: Final = _wait("first version", "the first version of the weights")
TARGET: Final = _wait("next version", "a version after {serving} to be published")
INSTALL_LEAVE: Final = _wait("leave to install", "the schedule's leave to install version {version}")
RUN_ENDS: Final = _wait(
    "end of the run",
    "the end of the run",
    "cli/queue.py:_until_stopped _listen cli/serve.py:until_stopped transfer_queue/queue.py:TransferQueue.running"
    " transfer_queue/node.py:serve_controller serve_controller.join run/running.py:Running._over"
    " service/hosted.py:HostedRun._watch HostedRun._stop",
    ends="the run's end",
)
ALL_SERVE: Final = _wait(
    "all serve",
    "every rollout worker to serve version {version}",
    "run/stepwise.py:StepwiseRun._notify.all_serve",
    ends="the caller's timeout",
)
PUBLISHED: Final = _wait("published", "version {version} to be published by the trainer")
CRITIC_VERSION: Final = _wait("critic version", "version {version} of the critic")
BEGUN: Final = _wait("begun", "the trainer to serve its first weights")
EVALUATION_DUE: Final = _wait("evaluation due", "a version that is to be evaluated")
OUTCOME: Final = _wait(
    "outcome",
    "what the run is driven to: a step, an evaluation, its end",
    "run/job.py:Job.run Job.until Job.until_done run_with_signals run/running.py:Running._reached"
    " run/stepwise.py:StepwiseRun.__init__ StepwiseRun._on_any_attempt StepwiseRun._step StepwiseRun._evaluate"
    " StepwiseRun.until StepwiseRun.until_here"
    " service/hosted.py:HostedRun.publish",
)
CRITIC_PART: Final = _wait(
    "critic's part", "the critic's part of checkpoint {version}", "run/state/saving.py:CheckpointCoordinator.begin"
)
METRICS: Final = _wait(
    "metrics",
    "the metrics of step {version}",
    "run/records/metric_rows.py:MetricRows.__init__ run/state/saving.py:CheckpointCoordinator.settle",
)
REPORTS: Final = _wait(
    "reports",
    "the workers' reports up to a commit",
    "telemetry/hub.py:Hub.settle Hub.have_left",
    ends="a second (SETTLE_SECONDS), or what stopping allows",
)
LEASE: Final = _wait(
    "lease",
    "rows of task {task}",
    "transfer_queue/controller.py:Controller.lease Controller._columns_here transfer_queue/client_leases.py:ClientLeases.ask"
    " transfer_queue/client.py:TransferQueueClient.stream",
)
FREE_CORES: Final = _wait("free cores", "cores or devices that others leave free", ends="the run's end")
RENDEZVOUS: Final = _wait(
    "rendezvous",
    "ranks to meet: key {key}",
    "run/services/rendezvous.py:meet_at_driver.call weight_sync/collective.py:_store.call",
    ends="the rendezvous' timeout of torch",
)

# -- lanes: the state of a worker that waits -----------------------------------------------------------------------------------

LANE: Final = _wait(
    "lane",
    "the cause that the lane names",
    "loops/algorithm1.py:train Publishing.begin Publishing.ended loops/critic.py:_install publish_critic train_critic"
    " loops/rollout.py:Rollout._show_lane loops/tasks.py:serve run/workers.py:_go_on _call_state compute_values critic_worker leave"
    " train_worker run/state/saving.py:CheckpointWriter.save service/generation.py:PublishedFiles.fetch",
    ends="that of the wait it names",
)

# -- in a worker ---------------------------------------------------------------------------------------------------------------

OWN_RESPONSES: Final = _wait("own responses", "its own responses, which free its slots", "loops/rollout.py:Rollout._unless_stopped")
ADAPTER_IN_USE: Final = _wait(
    "adapter in use",
    "the responses to requests that name an adapter, which is to go",
    "engines/rollout/loaded_adapters.py:LoadedAdapter.unused",
    ends="their own ends: each has a largest number of tokens",
)
HELPERS: Final = _wait(
    "helpers",
    "passes and pieces that others compute beside the trainer's own, or one for them",
    "engines/train/helpers.py:Helpers.__init__ Helpers._take_pieces_until _HelperCall.take Helpers._serve"
    " engines/train/pass_gradients.py:PassGradients.__init__ engines/train/model/cast_weights.py:CastWeights.__init__",
)
FETCH: Final = _wait(
    "fetch",
    "the weights of version {version}",
    "weight_sync/network.py:NetworkReceiver._held NetworkReceiver._ask weight_sync/collective.py:CollectiveReceiver.fetch",
    ends="weight_sync.deadline_seconds",
)
PULL: Final = _wait(
    "pull",
    "bytes of version {version} from the trainer's sender at {address}",
    "weight_sync/network.py:NodeReceiver.hold NodeReceiver.__init__",
    ends="weight_sync.deadline_seconds",
)
BROADCAST: Final = _wait(
    "broadcast",
    "all receivers of a broadcast of weights",
    "weight_sync/collective.py:CollectiveSender._until CollectiveSender.join weight_sync/group.py:Group._finish",
    ends="weight_sync.deadline_seconds",
)
PUBLISHING: Final = _wait(
    "publishing",
    "version {version} to be published",
    "weight_sync/shared_memory.py:SharedMemorySender.__init__ engines/train/leader_engine.py:_GatheredWeights.gathered"
    " _GatheredWeights.tensors",
)
READERS: Final = _wait(
    "readers",
    "a worker to have read a version that is over, in whose place another one is written",
    "weight_sync/files.py:VersionFiles._wait_for_readers",
    ends="weight_sync.deadline_seconds",
)
PROCESS: Final = _wait(
    "process",
    "{process} {pid}",
    "sandbox/process.py:SandboxProcess.ask sandbox/pool.py:SandboxPool._unless_failed sandbox/forked.py:_ChildWatch._wait",
    ends="its deadline",
)
PROCESS_END: Final = _wait(
    "process end",
    "the end of a process that was killed",
    "sandbox/process.py:SandboxProcess.kill sandbox/pool.py:SandboxPool.close sandbox/forked.py:_ChildWatch.end"
    " sandbox/limits.py:end_children",
    ends="KILL_SECONDS (5 s) after SIGKILL; END_SECONDS (2 s), of what a piece of work has left",
)
SIBLINGS: Final = _wait(
    "siblings",
    "the rewards of a group's other rows",
    "loops/score_batching.py:ScoredRows.to_store",
    ends="SIBLINGS_SECONDS (0.5 s)",
)
RESET: Final = _wait(
    "first words", "the first words of environments", "loops/episode.py:EpisodePlayer.begin", ends="episodes.deadline_seconds"
)
REWARD_MODEL: Final = _wait(
    "reward model", "the reward model's score", "rewards/scorings.py:by_model.answer", ends="reward.deadline_seconds"
)
USER_CODE: Final = _wait(
    "user's code",
    "a coroutine of the user's own",
    "rewards/worker.py:_awaited _awaited.wait environments/tools.py:ToolBox.result_of"
    " environments/trl.py:TRLEnvironment._reward TRLEnvironment.reset environments/worker.py:Player._call"
    " environments/agent.py:Agent._called Agent._started environments/worker.py:serve_one_by_one",
    ends="the deadline of the process that it runs in",
)
QUESTIONS: Final = _wait(
    "questions",
    "the next question of the process's owner",
    "environments/worker.py:serve_together cluster/fork_server.py:main",
    ends="the owner's end, which closes its pipes",
)
MCP: Final = _wait(
    "MCP server",
    "an MCP server of the environment",
    "environments/mcp_tools.py:McpTools.__init__ McpTools._keep McpTools.close McpTools.open _connected",
    ends="START_SECONDS (30 s), then the call's own deadline",
)
CAPTURED: Final = _wait(
    "captured call",
    "room for a call of a captured program",
    "environments/capture/episode.py:CapturedEpisode.__init__ CapturedEpisode._room"
    " environments/capture/endpoint.py:CaptureEndpoint.stop",
    ends="episodes.deadline_seconds",
)
NEXT_CALL: Final = _wait(
    "next call",
    "the next call that a thread is to compute",
    "threads.py:ComputeThread._loop engines/rollout/threaded.py:ThreadedEngine._run"
    " engines/rollout/transformers_engine.py:TransformersEngine._between_tokens",
    ends="`close` of its owner",
)
BLOCKING: Final = _wait(
    "blocking call",
    "an event loop in another thread to answer a blocking call",
    "client.py:_Blocking._call trainer.py:Trainer._call",
    ends="the deadline of what is called",
)
OUTPUT: Final = _wait(
    "output",
    "the reader of standard output",
    "cli/output.py:OptionalReader.write",
    ends="PATIENCE_SECONDS (0.5 s), after which lines are left out",
)
COMPUTATION: Final = _wait(
    "computation",
    "the computation of the thread that owns the model",
    "threads.py:ComputeThread.run engines/rollout/threaded.py:ThreadedEngine._generate engines/train/model/causal_model.py:-"
    " engines/devices.py:-",
)
SERVER: Final = _wait(
    "vLLM",
    "{server}",
    "engines/rollout/vllm/generation.py:Generation._ask Generation.responses"
    " engines/rollout/vllm/engine.py:VllmEngine.__init__ engines/rollout/vllm/servers.py:ServerHandle.__init__",
    ends="the look at the server's health, or generation_seconds of rollout.engine",
)
SERVER_START: Final = _wait(
    "vLLM start",
    "a vLLM server that serves: {servers}",
    "engines/rollout/vllm/servers.py:ServerPool.least_loaded ServerHandle.until_lost ServerHandle._until_it_answers"
    " engines/rollout/vllm/hosts.py:OwnServer.__init__ engines/rollout/vllm/process.py:ServerProcess.wait_until_ready",
    ends="start_seconds of rollout.engine",
)
SERVER_WEIGHTS: Final = _wait(
    "vLLM weights",
    "a vLLM server to take its weights",
    "engines/rollout/vllm/transfer.py:NcclTransfer.send _Calls._wait engines/rollout/vllm/weights.py:ServerWeights.write_over",
    ends="weight_sync.deadline_seconds",
)
SERVER_END: Final = _wait(
    "vLLM end",
    "the end of a vLLM server",
    "engines/rollout/vllm/process.py:ServerProcess.stop engines/rollout/in_vllm/guard.py:main",
    ends="KILL_SECONDS (5 s) after SIGKILL",
)
COLLECTIVE: Final = _wait(
    "collective",
    "the other ranks of the trainer",
    "engines/train/leader_engine.py:LeaderEngine.follow engines/train/parallel/pipeline.py:Pipeline._wait_for"
    " engines/train/parallel/many_ranks.py:ManyRanks._to_first engines/train/profile.py:Stopwatch.timed _there_and_back"
    " engines/train/parallel/pipeline.py:Pipeline._broadcast"
    " engines/train/parallel/ranks.py:Ranks.broadcast Ranks.largest Ranks.receive Ranks.total"
    " engines/train/model/log_probs.py:VocabularyShard.join engines/train/model/rank_sums.py:summed_rows gathered_rows"
    " engines/train/adapters/megatron/engine.py:MegatronTraining._from_last_stage MegatronTraining._norm MegatronTraining._summed"
    " MegatronTraining._response_log_probs engines/train/adapters/megatron/tensors.py:StageTensors._gather",
    ends="EXCHANGE_SECONDS (600 s)",
)
CHECKPOINT: Final = _wait(
    "checkpoint",
    "files of checkpoint {version} to be written, in {folder}",
    "run/state/saving.py:CheckpointWriter._written_files CheckpointWriter._written CheckpointWriter.written"
    " run/records/record.py:RunRecord.__init__",
)
CHECKPOINT_PARTS: Final = _wait(
    "checkpoint's parts",
    "the other ranks to write their parts of a checkpoint",
    "engines/train/state.py:StateWriter._wait_for_others",
    ends="WRITE_SECONDS (600 s)",
)
CHECKPOINT_WHOLE: Final = _wait("whole checkpoint", "the driver to make checkpoint {version} whole, in {folder}")
WORK_AT_ONCE: Final = _wait("room for work", "work of its own to end, so that there is room for more", "loops/tasks.py:serve")
OUTSIDE: Final = _wait(
    "outside",
    "a process from outside: a client that generates or trains",
    "run/services/desk.py:TrainDesk.publish TrainDesk.take TrainDesk.update service/generation.py:OutsideEngine.generate"
    " OutsideEngine.install OutsideEngine.put OutsideEngine.take service/workers.py:OutsideWorkers.join OutsideWorkers.hold"
    " OutsideWorkers.leave cli/join.py:JoinedGenerator._generate _rest",
    ends="queue.lease_seconds, and the client's own timeout",
)

SITUATION: Final = _wait(
    "situation",
    "the disk, for the file that `asyncflow why` reads",
    "run/watch.py:Watch._write Watch.ended",
    ends="a second (SECONDS), after which it is left alone",
)

# -- between processes ---------------------------------------------------------------------------------------------------------

ANSWER: Final = _wait(
    "answer",
    "the answer of another process's service, where it has a name of its own",
    "transport/peer.py:Peer.call Peer.connect _connect_unix cluster/wire.py:SimulatedPeer.call transport/server.py:Server.close"
    " transfer_queue/directory.py:Places._dial Places.call Directory.describe",
    ends="the loss of the connection, which is an error at once, or after the patience of a queue's client",
)
UNIT: Final = _wait(
    "storage unit",
    "storage unit {unit} to store {rows} rows",
    "transfer_queue/durable_state.py:SavedDurableState.__init__"
    " transfer_queue/unit_store.py:UnitStore._drop UnitStore._store UnitStore._to_its_end UnitStore.admit UnitStore._ended"
    " transfer_queue/freeing.py:Freeing.__init__ Freeing.free transfer_queue/client.py:_all_that_answer",
    ends="queue.lease_seconds",
)
CAPACITY: Final = _wait("room in a unit", "room for {rows} rows in a storage unit", "transfer_queue/capacity.py:Capacity.reserve")
NOTICES: Final = _wait(
    "notices",
    "notices of a storage unit",
    "transfer_queue/unit_subscription.py:UnitSubscription.caught_up UnitSubscription.follow",
    ends="the loss of the connection, after which it follows anew",
)
STORE: Final = _wait(
    "store",
    "the store behind a storage unit (Redis, Mooncake)",
    "transfer_queue/storage/servers/key_value.py:KeyValueStorage.__init__"
    " transfer_queue/storage/servers/mooncake.py:MooncakeKeyValue._call"
    " transfer_queue/storage/servers/redis.py:RedisKeyValue._deadline",
    ends="queue.storage's timeout_seconds",
)
ARENA: Final = _wait(
    "arena",
    "another thread's use of the shared memory",
    "transport/arena.py:- Arena.__init__ Arena._settle",
    ends="that use, which does no I/O",
)
MODEL_FILES: Final = _wait(
    "model files",
    "the model's files from the driver's machine",
    "transport/ahead.py:read_ahead run/models/model_source.py:run_module run/models/hub_parts.py:fetch"
    " run/models/hub_parts.py:_complete run/job.py:Job._begin run/models/model_files.py:model_here",
    ends="CHUNK_SECONDS (60 s) without a chunk; of a download, HF_HUB_DOWNLOAD_TIMEOUT without"
    " a byte, again and again; of weights, whose wait is `PULL`, weight_sync.deadline_seconds",
)
LOADER: Final = _wait(
    "loader",
    "the next batch of a data loader in another product's trainer",
    "transfer_queue/loader/broadcast.py:GroupBroadcast._broadcast"
    " transfer_queue/loader/dataloader.py:StreamDataLoader._from_queue StreamDataLoader._next"
    " transfer_queue/loader/prefetch.py:Ahead.__init__ Ahead.run Ahead.take StreamFeed._main StreamFeed.call StreamFeed.close"
    " StreamFeed.wait StreamSource.connect _end_with",
    ends="the loader's own timeout",
)

# -- beginning and ending ------------------------------------------------------------------------------------------------------

DRIVER: Final = _wait(
    "driver",
    "the driver that torchrun's first rank has started to begin the run",
    "cluster/torchrun.py:_wait_for_driver",
    ends="the driver's end",
)
WORKERS_START: Final = _wait(
    "workers' start",
    "the cluster to start {workers} workers",
    "cluster/forking.py:ForkServer.fork - ForkServer._receive",
    ends="an interrupt, a loop that fails, or the cluster's own deadline (start_seconds on Ray)",
)
THREADS_START: Final = _wait(
    "threads' start",
    "this process's threads to begin",
    "threads.py:_ReadyLoop.__init__",
    ends="START_SECONDS (60 s), which ends the process",
)
RAY_ROOM: Final = _wait(
    "room on Ray",
    "room in the Ray cluster for {workers}",
    "cluster/ray/places.py:_in_thread cluster/ray/cluster.py:RayCluster._spawn",
    ends="start_seconds of the cluster",
)
RAY: Final = _wait(
    "Ray",
    "an answer of Ray, or of a host that it has placed",
    "cluster/ray/cluster.py:RayCluster._look_apart RayCluster._look_for_devices RayCluster.stop"
    " cluster/ray/connection.py:RayConnection._begin_cluster RayConnection.answer RayConnection.disconnect _answers"
    " cluster/ray/guard.py:guard"
    " cluster/ray/node_folders.py:_hold"
    " cluster/ray/host.py:RayHost.__init__ RayHost.lacks RayHost._end_predecessor RayHost._read RayHost._wait RayHost.listen"
    " cluster/ray/places.py:RayPlaces._leave cluster/ray/process.py:RayProcess._follow RayProcess._kill"
    " RayProcess._order_kill",
    ends="HOST_SECONDS (30 s), UNAVAILABLE_SECONDS (60 s)",
)
HANDOVER: Final = _wait(
    "handover",
    "{workers} workers that may stay for the next attempt to let go of this one",
    "run/services/handover.py:Handover.staying",
    ends="STAY_SECONDS (5 s)",
)
NEXT_ATTEMPT: Final = _wait(
    "next attempt", "the next attempt of the run, after a worker's death", "run/in_worker/connection.py:next_attempt"
)
UNITS: Final = _wait("units", "{units} storage units to come", "run/driver.py:Driver._units_there", ends="UNITS_SECONDS (60 s)")
ROWS_REMOVED: Final = _wait(
    "rows removed",
    "the storage units to remove what the attempt has stored",
    "run/driver.py:Driver._remove_rows",
    ends="REMOVE_SECONDS (5 s)",
)
WORKER_ENDS: Final = _wait(
    "worker's end",
    "a worker's process to end",
    "run/job.py:Job.restart_after cluster/forking.py:ForkServer._end ForkedProcess.wait"
    " cluster/supervised.py:SupervisedCluster._keep_alive cluster/torchrun.py:run_rank",
    ends="the worker's end, which its cluster tells of",
)
STOPPING: Final = _wait(
    "stopping",
    "workers, or work under way, to end",
    "cluster/inline.py:InlineCluster.end InlineCluster.stop cluster/simulated.py:SimulatedCluster.end SimulatedCluster.stop"
    " cluster/supervised.py:SupervisedCluster._end SupervisedCluster.end cluster/torchrun.py:_end"
    " run/background.py:BackgroundTasks.settle trainer.py:Trainer.stop client.py:Client.close"
    " service/server.py:HttpServer.stop",
    ends="run.stop_grace_seconds, then SIGKILL",
)
SCALING: Final = _wait(
    "scaling",
    "workers to come or to leave",
    "run/services/scaling.py:Scaling.__init__ Scaling.scale cli/cluster.py:_scale",
    ends="the command's --grace, ANSWER_SECONDS (180 s)",
)
TRIAL: Final = _wait(
    "trial",
    "a process that looks at the machine, at the user's own engines, or at a layer's costs",
    "engines/rollout/vllm/look_up.py:look_up engines/rollout/vllm/options.py:check_environment"
    " run/availability.py:check_devices check_engines _check_apart run/trials/profile.py:_until_ended profile"
    " cli/verify.py:_Run.group cli/watch.py:predicted",
    ends="its own deadline",
)
HTTP: Final = _wait(
    "HTTP",
    "a client's request, or its repetition",
    "service/app.py:Gate._paced.paced service/hosted.py:HostedRun.__init__ HostedRun.farewell"
    " service/watching.py:WatchedRun.__init__ look_at"
    " service/repeats.py:Repeats.begin",
    ends="the limits of the service (service/limits.py); FAREWELL_SECONDS (5 s), of a run that is over",
)
TINKER: Final = _wait(
    "Tinker's API",
    "the request of a model before this one, a place to sample, or one to train",
    "service/tinker/results.py:Results.get service/tinker/samplers.py:Samplers._granted _Held.have_arrived"
    " service/tinker/trained_model.py:TrainedModel.run answered"
    " service/tinker/training_passes.py:TrainingPasses.forward_backward",
    ends="RETRIEVE_SECONDS (20 s), after which the client asks again",
)
SIMULATION: Final = _wait(
    "simulation",
    "virtual time, or a process that simulates",
    "engines/sleeping/rollout.py:SleepingRolloutEngine._decode SleepingRolloutEngine._generate SleepingRolloutEngine._hand_in"
    " SleepingRolloutEngine._run engines/sleeping/train.py:SleepingPasses.compute SleepingPasses.compute.help_out"
    " SleepingTrainEngine.__init__ SleepingTrainEngine.forward_backward simulation/run.py:SimulatedJob._place"
    " _SleepingScorer.__init__ _run simulation/seeds.py:Simulators.outcomes _end outcomes",
    ends="the simulated run's own deadlines, RUN_SECONDS (1800 s)",
)
