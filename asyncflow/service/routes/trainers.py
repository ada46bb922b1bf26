"""Routes of clients that train, `/v1/trainers/...` and `/v1/weights/...`: get_experience_data, acknowledge, weights."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response
from pydantic import BaseModel, Field
from starlette.requests import ClientDisconnect

from asyncflow.engines.train.experience import Published
from asyncflow.service.experience import MEDIA_TYPES, Form, as_lists, as_msgpack, as_safetensors
from asyncflow.service.hosted import HostedRun
from asyncflow.service.limits import Busy, Denied
from asyncflow.service.routes.bodies import (
    MAX_ROWS,
    Body,
    Confirmation,
    Name,
    NumRows,
    PolicyVersion,
    PollSeconds,
    Seconds,
    StepNumber,
)


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
    step: StepNumber
    path: Annotated[str, Field(max_length=4096)]
    """A safetensors file, or a folder in Hugging Face format, on the server's machine; empty: the update is skipped."""
    grad_norm: Annotated[float, Field(ge=0)] = 0.0
    learning_rate: Annotated[float, Field(ge=0)] = 0.0
    timeout_seconds: Seconds = 120.0


def add_trainers(router: APIRouter, hosted: HostedRun) -> None:
    """Add the routes of clients that train."""

    @router.post("/trainers", tags=["trainers"])
    async def begin_training(body: BeginTraining) -> TrainerJoined:
        """Train for the run from now on, whose train engine is outside."""
        session = hosted.begin_training(is_fresh=body.is_fresh)
        return TrainerJoined(trainer=session.name, step=hosted.run.driver.ledger.ledger.committed)

    @router.post("/trainers/{trainer}/experience", tags=["trainers"], response_model=ExperienceAnswer)
    async def get_experience_data(trainer: Name, body: WantExperience) -> Any:
        """Take groups of the present step: some, or a token budget. Waits for some; asking is a heartbeat."""
        taken = await hosted.workers.take_groups(
            trainer, groups=body.groups, tokens=body.tokens, timeout_seconds=body.timeout_seconds
        )
        if body.form != "json":
            encode = as_msgpack if body.form == "msgpack" else as_safetensors
            return Response(encode(taken, has_bulk=body.has_bulk), media_type=MEDIA_TYPES[body.form])
        groups = [as_lists(group, has_bulk=body.has_bulk) for group in taken.groups]
        return {"step": taken.step, "groups": groups, "normaliser": taken.normaliser}

    @router.post("/trainers/{trainer}/acknowledge", tags=["trainers"])
    async def acknowledge(trainer: Name, body: Acknowledge) -> NumRows:
        """Note that these groups are in the trainer's gradient: no other trainer is to have them."""
        with hosted.workers.trainer(trainer):
            hosted.run.driver.desk.acknowledge(trainer, body.groups)
        return NumRows(rows=len(body.groups))

    @router.post("/trainers/{trainer}/weights", tags=["trainers"])
    async def publish(trainer: Name, body: PublishFolder) -> PolicyVersion:
        """Publish the weights of a file or folder on the server's machine as the version that `step` has made."""
        with hosted.workers.trainer(trainer):
            path = str(hosted.readable(Path(body.path))) if body.path else ""
            published = Published(path, body.grad_norm, body.learning_rate)
            return PolicyVersion(version=await hosted.publish(body.step, published, body.timeout_seconds))

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
        with hosted.workers.trainer(trainer):
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
                    published = Published(str(path), grad_norm, learning_rate)
                    return PolicyVersion(version=await hosted.publish(step, published, timeout_seconds))
                except ClientDisconnect as error:
                    raise Denied(400, "the upload was cut off") from error
                finally:
                    path.unlink(missing_ok=True)

    @router.delete("/trainers/{trainer}", tags=["trainers"])
    async def end_training(trainer: Name) -> Confirmation:
        """Train no more: groups that were not acknowledged are given to others."""
        hosted.workers.end_training(trainer)
        return Confirmation(message=f"{trainer} has left")
