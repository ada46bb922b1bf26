"""Routes of a hosted run: the calls of AsyncFlow's service (AF, section 5), and of people that drive or watch a run.

/v1/...                  the run: init_engines, step, status, prompts, ...
/v1/generators/...       clients that generate: get_prompts_data, put_experience_data, weights
/v1/trainers/...         clients that train: get_experience_data, acknowledge, weights
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import FileResponse, StreamingResponse
from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import ClientDisconnect

from asyncflow.attestation import Attestation
from asyncflow.engines.base import Response as Generated
from asyncflow.engines.train.experience import Published
from asyncflow.service.app import Denied, needs
from asyncflow.service.experience import MEDIA_TYPES, Form, as_lists, as_msgpack, as_safetensors
from asyncflow.service.generation import STORED
from asyncflow.service.hosted import HostedRun, Place
from asyncflow.service.keys import KeyRing, Scope
from asyncflow.service.limits import Busy
from asyncflow.types import RunError, UserError

MAX_ROWS = 100_000
"""Rows of one request at most."""
CHUNK_BYTES = 1 << 20
STREAMED = ("/v1/weights/",)
"""Beginnings of paths whose bodies go into files as they come."""
Seconds = Annotated[float, Field(gt=0, le=3600)]
PollSeconds = Annotated[float, Field(ge=0, le=60)]
"""Time that a request may wait for something to come."""
Step = Annotated[int, Field(ge=0, lt=1 << 31)]
Name = Annotated[str, Field(pattern=r"^[a-z0-9-]{1,64}$")]


class Body(BaseModel):
    """Body of a request: an unknown field is a mistake."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


class MakeKey(Body):
    name: Name
    scope: Scope
    expires_seconds: Annotated[float, Field(gt=0, le=1e10)] | None = None
    """Seconds from now until the key ends; without it the key has no end."""


class KeySecret(BaseModel):
    secret: str


class KeyFacts(BaseModel):
    name: str
    scope: Scope
    expires: float | None
    """Unix time."""


class InitEngines(Body):
    rollout: Place | None = None
    """`own`: the run starts rollout workers. `outside`: clients generate. Without it the configuration says it."""
    train: Place | None = None
    """Likewise, the client that trains."""


class Begun(BaseModel):
    step: int | None
    """The step that the run begins with; null while the other engine is still to be named."""


class Prompts(Body):
    rows: Annotated[list[dict[str, Any]], Field(min_length=1, max_length=MAX_ROWS)]
    """Rows as a data set has them."""


class NumRows(BaseModel):
    rows: int


class StepDone(BaseModel):
    metrics: dict[str, float | None] | None
    """Metrics of the step, those that are no number as null; null when all steps are done."""


class Allow(Body):
    steps: Step
    """The run trains up to so many steps by itself."""


class Notify(Body):
    timeout_seconds: Seconds = 60.0


class PolicyVersion(BaseModel):
    version: int


class Scale(Body):
    num_workers: Annotated[int, Field(ge=0, le=100_000)]
    grace_seconds: Annotated[float, Field(ge=0, le=3600)] = 60.0


class Confirmation(BaseModel):
    message: str


class RunStatus(BaseModel):
    run: str
    is_live: bool
    has_begun: bool = True
    committed: int = 0
    steps: int = 0
    idle_seconds: float = 0.0
    workers: list[str] = []
    waits: list[str] = []
    queue: dict[str, dict[str, int]] = {}


class Join(Body):
    num_slots: Annotated[int, Field(ge=1, le=1 << 16)] = 64
    """Responses that the client generates at once."""


class Joined(BaseModel):
    worker: str
    version: int
    group_size: int
    max_context: int
    """Tokens of a prompt and its response at most."""
    seed: int
    group_bits: int
    """A row is group << group_bits | sample. Sampling noise that depends on seed, group, sample and position alone has a lost row
    made again as it was."""
    dtype: str
    """Floating-point type that the run's own rollout workers generate in, and that sums of weights are of."""


