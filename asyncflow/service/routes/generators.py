"""Routes of clients that generate, `/v1/generators/...`: get_prompts_data, put_experience_data, weights."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Annotated, Final, Literal

import numpy as np
from fastapi import APIRouter, Request
from fastapi.responses import StreamingResponse
from pydantic import BaseModel, Field

from asyncflow.attestation import Attestation
from asyncflow.engines.base import Response as Generated
from asyncflow.model_folder import sample_hash
from asyncflow.service.generation import STORED, OutsidePrompt
from asyncflow.service.hosted import HostedRun
from asyncflow.service.limits import Denied
from asyncflow.service.routes.bodies import MAX_ROWS, Body, Confirmation, Name, PolicyVersion, PollSeconds, StepNumber
from asyncflow.service.workers import GeneratorSession
from asyncflow.types import UserError, row_index

CHUNK_BYTES: Final = 1 << 20


class Join(Body):
    num_slots: Annotated[int, Field(ge=1, le=1 << 16)] = 64
    """Responses that the client generates at once."""


class Joined(BaseModel):
    worker: str
    """Name of the client in its requests."""
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
    run: str
    model: str
    """Hash of the run's model (model_folder.py): a client that joins again has the same one."""


MAX_PROBED: Final = 4096
"""Log-probs of a probe, at most."""


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


class ProbeAnswer(BaseModel):
    token_ids: list[int]


class PromptsAnswer(BaseModel):
    version: int
    """The version under which the prompts are to be answered."""
    prompts: list[PromptAnswer]
    install: int | None
    """A version that the client is to load first, and say so; there are no prompts then."""
    is_over: bool
    """The run is stopping, or the worker is to leave."""
    probe: ProbeAnswer | None
    """Sequence of which the client may give its log-probs when it has loaded that version: the trainer's are compared with them."""


class PutResponse(Body):
    row: Annotated[int, Field(ge=0, lt=1 << 62)]
    token_ids: Annotated[list[Annotated[int, Field(ge=0, lt=1 << 31)]], Field(min_length=1, max_length=1 << 20)]
    """The end token included where it was reached."""
    logprobs: Annotated[list[float], Field(min_length=1, max_length=1 << 20)]
    """Log-probabilities of the tokens under the distribution that was sampled from."""
    finish_reason: Literal["stop", "length"]
    versions: Annotated[list[tuple[StepNumber, StepNumber]], Field(max_length=1 << 16)] | None = None
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
    parts: list[AttestedPart] | None = None
    """Tensors that lie in one buffer, and the sum of the bits of its elements as integers, modulo 2^32 (or 2^64)."""
    base: Annotated[int, Field(ge=0, lt=1 << 64)] | None = None
    """The sum over the model's own weights, where a version is an adapter over them."""
    log_probs: Annotated[list[float], Field(max_length=MAX_PROBED)] | None = None
    """Log-probs of the probe's tokens after its first, at temperature 1, with the weights that the client now generates with."""
    is_quantised: bool = False
    """Whether the sums are those of quantised weights, whose log-probs differ by more."""
    unseen: list[str] = Field(default_factory=list)
    """Names of tensors that may lack in `parts`, since the client cannot tell what it has in their place."""


class Installed(Body):
    version: StepNumber
    attested: AttestedWeights | None = None
    """Weights that the client now generates with, in the run's dtype, if it can tell: compared with what the trainer published."""


def add_generators(router: APIRouter, hosted: HostedRun) -> None:
    """Add the routes by which clients that generate come, stay and go."""

    @router.post("/generators", tags=["generators"])
    async def join(body: Join) -> Joined:
        """Generate for the run from now on, as one more of its rollout workers. Version 0 is the model that /v1/model has."""
        session = await hosted.workers.join(body.num_slots)
        shape = hosted.run.driver.shape
        return Joined(
            worker=session.id,
            version=session.engine.version,
            group_size=shape.group_size,
            max_context=hosted.run.job.prepared.max_context,
            seed=shape.seed,
            group_bits=shape.group_bits,
            dtype=hosted.run.config.rollout.dtype,
            run=hosted.run.config.run.name,
            model=sample_hash(hosted.run.job.prepared.model),
        )

    @router.post("/generators/{worker}/alive", tags=["generators"])
    async def alive(worker: Name, request: Request, body: Alive | None = None) -> PolicyVersion:
        """A heartbeat, for a client that asks for nothing else for a while. Answers with the version that the worker serves."""

        async def broken() -> None:
            while (await request.receive())["type"] != "http.disconnect":
                pass

        session = _session(hosted, worker)
        if body is not None and body.timeout_seconds:
            await hosted.workers.hold(session, body.timeout_seconds, broken)
        return PolicyVersion(version=session.engine.version)

    @router.delete("/generators/{worker}", tags=["generators"])
    async def leave(worker: Name) -> Confirmation:
        """Generate no more: what the worker has is given to others."""
        await hosted.workers.leave(worker)
        return Confirmation(message=f"{worker} has left")


