"""Output that nobody reads."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from asyncflow.cli.output import PATIENCE_SECONDS, OptionalReader, _optional


def test_what_is_read_arrives_whole() -> None:
    reading, writing = os.pipe()
    assert OptionalReader(writing).write(b"a line\n") == 7
    assert os.read(reading, 100) == b"a line\n"


def test_a_closed_pipe_takes_everything_and_raises_nothing() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    stream = _optional(os.fdopen(writing, "w"))
    for _ in range(3):
        print("nobody reads this", file=stream, flush=True)
    print("or an arrow, in an encoding without one: →", file=stream, flush=True)


def test_a_reader_that_stands_still_is_waited_for_once_and_gets_what_comes_later() -> None:
    reading, writing = os.pipe()
    file, began = OptionalReader(writing), time.monotonic()
    for _ in range(100):
        assert file.write(b"x" * 4000) == 4000  # a pipe holds some of them
    assert time.monotonic() - began < 20 * PATIENCE_SECONDS
    held = os.read(reading, 1 << 20)
    assert 0 < len(held) < 400_000
    file.write(b"again")
    assert os.read(reading, 1 << 20).endswith(b"again")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full here")
def test_a_full_disk() -> None:
    with open("/dev/full", "w") as full:
        assert OptionalReader(full.fileno()).write(b"lost") == 4
