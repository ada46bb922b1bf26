"""Messages: what the header of a frame says, and how numpy arrays travel beside it.

    hello  -->                  the client's name
           <--  welcome         requests are served from here on
    request, cancel  -->
           <--  reply
    taken  -->                  a reply's arrays that were handed over by reference have been copied

Arguments and results are decoded against the annotations of the method called and nothing else. An array in them is an `ArrayRef`:
it names one of the frame's buffers, or a place in the server's arena.
"""

from __future__ import annotations

import asyncio
import collections.abc
import contextvars
import functools
import inspect
import math
import threading
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Generic, NamedTuple, TypeVar, cast, get_args, get_origin, get_type_hints

import msgspec
import numpy as np

from asyncflow.transport.arena import Arena, ArenaPlace, ArenaReader, receive_buffer
from asyncflow.transport.frames import LARGE_BYTES, Buffer
from asyncflow.types import ARRAY_DTYPES, CROSSING, RunError

F = TypeVar("F", bound=Callable[..., Awaitable[Any]])
A = TypeVar("A")

DTYPES = {name: np.dtype(name) for name in ARRAY_DTYPES}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
MAX_DIMENSIONS = 4

client_key: contextvars.ContextVar[str] = contextvars.ContextVar("client_key", default="")
"""Inside a handler: `NAME@NUMBER`, of this one connection (two clients may have one name); empty if it crosses no socket."""

client_name: contextvars.ContextVar[str] = contextvars.ContextVar("client_name", default="driver")
"""Inside a handler: the name that the calling process gave in its hello."""


class ConnectionLost(RunError):
    """The other side of a connection has gone, or sent what is no frame."""


class RemoteError(RunError):
    """A handler raised something that is not part of its contract."""


class Hello(msgspec.Struct, array_like=True, tag="hello"):
    """First message of a client."""

    name: str


class Welcome(msgspec.Struct, array_like=True, tag="welcome"):
    """Answer to `Hello`."""

    arena: str = ""
    """Path of the file that the server hands arrays over in; empty: it does not."""


def error_name(error: BaseException) -> str:
    """Name of an exception on the wire: that of a class that the caller knows, if it is of one."""
    return next((base.__name__ for base in type(error).__mro__ if base.__name__ in CROSSING), type(error).__name__)


def raised(service: str, method: str, name: str, message: str) -> Exception:
    """Exception that the caller raises: the exception itself where it crosses, or one that names it."""
    if name in CROSSING:
        return CROSSING[name](message)
    return RemoteError(f"{service}.{method} failed: {name}: {message}")


class Request(msgspec.Struct, Generic[A], array_like=True, tag="request", gc=False):
    """Call of a service's method. `arguments`: a tuple; as it arrives a `Raw`, which the method that it names decodes."""

    id: int
    service: str
    method: str
    arguments: A


class Cancel(msgspec.Struct, array_like=True, tag="cancel"):
    """The caller of request `id` has gone: nobody is to answer it any more."""

    id: int


class Taken(msgspec.Struct, array_like=True, tag="taken"):
    """The arrays in the arena that the reply to request `id` refers to have been copied."""

    id: int


class Reply(msgspec.Struct, Generic[A], array_like=True, tag="reply", gc=False):
    """Answer to a request. `result`: as it arrives a `Raw`, which the method that was called decodes."""

    id: int
    result: A
    error: str = ""
    message: str = ""


class ArrayRef(msgspec.Struct, array_like=True, gc=False):
    """Stands for a numpy array in a header; its bytes, in C order, are the frame's buffer of that number or lie at `place`."""

    dtype: str
    shape: tuple[int, ...]
    buffer: int
    place: ArenaPlace | None = None


from_client = msgspec.msgpack.Decoder(Hello | Request[msgspec.Raw] | Cancel | Taken)
from_server = msgspec.msgpack.Decoder(Welcome | Reply[msgspec.Raw])


def decode_message(decoder: msgspec.msgpack.Decoder[Any], header: Buffer) -> Any:
    """Raises `ValueError` when it is none of the decoder's messages."""
    try:
        return decoder.decode(header)
    except RecursionError as error:
        raise ValueError("a message that is nested too deeply") from error


