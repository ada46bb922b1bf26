"""What `make test` does not run: the suites with environments of their own, what each of them looks at, and when they last passed.

    python -m tests.suites gate       of each suite what its rooms need: all of it where one has changed since it last passed, else
                                      its smoke tests; and what is left for the deep suite
    python -m tests.suites smoke ray  smoke tests alone
    python -m tests.suites deep       everything there is; writes docs/tested.md

A suite whose environment cannot be made (`make ENVIRONMENT/installed`) is left out, and said to be.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import statistics
import subprocess
import sys
import time
import xml.etree.ElementTree
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from tests.patience import patience

ROOT = Path(__file__).parent.parent
PAGE_NAME = "docs/tested.md"
PAGE = ROOT / PAGE_NAME
TRAIN_ENGINE_TESTS = (
    "tests/contract/test_train_engine.py",
    "tests/contract/test_train_engine_ranks.py",
    "tests/e2e/test_adapters.py",
)
ADAPTER_ROOMS = (
    "asyncflow/engines/train/adapters",
    "asyncflow/engines/train/leader_engine.py",
)


@dataclass(frozen=True)
class Suite:
    """`rooms`: files and folders whose change asks for all of it, as that of its `tests` does. `keyword`: which of these, in
    pytest's words."""

    name: str
    tests: tuple[str, ...]
    environment: str = ".venv"
    rooms: tuple[str, ...] = ()
    keyword: str = ""
    variables: dict[str, str] = field(default_factory=dict)
    processes: int = 1


EVERYTHING = Suite("everything", ("tests",), keyword="", processes=2)
SUITES = (
    Suite(
        "deepspeed",
        TRAIN_ENGINE_TESTS,
        ".venv-adapters",
        ADAPTER_ROOMS,
        keyword="deepspeed",
    ),
    Suite(
        "megatron",
        TRAIN_ENGINE_TESTS,
        ".venv-adapters",
        ADAPTER_ROOMS,
        keyword="megatron",
    ),
    Suite(
        "ray",
        ("tests/unit/cluster/ray/test_cluster.py", "tests/e2e/test_ray.py"),
        ".venv-ray",
        (
            "asyncflow/cluster/ray",
            "asyncflow/cluster/remote_node.py",
            "asyncflow/cluster/supervised.py",
        ),
    ),
    Suite(
        "tinker",
        ("tests/tinker",),
        ".venv",
        ("asyncflow/service/tinker", "asyncflow/service/app.py", "asyncflow/engines/train/passes.py"),
        variables={
            "ASYNCFLOW_TINKER_PYTHONS": os.pathsep.join(
                str(ROOT / environment / "bin" / "python") for environment in (".venv-tinker", ".venv-tinker-early")
            )
        },
    ),
    Suite(
        "environments",
        ("tests/environments",),
        ".venv-environments",
        (
            "asyncflow/data/reasoning_gym.py",
            "asyncflow/environments",
            "asyncflow/rewards/reasoning_gym.py",
        ),
    ),
    Suite(
        "vllm",
        ("tests/contract/test_rollout_engine.py", "tests/vllm"),
        ".venv",
        ("asyncflow/engines/rollout/vllm", "asyncflow/engines/rollout/in_vllm"),
        keyword="vllm",
        variables={"ASYNCFLOW_VLLM_PYTHON": str(ROOT / ".venv-vllm" / "bin" / "python")},
    ),
)
SECONDS = 2700
"""After which a suite is ended, some three times what the longest takes on a quiet machine: it is for what hangs."""
SMOKE_SECONDS = 90.0
"""What smoke tests may take on a quiet machine, with their environment already there."""
ALSO_MADE = {"tinker": (".venv-tinker", ".venv-tinker-early"), "vllm": (".venv-vllm",)}
"""Environments that a suite needs beside the one that its tests run in."""


