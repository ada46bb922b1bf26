"""Routes of a hosted run: the calls of AsyncFlow's service (AF, section 5), and of whoever drives or watches a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from fastapi import APIRouter, Response
from pydantic import BaseModel, ConfigDict, Field

from asyncflow.service.app import needs
from asyncflow.service.hosted import HostedRun

MAX_ROWS = 100_000
"""Rows of one request at most."""
Seconds = Annotated[float, Field(gt=0, le=3600)]


class Body(BaseModel):
    """Body of a request: an unknown field is a mistake."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


class InitEngines(Body):
    """Start the run's engines."""


class Begun(BaseModel):
    step: int
    """The step that the run begins with."""


class Prompts(Body):
    rows: Annotated[list[dict[str, Any]], Field(min_length=1, max_length=MAX_ROWS)]
    """Rows as a data set has them."""


class NumRows(BaseModel):
    rows: int


class StepDone(BaseModel):
    metrics: dict[str, float | None] | None
    """Metrics of the step, those that are no number as null; null when all steps are done."""


class Notify(Body):
    timeout_seconds: Seconds = 60.0


class Version(BaseModel):
    version: int


class Scale(Body):
    num_workers: Annotated[int, Field(ge=0, le=100_000)]
    grace_seconds: Annotated[float, Field(ge=0, le=3600)] = 60.0


class Told(BaseModel):
    message: str


class RunStatus(BaseModel):
    run: str
    is_live: bool
    committed: int = 0
    steps: int = 0
    idle_seconds: float = 0.0
    workers: list[str] = []
    waits: list[str] = []
    queue: dict[str, dict[str, int]] = {}


def routes(hosted: HostedRun) -> APIRouter:
    """The routes of this run."""
    router = APIRouter(prefix="/v1", tags=["run"])

    @router.post("/init_engines")
    async def init_engines(body: InitEngines) -> Begun:
        """Check the configuration and start the run's workers. Repeating it changes nothing."""
        return Begun(step=await hosted.start())

    @router.post("/step")
    async def step() -> StepDone:
        """Train one step, and answer when it is committed."""
        metrics = await hosted.step()
        return StepDone(metrics=None if metrics is None else numbers(metrics))

    @router.post("/prompts")
    async def put_prompts_data(body: Prompts) -> NumRows:
        """Train on these rows next, before those of the run's data set."""
        await hosted.put_prompts_data(body.rows)
        return NumRows(rows=len(body.rows))

    @router.post("/weight_sync_notify")
    async def weight_sync_notify(body: Notify) -> Version:
        """Have all rollout workers serve the weights of the last committed step, and answer when they do."""
        return Version(version=await hosted.weight_sync_notify(body.timeout_seconds))

    @router.post("/scale")
    async def scale(body: Scale) -> Told:
        """Let rollout workers join or leave."""
        return Told(message=await hosted.scale_rollout(body.num_workers, body.grace_seconds))

    @router.get("/status")
    async def status() -> RunStatus:
        """State of the run, its workers and its queue."""
        name = hosted.config.run.name
        if (found := await hosted.status()) is None:
            return RunStatus(run=name, is_live=False, steps=hosted.config.run.steps)
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

    @router.get("/metrics", response_class=Response)
    async def metrics() -> Response:
        """The queue's metrics in Prometheus' text form."""
        return Response(await hosted.metrics(), media_type="text/plain; version=0.0.4")

    @router.post("/stop", dependencies=[needs("admin")])
    async def stop() -> Told:
        """Stop the run: its model, trace and report are written before the answer."""
        await hosted.stop()
        return Told(message=f"the run in {hosted.config.run_dir} has stopped")

    return router


def numbers(metrics: Mapping[str, float]) -> dict[str, float | None]:
    """Metrics as JSON has them: one that is no finite number is null."""
    return {name: value if abs(value) < float("inf") else None for name, value in metrics.items()}
