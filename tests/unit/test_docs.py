"""The documentation says what the code says."""

from __future__ import annotations

import re

from asyncflow.telemetry.metrics import definitions_table
from tests.conftest import ROOT


def test_metrics_page_is_the_definitions() -> None:
    assert definitions_table() in (ROOT / "docs" / "metrics.md").read_text()


def test_links_between_pages_lead_somewhere() -> None:
    for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
            assert target.startswith("http") or (page.parent / target).exists(), f"{page.name}: {target}"


def test_every_room_of_the_package_is_on_the_map() -> None:
    rooms = {path.name for path in (ROOT / "asyncflow").iterdir() if not path.name.startswith("_")}
    for page in ("README.md", "docs/architecture.md"):
        text = (ROOT / page).read_text()
        assert not [room for room in rooms if room not in text], page
