"""The wire decoder under bytes that nobody meant: no exception but `ValueError`, no memory that was neither sent nor allowed.

What is decoded is what a server decodes: frames, messages, and the arguments of a service with arrays, structs and unions in them.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import struct
import tracemalloc
from collections.abc import Awaitable, Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncflow.transport import FrameLimits, codec, remote
from asyncflow.transport.frames import PREFIX, FrameParser, encode_frame, new_buffer
from asyncflow.types import GroupMeta, Interval
from tests.depth import few
from tests.unit.transport.bench import HELLO, Bench, Parcel, frame, packed, request

LIMITS = FrameLimits(header_bytes=60_000, body_bytes=100_000, buffers=64)
BATCHES, CASES = 8, few(20_000, 50_000)


class Token(msgspec.Struct, frozen=True, array_like=True):
    task: str
    number: int


class Page(msgspec.Struct, array_like=True):
    name: str
    values: np.ndarray
    offsets: np.ndarray | None = None


class Pages(msgspec.Struct, array_like=True):
    indices: np.ndarray
    pages: list[Page]


class Store:
    """Shaped as the services of the transfer queue are."""

    @remote
    async def put(self, pages: Pages, metas: list[GroupMeta]) -> None: ...

    @remote
    def complete(self, token: Token, pages: Pages, losses: dict[str, float]) -> Awaitable[np.ndarray]: ...  # type: ignore[empty-body]

    @remote
    async def read(self, indices: np.ndarray, columns: list[str], seconds: float | None) -> Pages: ...  # type: ignore[empty-body]

    @remote
    async def park(self) -> None: ...


def valid_frames() -> list[bytes]:
    rng = np.random.default_rng(0)
    tokens, offsets = rng.integers(0, 1000, 40), np.array([0, 10, 40])
    pages = Pages(np.arange(2), [Page("ids", tokens, offsets), Page("reward", rng.random(2, np.float32)[:, None])])
    large = Pages(np.arange(3), [Page("x", rng.integers(0, 255, (2, 5_000, 7), np.uint8))])
    metas = [GroupMeta(3, 2, 1, Interval(0, 2)), GroupMeta(4, 2, 1, Interval(0, 1 << 40), "eval")]
    messages: list[msgspec.Struct] = [
        codec.Hello("worker-0"),
        codec.Request(1, "store", "put", (pages, metas)),
        codec.Request(2, "store", "complete", (Token("train", 7), large, {"loss": 0.5, "kl": -1e300})),
        codec.Request(3, "store", "read", (np.arange(100), ["ids", "reward", "ß" * 50], None)),
        codec.Request(4, "store", "park", ()),
        codec.Cancel(4),
        codec.Taken(3),
    ]
    frames = []
    for message in messages:
        arrays: list[np.ndarray] = []
        header = codec.encode(message, arrays, [])
        frames.append(b"".join(bytes(piece) for piece in encode_frame(header, arrays, LIMITS)))
    return frames


VALID = valid_frames()
LENGTHS = [0, 1, 7, 8, 63, 64, 255, 4095, 65_535, 1 << 16, 100_000, 100_001, 1 << 31, (1 << 32) - 1, 1 << 63, (1 << 64) - 1]


def mutate(rng: random.Random, content: bytes) -> bytes:
    """One to four changes of the kinds that decoders fall over."""
    mutable = bytearray(content)
    for _ in range(rng.choice((1, 1, 2, 4))):
        size, kind = len(mutable), rng.randrange(8)
        # The header of a frame is where the meaning is, and it is short.
        at = rng.randrange(min(size, 200) if rng.random() < 0.8 else size) if size else 0
        if kind == 0 and size:
            mutable[at] ^= 1 << rng.randrange(8)
        elif kind == 1 and size:
            mutable[at] = rng.choice((0, 0x7F, 0x80, 0x90, 0xC0, 0xC1, 0xC6, 0xCF, 0xD3, 0xD9, 0xDB, 0xDC, 0xDD, 0xDF, 0xFF))
        elif kind == 2:
            del mutable[at:]
        elif kind == 3:
            del mutable[at : at + rng.randrange(1, 9)]
        elif kind == 4:
            mutable[at:at] = rng.randbytes(rng.randrange(1, 9))
        elif kind == 5:
            other = rng.choice(VALID)
            first = rng.randrange(len(other))
            mutable[at:at] = other[first : first + rng.randrange(1, 64)]
        elif kind == 6 and size >= PREFIX.size:
            field, width = rng.choice(((4, 4), (8, 4), (12, 8)))
            mutable[field : field + width] = (rng.choice(LENGTHS) & ((1 << 8 * width) - 1)).to_bytes(width, "little")
        elif kind == 7 and size >= PREFIX.size + 8:
            count = min(struct.unpack_from("<I", mutable, 8)[0], (size - PREFIX.size) // 8)
            if count:
                i = PREFIX.size + 8 * rng.randrange(count)
                mutable[i : i + 8] = rng.choice(LENGTHS).to_bytes(8, "little")
    return bytes(mutable)


def repaired(content: bytes, rng: random.Random) -> bytes:
    """A mutated header in a frame whose sizes are right, so that what lies behind the parser is reached."""
    _, header_bytes, num_buffers, body_bytes = PREFIX.unpack_from(content)
    at = PREFIX.size + 8 * num_buffers
    header = mutate(rng, content[at : at + header_bytes])
    prefix = PREFIX.pack(content[:4], len(header), num_buffers, body_bytes)
    return prefix + content[PREFIX.size : at] + header + content[at + header_bytes :]


def decode_all(content: bytes) -> tuple[int, int]:
    """(frames, requests whose arguments are right) in a stream. Everything but a `ValueError` of a decoder goes through."""
    allocated = 0

    def allocate(num_bytes: int) -> np.ndarray:
        nonlocal allocated
        allocated += num_bytes
        assert num_bytes <= LIMITS.body_bytes and allocated <= len(content) + LIMITS.body_bytes
        return new_buffer(num_bytes)

    parser, frames, requests, at = FrameParser(LIMITS, allocate), 0, 0, 0
    while at < len(content) and not parser.failure:
        buffer = parser.get_buffer()
        part = content[at : at + len(buffer)]
        buffer[: len(part)] = part
        at += len(part)
        for header, buffers in parser.advance(len(part)):
            frames += 1
            with contextlib.suppress(ValueError):
                message = codec.decode_message(codec.from_client, header)
                if isinstance(message, codec.Request) and message.method in ("put", "complete", "read", "park"):
                    codec.decode(codec.schema(Store, message.method).arguments, message.arguments, buffers, is_writeable=False)
                    requests += 1
    parser.close()
    return frames, requests


def test_what_is_valid_is_decoded() -> None:
    assert decode_all(b"".join(VALID)) == (7, 4)


def cases(rng: random.Random, count: int) -> Iterator[bytes]:
    for i in range(count):
        chosen = rng.choice(VALID)
        yield repaired(chosen, rng) if i % 2 else mutate(rng, chosen) + (rng.choice(VALID) if i % 8 == 0 else b"")


@pytest.mark.parametrize("seed", range(BATCHES))
def test_mutated_frames_are_decoded_or_refused(seed: int) -> None:
    frames = requests = 0
    for content in cases(random.Random(seed), CASES):
        found = decode_all(content)
        frames, requests = frames + found[0], requests + found[1]
    # The cases reach every layer, and stop in every layer.
    assert 0.5 * CASES < frames < 1.2 * CASES and 0.02 * CASES < requests < 0.9 * frames


def test_mutated_frames_take_no_more_memory_than_was_sent_and_allowed() -> None:
    allowed = LIMITS.header_bytes + LIMITS.body_bytes + (512 << 10)  # and a receive buffer
    tracemalloc.start()
    try:
        for content in cases(random.Random(99), 4_000):
            tracemalloc.reset_peak()
            before, _ = tracemalloc.get_traced_memory()
            decode_all(content)
            _, peak = tracemalloc.get_traced_memory()
            assert peak - before < allowed + 100 * len(content), content
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "claim", [b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"\xdb\xff\xff\xff\xff"]
)
def test_a_claim_inside_a_header_is_not_believed(claim: bytes) -> None:
    tracemalloc.start()
    try:
        for before in (
            b"\x95\xa7request\x01\xa5store\xa4read",
            b"\x95\xa7request\x01\xa5store\xa4read\x93\x93\xa5int64",
            b"\x92\xa5hello",
            b"",
        ):
            with pytest.raises(ValueError, match=r"truncated|Expected"):
                codec.decode_message(codec.from_client, before + claim)
        with pytest.raises(ValueError, match=r"truncated|Expected"):
            codec.decode(codec.schema(Store, "read").arguments, b"\x93" + claim, [], is_writeable=False)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@settings(max_examples=few(80, 400), deadline=None, derandomize=True, database=None)
@given(st.binary(max_size=200), st.sampled_from([b"", b"\x95\xa7request\x01\xa5store", b"\x95\xa7request\x01\xa5store\xa3put\x92"]))
def test_any_bytes_are_decoded_or_refused(tail: bytes, head: bytes) -> None:
    decode_all(tail)
    decode_all(frame(head + tail, bytes(16)))


async def test_a_live_server_serves_others_meanwhile(tmp_path: Path) -> None:
    errors: list[dict[str, object]] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: errors.append(context))
    rng = random.Random(1)
    frames = [frame(request(1, "echo", {"name": "x", "values": ["uint8", [8], 0]}), bytes(8)), frame(request(2, "add", 1, 2))]
    frames += [frame(request(3, "park")), frame(packed("cancel", 3)), *VALID]
    async with Bench(tmp_path / "s.sock", LIMITS) as bench:
        client, answered, is_over = await bench.client("honest"), 0, False

        async def honest() -> None:
            nonlocal answered
            while not is_over:
                assert np.array_equal((await client.echo(Parcel("x", np.arange(10)))).values, np.arange(10))
                answered += 1

        async def rude() -> None:
            for i in range(750):
                reader, writer = await asyncio.open_unix_connection(bench.path)
                with contextlib.suppress(ConnectionError):
                    writer.write(mutate(rng, HELLO) if i % 10 == 0 else HELLO)
                    if i % 10:
                        await reader.readexactly(len(frame(packed("welcome", ""))))
                    writer.write(b"".join(mutate(rng, rng.choice(frames)) for _ in range(2)))
                    if i % 3:
                        writer.write_eof()
                        await asyncio.wait_for(reader.read(), 5)
                writer.close()

        serving = asyncio.create_task(honest())
        await asyncio.gather(*(rude() for _ in range(3)))
        is_over = True
        await asyncio.wait_for(serving, 2)
        assert answered > 100 and "honest" not in bench.gone
        assert errors == [], errors[0]
