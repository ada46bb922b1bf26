"""The live page of a long run in a real browser: how soon it is there, and how smoothly it moves.

    python benchmarks/watch.py [--steps 1000] [--workers 64] [--spans 2000] [--json FILE]

A made-up run of so many steps, workers and spans a step is written to a folder, `asyncflow watch` is started on it, and Chromium
(headless, drawn by the CPU) opens the page. Told are the seconds from the address to the figures, to the newest part of the Gantt
chart, and until that has been moved by a mouse that drags it at once; the longest time after that in which the page answers nobody
(it reads its library of line charts); the seconds until all spans have been read, from which moment on any part of the run can be
looked at; the same opening after that; and the frames a second while the chart is dragged and while the page is scrolled. Its
aims are absolute, since they are what somebody who looks at a page feels: there within 2 s, and 30 frames a second. Needs
`playwright` and Chromium.
"""

from __future__ import annotations

import json
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
from figures import Figure, finish, parser
from playwright.sync_api import Page, sync_playwright

from asyncflow.telemetry.spans import Span

STEP_SECONDS = 10.0
TRAINERS = 4
GROUPS = 3  # of each rollout worker in a step
SEEN = """
() => {
  window.seen = {};
  window.pauses = [];
  const since = () => performance.timeOrigin + performance.now();
  const painted = (name) => requestAnimationFrame(() => setTimeout(() => { window.seen[name] = since(); }));
  new MutationObserver(() => {
    if (!("chart" in window.seen) && document.querySelector("#gantt canvas")) { window.seen.chart = null; painted("chart"); }
    const view = document.getElementById("gantt-view")?.textContent;
    if (window.seen.chart && !window.before) window.before = view;
    if (window.before && view !== window.before && !("moved" in window.seen)) { window.seen.moved = null; painted("moved"); }
  }).observe(document, { subtree: true, childList: true });
  new PerformanceObserver((list) => window.pauses.push(...list.getEntries().map((entry) => [entry.startTime, entry.duration])))
    .observe({ type: "longtask", buffered: true });
}
"""
"""Notes when the chart has first been painted, and then moved. The page does so itself: it may be too busy to answer."""
FRAMES = """
() => {
  window.frames_seen = [];
  const note = (now) => { window.frames_seen.push(now); window.noting = requestAnimationFrame(note); };
  window.noting = requestAnimationFrame(note);
}
"""