def encode(message: msgspec.Struct, arrays: list[np.ndarray], held: list[np.ndarray], arena: Arena | None = None) -> bytes:
    """A header. The arrays to send are appended to `arrays`, those that the other side will copy out of `arena` to `held`.

    Raises:
        TypeError: there is something in it that would not arrive as what it is.
    """

    def hook(item: Any) -> Any:
        if isinstance(item, np.ndarray):
            name = NAMES.get(item.dtype)
            if item.ndim > MAX_DIMENSIONS or name is None:
                raise TypeError(f"an array of {item.ndim} dimensions and dtype {item.dtype.str} cannot be sent")
            if arena is not None and item.nbytes >= LARGE_BYTES and (place := arena.locate(item)) is not None:
                held.append(item)
                return ArrayRef(name, item.shape, -1, place)
            arrays.append(item if item.flags.c_contiguous else np.ascontiguousarray(item))
            return ArrayRef(name, item.shape, len(arrays) - 1)
        if isinstance(item, np.generic):
            return item.item()
        raise TypeError(f"{type(item).__name__} cannot be sent")

    return msgspec.msgpack.encode(message, enc_hook=hook)


class _ArrivingFrame(threading.local):
    """Frame that is being decoded in this thread, for the hook of the decoders, which are shared."""

    buffers: Sequence[np.ndarray] = ()
    is_writeable: bool = True
    arena: Callable[[], ArenaReader] | None = None
    """Reads the other side's arena; None: it may not refer to one."""


_arriving = _ArrivingFrame()


def decode(
    decoder: msgspec.msgpack.Decoder[Any],
    raw: Buffer | msgspec.Raw,
    buffers: Sequence[np.ndarray],
    *,
    is_writeable: bool,
    arena: Callable[[], ArenaReader] | None = None,
) -> Any:
    """Arguments or a result. Arrays are views of the frame's `buffers`, or copies of what they refer to in `arena`.

    Raises:
        ValueError: it is not of the decoder's type.
        LookupError: an array in the arena has been freed.
    """
    _arriving.buffers, _arriving.is_writeable, _arriving.arena = buffers, is_writeable, arena
    try:
        return decoder.decode(raw)
    except RecursionError as error:
        raise ValueError("a value that is nested too deeply") from error
    finally:
        _arriving.buffers, _arriving.arena = (), None


def _decode_array(wanted: type, item: Any) -> np.ndarray:
    if wanted is not np.ndarray:
        raise TypeError(f"{wanted} cannot be received")
    ref = msgspec.convert(item, ArrayRef)
    dtype, shape, buffers = DTYPES.get(ref.dtype), ref.shape, _arriving.buffers
    # A product of Python integers does not overflow; the bound on each keeps numpy's own arithmetic from it.
    if dtype is None or len(shape) > MAX_DIMENSIONS or any(not 0 <= n < 1 << 40 for n in shape):
        raise ValueError(f"no such array can be received: {ref}")
    if ref.place is not None and _arriving.arena is not None:
        if ref.place.num_bytes != math.prod(shape) * dtype.itemsize:
            raise ValueError(f"an array whose shape and bytes differ: {ref}")
        buffer = _arriving.arena().copy(ref.place, receive_buffer)
    elif not 0 <= ref.buffer < len(buffers) or math.prod(shape) * dtype.itemsize != len(buffers[ref.buffer]):
        raise ValueError(f"no such array in the frame: {ref}")
    else:
        buffer = buffers[ref.buffer]
    array: np.ndarray = np.ndarray(shape, dtype, buffer)
    if not _arriving.is_writeable:
        array.setflags(write=False)
    return array


def remote(method: F) -> F:
    """Mark a service's method as callable through a proxy. Its annotations are its message schema.

    It is a coroutine function, or a plain function that returns an awaitable of its result (`-> Awaitable[X]`). A future that is
    done when it is returned is answered at once; a future belongs to its request, and is cancelled with it.
    """
    method.__remote__ = True  # type: ignore[attr-defined]
    return method


class Method(NamedTuple):
    """Decoders of the messages of a remote method."""

    arguments: msgspec.msgpack.Decoder[Any]
    result: msgspec.msgpack.Decoder[Any]


@functools.cache
def schema(interface: type, method: str) -> Method:
    """Raises `LookupError` when there is no such remote method."""
    function = getattr(interface, method, None)
    if not getattr(function, "__remote__", False):
        raise LookupError(f"{interface.__name__} has no remote method {method!r}")
    function = cast(Callable[..., Any], function)
    hints = get_type_hints(function)
    names = list(inspect.signature(function).parameters)[1:]
    arguments = tuple[tuple(hints[n] for n in names)] if names else tuple[()]  # type: ignore[misc]
    result = hints.get("return", type(None))
    if not inspect.iscoroutinefunction(function):
        if get_origin(result) not in (collections.abc.Awaitable, collections.abc.Coroutine, asyncio.Future, asyncio.Task):
            raise TypeError(f"the remote method {function.__qualname__} is no coroutine and not annotated -> Awaitable[...]")
        result = get_args(result)[-1]
    return Method(*(msgspec.msgpack.Decoder(kind, dec_hook=_decode_array) for kind in (arguments, result)))
