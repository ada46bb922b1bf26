"""The report in a real browser: no error, no request, the charts are drawn, the model's output stays text."""

import importlib.util
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
