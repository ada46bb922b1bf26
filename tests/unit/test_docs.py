"""The documentation says what the code says."""

from __future__ import annotations

import re
import subprocess
import sys

from asyncflow.telemetry.metrics import definitions_table
from tests.conftest import ROOT


def test_metrics_page_is_the_definitions() -> None:
    assert definitions_table() in (ROOT / "docs" / "metrics.md").read_text()


def test_links_between_pages_lead_somewhere() -> None:
    for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
            assert target.startswith("http") or (page.parent / target).exists(), f"{page.name}: {target}"


def test_the_queue_of_its_page_runs() -> None:
    source = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "transfer_queue.md").read_text(), re.DOTALL)[0]
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=60)
    assert done.stdout == "[0.0, 1.0, 2.0, 3.0, 4.0, 5.0]\n", done.stderr


def test_every_room_of_the_package_is_on_the_map() -> None:
    rooms = {path.name for path in (ROOT / "asyncflow").iterdir() if not path.name.startswith("_")}
    for page in ("README.md", "docs/architecture.md"):
        text = (ROOT / page).read_text()
        assert not [room for room in rooms if room not in text], page