class WantPrompts(Body):
    prompts: Annotated[int, Field(ge=1, le=4096)] = 1
    """Prompts at most; each comes with the rows that are wanted of it."""
    timeout_seconds: PollSeconds = 20.0


class Alive(Body):
    timeout_seconds: PollSeconds = 0.0
    """Seconds for which the answer is held. A client whose connection breaks meanwhile has gone, unless it makes another request
    within three seconds; otherwise that is noticed when nothing was heard of it for `queue.lease_seconds`."""


class PromptAnswer(BaseModel):
    rows: list[int]
    """Row indices, one for each response that is wanted."""
    prompt_ids: list[int]
    prompt: str
    temperature: float
    max_new_tokens: int
    top_p: float
    top_k: int
    min_p: float
    stop: list[str]
    """As the run samples: `rollout` of its configuration says what each means."""


class PromptsAnswer(BaseModel):
    version: int
    """The version under which the prompts are to be answered."""
    prompts: list[PromptAnswer]
    install: int | None
    """A version that the client is to load first, and say so; there are no prompts then."""
    is_over: bool
    """The run is stopping, or the worker is to leave."""


class PutResponse(Body):
    row: Annotated[int, Field(ge=0, lt=1 << 62)]
    token_ids: Annotated[list[Annotated[int, Field(ge=0, lt=1 << 31)]], Field(min_length=1, max_length=1 << 20)]
    """The end token included where it was reached."""
    logprobs: Annotated[list[float], Field(min_length=1, max_length=1 << 20)]
    """Log-probabilities of the tokens under the distribution that was sampled from."""
    finish_reason: Literal["stop", "length"]
    versions: Annotated[list[tuple[Step, Step]], Field(max_length=1 << 16)] | None = None
    """Pairs (first token, version), ascending; without it all tokens are of the version that the worker serves."""


class PutExperience(Body):
    responses: Annotated[list[PutResponse], Field(min_length=1, max_length=MAX_ROWS)]


class Outcomes(BaseModel):
    outcomes: list[str]
    """Outcome of each response: `stored`, or why it does not count: another one was first, its reward failed, ..."""


class AttestedPart(Body):
    names: list[str]
    found: Annotated[int, Field(ge=0, lt=1 << 64)]


class AttestedWeights(Body):
    parts: list[AttestedPart]
    """Tensors that lie in one buffer, and the sum of the bits of its elements as integers, modulo 2^64."""
    base: Annotated[int, Field(ge=0, lt=1 << 64)] | None = None
    """The sum over the model's own weights, where a version is an adapter over them."""


class Installed(Body):
    version: Step
    attested: AttestedWeights | None = None
    """Weights that the client now generates with, in the run's dtype, if it can tell: compared with what the trainer published."""


class BeginTraining(Body):
    is_fresh: bool = True
    """The client has no gradient of the present step: its groups are all handed out anew."""


class TrainerJoined(BaseModel):
    trainer: str
    step: int


class WantExperience(Body):
    groups: Annotated[int, Field(ge=0, le=MAX_ROWS)] = 0
    """Groups at most; 0: no limit."""
    tokens: Annotated[int, Field(ge=0, le=1 << 40)] = 0
    """Tokens of prompts and responses at most, but one group at least; 0: no limit."""
    timeout_seconds: PollSeconds = 20.0
    form: Form = "json"
    has_bulk: bool = True
    """With false, token ids, masks and log-probs are left out: the client reads them from the queue."""


class GroupAnswer(BaseModel):
    number: int
    indices: list[int]
    advantages: list[list[float]]
    rewards: list[float]
    staleness: list[int]
    prompt_ids: list[int] = []
    response_ids: list[list[int]] = []
    loss_mask: list[list[int]] = []
    rollout_logprobs: list[list[float]] = []


