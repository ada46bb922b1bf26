"""Requests of the Tinker API: their fields, as the SDK's versions send them in JSON or protobuf, and what is possible.

A field that this server does not know may be there if it is empty (null, false, 0, "", []): newer SDKs have more of them. One that
asks for something is refused by name.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal, TypeVar

import msgspec
import numpy as np
from google.protobuf.message import DecodeError
from pydantic import AfterValidator, AliasChoices, BaseModel, ConfigDict, Field, model_validator

from asyncflow.engines.base import Hyperparameters, Sampling
from asyncflow.service.tinker import protobuf
from asyncflow.service.tinker.examples import Example
from asyncflow.types import Array

T = TypeVar("T")
Id = Annotated[str, Field(min_length=1, max_length=256)]
Number = Annotated[int, Field(ge=0, lt=1 << 62)]
TokenId = Annotated[int, Field(ge=0, lt=1 << 31)]
METADATA_BYTES: Final = 64 << 10
LEAST_TEMPERATURE: Final = 1e-4
DTYPES: Final = {"float32": np.float32, "int64": np.int64}
_WIRE_DTYPES: Final[dict[int, np.dtype]] = {protobuf.FLOAT32: np.dtype("<f4"), protobuf.INT64: np.dtype("<i8")}


def check_metadata(metadata: T) -> T:
    """The metadata. Raises `ValueError` for some that take too much room."""
    if metadata is not None and len(msgspec.json.encode(metadata)) > METADATA_BYTES:
        raise ValueError(f"user_metadata may have {METADATA_BYTES} bytes as JSON")
    return metadata


Metadata = Annotated[dict[str, Any] | None, AfterValidator(check_metadata)]


class WireMessage(BaseModel):
    """Object in a request."""

    model_config = ConfigDict(extra="allow", protected_namespaces=(), frozen=True)
    type: str = ""

    @model_validator(mode="after")
    def _known(self) -> WireMessage:
        for name, value in (self.model_extra or {}).items():
            if value:
                raise ValueError(f"this server does not know {name[:100]!r}: leave it out")
        return self


class CreateSession(WireMessage):
    tags: list[str] = Field(default=[], max_length=100)
    user_metadata: Metadata = None
    sdk_version: str = ""
    project_id: str | None = None
    display_name: str | None = Field(None, max_length=1000)


class OfSession(WireMessage):
    session_id: Id


class LoraConfig(WireMessage):
    """Low-rank adapter that a client asks for. The output layer gets none: `train_unembed` has no effect. `seed`: of its first
    values; None: the server's."""

    rank: Annotated[int, Field(ge=1, le=1024)]
    seed: int | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class OptimizerConfig(WireMessage):
    type: Literal["adamw"] = "adamw"


class CreateModel(WireMessage):
    session_id: Id
    model_seq_id: Number
    base_model: Id
    user_metadata: Metadata = None
    lora_config: LoraConfig | None = None
    optimizer_config: OptimizerConfig = OptimizerConfig()


class OfModel(WireMessage):
    model_id: Id


class NumberedRequest(WireMessage):
    """Request to a model, which is done in the order of the numbers."""

    model_id: Id
    seq_id: Number | None = None


class AdamParams(WireMessage):
    learning_rate: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1e-4
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.95
    eps: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1e-12
    weight_decay: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    grad_clip_norm: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0

    @property
    def hyperparameters(self) -> Hyperparameters:
        """Hyperparameters for the engine."""
        return Hyperparameters(
            learning_rate=self.learning_rate,
            betas=(self.beta1, self.beta2),
            epsilon=self.eps,
            weight_decay=self.weight_decay,
            max_grad_norm=self.grad_clip_norm or None,
        )


class OptimStep(NumberedRequest):
    adam_params: AdamParams


class SaveWeights(NumberedRequest):
    path: str | None = None
    ttl_seconds: Annotated[int, Field(ge=1)] | None = None
    overwrite: bool = False
    user_metadata: Annotated[dict[str, str] | None, AfterValidator(check_metadata)] = None


class SaveWeightsForSampler(SaveWeights):
    sampling_session_seq_id: Number | None = None
    kind: Literal["snapshot"] = "snapshot"


