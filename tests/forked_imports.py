"""What the tests' fork server imports and makes, for all of its forks (tests/forked.py)."""

from __future__ import annotations

import contextlib
import gc
import importlib

from tests.forked import MODULES

gc.disable()  # what an import makes stays, and looking for garbage among it takes a fifth of its time
for module in MODULES:
    with contextlib.suppress(ImportError):  # whoever needs it says so
        importlib.import_module(module)
importlib.import_module("asyncflow.telemetry.report").page_template("report.html.j2")  # compiled
gc.freeze()  # it is the forks' too: their garbage collection is not to write into shared pages
gc.enable()
