"""Calls that the leader of a data-parallel group sends to the ranks that follow it: the engine's own, as bytes with a closed
schema.

the engine's method and arguments -> one of `Call` -> encode -> bytes -> decode -> the same method on every follower
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from asyncflow.engines.base import MicroBatch
from asyncflow.types import ARRAY_DTYPES, Array, Ragged, RunError


class BeginStep(msgspec.Struct, tag="begin_step"):
    """See `TrainEngine`, as for all that follow."""


class ForwardBackward(msgspec.Struct, tag="forward_backward"):
    micro_batches: list[MicroBatch]


class OptimStep(msgspec.Struct, tag="optim_step"):
    normaliser: int


class Discard(msgspec.Struct, tag="discard"):
    pass


class LogProbs(msgspec.Struct, tag="log_probs"):
    prompt_ids: Array
    response_ids: Ragged


class Gather(msgspec.Struct, tag="gather"):
    """The next of the weights that are exported."""

    name: str


class Fingerprint(msgspec.Struct, tag="fingerprint"):
    pass


class Save(msgspec.Struct, tag="save"):
    path: Path


class SaveState(msgspec.Struct, tag="save_state"):
    folder: Path


class LoadState(msgspec.Struct, tag="load_state"):
    folder: Path


class Close(msgspec.Struct, tag="close"):
    pass


Call = (
    BeginStep | ForwardBackward | OptimStep | Discard | LogProbs | Gather | Fingerprint | Save | SaveState | LoadState | Close
)  # fmt: skip


def name_of(call: Call) -> str:
    """Name of a call, for the lane of a follower."""
    return str(call.__struct_config__.tag)


def encode(call: Call) -> bytes:
    """A call as msgpack; arrays by dtype, shape and bytes."""
    return _ENCODER.encode(call)


def decode(content: bytes | memoryview) -> Call:
    """The call. Raises `RunError` for what is none."""
    try:
        return _DECODER.decode(content)
    except msgspec.MsgspecError as error:
        raise RunError(f"a data-parallel group's leader sent what is no call of a train engine: {error}") from error


def _encode_hook(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return str(value.dtype), value.shape, np.ascontiguousarray(value).data.cast("B") if value.size else b""
    if isinstance(value, Ragged):
        return value.values, value.offsets
    if isinstance(value, Path):
        return str(value)
    raise NotImplementedError(f"{type(value)} is no part of a call")


def _decode_hook(kind: type, value: Any) -> Any:
    if kind is np.ndarray:
        dtype, shape, content = msgspec.convert(value, tuple[str, list[int], bytes])
        if dtype not in ARRAY_DTYPES or min(shape, default=0) < 0 or math.prod(shape) * np.dtype(dtype).itemsize != len(content):
            raise ValueError(f"no array of {dtype} {shape} has {len(content)} bytes")
        return np.frombuffer(content, dtype).reshape(shape)
    if kind is Ragged:
        values, offsets = value
        return Ragged(_decode_hook(np.ndarray, values), _decode_hook(np.ndarray, offsets))
    if kind is Path or issubclass(kind, Path):
        return Path(value)
    raise NotImplementedError(f"{kind} is no part of a call")


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_encode_hook)
_DECODER: msgspec.msgpack.Decoder[Call] = msgspec.msgpack.Decoder(Call, dec_hook=_decode_hook)