def write_run(folder: Path, steps: int, workers: int, spans: int) -> int:
    """Write a delayed run's files. Returns the number of its spans."""
    folder.mkdir()
    (folder / "config.yaml").write_text("run: {name: long}\nschedule: {name: delayed}\ntrain: {prompts_per_step: 180}\n")
    num_rollout = workers - TRAINERS
    pieces = max(2, (spans - TRAINERS * (num_rollout * GROUPS // TRAINERS + 1)) // num_rollout - GROUPS - 2)
    written = 0
    encoder = msgspec.json.Encoder()

    def span(
        worker: str, task: str, start: float, end: float, step: int = -1, version: int = -1, group: int = -1, **more: Any
    ) -> bytes:
        made = Span(worker=worker, task=task, start=start, end=end, step=step, version=version, group=group, **more)
        return encoder.encode(made) + b"\n"

    with (folder / "spans.jsonl").open("wb") as file, (folder / "metrics.jsonl").open("w") as metrics:
        for step in range(steps):
            began = 1000.0 + step * STEP_SECONDS
            lines: list[bytes] = []
            each = (STEP_SECONDS - 1.0) / pieces
            for worker in range(num_rollout):
                version, end = max(0, step - 1), began + STEP_SECONDS - 1.0
                lines += [
                    span(
                        f"rollout/{worker}",
                        "generate",
                        began + i * each,
                        began + (i + 0.98) * each,
                        step,
                        version,
                        rows=4,
                        tokens=256,
                    )
                    for i in range(pieces)
                ]
                first = (step * num_rollout + worker) * GROUPS
                lines += [
                    span(f"rollout/{worker}", "generate_group", began, end - 0.2 * i, step, version, first + i, is_lane=False)
                    for i in range(GROUPS)
                ]
                lines.append(span(f"rollout/{worker}", "wait", end, end + 0.7, cause="weights"))
                lines.append(span(f"rollout/{worker}", "install", end + 0.7, end + 1.0, version=step + 1))
            of_each = num_rollout * GROUPS // TRAINERS
            for trainer in range(TRAINERS):
                each, first = (STEP_SECONDS - 0.6) / of_each, step * num_rollout * GROUPS + trainer * of_each
                lines += [
                    span(
                        f"trainer/{trainer}", "forward_backward", began + i * each, began + (i + 0.9) * each, step, step, first + i
                    )
                    for i in range(of_each)
                ]
                end = began + STEP_SECONDS
                lines.append(span(f"trainer/{trainer}", "optim_step", end - 0.6, end - 0.3, step, step))
            file.writelines(lines)
            written += len(lines)
            row = {
                "step": step,
                "reward/mean": step / steps,
                "reward/std": 0.3,
                "perf/tpspd": 900.0,
                "perf/step_seconds": STEP_SECONDS,
            }
            row |= {"policy/entropy": 1.0, "policy/kl": 0.1, "policy/grad_norm": 1.0, "response_length/mean": 80.0}
            row |= {f"perf/idle_ratio/rollout/{worker}": 0.07 for worker in range(num_rollout)}
            row |= {f"memory/rss_bytes/rollout/{worker}": 4e9 for worker in range(num_rollout)}
            metrics.write(json.dumps(row) + "\n")
    samples = (
        {"step": s, "purpose": "train", "row": s, "prompt": "2 + 2?", "response": "4 " * 60, "reward": s % 2} for s in range(steps)
    )
    (folder / "samples.jsonl").write_text("".join(json.dumps(sample) + "\n" for sample in samples))
    return written


def opened(page: Page, address: str, steps: int) -> tuple[float, float, float]:
    """Seconds until the page shows the run's figures, the newest part of the chart, and that part moved by a mouse."""
    page.goto("about:blank")
    began = time.time()
    page.goto(address)
    page.wait_for_function("steps => document.querySelector('#header .value')?.textContent === steps", arg=str(steps))
    figures = time.time() - began
    page.wait_for_function("() => window.seen.chart")
    across, down = middle_of_chart(page)
    page.keyboard.down("Shift")
    page.mouse.move(across, down)
    page.mouse.down()
    page.mouse.move(across + 100, down, steps=2)
    page.wait_for_function("() => window.seen.moved")
    page.mouse.up()
    page.keyboard.up("Shift")
    seen = {name: moment / 1000 - began for name, moment in page.evaluate("window.seen").items()}
    return figures, seen["chart"], seen["moved"]


def middle_of_chart(page: Page) -> tuple[float, float]:
    """Place of a mouse, in pixels."""
    page.locator("#gantt").scroll_into_view_if_needed()
    box = page.locator("#gantt canvas").bounding_box()
    assert box is not None
    return box["x"] + box["width"] / 2, box["y"] + min(200.0, box["height"] / 2)


def longest_pause(page: Page) -> float:
    """Seconds of the longest task of the page since the chart was there."""
    pauses = page.evaluate("window.pauses.filter(([began]) => performance.timeOrigin + began > window.seen.chart)")
    return max((seconds for _, seconds in pauses), default=0.0) / 1000


def frames_a_second(page: Page) -> float:
    """Frames a second since `FRAMES` was begun, mean over the whole time."""
    times = page.evaluate("() => { cancelAnimationFrame(window.noting); return window.frames_seen; }")
    return 1000 * (len(times) - 1) / (times[-1] - times[0])


def dragged(page: Page) -> float:
    """Frames a second while the chart is dragged to earlier moments and back."""
    across, down = middle_of_chart(page)
    page.keyboard.down("Shift")
    page.mouse.move(across, down)
    page.mouse.down()
    page.evaluate(FRAMES)
    for i in range(60):
        page.mouse.move(across + 200 * (i % 30) / 30, down)
    found = frames_a_second(page)
    page.mouse.up()
    page.keyboard.up("Shift")
    return found


def scrolled(page: Page) -> float:
    """Frames a second while the page is scrolled by the wheel from its head to the charts."""
    page.evaluate("scrollTo(0, 0)")
    page.mouse.move(40, 400)
    page.evaluate(FRAMES)
    for _ in range(40):
        page.mouse.wheel(0, 120)
        time.sleep(0.02)
    return frames_a_second(page)


def main() -> int:
    arguments = parser(__doc__)
    arguments.add_argument("--steps", type=int, default=1000)
    arguments.add_argument("--workers", type=int, default=64)
    arguments.add_argument("--spans", type=int, default=2000, help="of a step")
    arguments.add_argument("--run", type=Path, help="a run that an earlier call has written, or where to keep this one's")
    options = arguments.parse_args()
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        print("there is no chromium on this machine: apt-get install chromium")
        return 2
    with tempfile.TemporaryDirectory(prefix="asyncflow-") as scratch:
        folder = options.run or Path(scratch) / "long"
        if not folder.exists():
            write_run(folder, options.steps, options.workers, options.spans)
        num_spans = sum(1 for _ in (folder / "spans.jsonl").open("rb"))
        return finish(measured(folder, options.steps, num_spans, chromium), options.json)


@contextmanager
def page_of(folder: Path, chromium: str) -> Iterator[tuple[Page, str, int]]:
    """Page of a browser, the address at which `asyncflow watch` serves a folder, and the process number of that."""
    command = [sys.executable, "-m", "asyncflow", "watch", str(folder), "--no-browser"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        (address,) = re.findall(r"http\S+", server.stdout.readline())
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
            yield browser.new_page(viewport={"width": 1360, "height": 900}), address, server.pid
            browser.close()
    finally:
        server.terminate()
        server.wait()


def measured(folder: Path, steps: int, num_spans: int, chromium: str) -> list[Figure]:
    with page_of(folder, chromium) as (page, address, _):
        page.add_init_script(f"({SEEN})()")
        began = time.perf_counter()
        figures, chart, moved = opened(page, address, steps)
        page.wait_for_function("() => !document.getElementById('status').textContent.includes('reading')", timeout=600_000)
        whole = time.perf_counter() - began
        pause = longest_pause(page)
        again = statistics.median(opened(page, address, steps)[2] for _ in range(3))
        page.wait_for_timeout(4000)
        drag, scroll = dragged(page), scrolled(page)
        before = page.inner_text("#gantt-level")
        page.keyboard.press("a")
        began = time.perf_counter()
        page.wait_for_function("() => document.getElementById('gantt-view').textContent.startsWith('0.00 s')")
        page.wait_for_function("before => document.getElementById('gantt-level').textContent !== before", arg=before)
        everything = time.perf_counter() - began
        page.wait_for_timeout(2000)
        drag_all = dragged(page)
    return [
        Figure("spans", num_spans, ""),
        Figure("opened for the first time: figures", figures, "s", "<= 2"),
        Figure("opened for the first time: the newest part of the chart", chart, "s", "<= 2"),
        Figure("opened for the first time: that part has been moved", moved, "s", "<= 2"),
        Figure("longest pause of the page after that", pause, "s"),
        Figure("until all spans are read", whole, "s"),
        Figure("opened again: the chart has been moved", again, "s", "<= 2"),
        Figure("frames a second, the chart dragged", drag, "/s", ">= 30"),
        Figure("frames a second, the page scrolled", scroll, "/s", ">= 30"),
        Figure("from a part to the whole run", everything, "s"),
        Figure("frames a second, the chart of the whole run dragged", drag_all, "/s", ">= 30"),
    ]


if __name__ == "__main__":
    sys.exit(main())
