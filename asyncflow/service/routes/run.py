"""Routes of a hosted run, `/v1/...`: to begin it, drive it step by step, look at it and end it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Query, Response
from fastapi.responses import FileResponse
from pydantic import BaseModel, Field

from asyncflow.service.app import needs
from asyncflow.service.hosted import EnginePlace, HostedRun
from asyncflow.service.limits import Denied
from asyncflow.service.routes.bodies import MAX_ROWS, Body, Confirmation, NumRows, PolicyVersion, Seconds, StepNumber


class InitEngines(Body):
    rollout: EnginePlace | None = None
    """`own`: the run starts rollout workers. `outside`: clients generate. Without it the configuration says it."""
    train: EnginePlace | None = None
    """Likewise, the client that trains."""


class Begun(BaseModel):
    step: int | None
    """The step that the run begins with; null while the other engine is still to be named."""


class Prompts(Body):
    rows: Annotated[list[dict[str, Any]], Field(min_length=1, max_length=MAX_ROWS)]
    """Rows as a data set has them."""


class StepDone(BaseModel):
    metrics: dict[str, float | None] | None
    """Metrics of the step, those that are no number as null; null when all steps are done."""


class Allow(Body):
    steps: StepNumber
    """The run trains up to so many steps by itself."""


class Notify(Body):
    timeout_seconds: Seconds = 60.0


class Scale(Body):
    num_workers: Annotated[int, Field(ge=0, le=100_000)]
    grace_seconds: Annotated[float, Field(ge=0, le=3600)] = 60.0


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


def add_calls(router: APIRouter, hosted: HostedRun) -> None:
    """Add the routes that drive a run."""

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
        hosted.run.allow(body.steps)
        return Confirmation(message=f"up to {body.steps} steps are trained")

    @router.get("/steps", tags=["run"])
    async def steps(first: Annotated[int, Query(ge=0, lt=1 << 31)] = 0) -> dict[int, dict[str, float | None]]:
        """Metrics of the committed steps."""
        return {step: numbers(row) for step, row in hosted.steps(first).items()}

    @router.post("/prompts", tags=["run"])
    async def put_prompts_data(body: Prompts) -> NumRows:
        """Train on these rows next, before those of the run's data set. What was answered is kept, also by a server that is killed
        and started again with --resume."""
        await hosted.run.put_prompts_data(body.rows)
        return NumRows(rows=len(body.rows))

    @router.post("/weight_sync_notify", tags=["run"])
    async def weight_sync_notify(body: Notify) -> PolicyVersion:
        """Have all rollout workers serve the weights of the last committed step, and answer when they do."""
        return PolicyVersion(version=await hosted.run.weight_sync_notify(body.timeout_seconds))

    @router.post("/scale", tags=["run"])
    async def scale(body: Scale) -> Confirmation:
        """Let rollout workers join or leave."""
        return Confirmation(message=await hosted.scale_rollout(body.num_workers, body.grace_seconds))

    @router.post("/checkpoint", tags=["run"])
    async def checkpoint() -> PolicyVersion:
        """Have a checkpoint written with the next step that is committed, and answer at once with its version."""
        return PolicyVersion(version=await hosted.run.checkpoint())

    @router.post("/stop", tags=["run"], dependencies=[needs("admin")])
    async def stop() -> Confirmation:
        """Stop the run: its model, trace and report are written before the answer."""
        hosted.check_may_stop()
        await hosted.stop()
        return Confirmation(message=f"the run in {hosted.config.run_dir} has stopped")


def add_state(router: APIRouter, hosted: HostedRun) -> None:
    """Add the routes that say what a run has and does."""

    @router.get("/status", tags=["run"])
    async def status() -> RunStatus:
        """State of the run, its workers and its queue."""
        if (found := await hosted.status()) is None:
            run = hosted.config.run
            return RunStatus(run=run.name, is_live=False, has_begun=hosted.has_begun, steps=run.steps)
        return RunStatus(is_live=True, **msgspec.structs.asdict(found))

    @router.get("/metrics", tags=["run"], response_class=Response)
    async def metrics() -> Response:
        """The queue's metrics in Prometheus' text form."""
        return Response(await hosted.metrics(), media_type="text/plain; version=0.0.4")

    @router.get("/model", tags=["run"])
    async def model() -> list[str]:
        """Files of the model that the run started from: version 0."""
        return sorted(file.name for file in hosted.run.job.prepared.model.iterdir() if file.is_file())

    @router.get("/model/{name}", tags=["run"], response_class=FileResponse)
    async def model_file(name: Annotated[str, Field(max_length=255)]) -> FileResponse:
        """File of a model."""
        found = {file.name: file for file in hosted.run.job.prepared.model.iterdir() if file.is_file()}
        if name not in found:
            raise Denied(404, "the model has no such file")
        return FileResponse(found[name], media_type="application/octet-stream")


def numbers(metrics: Mapping[str, float]) -> dict[str, float | None]:
    """Metrics as JSON has them: one that is no finite number is null."""
    return {name: value if abs(value) < float("inf") else None for name, value in metrics.items()}
