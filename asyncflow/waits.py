"""Waits of the code: every place where it waits for somebody else, by the name of the wait, with the deadline that ends it.

    a wait that is registered here --Signal.until, waiting()--> OpenWait: who, since when, what has moved --> telemetry/why.py

A test goes through the source: a place that waits and is not in `places`, or a place here that is gone, fails it. Not counted as
waits: a pause of a given length (`asyncio.sleep`), work of the process's own threads (`asyncio.to_thread`), and calls of another
process's service, which wait there, under the name that they have there.
"""

from __future__ import annotations

import asyncio
from contextvars import ContextVar
from dataclasses import dataclass
from types import TracebackType
from typing import Final

import msgspec


@dataclass(frozen=True, slots=True)
class Wait:
    """A kind of wait. `what` is waited for, a text with the names of facts in braces; `ends`: what ends it at the latest, a
    configuration key where there is one. `places`: `file:class.function` below `asyncflow/`, separated by blanks."""

    name: str
    what: str
    ends: str
    places: str

    def words(self, facts: dict[str, int | str]) -> str:
        """Description of what is waited for; a fact that is not known is left out."""
        return self.what.format_map(_Facts(facts))


class _Facts(dict[str, int | str]):
    def __missing__(self, name: str) -> str:
        return f"some {name}"