class ExperienceAnswer(BaseModel):
    step: int
    groups: list[GroupAnswer]
    normaliser: int | None
    """Divisor of the sum over all of the step's groups, when there are no more of them than were given out; else null."""


class Acknowledge(Body):
    groups: Annotated[list[Annotated[int, Field(ge=0, lt=1 << 62)]], Field(max_length=MAX_ROWS)]


class PublishFolder(Body):
    step: Step
    path: Annotated[str, Field(max_length=4096)]
    """A safetensors file, or a folder in Hugging Face format, on the server's machine; empty: the update is skipped."""
    grad_norm: Annotated[float, Field(ge=0)] = 0.0
    learning_rate: Annotated[float, Field(ge=0)] = 0.0
    timeout_seconds: Seconds = 120.0


def routes(hosted: HostedRun, keys: KeyRing) -> APIRouter:
    """The routes of this run, and of the service's keys."""
    router = APIRouter(prefix="/v1")
    _add_run(router, hosted)
    _add_state(router, hosted)
    _add_generators(router, hosted)
    _add_trainers(router, hosted)
    _add_keys(router, keys)
    return router


def _add_keys(router: APIRouter, keys: KeyRing) -> None:
    @router.get("/keys", tags=["keys"], dependencies=[needs("admin")])
    async def all_keys() -> list[KeyFacts]:
        """The keys, without their secrets."""
        return [KeyFacts(name=key.name, scope=key.scope, expires=key.expires) for key in keys.all]

    @router.post("/keys", tags=["keys"], dependencies=[needs("admin")])
    async def make_key(body: MakeKey) -> KeySecret:
        """Make a key. Its secret is told this once."""
        expires = None if body.expires_seconds is None else keys.clock() + body.expires_seconds
        return KeySecret(secret=keys.add(body.name, body.scope, expires).secret)

    @router.delete("/keys/{name}", tags=["keys"], dependencies=[needs("admin")])
    async def remove_key(name: Name) -> Confirmation:
        """Remove a key: it is refused from now on."""
        keys.remove(name)
        return Confirmation(message=f"the key {name} is removed")


def _add_run(router: APIRouter, hosted: HostedRun) -> None:
    @router.post("/init_engines", tags=["run"])
    async def init_engines(body: InitEngines) -> Begun:
        """Say which engines the run starts, and which clients provide; start it when both are known."""
        return Begun(step=await hosted.init_engines(body.rollout, body.train))

    @router.post("/step", tags=["run"])
    async def step() -> StepDone:
        """Train one step, and answer when it is committed."""
        metrics = await hosted.step()
        return StepDone(metrics=None if metrics is None else numbers(metrics))

    @router.post("/allow", tags=["run"])
    async def allow(body: Allow) -> Confirmation:
        """Let the run train up to so many steps by itself."""
        hosted.allow(body.steps)
        return Confirmation(message=f"up to {body.steps} steps are trained")

    @router.get("/steps", tags=["run"])
    async def steps(first: Annotated[int, Query(ge=0, lt=1 << 31)] = 0) -> dict[int, dict[str, float | None]]:
        """Metrics of the committed steps."""
        return {step: numbers(row) for step, row in hosted.steps(first).items()}

    @router.post("/prompts", tags=["run"])
    async def put_prompts_data(body: Prompts) -> NumRows:
        """Train on these rows next, before those of the run's data set. What was answered is kept, also by a server that is killed
        and started again with --resume."""
        await hosted.put_prompts_data(body.rows)
        return NumRows(rows=len(body.rows))

    @router.post("/weight_sync_notify", tags=["run"])
    async def weight_sync_notify(body: Notify) -> PolicyVersion:
        """Have all rollout workers serve the weights of the last committed step, and answer when they do."""
        return PolicyVersion(version=await hosted.weight_sync_notify(body.timeout_seconds))

    @router.post("/scale", tags=["run"])
    async def scale(body: Scale) -> Confirmation:
        """Let rollout workers join or leave."""
        return Confirmation(message=await hosted.scale_rollout(body.num_workers, body.grace_seconds))

    @router.post("/checkpoint", tags=["run"])
    async def checkpoint() -> PolicyVersion:
        """Have a checkpoint written with the next step that is committed, and answer at once with its version."""
        return PolicyVersion(version=hosted.checkpoint())

    @router.post("/stop", tags=["run"], dependencies=[needs("admin")])
    async def stop() -> Confirmation:
        """Stop the run: its model, trace and report are written before the answer."""
        await hosted.stop()
        return Confirmation(message=f"the run in {hosted.config.run_dir} has stopped")