class SaveWeightsExternal(SaveWeights):
    path: Id


class LoadWeights(WireMessage):
    """Load of a checkpoint into a model, or, with `session_id`, into a new one."""

    model_id: Id | None = None
    seq_id: Number | None = None
    session_id: Id | None = None
    model_seq_id: Number | None = None
    base_model: Id | None = None
    user_metadata: Metadata = None
    path: str
    optimizer: bool
    optimizer_config: OptimizerConfig | None = None

    @model_validator(mode="after")
    def _possible(self) -> LoadWeights:
        if (self.model_id is None) == (self.session_id is None or self.model_seq_id is None):
            raise ValueError("say model_id, or session_id and model_seq_id: one of the two")
        return self


class CreateSamplingSession(WireMessage):
    session_id: Id
    sampling_session_seq_id: Number
    base_model: Id | None = None
    model_path: str | None = None


class TokensChunk(WireMessage):
    tokens: list[TokenId]
    type: Literal["encoded_text"] = "encoded_text"


class ModelInput(WireMessage):
    chunks: list[TokensChunk]

    @property
    def token_ids(self) -> Array:
        """Tokens of all chunks, int64 [N]."""
        return np.array([token for chunk in self.chunks for token in chunk.tokens], np.int64)


class TensorData(WireMessage):
    data: list[float] | list[int]
    dtype: Literal["float32", "int64"]
    shape: list[Annotated[int, Field(ge=0)]] | None = None

    def array(self) -> Array:
        """The tensor. Raises `ValueError` if data, dtype and shape contradict each other."""
        if self.dtype == "int64" and not all(isinstance(value, int) for value in self.data):
            raise ValueError("a tensor of int64 has numbers that are no integers")
        try:
            values = np.array(self.data, DTYPES[self.dtype])
        except OverflowError as error:
            raise ValueError(f"a tensor has numbers that {self.dtype} does not hold") from error
        return values if self.shape is None else values.reshape(self.shape)


class SamplingParams(WireMessage):
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    seed: int | None = None
    stop: str | list[str] | list[TokenId] | None = None
    temperature: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1.0
    top_k: Annotated[int, Field(ge=-1, lt=1 << 31)] = -1
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0

    @model_validator(mode="after")
    def _possible(self) -> SamplingParams:
        if 0 < self.temperature < LEAST_TEMPERATURE:
            raise ValueError(f"a temperature is 0 or at least {LEAST_TEMPERATURE:g}: logits divided by less are not finite")
        return self

    def sampling(self, end_ids: Sequence[int], largest: int) -> Sampling:
        """Settings for the engine. `end_ids`: end tokens of the model's own; `largest`: tokens that there is room for.

        Stop tokens come in addition to the end tokens, except for an empty list, which disables them too.
        """
        texts: tuple[str, ...] = ()
        stop_ids: tuple[int, ...] | None = None
        if isinstance(self.stop, str):
            texts = (self.stop,)
        elif isinstance(self.stop, list):
            texts = tuple(stop for stop in self.stop if isinstance(stop, str))
            numbers = tuple(stop for stop in self.stop if isinstance(stop, int))
            stop_ids = () if not self.stop else (*numbers, *end_ids) if numbers else None
        return Sampling(
            temperature=self.temperature,
            max_new_tokens=largest if self.max_tokens is None else self.max_tokens,
            top_p=self.top_p,
            top_k=max(0, self.top_k),
            stop=texts,
            stop_ids=stop_ids,
        )


class SamplingRequest(WireMessage):
    num_samples: Annotated[int, Field(ge=1, le=1024)] = 1
    prompt: ModelInput
    sampling_params: SamplingParams
    base_model: Id | None = None
    model_path: str | None = None
    sampling_session_id: Id | None = None
    seq_id: Number | None = None
    prompt_logprobs: bool | None = None
    prompt_logprobs_last_n: Annotated[int, Field(ge=1)] | None = None


class RetrieveFuture(WireMessage):
    request_id: Id
    allow_metadata_only: bool = False


class CancelFuture(WireMessage):
    request_id: Id


class WeightsInfo(WireMessage):
    tinker_path: str


class KeepFor(WireMessage):
    ttl_seconds: Annotated[int, Field(ge=1)] | None = None


