"""A real browser, for pages to be looked at. Whoever imports this is skipped where there is none."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.patience import patience

sync_api = pytest.importorskip("playwright.sync_api", reason="the Python package playwright is not installed")
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
if CHROMIUM is None:
    pytest.skip("no chromium on this machine (apt-get install chromium)", allow_module_level=True)
FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
]  # fmt: skip


@contextmanager
def browser_of(profile: Path, **how: Any) -> Iterator[Any]:
    """A browser with its profile in this folder (a context of `playwright`), which waits as long as this machine needs."""
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch_persistent_context(
            str(profile), executable_path=CHROMIUM, args=FLAGS, timeout=1000 * patience(30), **how
        )
        browser.set_default_timeout(1000 * patience(30))
        yield browser
        browser.close()
