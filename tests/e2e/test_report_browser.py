"""The report in a real browser: no error, no request, the charts are drawn, the model's output stays text."""

import importlib.util
import re
from pathlib import Path

import pytest

from asyncflow.telemetry.report import write_report
from tests.browser import browser_of, complaints_of
from tests.depth import deep

_path = Path(__file__).parents[1] / "unit" / "telemetry" / "synthetic_run.py"
_spec = importlib.util.spec_from_file_location("synthetic_run", _path)
synthetic_run = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(synthetic_run)


@pytest.fixture(scope="module")
def browser():
    """A browser with an empty profile of its own."""
    with browser_of(viewport={"width": 1360, "height": 900}) as browser:
        yield browser


class Opened:
    """A page opened from its file, with all that it complained about or asked for."""

    def __init__(self, browser, path: Path) -> None:
        self.requests: list[str] = []
        self.page = browser.new_page()
        self.complaints = complaints_of(self.page)
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.url = path.resolve().as_uri()
        self.page.goto(self.url)

    def num_bars(self) -> int:
        return int(self.page.locator("#gantt canvas").get_attribute("data-bars") or 0)

    def check(self) -> None:
        assert self.complaints == []
        assert self.requests == [self.url]
        assert self.page.evaluate("window.hacked") is None


def test_a_finished_run(browser, tmp_path):
    synthetic_run.write_run(tmp_path)
    opened = Opened(browser, write_report(tmp_path))
    page = opened.page
    page.wait_for_selector("#gantt canvas")
    few = opened.num_bars()
    assert few > 20
    assert page.locator(".plot .scatterlayer .trace").count() >= 15
    assert "step 2 to step 5" in page.locator("#gantt canvas").get_attribute("aria-label")
    page.screenshot(path=str(tmp_path / "report.png"), full_page=True)
    assert (tmp_path / "report.png").stat().st_size > 50_000

    page.click("#gantt-all")
    assert opened.num_bars() > few
    assert page.locator("#gantt-view").inner_text().startswith("0.00 s")
    page.click("#gantt-few")
    page.click("#gantt-in")
    before = page.locator("#gantt-view").inner_text()
    page.click("#gantt-forth")
    assert page.locator("#gantt-view").inner_text() != before
    box = page.locator("#gantt canvas").bounding_box()
    page.mouse.move(box["x"] + box["width"] * 0.5, box["y"] + 103)
    assert page.is_visible("#gantt .told")
    assert "rollout/1" in page.inner_text("#gantt .told") and "from" in page.inner_text("#gantt .told")
    page.click("#gantt-legend button:has-text('generate')")
    assert page.locator("#gantt-legend button[aria-pressed=false]").count() == 1
    opened.check()
    page.close()


def test_dragging_zooms_and_a_double_click_shows_the_whole_run(browser, tmp_path):
    synthetic_run.write_run(tmp_path)
    opened = Opened(browser, write_report(tmp_path))
    page = opened.page
    page.wait_for_selector("#gantt canvas")
    before = page.locator("#gantt-view").inner_text()
    box = page.locator("#gantt canvas").bounding_box()
    middle = box["y"] + box["height"] / 2
    page.mouse.move(box["x"] + box["width"] * 0.3, middle)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.6, middle, steps=5)
    page.mouse.up()
    page.wait_for_function("before => document.getElementById('gantt-view').textContent !== before", arg=before)
    start, end = (float(part.split()[0]) for part in page.locator("#gantt-view").inner_text().split(" of ")[0].split(" to "))
    page.keyboard.down("Shift")
    page.mouse.move(box["x"] + box["width"] * 0.3, middle)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.6, middle, steps=5)
    page.mouse.up()
    page.keyboard.up("Shift")
    later = [float(part.split()[0]) for part in page.locator("#gantt-view").inner_text().split(" of ")[0].split(" to ")]
    assert later[0] < start and later[1] - later[0] == pytest.approx(end - start, abs=0.02)  # moved, not zoomed
    page.mouse.dblclick(box["x"] + box["width"] * 0.5, middle)
    page.wait_for_function("() => document.getElementById('gantt-view').textContent.startsWith('0.00 s')")
    opened.check()
    page.close()


