"""Sessions of the Tinker API, with their models and samplers: the state of one server.

    session (a client's, alive as long as it sends anything) --+--> models in training, by MODEL = SESSION:train:NUMBER
                                                               +--> samplers, by SESSION:sample:NUMBER: weights to sample from

consumes: requests, whose numbers within a session make them repeatable
waits for: nothing: work is done by background tasks, whose answers go to results.py
is unblocked by: `close`, which ends all sessions
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
import uuid
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from asyncflow.engines.base import SampleKey
from asyncflow.engines.lora_files import holds_adapter
from asyncflow.model_folder import end_token_ids
from asyncflow.service.limits import Busy, Denied
from asyncflow.service.tinker import messages
from asyncflow.service.tinker.answers import Answer, Failure, Fields
from asyncflow.service.tinker.checkpoint_store import Checkpoint, CheckpointKind
from asyncflow.service.tinker.context import ServerContext
from asyncflow.service.tinker.samplers import SampleRequest, SamplerFiles, Samplers
from asyncflow.service.tinker.trained_model import TrainedModel, answered
from asyncflow.types import UserError

log = logging.getLogger(__name__)
SWEEP_SECONDS: Final = 5.0
LARGEST_SEED: Final = 1 << 63
DEFAULT_RANK: Final = 32


@dataclass(slots=True, eq=False)
class SampledWeights:
    """Weights that a client samples from. `path`: of the checkpoint; None: the base model, or a snapshot without a name."""

    sampler_id: str
    weights: SamplerFiles
    path: str | None
    seed: int = field(default_factory=lambda: secrets.randbits(62))
    num_requests: int = 0


@dataclass(slots=True, eq=False)
class Session:
    """Session of a client. `seen`: event-loop time of its last request."""

    session_id: str
    seen: float
    request: messages.CreateSession
    models: dict[str, TrainedModel] = field(default_factory=dict)
    samplers: dict[str, SampledWeights] = field(default_factory=dict)
    tasks: set[asyncio.Task[None]] = field(default_factory=set)


class Sessions:
    """Sessions of a server over one base model."""

    def __init__(self, context: ServerContext, samplers: Samplers, *, trains_whole_weights: bool = False) -> None:
        """`samplers` has the base model's weights at the start. Both are closed with the sessions. `trains_whole_weights`: of the
        model, also where a client asks for an adapter."""
        self.base, self.store, self.results = context.base, context.store, context.results
        self.trains_whole_weights = trains_whole_weights
        self._context, self._bounds, self._samplers = context, context.bounds, samplers
        self._sessions: dict[str, Session] = {}
        self._sampling: dict[str, asyncio.Task[None]] = {}  # by request id
        self._end_ids = end_token_ids(context.base.folder)
        self._sweeping = asyncio.create_task(self._sweep(), name="tinker sessions")

    def create_session(self, request: messages.CreateSession) -> str:
        """Begin a session. Returns its id."""
        if len(self._sessions) >= self._bounds.sessions:
            raise Busy(f"there are {len(self._sessions)} sessions already", 10.0)
        session_id = str(uuid.uuid4())
        self._sessions[session_id] = Session(session_id, asyncio.get_running_loop().time(), request)
        return session_id

    def session(self, session_id: str) -> Session:
        """Session of this id, which is alive at this moment. Raises `Denied`."""
        session = self._sessions.get(session_id)
        if session is None:
            raise Denied(410, "there is no such session: it has ended, or nothing has come from it for too long")
        session.seen = asyncio.get_running_loop().time()
        return session

    def all(self) -> Sequence[Session]:
        """Sessions that have not ended."""
        return list(self._sessions.values())

    async def end_session(self, session_id: str) -> None:
        """End a session: its models and results are dropped, its checkpoints stay. Raises `Denied`."""
        session = self.session(session_id)
        del self._sessions[session_id]
        for task in session.tasks:
            task.cancel()
        try:
            await asyncio.gather(*session.tasks, return_exceptions=True)
            for error in await asyncio.gather(*(model.close() for model in session.models.values()), return_exceptions=True):
                if error is not None:  # its client has gone, and the other sessions end all the same
                    log.error("a model of the session %s could not be closed", session_id, exc_info=error)
        finally:
            self.results.forget(session_id)

    async def close(self) -> None:
        """End all sessions, and let the engines go."""
        self._sweeping.cancel()
        while self._sessions:
            await self.end_session(next(iter(self._sessions)))
        await self._samplers.close()

    def create_model(self, request: messages.CreateModel) -> str:
        """Begin a model from the base model. Returns the request's id."""
        self._check_base(request.base_model)
        asked = request.lora_config
        rank, adapter = DEFAULT_RANK if asked is None else asked.rank, None
        if asked is not None and not self.trains_whole_weights:
            if not (asked.train_attn or asked.train_mlp):
                raise UserError("lora_config asks for an adapter of no layer: set train_attn or train_mlp")
            if rank > self._bounds.rank:
                raise UserError(
                    f"adapters have rank {self._bounds.rank} at most here: ask for less, or start the server with --max-rank"
                )
            adapter = asked
        return self._begin_model(request.session_id, request.model_seq_id, {"type": "create_model"}, rank, adapter)

    def load_weights(self, request: messages.LoadWeights) -> str:
        """Load a checkpoint into a model, after the requests before this one, or into a new one. Returns the request's id."""
        if request.base_model is not None:
            self._check_base(request.base_model)
        if request.model_id is None:
            assert request.session_id is not None and request.model_seq_id is not None
            found, made = self.store.find(request.path), {"type": "load_weights", "path": request.path}
            rank, has_optimizer = found.record.rank, request.optimizer
            return self._begin_model(
                request.session_id, request.model_seq_id, made, rank, checkpoint=found, has_optimizer=has_optimizer
            )
        model = self.model(request.model_id)

        async def work() -> Answer:
            await model.open(await asyncio.to_thread(self.store.find, request.path), has_optimizer=request.optimizer)
            return Fields({"type": "load_weights", "path": request.path, "model_id": model.model_id})

        return model.submit(request.seq_id, messages.content_of(request), work)

    def model(self, model_id: str) -> TrainedModel:
        """Model of this id; its session is alive at this moment. Raises `Denied`."""
        model = self.session(model_id.partition(":")[0]).models.get(model_id)
        if model is None:
            raise Denied(404, f"there is no model {model_id}")
        model.last_request = time.time()
        return model

    def do_pass(self, request: messages.PassRequest, content: bytes) -> str:
        """`forward` or `forward_backward`. Returns the request's id. `content`: hash of the request."""
        model = self.model(request.model_id)
        return model.submit(request.seq_id, content, lambda: model.do_pass(request), request.nbytes)

    def optim_step(self, request: messages.OptimStep) -> str:
        """Returns the request's id."""
        model = self.model(request.model_id)
        return model.submit(request.seq_id, messages.content_of(request), lambda: model.optim_step(request.adam_params))

    def save_weights(self, request: messages.SaveWeights, kind: CheckpointKind = "weights") -> str:
        """Returns the request's id."""
        model = self.model(request.model_id)

        async def work() -> Answer:
            checkpoint = await model.save(request, kind, request.seq_id or "unnumbered")
            return Fields({"path": checkpoint.path, "size_bytes": checkpoint.record.num_bytes})

        return model.submit(request.seq_id, messages.content_of(request), work)

    def save_weights_for_sampler(self, request: messages.SaveWeightsForSampler) -> str:
        """Save under a name, or make a sampler without one. Returns the request's id."""
        model = self.model(request.model_id)
        session = self.session(request.model_id.partition(":")[0])

        async def work() -> Answer:
            if request.sampling_session_seq_id is not None and request.path is None:
                weights = await model.save_snapshot()
                sampler_id = self._add_sampler(session, request.sampling_session_seq_id, weights, None)
                return Fields({"type": "save_weights_for_sampler", "sampling_session_id": sampler_id})
            checkpoint = await model.save(request, "sampler_weights", request.seq_id or "unnumbered")
            return Fields({"type": "save_weights_for_sampler", "path": checkpoint.path})

        return model.submit(request.seq_id, messages.content_of(request), work)

    def create_sampler(self, request: messages.CreateSamplingSession) -> str:
        """Sampler of a checkpoint, or of the base model. Returns its id."""
        session = self.session(request.session_id)
        if request.model_path is None:
            self._check_base(request.base_model)
            return self._add_sampler(session, request.sampling_session_seq_id, self.base.folder, None)
        checkpoint = self.store.find(request.model_path)
        if checkpoint.record.base_model != self.base.name:
            raise UserError(f"{checkpoint.path} is of {checkpoint.record.base_model}, and this server has {self.base.name}")
        return self._add_sampler(session, request.sampling_session_seq_id, checkpoint.model, checkpoint.path)

    def sampler(self, sampler_id: str) -> SampledWeights:
        """Sampler of this id; its session is alive at this moment. Raises `Denied`."""
        sampler = self.session(sampler_id.partition(":")[0]).samplers.get(sampler_id)
        if sampler is None:
            raise Denied(404, f"there is no sampler {sampler_id}")
        return sampler

    def sample(self, request: messages.SamplingRequest) -> str:
        """Draw samples. Returns the request's id. Raises `UserError`, `Denied` or `Busy`."""
        if request.sampling_session_id is None:
            raise UserError("say sampling_session_id: samples are drawn in a sampling session here")
        sampler = self.sampler(request.sampling_session_id)
        number = sampler.num_requests if request.seq_id is None else request.seq_id
        request_id = f"{sampler.sampler_id}:{number}"
        if request_id in self.results:
            return request_id
        prompt_ids = request.prompt.token_ids
        largest = self.base.max_context - len(prompt_ids)
        if not len(prompt_ids) or largest < 1:
            raise UserError(f"a prompt has 1 to {self.base.max_context - 1} tokens here, and this one has {len(prompt_ids)}")
        self._samplers.check_room()
        seed = request.sampling_params.seed
        scored = len(prompt_ids) if request.prompt_logprobs else 0
        asked = SampleRequest(
            weights=sampler.weights,
            prompt_ids=prompt_ids,
            num_samples=request.num_samples,
            sampling=request.sampling_params.sampling(self._end_ids, largest),
            key=SampleKey(sampler.seed, number) if seed is None else SampleKey(seed % LARGEST_SEED, 0),
            scored_tokens=min(scored, request.prompt_logprobs_last_n or scored),
        )
        session = self.session(sampler.sampler_id.partition(":")[0])
        self.results.begin(request_id, session.session_id)
        sampler.num_requests = max(sampler.num_requests, number + 1)

        async def work() -> None:
            self.results.settle(request_id, await answered(self._samplers.sample(asked)))

        task = self._sampling[request_id] = self._start(session, work())
        task.add_done_callback(lambda _: self._sampling.pop(request_id, None))
        return request_id

    def cancel(self, request_id: str) -> None:
        """Stop drawing samples for a request, if any are drawn."""
        if (task := self._sampling.get(request_id)) is not None and task.cancel():
            self.results.settle(request_id, Failure("the request was cancelled"))

    def touch(self, request_id: str) -> None:
        """Note that the session of a request is alive."""
        session = self._sessions.get(request_id.partition(":")[0])
        if session is not None:
            session.seen = asyncio.get_running_loop().time()

    def _begin_model(
        self,
        session_id: str,
        number: int,
        made: dict[str, str],
        rank: int,
        adapter: messages.LoraConfig | None = None,
        *,
        checkpoint: Checkpoint | None = None,
        has_optimizer: bool = False,
    ) -> str:
        session = self.session(session_id)
        model_id = f"{session_id}:train:{number}"
        request_id = f"{model_id}:0"
        if model_id in session.models:
            return request_id
        count = sum(len(one.models) for one in self._sessions.values())
        if count >= self._bounds.models:
            raise UserError(
                f"this server holds {count} models, which is all it may: end a session, or let it have --max-models more"
            )
        model = TrainedModel(model_id, self._context, rank=rank, adapter=adapter)
        self.results.begin(request_id, session_id)
        session.models[model_id] = model

        async def opened() -> Answer:
            await model.open(checkpoint, has_optimizer=has_optimizer)
            return Fields({**made, "model_id": model_id})

        async def work() -> None:
            answer = await answered(opened())
            self.results.settle(request_id, answer)
            if isinstance(answer, Failure):
                del session.models[model_id]
            else:
                await model.run()

        self._start(session, work())
        return request_id

    def _add_sampler(self, session: Session, number: int, weights: Path, path: str | None) -> str:
        sampler_id = f"{session.session_id}:sample:{number}"
        if sampler_id not in session.samplers:
            if len(session.samplers) >= self._bounds.samplers:
                raise UserError(f"this session has {len(session.samplers)} samplers: begin another")
            files = SamplerFiles(self.base.folder, weights) if holds_adapter(weights) else SamplerFiles(weights)
            session.samplers[sampler_id] = SampledWeights(sampler_id, files, path)
        return sampler_id

    def _check_base(self, name: str | None) -> None:
        if name != self.base.name:
            raise UserError(f"there is no model {name!r} here: this server has {self.base.name!r}")

    def _start(self, session: Session, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        session.tasks.add(task)
        task.add_done_callback(session.tasks.discard)
        return task

    async def _sweep(self) -> None:
        """End the sessions from which nothing has come for too long."""
        while True:
            await asyncio.sleep(min(SWEEP_SECONDS, self._bounds.session_seconds))
            oldest = asyncio.get_running_loop().time() - self._bounds.session_seconds
            for session in self.all():
                # Looked at when it is its turn: while another one ends, a client may end its own, or send something.
                if session.seen < oldest and session.session_id in self._sessions:
                    await self.end_session(session.session_id)
