"""A real browser, for pages to be looked at. Whoever imports this is skipped where there is none."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
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


TOO_SLOW = "not used within a few seconds from the window's load event"  # said of a script that was preloaded: a matter of pace


def complaints_of(page: Any) -> list[str]:
    """What the page complains about from now on, in its console or by errors; it grows."""
    complaints: list[str] = []
    page.on("console", lambda message: None if TOO_SLOW in message.text else complaints.append(f"{message.type}: {message.text}"))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    return complaints


@contextmanager
def browser_of(**how: Any) -> Iterator[Any]:
    """A browser with an empty profile (a context of `playwright`), which waits as long as this machine needs."""
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS, timeout=1000 * patience(30))
        context = browser.new_context(**how)
        context.set_default_timeout(1000 * patience(30))
        yield context
        browser.close()
