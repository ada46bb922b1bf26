"""What the tests share: the shipped model, and configurations small enough to run in seconds."""

from __future__ import annotations

import faulthandler
import gc
import os
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests import forked
from tests.depth import IS_DEEP, IS_SMOKE, pairwise
from tests.patience import patience

if TYPE_CHECKING:
    from asyncflow.engines.rollout.vllm.process import ServerProcess

gc.disable()  # until all is imported: what an import makes stays, and looking for garbage among it takes a fifth of its time
ROOT = Path(__file__).parent.parent
FOLDERS = ("tests/e2e/", "tests/schedules/", "tests/contract/", "tests/unit/engines/", "tests/")
MODEL = ROOT / "recipes" / "models" / "tiny-arithmetic"
LONGEST = 3600 if IS_DEEP else 600  # seconds of a quiet machine, many times what the longest test takes
SHOWN_AT, HANGS_AFTER = pytest.StashKey[int](), pytest.StashKey[float]()


def gsm8k_folder() -> Path | None:
    """The real data set, where it is to be found."""
    places = [os.environ.get("ASYNCFLOW_GSM8K"), str(ROOT.parent / "shared" / "data" / "gsm8k")]
    return next((Path(p) for p in places if p and (Path(p) / "train.jsonl").is_file()), None)


def merged(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Nested mappings, the second over the first."""
    return base | {
        key: merged(base[key], value) if isinstance(value, dict) and isinstance(base.get(key), dict) else value
        for key, value in changes.items()
    }


@pytest.fixture
def small(tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """A configuration of 2 steps of 4 prompts x 4 responses; keyword arguments change sections of it."""
    return small_in(tmp_path)


def small_in(folder: Path) -> Callable[..., dict[str, Any]]:
    """`small`, whose runs are in this folder."""
    base = {
        "run": {"name": "test", "dir": str(folder / "runs"), "steps": 2, "stall_timeout_seconds": patience(60)},
        "model": {"path": str(MODEL)},
        "data": {"path": "generated:arithmetic", "limit": 64},
        "rollout": {"num_slots": 16, "group_size": 4, "max_new_tokens": 48},
        "train": {"prompts_per_step": 4, "learning_rate": 1e-4},
        "telemetry": {"trackers": []},
    }

    def build(**changes: Any) -> dict[str, Any]:
        return merged(base, changes)

    return build


@pytest.fixture(scope="session")
def vllm_server() -> Iterator[ServerProcess]:
    """A real vLLM with the shipped model, for all tests that change nothing of it but its weights."""
    from asyncflow.engines.rollout.vllm.process import ServerProcess
    from tests.vllm.servers import CONTEXT, VLLM_PYTHON, server_options

    if VLLM_PYTHON is None:
        pytest.skip("ASYNCFLOW_VLLM_PYTHON names no interpreter that has vLLM: make test-deep SUITES=vllm installs one")
    server = ServerProcess(server_options(VLLM_PYTHON, MODEL, num_slots=16, max_context=CONTEXT), "vLLM")
    try:
        server.spawn()
        server.wait_until_ready()
        yield server
    finally:
        server.stop()


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Each of several processes that tests run in is told of one fork server, which imports everything while they collect."""
    node.workerinput["forks"] = forked.address()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[SHOWN_AT] = os.dup(2)  # now: during a test it is a file of pytest's
    config.stash[HANGS_AFTER] = min(patience(LONGEST) for _ in range(5))  # the machine's pace, and not a moment's
    if (told := getattr(config, "workerinput", None)) is not None:
        forked.join(told["forks"])


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """A test that hangs ends its process, which shows where its threads are: pytest-xdist names the test as failed, and another
    process goes on with the others."""
    faulthandler.dump_traceback_later(item.config.stash[HANGS_AFTER], exit=True, file=item.config.stash[SHOWN_AT])
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    """A thread that a test has left behind must not keep pytest from ending: it is shown, and the tests have failed. One of
    several processes only waits here for the others, however long, and is ended by the first."""
    if not hasattr(config, "workerinput"):
        faulthandler.dump_traceback_later(120, exit=True)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Without ASYNCFLOW_TESTS, what is marked deep is not there. The folders whose files take longest come first, so that no
    process is left with one of them at the end."""
    items.sort(key=lambda item: FOLDERS.index(next(folder for folder in FOLDERS if item.nodeid.startswith(folder))))
    if not IS_DEEP and not IS_SMOKE:
        kept = pairwise([item for item in items if not item.get_closest_marker("deep")])
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = [item for item in items if item in kept]


def pytest_collection_finish() -> None:
    gc.freeze()  # nor is it looked at again
    gc.enable()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Where the time goes, by file."""
    seconds: Counter[str] = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                seconds[report.nodeid.partition("::")[0]] += report.duration
    if len(seconds) > 20:
        terminalreporter.section("slowest 20 files")
        for file, taken in seconds.most_common(20):
            terminalreporter.write_line(f"{taken:8.1f} s  {file}")
        terminalreporter.write_line(f"{seconds.total():8.1f} s  all {len(seconds)} files, one test after another")
