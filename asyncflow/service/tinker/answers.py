"""Answers to requests: what `retrieve_future` returns, as JSON or, where the client can read it, as protobuf."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, Protocol

import numpy as np

from asyncflow.engines.base import Response
from asyncflow.service.tinker import protobuf
from asyncflow.types import Array, Ragged

Category = Literal["user", "server", "unknown"]
"""Side whose mistake a failed request was."""
OUTPUT_TYPE: Final = "ArrayRecord"


class Answer(Protocol):
    """Answer to a request, once it has been computed."""

    @property
    def nbytes(self) -> int:
        """Bytes of memory that it takes, about."""
        return 1_000

    def json(self) -> dict[str, Any]:
        """Answer as a JSON object."""

    def protobuf(self) -> bytes | None:
        """Answer as a protobuf message; None: it is always JSON."""
        return None


@dataclass(frozen=True, slots=True)
class Fields(Answer):
    """Answer without tensors."""

    fields: Mapping[str, Any]

    def json(self) -> dict[str, Any]:
        return dict(self.fields)


@dataclass(frozen=True, slots=True)
class Failure(Answer):
    """Answer to a request that failed, with a sentence that says why."""

    error: str
    category: Category = "user"

    def json(self) -> dict[str, Any]:
        return {"error": self.error, "category": self.category}


@dataclass(frozen=True, slots=True)
class PassOutput(Answer):
    """Answer to `forward` and `forward_backward`: `logprobs`, float32, an entry for each datum, of its target tokens.

    `metrics`: names end in `:sum`, `:mean` and so on, by which the SDK joins the parts of a request that it has cut.
    """

    logprobs: Ragged
    metrics: Mapping[str, float]

    @property
    def nbytes(self) -> int:
        return self.logprobs.nbytes

    def json(self) -> dict[str, Any]:
        outputs = [{"logprobs": _tensor(values)} for values in self.logprobs]
        return {"loss_fn_output_type": OUTPUT_TYPE, "loss_fn_outputs": outputs, "metrics": dict(self.metrics)}

    def protobuf(self) -> bytes:
        made = protobuf.message("ForwardBackwardOutput")
        made.loss_fn_output_type = OUTPUT_TYPE
        for name, value in self.metrics.items():
            made.metrics[name] = value
        record = made.loss_fn_outputs.add(num_datums=len(self.logprobs))
        batched = record.fields["logprobs"]
        batched.data, batched.dtype = self.logprobs.values.astype("<f4").tobytes(), protobuf.FLOAT32
        batched.offsets = (self.logprobs.offsets * 4).astype("<i8").tobytes()  # in bytes
        return made.SerializeToString()


@dataclass(frozen=True, slots=True)
class SampleOutput(Answer):
    """Answer to `asample`. `prompt_logprobs`: float32 [Lp], NaN for tokens that were not scored, such as the first one."""

    sequences: Sequence[Response]
    prompt_logprobs: Array | None = None

    @property
    def nbytes(self) -> int:
        return sum(one.token_ids.nbytes + one.logprobs.nbytes for one in self.sequences) + 1_000

    def json(self) -> dict[str, Any]:
        sequences = [
            {"tokens": one.token_ids.tolist(), "logprobs": one.logprobs.tolist(), "stop_reason": one.finish_reason}
            for one in self.sequences
        ]
        made: dict[str, Any] = {"type": "sample", "sequences": sequences}
        if self.prompt_logprobs is not None:
            made["prompt_logprobs"] = [None if math.isnan(value) else value for value in self.prompt_logprobs.tolist()]
        return made

    def protobuf(self) -> bytes:
        made = protobuf.message("SampleResponse")
        for one in self.sequences:
            made.sequences.add(
                stop_reason=protobuf.STOP if one.finish_reason == "stop" else protobuf.LENGTH,
                tokens=one.token_ids.astype("<i4").tobytes(),
                logprobs=one.logprobs.astype("<f4").tobytes(),
            )
        if self.prompt_logprobs is not None:
            made.prompt_logprobs = self.prompt_logprobs.astype("<f4").tobytes()
        return made.SerializeToString()


def _tensor(values: Array) -> dict[str, Any]:
    return {"data": np.asarray(values, np.float64).tolist(), "dtype": "float32", "shape": [len(values)]}