@dataclass(frozen=True)
class Result:
    """How a suite ended. `limit`: the seconds that it may take."""

    suite: str
    is_deep: bool
    passed: int
    failed: int
    skipped: int
    seconds: float
    limit: float = math.inf

    @property
    def is_right(self) -> bool:
        """Whether tests ran, all passed, and they were not too slow."""
        return bool(self.passed) and not self.failed and self.seconds <= self.limit


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 1 if a test failed, a suite had none or smoke tests took too long, 0 otherwise."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["gate", "smoke", "deep"])
    parser.add_argument("suites", nargs="*", help="by default all")
    chosen = parser.parse_args(arguments)
    if strangers := set(chosen.suites) - {suite.name for suite in (EVERYTHING, *SUITES)}:
        parser.error(f"{', '.join(strangers)}: there are {', '.join(suite.name for suite in (EVERYTHING, *SUITES))}")
    every = (EVERYTHING, *SUITES) if chosen.what == "deep" else SUITES
    suites = [suite for suite in every if not chosen.suites or suite.name in chosen.suites]
    at = commit()  # before the first test: whatever is committed meanwhile is not what they run
    tested, results, missing = read_page(PAGE.read_text() if PAGE.exists() else ""), [], []
    for suite in suites:
        why = "" if chosen.what == "smoke" else "all is asked for" if chosen.what == "deep" else why_deep(suite, tested)
        if not all(make(environment) for environment in (suite.environment, *ALSO_MADE.get(suite.name, ()))):
            missing.append(suite.name)
            print(f"NOTE: {suite.name}'s environment cannot be made here: ITS TESTS DID NOT RUN", flush=True)
            continue
        print(f"== {suite.name}: {f'everything, since {why}' if why else 'smoke tests'}", flush=True)
        results.append(run(suite, is_deep=bool(why)))
        if chosen.what == "deep":  # after each, since hours may lie between the first and the last
            PAGE.write_text(page(PAGE.read_text() if PAGE.exists() else "", results, at))
    for result in results:
        what = "all" if result.is_deep else "smoke"
        print(f"{result.suite:12} {what:6} {result.passed:5} passed {result.failed} failed {result.seconds:6.0f} s", end="")
        print("" if result.seconds <= result.limit else f": TOO SLOW, these may take {result.limit:.0f} s now: mark fewer as smoke")
    if chosen.what == "gate":
        left = [result.suite for result in results if not result.is_deep] + missing
        print(
            f"left for `make test-deep`: seeds, parameters and tests marked deep, most mutants; of {', '.join(left) or 'no suite'} "
            f"all but the smoke tests (docs/tested.md says when they last passed)"
        )
    return 0 if all(result.is_right for result in results) else 1


def why_deep(suite: Suite, tested: dict[str, str]) -> str:
    """Why all of a suite is to run in the gate; empty: it need not. `tested`: commits by suite."""
    if (last := tested.get(suite.name)) is None:
        return "it has never passed"
    known = subprocess.run(["git", "cat-file", "-e", f"{last}^{{commit}}"], cwd=ROOT, capture_output=True, check=False)
    if known.returncode:
        return f"commit {last}, at which it last passed, is not known here"
    changed = said("git", "diff", "--name-only", last, "HEAD", "--", *suite.rooms, *suite.tests).split()
    return f"{changed[0]} has changed since {last}" if changed else ""


def make(environment: str) -> bool:
    """Whether the environment is there, or could be made."""
    target = f"{environment}/installed-dev" if environment == ".venv" else f"{environment}/installed"
    return not subprocess.run(["make", "--no-print-directory", target], cwd=ROOT, check=False).returncode