def _add_state(router: APIRouter, hosted: HostedRun) -> None:
    @router.get("/status", tags=["run"])
    async def status() -> RunStatus:
        """State of the run, its workers and its queue."""
        name = hosted.config.run.name
        if (found := await hosted.status()) is None:
            return RunStatus(run=name, is_live=False, has_begun=hosted.has_begun, steps=hosted.config.run.steps)
        return RunStatus(
            run=name,
            is_live=True,
            committed=found.committed,
            steps=found.steps,
            idle_seconds=found.idle_seconds,
            workers=found.workers,
            waits=found.waits,
            queue=found.queue,
        )

    @router.get("/metrics", tags=["run"], response_class=Response)
    async def metrics() -> Response:
        """The queue's metrics in Prometheus' text form."""
        return Response(await hosted.metrics(), media_type="text/plain; version=0.0.4")

    @router.get("/model", tags=["run"])
    async def model() -> list[str]:
        """Files of the model that the run started from: version 0."""
        return sorted(file.name for file in hosted.run.job.model.iterdir() if file.is_file())

    @router.get("/model/{name}", tags=["run"], response_class=FileResponse)
    async def model_file(name: Annotated[str, Field(max_length=255)]) -> FileResponse:
        """File of a model."""
        found = {file.name: file for file in hosted.run.job.model.iterdir() if file.is_file()}
        if name not in found:
            raise Denied(404, "the model has no such file")
        return FileResponse(found[name], media_type="application/octet-stream")


