"""A hosted run that cannot write its end."""

from __future__ import annotations

import errno
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from asyncflow.service.hosted import HostedRun


async def test_a_server_whose_run_cannot_be_stopped_in_order_ends_all_the_same(tmp_path: Path) -> None:
    """On a full disk: else it would listen for ever, and refuse whatever it is asked."""

    async def stop() -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    config: Any = None
    hosted = HostedRun(config, tmp_path / "journal")
    run: Any = SimpleNamespace(stop=stop, job=SimpleNamespace(interrupt=lambda: None, journal=None))
    hosted._run = run
    with pytest.raises(OSError, match="No space left"):
        await hosted.stop()
    assert hosted.over.is_set()