def run(suite: Suite, *, is_deep: bool) -> Result:
    """Have pytest run it, in its environment."""
    report = ROOT / suite.environment / f"{suite.name}.xml"
    command = [str(ROOT / suite.environment / "bin" / "python"), "-m", "pytest", f"--junitxml={report}", *suite.tests]
    command += ["-k", suite.keyword] if suite.keyword else []
    command += [] if is_deep else ["-m", "smoke"]
    command += ["-n", str(suite.processes), "--dist", "loadfile", "--no-loadscope-reorder"] if suite.processes > 1 else []
    began = time.monotonic()
    report.unlink(missing_ok=True)
    variables = {"ASYNCFLOW_TESTS": "deep" if is_deep else "smoke", **suite.variables}
    deadline = None if suite is EVERYTHING else SECONDS
    limit = math.inf if is_deep else smoke_limit()
    try:
        status = subprocess.run(command, cwd=ROOT, env={**os.environ, **variables}, check=False, timeout=deadline).returncode
    except subprocess.TimeoutExpired:
        print(f"{suite.name} has not ended within {deadline} s: it was ended", flush=True)
        status = 1
    seconds = time.monotonic() - began
    counts = dict.fromkeys(("tests", "failures", "errors", "skipped"), 0)
    if report.exists():
        for element in xml.etree.ElementTree.parse(report).iter("testsuite"):
            counts = {name: counts[name] + int(element.get(name, "0")) for name in counts}
    failed = counts["failures"] + counts["errors"]
    failed = max(failed, 1) if status else failed  # it may have ended before it could say so
    passed = counts["tests"] - failed - counts["skipped"]
    limit = limit if seconds <= limit else max(limit, smoke_limit())  # the machine may have become slower meanwhile
    return Result(suite.name, is_deep, passed, failed, counts["skipped"], seconds, limit)


def smoke_limit() -> float:
    """Seconds that smoke tests may take on this machine now. A mean: one measured step is over before others get their share."""
    return statistics.fmean(patience(SMOKE_SECONDS) for _ in range(50))


def commit() -> str:
    """What is tested. The page itself is no change: of several suites, one after another, the first writes it."""
    found = said("git", "rev-parse", "--short=12", "HEAD")
    return f"{found}+" if said("git", "status", "--porcelain", "--", ".", f":!{PAGE_NAME}") else found


def said(*command: str) -> str:
    """What a command prints."""
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


HEAD = """# When everything last passed

`make test-deep` writes this page: every test there is, with all seeds, all parameters and all mutants, and the suites with
environments of their own (DeepSpeed, Megatron-Core, Ray, Tinker's SDK, other people's environments, a real vLLM). `make test` runs
the part of the first row that finds most faults. The gate (`.ci/run`) adds the smoke tests of the others; of a suite whose rooms or
tests have changed since the commit named here it runs everything (`tests/suites.py`). Where the last run of a suite has failed, or
was of changes that were not committed (`+`), the row of the last one that passed stays below it.

| suite | at commit | on | passed | failed | skipped | seconds |
|---|---|---|---|---|---|---|
"""
ROW = re.compile(r"^\| (\S+) \| (\S+) \| (\S+) \| (\d+) \| (\d+) \| (\d+) \| (\d+) \|$", re.MULTILINE)


def read_page(text: str) -> dict[str, str]:
    """The commits at which suites passed. One with changes that were not committed counts for nothing, nor does one that failed."""
    return {row[0]: row[1] for row in ROW.findall(text) if has_passed(row)}


def has_passed(row: tuple[str, ...]) -> bool:
    """Whether everybody can have what passed."""
    _, at, _, passed, failed, *_ = row
    return passed != "0" and failed == "0" and not at.endswith("+")


def page(before: str, results: Sequence[Result], at: str) -> str:
    """The page, with these results, and the rows of suites that did not run as they were `before`: of each suite the last run, and
    the last one that passed."""
    rows: dict[str, list[tuple[str, ...]]] = {suite.name: [] for suite in (EVERYTHING, *SUITES)}
    for row in ROW.findall(before):
        rows.setdefault(row[0], []).append(row)
    today = datetime.now(UTC).date().isoformat()
    for result in results:
        counts = (result.passed, result.failed, result.skipped, round(result.seconds))
        row = (result.suite, at, today, *map(str, counts))
        rows[result.suite] = [row, *([] if has_passed(row) else filter(has_passed, rows[result.suite]))]
    return HEAD + "".join(f"| {' | '.join(row)} |\n" for suite in (EVERYTHING, *SUITES) for row in rows[suite.name])


if __name__ == "__main__":
    sys.exit(main())