def add_rows(router: APIRouter, hosted: HostedRun) -> None:
    """Add the routes of what they generate."""

    @router.post("/generators/{worker}/prompts", tags=["generators"])
    async def get_prompts_data(worker: Name, body: WantPrompts) -> PromptsAnswer:
        """Lease prompts under the version that the worker serves. Waits for some; asking is a heartbeat."""
        session = _session(hosted, worker)
        work = await session.engine.take(body.prompts, body.timeout_seconds)
        if work.is_over:
            hosted.end_is_known(session.id)
        bits = hosted.run.driver.shape.group_bits
        prompts = [_as_answer(prompt, session.decode(prompt.prompt_ids), bits) for prompt in work.prompts]
        manifest = session.files.manifest
        probe = manifest.probe if manifest is not None and manifest.version == work.install else None
        asked = None if probe is None else ProbeAnswer(token_ids=probe.token_ids)
        return PromptsAnswer(version=work.version, prompts=prompts, install=work.install, is_over=work.is_over, probe=asked)

    @router.post("/generators/{worker}/experience", tags=["generators"])
    async def put_experience_data(worker: Name, body: PutExperience) -> Outcomes:
        """Put responses. Answers when each is scored and stored, or is known not to count."""
        engine = _session(hosted, worker).engine
        outcomes = await engine.put([(one.row, _generated(one, engine.version)) for one in body.responses])
        return Outcomes(outcomes=[outcome if outcome != STORED else "stored" for outcome in outcomes])


def add_installs(router: APIRouter, hosted: HostedRun) -> None:
    """Add the routes of the weights that they generate with."""

    @router.get("/generators/{worker}/weights/{version}", tags=["generators"], response_class=StreamingResponse)
    async def weights(worker: Name, version: Annotated[int, Field(ge=0, lt=1 << 31)]) -> StreamingResponse:
        """The version that the worker is to install: a safetensors file. `X-Hash` is its xxh3_128."""
        files = _session(hosted, worker).files
        path, manifest = files.file(version), files.manifest
        assert manifest is not None
        headers = {"X-Hash": manifest.hash, "Content-Length": str(manifest.num_bytes)}
        return StreamingResponse(_parts(path), headers=headers, media_type="application/octet-stream")

    @router.post("/generators/{worker}/installed", tags=["generators"])
    async def installed(worker: Name, body: Installed) -> PolicyVersion:
        """Say that the worker generates under this version from now on."""
        given = body.attested
        attested = None
        if given is not None:
            parts = None if given.parts is None else [(part.names, part.found) for part in given.parts]
            attested = Attestation(parts, given.base, given.log_probs, given.is_quantised, given.unseen)
        _session(hosted, worker).engine.installed(body.version, attested)
        return PolicyVersion(version=body.version)


def _session(hosted: HostedRun, worker: str) -> GeneratorSession:
    if hosted.is_over_for(worker):
        raise Denied(410, "the run is over")
    return hosted.workers.generator(worker)


def _as_answer(prompt: OutsidePrompt, text: str, group_bits: int) -> PromptAnswer:
    sampling = prompt.sampling
    return PromptAnswer(
        rows=[row_index(prompt.group, sample, group_bits) for sample in prompt.samples],
        prompt_ids=prompt.prompt_ids.tolist(),
        prompt=text,
        temperature=sampling.temperature,
        max_new_tokens=sampling.max_new_tokens,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        stop=list(sampling.stop),
    )


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
