"""Calls that the leader of a data-parallel group sends to the ranks that follow it: the engine's own, as bytes with a closed
schema.

method and arguments -> encode -> bytes -> decode, by `ARGUMENTS` -> the same method on every follower
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np

from asyncflow.engines.base import Hyperparameters, MicroBatch
from asyncflow.types import ARRAY_DTYPES, Array, Ragged, RunError

ARGUMENTS: Final[dict[str, Any]] = {
    "use_threads": tuple[int],
    "begin_step": tuple[()],
    "forward_backward": tuple[list[MicroBatch]],
    "optim_step": tuple[int],
    "discard": tuple[()],
    "set_hyperparameters": tuple[Hyperparameters],
    "log_probs": tuple[Array, Ragged, Ragged | None, float | None, str | None],
    "gather": tuple[str],
    "fingerprint": tuple[()],
    "save": tuple[Path],
    "save_state": tuple[Path],
    "load_state": tuple[Path],
    "close": tuple[()],
}
"""Arguments of each method of `Training`, without the objective, which every rank has. After `close` there are no more calls."""


class Call(NamedTuple):
    """Call of a method of `Training`."""

    method: str
    arguments: tuple[Any, ...] = ()


def encode(call: Call) -> bytes:
    """A call as msgpack; arrays by dtype, shape and bytes."""
    return _ENCODER.encode(call)


def decode(content: bytes | memoryview) -> Call:
    """The call. Raises `RunError` for what is none."""
    try:
        method, arguments = _CALL.decode(content)
        return Call(method, _DECODERS[method].decode(arguments))
    except (msgspec.MsgspecError, KeyError) as error:
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
_CALL = msgspec.msgpack.Decoder(tuple[str, msgspec.Raw])
_DECODERS = {name: msgspec.msgpack.Decoder(kind, dec_hook=_decode_hook) for name, kind in ARGUMENTS.items()}