def test_the_keyboard_goes_from_bar_to_bar_of_the_chart(browser, tmp_path):
    synthetic_run.write_run(tmp_path)
    opened = Opened(browser, write_report(tmp_path))
    page = opened.page
    page.wait_for_selector("#gantt canvas")
    told, cursor = page.get_by_role("status"), page.get_by_role("application", name="Bars of the chart")
    page.locator("#gantt-legend button").last.focus()
    page.keyboard.press("Tab")
    assert cursor.evaluate("each => each === document.activeElement && getComputedStyle(each).outlineWidth") == "2px"
    assert told.inner_text() == ""

    def pressed(key: str) -> tuple[str, float, float]:
        """What is told of a bar: whose it is, when it begins, and when it ends."""
        page.keyboard.press(key)
        whose, lasts = told.inner_text().splitlines()[:2]
        amount, unit, start = re.fullmatch(r"([\d.]+) (m?s), from ([\d.]+) s", lasts).groups()
        return whose.split()[0], float(start), float(start) + float(amount) / (1000 if unit == "ms" else 1)

    def is_around(bar: tuple[str, float, float]) -> bool:
        """Whether the cursor is where a pointer is told the same."""
        cursor.scroll_into_view_if_needed()
        before, box = told.inner_text(), cursor.bounding_box()
        page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
        found = told.inner_text()
        page.mouse.move(1, 1)
        return found == before and box["height"] > 3

    first = pressed("ArrowDown")
    assert first[0] == "rollout/0" and is_around(first)
    second = pressed("ArrowRight")
    words = told.inner_text()
    assert second[0] == "rollout/0" and second[1] == pytest.approx(first[2], abs=0.02) and is_around(second)
    below = pressed("ArrowDown")
    assert below[0] != "" and (below[0] == "rollout/0" or (below[1] < second[2] and below[2] > second[1]))
    while (lane := pressed("ArrowDown"))[0] != "trainer/0":
        assert lane[0] in ("rollout/0", "rollout/1")
    assert lane[1] <= (second[1] + second[2]) / 2 <= lane[2] and is_around(lane)  # at the same time
    while pressed("ArrowUp")[0] != "rollout/0" or told.inner_text() != words:
        assert told.inner_text().startswith("rollout/")
    before, ends = page.inner_text("#gantt-view"), [second[1]]
    while page.inner_text("#gantt-view") == before:  # what is out of view comes into it
        ends.append(pressed("ArrowLeft")[1])
    assert ends == sorted(ends, reverse=True) and len(ends) > 2 and is_around(pressed("ArrowLeft"))
    page.keyboard.press("Escape")
    assert told.inner_text() == ""
    assert pressed("ArrowLeft")[0] == "rollout/0"
    page.keyboard.press("Tab")
    assert told.inner_text() == ""
    opened.check()
    page.close()


@deep
def test_a_run_of_many_spans_draws_no_more_than_a_browser_bears(browser, tmp_path):
    log = synthetic_run.SpanLog(tmp_path / "spans.jsonl")
    for span in synthetic_run.make_spans(900):
        log.append(span)
    log.close()
    opened = Opened(browser, write_report(tmp_path))
    opened.page.wait_for_selector("#gantt canvas")
    assert "Every span is drawn" in opened.page.locator("#gantt-level").inner_text()
    opened.page.click("#gantt-all")
    assert 500 < opened.num_bars() <= 2_500
    assert "grouped by task" in opened.page.locator("#gantt-level").inner_text()
    opened.check()
    opened.page.close()


def test_an_empty_run(browser, tmp_path):
    opened = Opened(browser, write_report(tmp_path))
    assert "No steps yet" in opened.page.inner_text("main")
    opened.check()
    opened.page.close()
