"""The parser: any split of a stream gives the same frames, sizes are believed within the limits, large bodies arrive in place."""

from __future__ import annotations

import random

import numpy as np
import pytest

from asyncflow.transport.frames import LARGE_BYTES, MAGIC, PREFIX, FrameParser, encode_frame, new_buffer
from asyncflow.transport.limits import FrameLimits
from tests.unit.transport.bench import frame

LIMITS = FrameLimits()


def feed(parser: FrameParser, content: bytes, step: int) -> list[tuple[bytes, list[bytes]]]:
    frames, at = [], 0
    while at < len(content) and not parser.failure and not parser.is_blocked:
        buffer = parser.get_buffer()
        part = content[at : at + min(step, len(buffer))]
        buffer[: len(part)] = part
        at += len(part)
        frames += [(bytes(header), [b.tobytes() for b in buffers]) for header, buffers in parser.advance(len(part))]
    return frames


def messages() -> list[tuple[bytes, list[np.ndarray]]]:
    noise = np.random.default_rng(0)
    sizes: list[tuple[int, list[int]]] = [
        (1, []), (0, []), (300, [0]), (5, [1, 7, 8, 9]), (LARGE_BYTES, []), (LARGE_BYTES + 1, []), (400_000, []), 
        (30_000, [40_000]), (300_000, [300_000]),
        (3, [LARGE_BYTES]), (0, [LARGE_BYTES, 0, 3]), (2, []), (1_000, [700_001, 5]), (9, [1]),
    ]  # fmt: skip
    return [(noise.bytes(h), [np.frombuffer(noise.bytes(n), np.uint8) for n in lengths]) for h, lengths in sizes]


@pytest.mark.parametrize("step", [1, 1009, 65_536, 1 << 30])
def test_any_split_gives_the_same_frames(step: int) -> None:
    sent = messages()
    content = b"".join(bytes(piece) for header, arrays in sent for piece in encode_frame(header, arrays, LIMITS))
    parser = FrameParser(LIMITS)
    assert feed(parser, content, step) == [(header, [a.tobytes() for a in arrays]) for header, arrays in sent]
    assert not parser.failure and not parser.is_midway


def test_what_is_encoded_is_the_documented_format_and_not_a_copy() -> None:
    array = np.arange(3, dtype=np.int16)
    pieces = encode_frame(b"head", [array], LIMITS)
    assert b"".join(pieces) == frame(b"head", array.tobytes())
    assert np.shares_memory(np.frombuffer(pieces[1], np.uint8), array)


def test_a_large_body_is_received_where_it_stays() -> None:
    made: list[np.ndarray] = []

    def allocate(num_bytes: int) -> np.ndarray:
        made.append(new_buffer(num_bytes))
        return made[-1]

    parser = FrameParser(LIMITS, allocate)
    content = frame(b"h", bytes(1_000_000), b"abc")
    feed(parser, content[:300_000], 1 << 30)
    assert parser.is_assembling and [len(m) for m in made] == [1_000_008]
    assert np.shares_memory(np.frombuffer(parser.get_buffer(), np.uint8), made[0])
    small = parser.get_buffer().nbytes
    assert small == 1_000_008 - (300_000 - len(frame(b"h")) - 16)
    assert feed(parser, content[300_000:], 1 << 30)[0][1][1] == b"abc" and len(made) == 1


BAD = {
    "magic": (b"HTTP" + PREFIX.pack(MAGIC, 1, 0, 0)[4:], "begins with"),
    "header": (PREFIX.pack(MAGIC, LIMITS.header_bytes + 1, 0, 0), "above the limits"),
    "buffers": (PREFIX.pack(MAGIC, 0, LIMITS.buffers + 1, 0), "above the limits"),
    "body": (PREFIX.pack(MAGIC, 0, 1, LIMITS.body_bytes + 1), "above the limits"),
    "a body of no buffers": (PREFIX.pack(MAGIC, 0, 0, 8), "add up"),
    "a sum": (frame(b"", bytes(8), body=16), "add up"),
    "a sum above 2**64": (PREFIX.pack(MAGIC, 0, 2, 0) + b"\0" * 7 + b"\x80" + b"\0" * 7 + b"\x80", "add up"),
}


