"""What a user is told of an error."""

from __future__ import annotations

import errno

import pytest

from asyncflow.cli.display import sentence

FULL = (errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize(
    ("error", "place"),
    [
        (OSError(*FULL, "/runs/model/w"), "/runs/model/w"),
        (OSError(*FULL), "a file"),
        (OSError(*FULL, "/dev/shm/w", None, "/runs/model/w"), "/runs/model/w"),
    ],
)
def test_a_file_that_has_no_room_is_named(error: OSError, place: str) -> None:
    """Of a copy it is the copy: the disk of the original has room."""
    assert sentence(ExceptionGroup("", [error])) == f"{place}: No space left on device"
