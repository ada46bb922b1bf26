"""What somebody who looks at a run's page takes from the run: steps that are watched against steps that are not, in turn.

    python benchmarks/watched.py [--steps 240] [--each 5] [--json FILE]

One run of the quickstart's recipe, and one `asyncflow watch` of its folder on the same machine. For `--each` steps nobody looks;
for as many a client asks what a page asks that is open elsewhere (all changes, the newest part of the chart, the charts after each
step); for as many the page is open in Chromium, drawn by the CPU of this machine; and so on in turn. The first step after each
change counts for neither. A figure is the median, over all turns, of a turn's seconds a step over the mean of the two turns beside
it in which nobody looked. Told beside them are the processor seconds that the server takes each second. Needs `playwright` and
Chromium.
"""

from __future__ import annotations

import json
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.parse
import urllib.request
from collections import defaultdict
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
from figures import Figure, finish, parser
from watch import page_of

from asyncflow.telemetry.run_reader import RunReader

RECIPE = Path(__file__).parent.parent / "recipes" / "quickstart.yaml"
NOBODY, CLIENT, BROWSER = "nobody", "client", "browser"
TURNS = (NOBODY, CLIENT, NOBODY, BROWSER)
FIRST = 5
"""Steps before the first turn: the run loads, and the server reads what is there."""


class Client:
    """Asks what an open page asks, in a thread, until it is closed."""

    def __init__(self, address: str, key: str, run: str) -> None:
        self._address, self._key, self._run = address, key, run
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._ask)
        self._thread.start()

    def close(self) -> None:
        self._closed.set()
        self._thread.join()

    def _get(self, path: str, **query: float) -> Any:
        asked = urllib.parse.urlencode({"run": self._run, **query})
        headers = {"Authorization": f"Bearer {self._key}"}
        request = urllib.request.Request(f"{self._address}/watch/api/{path}?{asked}", headers=headers)
        return urllib.request.urlopen(request, timeout=60)

    def _ask(self) -> None:
        with self._get("events") as changes:
            for line in changes:
                if self._closed.is_set():
                    return
                if not line.startswith(b"data: "):
                    continue
                facts = json.loads(line.removeprefix(b"data: ")).get("facts")
                if facts is not None:
                    with self._get("gantt", start=max(0.0, facts["wall"] - 30), end=facts["wall"]) as part:
                        part.read()
                    with self._get("charts") as charts:
                        charts.read()


def steps_of(folder: Path) -> int:
    with suppress(FileNotFoundError):
        return (folder / "metrics.jsonl").read_bytes().count(b"\n")
    return 0


def processor_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


def ratios(seconds: list[tuple[str, float]]) -> dict[str, list[float]]:
    """Ratio of each turn in which somebody looks to the mean of those beside it in which nobody does, by who looks."""
    found = defaultdict[str, list[float]](list)
    for (_, before), (who, watched), (_, after) in zip(seconds[::2], seconds[1::2], seconds[2::2], strict=False):
        found[who].append(watched / statistics.fmean((before, after)))
    return found


def main() -> int:
    arguments = parser(__doc__)
    arguments.add_argument("--steps", type=int, default=240)
    arguments.add_argument("--each", type=int, default=5, help="steps of a turn")
    options = arguments.parse_args()
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        print("there is no chromium on this machine: apt-get install chromium")
        return 2
    with tempfile.TemporaryDirectory(prefix="asyncflow-") as scratch:
        return finish(measured(Path(scratch), options.steps, options.each, chromium), options.json)


def measured(scratch: Path, steps: int, each: int, chromium: str) -> list[Figure]:
    folder = scratch / "watched"
    settings = [f"run.dir={scratch}", f"run.name={folder.name}", f"run.steps={steps}"]
    command = [sys.executable, "-m", "asyncflow", "train", str(RECIPE), *settings]
    run = subprocess.Popen(command, cwd=RECIPE.parent.parent, stdout=subprocess.DEVNULL)
    try:
        while not folder.is_dir() and run.poll() is None:
            time.sleep(0.1)
        turns: list[tuple[str, int, int]] = []  # who looks, from which step on, to which
        busy = defaultdict[str, list[float]](list)
        with page_of(folder, chromium) as (page, page_address, pid):
            address, key = re.findall(r"(.*)/watch/#key=(.*)", page_address)[0]
            of_server = psutil.Process(pid)
            first = FIRST
            while first + each <= steps and run.poll() is None:
                who = TURNS[len(turns) % len(TURNS)]
                while steps_of(folder) < first and run.poll() is None:
                    time.sleep(0.02)
                began, taken = time.monotonic(), processor_seconds(of_server)
                client = Client(address, key, folder.name) if who == CLIENT else None
                page.goto(page_address if who == BROWSER else "about:blank")
                while steps_of(folder) < first + each and run.poll() is None:
                    page.wait_for_timeout(20)
                busy[who].append((processor_seconds(of_server) - taken) / (time.monotonic() - began))
                if client is not None:
                    client.close()
                turns.append((who, first, first + each))
                first += each
        if run.wait():
            raise RuntimeError("the run failed")
    finally:
        if run.poll() is None:
            run.terminate()
            run.wait()
    reader = RunReader(folder)
    reader.read_all()
    by_step = [row["perf/step_seconds"] for row in reader.rows]
    seconds = [(who, statistics.fmean(by_step[start + 1 : end])) for who, start, end in turns[:-1]]  # the last one saw the end
    found = ratios(seconds)
    return [
        Figure("turns in which somebody looked", sum(map(len, found.values())), ""),
        Figure("a step while a page is open elsewhere / while none is", statistics.median(found[CLIENT]), ""),
        Figure("a step while a browser of this machine draws the page / while none does", statistics.median(found[BROWSER]), ""),
        Figure("processor seconds a second of the server, while nobody looks", statistics.fmean(busy[NOBODY]), ""),
        Figure("while a page is open elsewhere", statistics.fmean(busy[CLIENT]), ""),
        Figure("while a browser of this machine draws the page", statistics.fmean(busy[BROWSER]), ""),
    ]


if __name__ == "__main__":
    sys.exit(main())