def _add_generators(router: APIRouter, hosted: HostedRun) -> None:
    @router.post("/generators", tags=["generators"])
    async def join(body: Join) -> Joined:
        """Generate for the run from now on, as one more of its rollout workers. Version 0 is the model that /v1/model has."""
        session = await hosted.workers.join(body.num_slots)
        shape = hosted.run.driver.shape
        return Joined(
            worker=session.name.rpartition("/")[2],
            version=session.engine.version,
            group_size=shape.group_size,
            max_context=hosted.run.job.max_context,
            seed=shape.seed,
            group_bits=shape.group_bits,
            dtype=hosted.run.config.rollout.dtype,
        )

    @router.post("/generators/{worker}/prompts", tags=["generators"])
    async def get_prompts_data(worker: Name, body: WantPrompts) -> PromptsAnswer:
        """Lease prompts under the version that the worker serves. Waits for some; asking is a sign of life."""
        session = hosted.generator(f"rollout/{worker}")
        work = await session.engine.take(body.prompts, body.timeout_seconds)
        if work.is_over:
            hosted.is_told(session.name)
        bits = hosted.run.driver.shape.group_bits
        return PromptsAnswer(
            version=work.version,
            prompts=[
                PromptAnswer(
                    rows=[(prompt.group << bits) | sample for sample in prompt.samples],
                    prompt_ids=prompt.prompt_ids.tolist(),
                    prompt=session.decode(prompt.prompt_ids),
                    temperature=prompt.sampling.temperature,
                    max_new_tokens=prompt.sampling.max_new_tokens,
                    top_p=prompt.sampling.top_p,
                    top_k=prompt.sampling.top_k,
                    min_p=prompt.sampling.min_p,
                    stop=list(prompt.sampling.stop),
                )
                for prompt in work.prompts
            ],
            install=work.install,
            is_over=work.is_over,
        )

    @router.post("/generators/{worker}/experience", tags=["generators"])
    async def put_experience_data(worker: Name, body: PutExperience) -> Outcomes:
        """Put responses. Answers when each is scored and stored, or is known not to count."""
        engine = hosted.generator(f"rollout/{worker}").engine
        outcomes = await engine.put([(one.row, _generated(one, engine.version)) for one in body.responses])
        return Outcomes(outcomes=[outcome if outcome != STORED else "stored" for outcome in outcomes])

    @router.get("/generators/{worker}/weights/{version}", tags=["generators"], response_class=StreamingResponse)
    async def weights(worker: Name, version: Annotated[int, Field(ge=0, lt=1 << 31)]) -> StreamingResponse:
        """The version that the worker is to install: a safetensors file. `X-Hash` is its xxh3_128."""
        files = hosted.generator(f"rollout/{worker}").files
        path, manifest = files.file(version), files.manifest
        assert manifest is not None
        headers = {"X-Hash": manifest.hash, "Content-Length": str(manifest.num_bytes)}
        return StreamingResponse(_parts(path), headers=headers, media_type="application/octet-stream")

    @router.post("/generators/{worker}/installed", tags=["generators"])
    async def installed(worker: Name, body: Installed) -> PolicyVersion:
        """The worker generates under this version from now on."""
        told = body.attested
        attested = None if told is None else Attestation([(part.names, part.found) for part in told.parts], told.base)
        hosted.generator(f"rollout/{worker}").engine.installed(body.version, attested)
        return PolicyVersion(version=body.version)

    @router.post("/generators/{worker}/alive", tags=["generators"])
    async def alive(worker: Name, request: Request, body: Alive = Alive()) -> PolicyVersion:
        """A sign of life, for a client that asks for nothing else for a while. Answers with the version that the worker serves."""

        async def broken() -> None:
            while (await request.receive())["type"] != "http.disconnect":
                pass

        session = hosted.generator(f"rollout/{worker}")
        await hosted.workers.hold(session, body.timeout_seconds, broken)
        return PolicyVersion(version=session.engine.version)

    @router.delete("/generators/{worker}", tags=["generators"])
    async def leave(worker: Name) -> Confirmation:
        """Generate no more: what the worker has is given to others."""
        await hosted.workers.leave(f"rollout/{worker}")
        return Confirmation(message=f"{worker} has left")