class OpenWait(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A wait that has not ended. Ages are in seconds, since the clocks of two machines differ.

    `who`: the worker, where the wait is another process's. `left`: until its deadline, None where it has none of its own. `still`:
    since something has last moved, of what moves in pieces; `moved`: how much has, in bytes.
    """

    name: str
    seconds: float
    who: str = ""
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

    __slots__ = ("_book", "_seconds", "bytes", "facts", "moved_at", "since", "wait")

    def __init__(self, wait: Wait, *, seconds: float | None = None, **facts: int | str) -> None:
        self.wait, self.facts, self._seconds = wait, facts, seconds
        self.since, self.bytes = 0.0, 0
        self.moved_at: float | None = None

    def __enter__(self) -> waiting:
        self._book = _recorded.get()
        if self._book is not None:
            self.since = asyncio.get_running_loop().time()
            self._book._open[self] = None
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._book is not None:
            self._book._open.pop(self, None)

    def moved(self, num_bytes: int) -> None:
        """Note that so many bytes more have come."""
        self.bytes += num_bytes
        if self._book is not None:
            self.moved_at = asyncio.get_running_loop().time()

    def at(self, now: float) -> OpenWait:
        """The open wait at this time of the event loop."""
        still = None if self.moved_at is None else now - self.moved_at
        left = None if self._seconds is None else self.since + self._seconds - now
        age = now - self.since
        return OpenWait(name=self.wait.name, seconds=age, left=left, still=still, moved=self.bytes, facts=self.facts)


WAITS: Final[dict[str, Wait]] = {}
"""Kinds of waits, by name."""

_STALL: Final = "run.stall_timeout_seconds"
_WORKER_ENDS: Final = "the worker's end, which its cluster tells of"


def _wait(name: str, what: str, ends: str, places: str) -> Wait:
    assert name not in WAITS, f"two waits are called {name}"
    WAITS[name] = wait = Wait(name, what, ends, places)
    return wait


# -- at the driver: parked requests, which the watchdog ends -------------------------------------------------------------------

MAY_ADMIT: Final = _wait(
    "admission", "the schedule's leave to admit step {step}", _STALL, "control/ledger/service.py:LedgerService.may_admit"
)
PROMPTS: Final = _wait("prompts", "prompts for step {step}, which somebody has to put", _STALL, "loops/algorithm1.py:feed")
CANDIDATES: Final = _wait(
    "candidates",
    "the rewards of the candidates of step {step}",
    _STALL,
    "control/ledger/service.py:LedgerService.wanted",
)
STEP_START: Final = _wait(
    "start", "the start of step {step} for task {task}", _STALL, "control/ledger/service.py:LedgerService.may_start"
)
TAKING: Final = _wait(
    "taking",
    "a rank that can use one more group of step {step}",
    _STALL,
    "control/ledger/service.py:LedgerService.may_take loops/taking.py:Taking.run",
)
COMMIT: Final = _wait(
    "commit",
    "the commit of step {step} by task {task}",
    _STALL,
    "control/ledger/service.py:LedgerService.closed control/ledger/service.py:LedgerService.finished"
    " run/running.py:Running.finish_step",
)
READ: Final = _wait("read", "group {number} of step {step}", _STALL, "control/ledger/service.py:LedgerService.next_read")
STATISTICS: Final = _wait(
    "statistics",
    "the statistics of all groups of step {step}",
    _STALL,
    "control/ledger/service.py:LedgerService.statistics",
)
ROUND: Final = _wait("round", "round {number} of step {step}", _STALL, "control/ledger/service.py:LedgerService.next_round")
EVALUATIONS: Final = _wait(
    "totals",
    "the last groups of step {step}, and evaluations under weights that its update displaces",
    _STALL,
    "control/ledger/service.py:LedgerService.totals control/ledger/service.py:LedgerService.until",
)
CONSUMED: Final = _wait("consumed", "the other ranks to train the last groups of step {step}", _STALL, "")
RELEASED: Final = _wait(
    "released",
    "the other models that train step {step} to commit it",
    _STALL,
    "control/ledger/service.py:LedgerService.released",
)
JOINING: Final = _wait(
    "first version", "the first version of the weights", _STALL, "control/policy_versions.py:PolicyVersions.join"
)
TARGET: Final = _wait(
    "next version",
    "a version after {serving} to be published",
    _STALL,
    "control/policy_versions.py:PolicyVersions.next_target",
)
INSTALL_LEAVE: Final = _wait(
    "leave to install",
    "the schedule's leave to install version {version}",
    _STALL,
    "control/policy_versions.py:PolicyVersions.may_install",
)
RUN_ENDS: Final = _wait(
    "end of the run",
    "the end of the run",
    "the run's end",
    "control/policy_versions.py:PolicyVersions.stopped cli/queue.py:_until_told cli/serve.py:until_told cli/queue.py:_listen"
    " transfer_queue/queue.py:TransferQueue.running transfer_queue/node.py:serve_controller"
    " transfer_queue/node.py:serve_controller.join run/running.py:Running._over service/hosted.py:HostedRun._watch",
)
ALL_SERVE: Final = _wait(
    "all serve",
    "every rollout worker to serve version {version}",
    "the caller's timeout",
    "control/policy_versions.py:PolicyVersions.all_serve run/stepwise.py:StepwiseRun.weight_sync_notify",
)
PUBLISHED: Final = _wait(
    "published",
    "version {version} to be published by the trainer",
    _STALL,
    "control/policy_versions.py:PolicyVersions.has_published",
)
CRITIC_VERSION: Final = _wait(
    "critic version",
    "version {version} of the critic",
    _STALL,
    "control/critic_versions.py:CriticVersions.reaches",
)
BEGUN: Final = _wait("begun", "the trainer to serve its first weights", _STALL, "run/driver.py:Driver.begun")
EVALUATION_DUE: Final = _wait("evaluation due", "a version that is to be evaluated", _STALL, "loops/evaluation.py:Evaluations.run")
OUTCOME: Final = _wait(
    "outcome",
    "what the run is driven to: a step, an evaluation, its end",
    _STALL,
    "run/job.py:Job.run run/job.py:Job.until run/job.py:Job.until_done run/running.py:Running.until"
    " run/stepwise.py:StepwiseRun.step run/stepwise.py:StepwiseRun.evaluate run/stepwise.py:StepwiseRun.until"
    " run/stepwise.py:StepwiseRun._or_its_end"
    " service/hosted.py:HostedRun.publish run/job.py:run_with_signals",
)
CRITIC_PART: Final = _wait(
    "critic's part",
    "the critic's part of checkpoint {version}",
    _STALL,
    "run/saving.py:CheckpointCoordinator._part_of_critic run/saving.py:CheckpointCoordinator.begin",
)
METRICS: Final = _wait(
    "metrics",
    "the metrics of step {version}",
    _STALL,
    "run/metric_rows.py:MetricRows.__init__ run/metric_rows.py:MetricRows.finished run/saving.py:CheckpointCoordinator.settle",
)
REPORTS: Final = _wait(
    "reports",
    "the workers' reports up to a commit",
    "a second (SETTLE_SECONDS), or what stopping allows",
    "telemetry/hub.py:Hub.settle telemetry/hub.py:Hub.have_left",
)
LEASE: Final = _wait(
    "lease",
    "rows of task {task}",
    _STALL,
    "transfer_queue/controller.py:Controller.lease transfer_queue/controller.py:Controller._columns_here"
    " transfer_queue/client_leases.py:ClientLeases.ask transfer_queue/client.py:TransferQueueClient.stream",
)
FREE_CORES: Final = _wait(
    "free cores",
    "cores or devices that others leave free",
    "the run's end",
    "run/cores.py:FreeCores.helpers run/cores.py:FreeCores.num_threads",
)
RENDEZVOUS: Final = _wait(
    "rendezvous", "ranks to meet: key {key}", "the rendezvous' timeout of torch", "run/rendezvous.py:Rendezvous.get"
)

# -- lanes: the state of a worker that waits -----------------------------------------------------------------------------------

LANE: Final = _wait(
    "lane",
    "the cause that the lane names",
    "that of the wait it names",
    "loops/algorithm1.py:train loops/algorithm1.py:Publishing.begin loops/algorithm1.py:Publishing.ended loops/critic.py:_install"
    " loops/critic.py:publish_critic loops/critic.py:train_critic loops/rollout.py:Rollout._show_lane loops/tasks.py:serve"
    " run/workers.py:_go_on run/workers.py:_led run/workers.py:add_log_probs run/workers.py:compute_values"
    " run/workers.py:critic_worker run/workers.py:roll_out run/workers.py:score_groups run/workers.py:train_worker"
    " run/saving.py:CheckpointWriter.save simulation/run.py:SimulatedJob._critic_worker"
    " simulation/run.py:SimulatedJob._train_worker service/generation.py:PublishedFiles.fetch",
)

# -- in a worker ---------------------------------------------------------------------------------------------------------------

OWN_RESPONSES: Final = _wait(
    "own responses",
    "its own responses, which free its slots",
    _STALL,
    "loops/rollout.py:Rollout._take_groups loops/rollout.py:Rollout._has_ended loops/rollout.py:Rollout._unless_stopped",
)
ADAPTER_IN_USE: Final = _wait(
    "adapter in use",
    "the responses to requests that name an adapter, which is to go",
    "their own ends: each has a largest number of tokens",
    "engines/rollout/loaded_adapters.py:LoadedAdapter.unused",
)
HELPERS: Final = _wait(
    "helpers",
    "passes and pieces that others compute beside the trainer's own, or one for them",
    _STALL,
    "engines/train/helpers.py:Helpers.__init__ engines/train/helpers.py:Helpers._take_pieces_until "
    "engines/train/helpers.py:_Shared.take engines/train/helpers.py:Helpers._serve "
    "engines/train/pass_gradients.py:PassGradients.__init__",
)
FETCH: Final = _wait(
    "fetch",
    "the weights of version {version}",
    "weight_sync.deadline_seconds",
    "loops/rollout.py:Rollout._fetched weight_sync/network.py:NetworkReceiver._held"
    " weight_sync/collective.py:CollectiveReceiver.fetch",
)
PULL: Final = _wait(
    "pull",
    "bytes of version {version} from the trainer's sender at {address}",
    "weight_sync.deadline_seconds",
    "weight_sync/network.py:NodeReceiver._chunks weight_sync/network.py:NodeReceiver.hold"
    " weight_sync/network.py:NodeReceiver.__init__ weight_sync/network.py:NodeReceiver._pulled",
)
BROADCAST: Final = _wait(
    "broadcast",
    "all receivers of a broadcast of weights",
    "weight_sync.deadline_seconds",
    "weight_sync/collective.py:CollectiveSender._until weight_sync/collective.py:CollectiveSender.join"
    " weight_sync/collective.py:_store weight_sync/group.py:Group._finish",
)
PUBLISHING: Final = _wait(
    "publishing",
    "version {version} to be published",
    _STALL,
    "loops/algorithm1.py:Publishing._publish weight_sync/shared_memory.py:SharedMemorySender.__init__"
    " engines/train/leader_engine.py:_GatheredWeights.gathered",
)
PROCESS: Final = _wait(
    "process",
    "{process} {pid}",
    "its own deadline (reward.deadline_seconds, episodes.deadline_seconds)",
    "sandbox/process.py:SandboxProcess.ask environments/pool.py:EnvironmentPool._process rewards/pool.py:RewardPool.score",
)
PROCESS_END: Final = _wait(
    "process end",
    "the end of a process that was killed",
    "KILL_SECONDS (5 s) after SIGKILL",
    "sandbox/process.py:SandboxProcess.kill sandbox/process.py:SandboxProcesses.close",
)
SIBLINGS: Final = _wait(
    "siblings",
    "the rewards of a group's other rows",
    "SIBLINGS_SECONDS (0.5 s)",
    "loops/score_batching.py:ScoredRows.to_store",
)
RESET: Final = _wait(
    "first words", "the first words of environments", "episodes.deadline_seconds", "loops/episode.py:EpisodePlayer.begin"
)
REWARD_MODEL: Final = _wait(
    "reward model", "the reward model's score", "reward.deadline_seconds", "rewards/scorings.py:by_model.answer"
)
USER_CODE: Final = _wait(
    "user's code",
    "a coroutine of the user's own",
    "the deadline of the process that it runs in",
    "rewards/worker.py:_awaited rewards/worker.py:_awaited.wait environments/tools.py:ToolBox.result_of"
    " environments/trl.py:TRLEnvironment._reward environments/trl.py:TRLEnvironment.reset environments/worker.py:Player._call"
    " environments/agent.py:Agent._called environments/agent.py:Agent._started",
)
QUESTIONS: Final = _wait(
    "questions",
    "the next question of the process's owner",
    "the owner's end, which closes its pipes",
    "environments/worker.py:serve_together",
)
MCP: Final = _wait(
    "MCP server",
    "an MCP server of the environment",
    "START_SECONDS (30 s), then the call's own deadline",
    "environments/mcp_tools.py:McpTools._keep environments/mcp_tools.py:McpTools.close environments/mcp_tools.py:McpTools.open"
    " environments/mcp_tools.py:_connected environments/mcp_tools.py:_run_apart",
)
CAPTURED: Final = _wait(
    "captured call",
    "room for a call of a captured program",
    "episodes.deadline_seconds",
    "environments/capture/episode.py:CapturedEpisode.__init__ environments/capture/episode.py:CapturedEpisode._room"
    " environments/capture/endpoint.py:CaptureEndpoint.stop",
)
COMPUTATION: Final = _wait(
    "computation",
    "the computation of the thread that owns the model",
    _STALL,
    "threads.py:ComputeThread.run engines/rollout/threaded.py:ThreadedEngine._generate engines/train/model/causal_model.py:-",
)
SERVER: Final = _wait(
    "vLLM",
    "{server}",
    "generation_seconds of rollout.engine (1800 s), and the look at the server's health",
    "engines/rollout/vllm/generation.py:Generation._ask engines/rollout/vllm/generation.py:Generation.responses"
    " engines/rollout/vllm/engine.py:VllmEngine.__init__ engines/rollout/vllm/servers.py:ServerHandle.__init__",
)
SERVER_START: Final = _wait(
    "vLLM start",
    "a vLLM server that serves",
    "start_seconds of rollout.engine (600 s)",
    "engines/rollout/vllm/servers.py:ServerPool.least_loaded engines/rollout/vllm/servers.py:ServerHandle.until_lost"
    " engines/rollout/vllm/hosts.py:OwnServer.__init__",
)
SERVER_WEIGHTS: Final = _wait(
    "vLLM weights",
    "a vLLM server to take its weights",
    "weight_sync.deadline_seconds",
    "engines/rollout/vllm/transfer.py:NcclTransfer.send engines/rollout/vllm/weights.py:ServerWeights.write_over",
)
SERVER_END: Final = _wait(
    "vLLM end",
    "the end of a vLLM server",
    "KILL_SECONDS (5 s) after SIGKILL",
    "engines/rollout/vllm/process.py:ServerProcess.stop engines/rollout/in_vllm/guard.py:main",
)
COLLECTIVE: Final = _wait(
    "collective",
    "the other ranks of the trainer",
    "EXCHANGE_SECONDS (600 s)",
    "engines/train/leader_engine.py:LeaderEngine.follow engines/train/parallel/pipeline.py:Pipeline._wait_for"
    " engines/train/parallel/many_ranks.py:ManyRanks._to_first engines/train/profile.py:Stopwatch.timed"
    " engines/train/profile.py:_there_and_back",
)
CHECKPOINT: Final = _wait(
    "checkpoint",
    "checkpoint {version} to be on the disk",
    "WRITE_SECONDS (600 s)",
    "run/saving.py:CheckpointWriter._written_files run/saving.py:CheckpointWriter._written"
    " run/saving.py:CheckpointWriter.written run/record.py:RunRecord.__init__",
)
WORK_AT_ONCE: Final = _wait(
    "room for work", "work of its own to end, so that there is room for more", _STALL, "loops/tasks.py:serve"
)
OUTSIDE: Final = _wait(
    "outside",
    "a process from outside: a client that generates or trains",
    "queue.lease_seconds, and the client's own timeout",
    "run/desk.py:TrainDesk.publish run/desk.py:TrainDesk.take run/desk.py:TrainDesk.update"
    " service/generation.py:OutsideEngine.generate service/generation.py:OutsideEngine.install"
    " service/generation.py:OutsideEngine.put service/generation.py:OutsideEngine.take service/workers.py:OutsideWorkers.join"
    " service/workers.py:OutsideWorkers.hold service/workers.py:OutsideWorkers.leave cli/join.py:JoinedGenerator._generate"
    " cli/join.py:_rest",
)

SITUATION: Final = _wait(
    "situation",
    "the disk, for the file that `asyncflow why` reads",
    "a second (SECONDS), after which it is left alone",
    "run/standstill.py:Standstill._write run/standstill.py:Standstill.ended",
)

# -- between processes ---------------------------------------------------------------------------------------------------------

ANSWER: Final = _wait(
    "answer",
    "the answer of another process's service, where it has a name of its own",
    "the loss of the connection, which is an error at once",
    "transport/peer.py:Peer.call transport/peer.py:Peer.connect cluster/wire.py:SimulatedPeer.call"
    " transport/server.py:Server.close transfer_queue/directory.py:Places._dial transfer_queue/directory.py:Directory.describe",
)
UNIT: Final = _wait(
    "storage unit",
    "storage unit {unit} to store {rows} rows",
    "queue.lease_seconds",
    "transfer_queue/unit_store.py:UnitStore._drop transfer_queue/unit_store.py:UnitStore._store"
    " transfer_queue/unit_store.py:UnitStore._to_its_end transfer_queue/unit_store.py:UnitStore.admit"
    " transfer_queue/unit_store.py:UnitStore.close transfer_queue/freeing.py:Freeing.__init__"
    " transfer_queue/freeing.py:Freeing.free transfer_queue/client.py:_all_that_answer"
    " transfer_queue/client.py:TransferQueueClient.complete",
)
CAPACITY: Final = _wait(
    "room in a unit",
    "room for {rows} rows in a storage unit",
    _STALL,
    "transfer_queue/capacity.py:Capacity.reserve",
)
NOTICES: Final = _wait(
    "notices",
    "notices of a storage unit",
    "the loss of the connection, after which it follows anew",
    "transfer_queue/unit_subscription.py:UnitSubscription.caught_up transfer_queue/unit_subscription.py:UnitSubscription.follow",
)
STORE: Final = _wait(
    "store",
    "the store behind a storage unit (Redis, Mooncake)",
    "queue.storage's timeout_seconds",
    "transfer_queue/storage/servers/key_value.py:KeyValueStorage.__init__"
    " transfer_queue/storage/servers/mooncake.py:MooncakeKeyValue._call"
    " transfer_queue/storage/servers/redis.py:RedisKeyValue._deadline",
)
ARENA: Final = _wait(
    "arena",
    "another thread's use of the shared memory",
    "that use, which does no I/O",
    "transport/arena.py:- transport/arena.py:Arena.__init__ transport/arena.py:Arena._settle",
)
MODEL_FILES: Final = _wait(
    "model files",
    "the model's files from the driver's machine",
    "CHUNK_SECONDS (60 s) without a chunk",
    "run/model_files.py:_chunks run/model_source.py:run_module",
)
LOADER: Final = _wait(
    "loader",
    "the next batch of a data loader of somebody else's trainer",
    "the loader's own timeout",
    "transfer_queue/loader/broadcast.py:GroupBroadcast._broadcast"
    " transfer_queue/loader/dataloader.py:StreamDataLoader._from_queue transfer_queue/loader/dataloader.py:StreamDataLoader._next"
    " transfer_queue/loader/prefetch.py:Ahead.__init__ transfer_queue/loader/prefetch.py:Ahead.run"
    " transfer_queue/loader/prefetch.py:Ahead.take transfer_queue/loader/prefetch.py:StreamFeed._main"
    " transfer_queue/loader/prefetch.py:StreamFeed.call transfer_queue/loader/prefetch.py:StreamFeed.close"
    " transfer_queue/loader/prefetch.py:StreamFeed.wait transfer_queue/loader/prefetch.py:StreamSource.connect"
    " transfer_queue/loader/prefetch.py:_end_with",
)

# -- beginning and ending ------------------------------------------------------------------------------------------------------

WORKERS_START: Final = _wait(
    "workers' start",
    "the cluster to start {workers} workers",
    "an interrupt, or the cluster's own deadline (start_seconds on Ray)",
    "run/running.py:Running.start cluster/forking.py:ForkServer.fork cluster/forking.py:- cluster/forking.py:ForkServer._hear",
)
RAY_ROOM: Final = _wait(
    "room on Ray",
    "room in the Ray cluster for {workers}",
    "start_seconds of the cluster (120 s)",
    "cluster/ray/places.py:_in_thread cluster/ray/places.py:RayPlaces.reserve cluster/ray/cluster.py:RayCluster._spawn",
)
RAY: Final = _wait(
    "Ray",
    "an answer of Ray, or of a host that it has placed",
    "HOST_SECONDS (30 s), UNAVAILABLE_SECONDS (60 s)",
    "cluster/ray/cluster.py:RayCluster._look_apart cluster/ray/cluster.py:RayCluster._look_for_devices"
    " cluster/ray/cluster.py:RayCluster.stop"
    " cluster/ray/connection.py:RayConnection._begin_cluster cluster/ray/connection.py:RayConnection.disconnect"
    " cluster/ray/connection.py:_answers cluster/ray/guard.py:guard cluster/ray/host.py:RayHost.__init__"
    " cluster/ray/host.py:RayHost._end_predecessor cluster/ray/host.py:RayHost._read cluster/ray/host.py:RayHost._wait"
    " cluster/ray/host.py:RayHost.listen cluster/ray/places.py:RayPlaces._leave cluster/ray/process.py:RayProcess._follow"
    " cluster/ray/process.py:RayProcess._kill",
)
HANDOVER: Final = _wait(
    "handover",
    "{workers} workers that may stay for the next attempt to let go of this one",
    "STAY_SECONDS (5 s)",
    "run/handover.py:Handover.staying",
)
NEXT_ATTEMPT: Final = _wait(
    "next attempt", "the next attempt of the run, after a worker's death", _STALL, "run/connection.py:next_attempt"
)
UNITS: Final = _wait("units", "{units} storage units to come", "UNITS_SECONDS (60 s)", "run/driver.py:Driver._units_there")
WORKER_ENDS: Final = _wait(
    "worker's end",
    "a worker's process to end",
    _WORKER_ENDS,
    "run/job.py:Job._restart_after cluster/forking.py:ForkServer._end cluster/forking.py:ForkedProcess.wait"
    " cluster/supervised.py:SupervisedCluster._keep_alive cluster/torchrun.py:run_rank",
)
STOPPING: Final = _wait(
    "stopping",
    "workers, or work under way, to end",
    "run.stop_grace_seconds, then SIGKILL",
    "cluster/inline.py:InlineCluster.end cluster/inline.py:InlineCluster.stop cluster/simulated.py:SimulatedCluster.end"
    " cluster/simulated.py:SimulatedCluster.stop cluster/supervised.py:SupervisedCluster._end"
    " cluster/supervised.py:SupervisedCluster.end cluster/torchrun.py:_end run/background.py:BackgroundTasks.settle"
    " trainer.py:Trainer.stop client.py:Client.close service/server.py:HttpServer.stop",
)
SCALING: Final = _wait(
    "scaling",
    "workers to come or to leave",
    "the command's --grace, ANSWER_SECONDS (180 s)",
    "run/scaling.py:Scaling.__init__ run/scaling.py:Scaling.scale cli/cluster.py:_scale",
)
TRIAL: Final = _wait(
    "trial",
    "a process that looks at the machine, at the user's own engines, or at a layer's costs",
    "its own deadline",
    "run/devices_there.py:check_devices run/parts_there.py:check_engines run/profile.py:_until_ended run/profile.py:profile "
    "cli/verify.py:_Run.group",
)
HTTP: Final = _wait(
    "HTTP",
    "a client's request, or its repetition",
    "the limits of the service (service/limits.py)",
    "service/app.py:Gate._paced.paced service/hosted.py:HostedRun.__init__"
    " service/watching.py:WatchedRun.__init__"
    " service/repeats.py:Repeats.begin",
)
TINKER: Final = _wait(
    "Tinker's API",
    "the request of a model before this one, or a place to sample",
    "RETRIEVE_SECONDS (20 s), after which the client asks again",
    "service/tinker/results.py:Results.get service/tinker/samplers.py:Samplers._granted"
    " service/tinker/samplers.py:_Held.have_arrived service/tinker/trained_model.py:TrainedModel.run"
    " service/tinker/trained_model.py:answered",
)
SIMULATION: Final = _wait(
    "simulation",
    "virtual time, or a process that simulates",
    "the simulated run's own deadlines, RUN_SECONDS (1800 s)",
    "engines/sleeping.py:SleepingRolloutEngine._decode engines/sleeping.py:SleepingRolloutEngine._generate"
    " engines/sleeping.py:SleepingRolloutEngine._hand_in engines/sleeping.py:SleepingRolloutEngine._run"
    " engines/sleeping.py:SleepingPasses.compute"
    " engines/sleeping.py:SleepingPasses.compute.help_out"
    " engines/sleeping.py:SleepingTrainEngine.__init__ engines/sleeping.py:SleepingTrainEngine.forward_backward"
    " simulation/run.py:SimulatedJob._place simulation/run.py:_Scorer.__init__ simulation/run.py:_Scorer.score"
    " simulation/run.py:_run environments/sleeping.py:SleepingEpisode.step"
    " simulation/seeds.py:Simulators.outcomes simulation/seeds.py:_end simulation/seeds.py:outcomes",
)
