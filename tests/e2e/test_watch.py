"""The live page, as the command serves it."""

from __future__ import annotations

import re
import signal
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2
import yaml

from tests.e2e.commands import wait_for
from tests.forked import Command


def test_the_page_is_served_at_a_unix_socket_of_its_owner(
    background: Callable[..., Command], small: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    run, place = tmp_path / "one", tmp_path / "page.sock"
    run.mkdir()
    (run / "config.yaml").write_text(yaml.safe_dump(small()))
    command = background("watch", run, "--listen", f"unix:{place}")
    assert command.stdout.readline().startswith(
        f"{run} is shown at unix:{place}: forward a port to it, such as ssh -L 8000:{place} "
    )
    (path, key) = re.fullmatch(r"http://localhost:8000(/watch/)#key=(\S+)\n", command.stdout.readline()).groups()
    assert stat.S_ISSOCK(place.stat().st_mode) and stat.S_IMODE(place.stat().st_mode) == 0o600
    with httpx2.Client(transport=httpx2.HTTPTransport(uds=str(place)), base_url="http://localhost:8000") as client:
        page = client.get(path)
        assert page.status_code == 200 and "<title>AsyncFlow</title>" in page.text
        assert client.get("/watch/api/runs").status_code == 401
        assert client.get("/watch/api/runs", headers={"Authorization": f"Bearer {key}"}).json() == ["one"]
    command.send_signal(signal.SIGTERM)
    wait_for(lambda: command.poll() is not None)
    assert command.poll() == 0 and not place.exists()