def _add_trainers(router: APIRouter, hosted: HostedRun) -> None:
    @router.post("/trainers", tags=["trainers"])
    async def begin_training(body: BeginTraining) -> TrainerJoined:
        """Train for the run from now on, whose train engine is outside."""
        session = hosted.begin_training(is_fresh=body.is_fresh)
        return TrainerJoined(trainer=session.name, step=hosted.run.driver.ledger.ledger.committed)

    @router.post("/trainers/{trainer}/experience", tags=["trainers"], response_model=ExperienceAnswer)
    async def get_experience_data(trainer: Name, body: WantExperience) -> Any:
        """Take groups of the present step: some, or a token budget. Waits for some; asking is a sign of life."""
        session = hosted.workers.trainer(trainer)
        taken = await hosted.run.driver.desk.take(
            session.name, groups=body.groups, tokens=body.tokens, timeout_seconds=body.timeout_seconds
        )
        if body.form != "json":
            encode = as_msgpack if body.form == "msgpack" else as_safetensors
            return Response(encode(taken, has_bulk=body.has_bulk), media_type=MEDIA_TYPES[body.form])
        groups = [as_lists(group, has_bulk=body.has_bulk) for group in taken.groups]
        return {"step": taken.step, "groups": groups, "normaliser": taken.normaliser}

    @router.post("/trainers/{trainer}/acknowledge", tags=["trainers"])
    async def acknowledge(trainer: Name, body: Acknowledge) -> NumRows:
        """Note that these groups are in the trainer's gradient: no other trainer is to have them."""
        session = hosted.workers.trainer(trainer)
        hosted.run.driver.desk.acknowledge(session.name, body.groups)
        return NumRows(rows=len(body.groups))

    @router.post("/trainers/{trainer}/weights", tags=["trainers"])
    async def publish(trainer: Name, body: PublishFolder) -> PolicyVersion:
        """Publish the weights of a file or folder on the server's machine as the version that `step` has made."""
        hosted.workers.trainer(trainer)
        path = str(hosted.readable(Path(body.path))) if body.path else ""
        published = Published(path, body.grad_norm, body.learning_rate)
        return PolicyVersion(version=await _published(hosted, body.step, published, body.timeout_seconds))

    @router.put("/weights/{trainer}/{step}", tags=["trainers"])
    async def upload_weights(
        trainer: Name,
        step: Annotated[int, Field(ge=0, lt=1 << 31)],
        request: Request,
        grad_norm: Annotated[float, Query(ge=0, allow_inf_nan=False)] = 0.0,
        learning_rate: Annotated[float, Query(ge=0, allow_inf_nan=False)] = 0.0,
        timeout_seconds: Annotated[float, Query(gt=0, le=3600)] = 120.0,
    ) -> PolicyVersion:
        """Publish the weights in the body, a safetensors file, as the version that `step` has made."""
        hosted.workers.trainer(trainer)
        length = int(request.headers.get("content-length", 0))
        if length > hosted.most_weight_bytes:
            raise Denied(413, f"{length} bytes are more than the model's weights can have ({hosted.most_weight_bytes})")
        if hosted.is_published(step):
            return PolicyVersion(version=step + 1)
        if hosted.uploading.locked():
            raise Busy("weights are being uploaded", 1.0)
        async with hosted.uploading:
            path = hosted.upload_file(step)
            try:
                with path.open("wb") as file:
                    async for part in request.stream():
                        file.write(part)
            except ClientDisconnect as error:
                path.unlink()
                raise Denied(400, "the upload was cut off") from error
            try:
                published = Published(str(path), grad_norm, learning_rate)
                return PolicyVersion(version=await _published(hosted, step, published, timeout_seconds))
            finally:
                path.unlink(missing_ok=True)

    @router.delete("/trainers/{trainer}", tags=["trainers"])
    async def end_training(trainer: Name) -> Confirmation:
        """Train no more: groups that were not acknowledged are given to others."""
        hosted.workers.end_training(trainer)
        return Confirmation(message=f"{trainer} has left")


def numbers(metrics: Mapping[str, float]) -> dict[str, float | None]:
    """Metrics as JSON has them: one that is no finite number is null."""
    return {name: value if abs(value) < float("inf") else None for name, value in metrics.items()}


async def _published(hosted: HostedRun, step: int, published: Published, timeout_seconds: float) -> int:
    try:
        return await hosted.publish(step, published, timeout_seconds)
    except TimeoutError as error:
        raise RunError(f"step {step} is not committed within {timeout_seconds:g} s: ask for the status") from error


def _generated(one: PutResponse, version: int) -> Generated:
    if len(one.logprobs) != len(one.token_ids):
        raise UserError(f"the response for row {one.row} has {len(one.token_ids)} tokens and {len(one.logprobs)} log-probs")
    spans = np.array(one.versions or [(0, version)], np.int64).reshape(-1, 2)
    token_ids, logprobs = np.array(one.token_ids, np.int64), np.array(one.logprobs, np.float32)
    return Generated(one.row, token_ids, logprobs, spans, one.finish_reason)


async def _parts(path: Path) -> AsyncIterator[bytes]:
    """A file's bytes, read in a thread."""
    with path.open("rb") as file:
        while part := await asyncio.to_thread(file.read, CHUNK_BYTES):
            yield part