class JsonDatum(WireMessage):
    model_input: ModelInput
    loss_fn_inputs: dict[str, TensorData]


class PassInput(WireMessage):
    data: list[JsonDatum]
    loss_fn: str
    loss_fn_config: dict[str, float | str] | None = None


class JsonPass(NumberedRequest):
    """`forward` or `forward_backward`, as older SDKs send it."""

    pass_input: PassInput = Field(validation_alias=AliasChoices("forward_backward_input", "forward_input"))


@dataclass(frozen=True, slots=True)
class PassRequest:
    """`forward` or `forward_backward`."""

    model_id: str
    seq_id: int | None
    examples: Sequence[Example]
    loss: str
    loss_options: Mapping[str, float | str]
    is_forward_only: bool

    @property
    def nbytes(self) -> int:
        """Bytes of its arrays."""
        return sum(one.token_ids.nbytes + sum(array.nbytes for array in one.inputs.values()) for one in self.examples)

    def content(self) -> bytes:
        """Hash of the request's content, however it was encoded."""
        found = hashlib.blake2b(f"{self.loss} {self.is_forward_only} {sorted(self.loss_options.items())}".encode(), digest_size=16)
        for example in self.examples:
            arrays = [("", example.token_ids), *sorted(example.inputs.items())]
            for name, array in arrays:
                found.update(f"{name} {array.dtype} {array.shape}".encode())
                found.update(np.ascontiguousarray(array).data.cast("B") if array.size else b"")
        return found.digest()


def content_of(message: WireMessage) -> bytes:
    """Hash of a request's content."""
    return hashlib.blake2b(f"{type(message).__name__} {message.model_dump_json()}".encode(), digest_size=16).digest()


def pass_of_json(message: JsonPass, *, is_forward_only: bool) -> PassRequest:
    """Request for a pass from JSON. Raises `ValueError`."""
    given = message.pass_input
    examples = [
        Example(datum.model_input.token_ids, {name: tensor.array() for name, tensor in datum.loss_fn_inputs.items()})
        for datum in given.data
    ]
    return PassRequest(message.model_id, message.seq_id, examples, given.loss_fn, given.loss_fn_config or {}, is_forward_only)


def pass_of_protobuf(body: bytes) -> PassRequest:
    """Request for a pass from protobuf. Raises `ValueError`."""
    made = protobuf.message("ForwardBackwardRequest")
    try:
        made.ParseFromString(body)
    except DecodeError as error:
        raise ValueError(f"the body is no protobuf message ForwardBackwardRequest: {error}") from error
    options: dict[str, float | str] = dict(made.loss_fn_config)
    for name, value in made.loss_fn_config_v2.items():
        options[name] = value.text if value.WhichOneof("kind") == "text" else value.number
    examples = [
        Example(_tokens(datum.model_input), {name: _array(name, tensor) for name, tensor in datum.loss_fn_inputs.items()})
        for datum in made.data
    ]
    return PassRequest(made.model_id, made.seq_id, examples, made.loss_fn, options, made.forward_only)


def _tokens(chunks: Any) -> Array:
    pieces = []
    for chunk in chunks:
        if chunk.WhichOneof("kind") != "encoded_text":
            raise ValueError("an input may have tokens alone: models here see no images and hear no sound")
        pieces.append(_read(chunk.encoded_text.tokens, np.dtype("<i4")).astype(np.int64))
    return np.concatenate(pieces) if pieces else np.zeros(0, np.int64)


def _array(name: str, tensor: Any) -> Array:
    if tensor.WhichOneof("kind") == "sparse_csr":
        raise ValueError(f"{name} is sparse, with several entries for each token: that is not supported")
    if tensor.dtype not in _WIRE_DTYPES:
        raise ValueError(f"{name} is neither float32 nor int64")
    values = _read(tensor.dense, _WIRE_DTYPES[tensor.dtype])
    return values.reshape(tuple(tensor.shape)) if len(tensor.shape) else values


def _read(content: bytes, dtype: np.dtype) -> Array:
    if len(content) % dtype.itemsize:
        raise ValueError(f"{len(content)} bytes are no array of {dtype}")
    return np.frombuffer(content, dtype)