@pytest.mark.parametrize("kind", BAD)
@pytest.mark.parametrize("step", [1, 1 << 30])
def test_sizes_are_checked_as_soon_as_they_arrive(kind: str, step: int) -> None:
    """Nothing follows: a parser that believed them would wait, or allocate."""
    content, why = BAD[kind]

    def refuse(num_bytes: int) -> bool:
        raise AssertionError("it was about to be allocated")

    parser = FrameParser(LIMITS, reserve=refuse)
    good = frame(b"good")
    assert feed(parser, good + content[: PREFIX.size + 16], step) == [(b"good", [])]
    assert why in parser.failure
    assert parser.advance(0) == []


def test_the_largest_that_is_allowed_is_believed() -> None:
    asked: list[int] = []
    parser = FrameParser(LIMITS, lambda n: new_buffer(1), lambda n: bool(asked.append(n)))
    feed(parser, PREFIX.pack(MAGIC, LIMITS.header_bytes, 1, LIMITS.body_bytes) + LIMITS.body_bytes.to_bytes(8, "little"), 1 << 30)
    assert not parser.failure and parser.is_blocked and asked == [LIMITS.header_bytes + LIMITS.body_bytes]


def test_what_does_not_fit_waits_and_what_is_done_makes_room() -> None:
    log: list[tuple[str, int]] = []

    def reserve(num_bytes: int) -> bool:
        log.append(("reserve", num_bytes))
        return False

    parser = FrameParser(LIMITS, new_buffer, reserve, lambda n: log.append(("release", n)))
    content = frame(b"h", bytes(500_000))
    assert feed(parser, frame(b"small") + content[:100_000], 1 << 30) == [(b"small", [])]
    assert parser.is_blocked and not parser.is_assembling
    assert parser.unblock() == [] and not parser.is_blocked and parser.is_assembling
    assert log == [("reserve", 500_001)]  # not asked twice
    assert len(feed(parser, content[100_000:], 1 << 30)) == 1
    assert log == [("reserve", 500_001), ("release", 500_001)]


def test_a_half_frame_gives_back_what_it_had_reserved() -> None:
    balance = 0

    def reserve(num_bytes: int) -> bool:
        nonlocal balance
        balance += num_bytes
        return True

    def release(num_bytes: int) -> None:
        nonlocal balance
        balance -= num_bytes

    parser = FrameParser(LIMITS, new_buffer, reserve, release)
    content = frame(b"h", bytes(500_000))
    feed(parser, content, 1 << 30)
    assert balance == 0
    feed(parser, content[:-1], 1 << 30)
    assert balance == 500_001
    parser.close()
    assert balance == 0 and parser.advance(1) == []


def test_parts_of_frames_in_random_steps() -> None:
    rng = random.Random(0)
    for _ in range(30):
        sent = rng.choices(messages(), k=6)
        content = b"".join(bytes(piece) for header, arrays in sent for piece in encode_frame(header, arrays, LIMITS))
        cuts = sorted(rng.randrange(len(content)) for _ in range(20))
        parser, got = FrameParser(LIMITS), []
        for first, last in zip([0, *cuts], [*cuts, len(content)], strict=True):
            got += feed(parser, content[first:last], 1 << 30)
        assert got == [(header, [a.tobytes() for a in arrays]) for header, arrays in sent]


@pytest.mark.parametrize("sizes", [{"header_bytes": 1 << 32}, {"buffers": -1}, {"assembly_bytes": 1 << 30}])
def test_limits_that_cannot_work_are_refused(sizes: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"limits that no frame|wait for ever"):
        FrameLimits(**sizes)  # type: ignore[arg-type]
