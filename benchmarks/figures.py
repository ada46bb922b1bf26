"""What the benchmarks share: figures with their targets, the machine that they were seen on, the exit code; where runs write."""

from __future__ import annotations

import importlib.metadata
import json
import operator
import os
import platform
import re
import sys
import tempfile
import time
from argparse import ArgumentParser
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

_SIGNS = {"<=": operator.le, "<": operator.lt, ">=": operator.ge}


@dataclass(frozen=True)
class Figure:
    """Measured number. `target`: what it is to reach, as `<= 1.15`, `< 1` or `>= 1.3`; none if it is only told."""

    name: str
    value: float
    unit: str
    target: str | None = None

    @property
    def met(self) -> bool:
        if self.target is None:
            return True
        sign, bound = self.target.split()
        return bool(_SIGNS[sign](self.value, float(bound)))


def parser(description: str | None, *, has_runs: bool = False) -> ArgumentParser:
    """Takes `--json FILE`, and `--dir FOLDER`, for `runs_folder`, where a benchmark `has_runs`."""
    arguments = ArgumentParser(description=(description or "").splitlines()[0])
    arguments.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to FILE")
    if has_runs:
        arguments.add_argument(
            "--dir", type=Path, metavar="FOLDER", help="keep each run, with its report, in FOLDER/<name of the run>"
        )
    return arguments


def begin_again_as(worker: Mapping[str, str]) -> None:
    """Begin the program again with what of a worker's environment the allocator reads at the start: it keeps freed memory then."""
    wanted = {key: value for key, value in worker.items() if key.startswith("MALLOC_")}
    if any(os.environ.get(key) != value for key, value in wanted.items()):
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **wanted})


@contextmanager
def runs_folder(kept: Path | None) -> Iterator[Path]:
    """Where runs write: `kept`, whose new reports are told at the end, or else a folder that is gone then."""
    if kept is None:
        with tempfile.TemporaryDirectory(prefix="asyncflow-") as scratch:
            yield Path(scratch)
        return
    folder, began = kept.resolve(), time.time()
    folder.mkdir(parents=True, exist_ok=True)
    yield folder
    reports = [report for report in folder.glob("*/report.html") if report.stat().st_mtime >= began]
    print("\nreports, each with the Gantt chart of its run:")
    for report in sorted(reports, key=lambda report: report.stat().st_mtime):
        print(f"  {report}")


def run_name(*words: str) -> str:
    """A run's name: `run_name("few, wide", "slots=4")` is `few-wide-slots-4`."""
    return re.sub(r"[^\w.-]+", "-", "-".join(words))


def processor() -> str:
    """The processor's name, which says the maker, too: of libraries some look at it."""
    facts = Path("/proc/cpuinfo")
    names = re.findall(r"^model name\s*: (.*)", facts.read_text(errors="replace"), re.MULTILINE) if facts.is_file() else []
    return (*names, platform.processor() or platform.machine())[0]


def instruction_set() -> str:
    """Widest instructions of the processor that torch's own code uses here, as AVX2 or AVX512."""
    from torch.backends import cpu  # late: a program sets what torch reads at its start

    return str(cpu.get_cpu_capability())


def finish(figures: list[Figure], file: Path | None) -> int:
    """Print the figures below the machine and the command, write them, and return the exit code: 1 if a target is missed."""
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("torch", "transformers", "numpy"))
    cores = f"{processor()}, {os.cpu_count()} cores, instruction set {instruction_set()}"
    print(f"\n{cores}; python {platform.python_version()}, {versions}")
    print(f"command: python {' '.join(sys.argv)}\n")
    width = max((len(figure.name) for figure in figures), default=0)
    for figure in figures:
        verdict = f"   to reach: {figure.target:8} {'met' if figure.met else 'MISSED'}" if figure.target else ""
        print(f"{figure.name:{width}}  {figure.value:12.4g} {figure.unit}{verdict}")
    if file is not None:
        file.write_text(json.dumps([{**asdict(figure), "met": figure.met} for figure in figures], indent=1))
    return 0 if all(figure.met for figure in figures) else 1
