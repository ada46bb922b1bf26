"""Links to files: good for a while, and for nobody who does not have them."""

from pathlib import Path

import pytest

from asyncflow.service import tickets as tickets_file
from asyncflow.service.tickets import Tickets


def test_a_link_leads_to_its_file_until_it_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    tickets = Tickets(lambda: now)
    path = tickets.make(Path("/a/b.bin"), 60)
    assert path.startswith("/tickets/") and path.endswith("/b.bin") and path != tickets.make(Path("/a/b.bin"), 60)
    assert tickets.find(path) == Path("/a/b.bin") == tickets.find(path.removesuffix("b.bin") + "whatever")
    assert tickets.find("/tickets/") is None and tickets.find("/tickets/x/b.bin") is None
    now = 160.0
    assert tickets.find(path) is None
    monkeypatch.setattr(tickets_file, "LARGEST_NUMBER", 2)
    paths = [tickets.make(Path(f"/{number}"), 60) for number in range(3)]
    assert [tickets.find(path) for path in paths] == [None, Path("/1"), Path("/2")]
