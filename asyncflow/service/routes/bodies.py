"""Bodies that routes of several files have, and the types of their fields."""

from __future__ import annotations

from typing import Annotated, Final

from pydantic import BaseModel, ConfigDict, Field

MAX_ROWS: Final = 100_000
"""Rows of one request at most."""
Seconds = Annotated[float, Field(gt=0, le=3600)]
PollSeconds = Annotated[float, Field(ge=0, le=60)]
"""Time that a request may wait for something to come."""
StepNumber = Annotated[int, Field(ge=0, lt=1 << 31)]
Name = Annotated[str, Field(pattern=r"^[a-z0-9-]{1,64}$")]


class Body(BaseModel):
    """Body of a request: an unknown field is a mistake."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


class PolicyVersion(BaseModel):
    version: int


class NumRows(BaseModel):
    rows: int


class Confirmation(BaseModel):
    message: str
