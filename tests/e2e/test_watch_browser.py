"""The live page in a real browser: it opens, follows a run that goes on, and is its owner's alone."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
from pathlib import Path

import pytest

from tests.e2e.commands import wait_for

sync_api = pytest.importorskip("playwright.sync_api", reason="the Python package playwright is not installed")
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine (apt-get install chromium)")

_path = Path(__file__).parents[1] / "unit" / "telemetry" / "synthetic_run.py"
_spec = importlib.util.spec_from_file_location("synthetic_run", _path)
assert _spec is not None and _spec.loader is not None
synthetic_run = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(synthetic_run)


def test_the_page_follows_a_run_and_compares_it(tmp_path, background):
    synthetic_run.write_run(tmp_path / "runs" / "one")
    synthetic_run.write_run(tmp_path / "runs" / "two", num_steps=4)
    said = [{"by": "policy", "texts": ["I take", " it"], "logprobs": [-0.1, -2.0]}]
    said.append({"by": "environment", "texts": ["You have it."]})
    with (tmp_path / "runs" / "one" / "samples.jsonl").open("a") as file:
        file.write(json.dumps({"step": 0, "purpose": "train", "row": 99, "prompt": "A lamp.", "turns": said, "reward": 1.0}) + "\n")
    command = background("watch", tmp_path / "runs", "--no-browser")
    (address,) = re.findall(r"http\S+", command.stdout.readline())
    complaints: list[str] = []
    requests: list[str] = []
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page(viewport={"width": 400, "height": 800})
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("request", lambda request: requests.append(request.url))
        held: list[sync_api.Route] = []
        page.route("**/plotly.js", lambda route: held.append(route))
        page.goto(address)
        page.wait_for_selector("#gantt canvas")
        assert "key=" not in page.url  # it is not left in the address
        before = page.inner_text("#gantt-view")
        page.keyboard.press("+")
        assert page.inner_text("#gantt-view") != before  # it moves before the library of the other charts is there
        page.locator("#charts").scroll_into_view_if_needed()
        wait_for(lambda: page.evaluate("1") and bool(held))
        held[0].continue_()
        page.wait_for_selector("#charts .plot .scatterlayer .trace", state="attached")
        page.select_option("#runs", "two")
        page.wait_for_function("() => document.querySelector('#header .value')?.textContent === '4'")  # steps
        page.wait_for_selector("#samples article:nth-child(6)")
        assert page.inner_text("#num-samples") == "6 found"
        assert page.evaluate("document.documentElement.scrollWidth") <= 400  # nothing is wider than a narrow screen
        assert page.evaluate("window.hacked") is None and synthetic_run.HOSTILE in page.text_content("#samples")

        card = page.locator("#samples article").first
        card.locator("details.trained summary").click()
        card.locator("details.trained .token.clipped").wait_for()
        told = card.locator("details.trained .token").nth(1).get_attribute("title")
        assert "log-prob of the engine -1.5" in told and "log-prob of the trainer -1.25" in told and "version 4" in told
        assert "clipped yes" in told and "entropy 0.5" in told and "in the loss" in told and "ratio 1.284" in told

        with (tmp_path / "runs" / "two" / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"step": 4, "reward/mean": 0.987}) + "\n")
        page.wait_for_function("() => document.getElementById('header').innerText.includes('0.987')")
        before = page.inner_text("#gantt-view")
        page.keyboard.press("+")
        page.wait_for_function("before => document.getElementById('gantt-view').textContent !== before", arg=before)
        page.keyboard.press("a")
        page.wait_for_function("() => document.getElementById('gantt-view').textContent.startsWith('0.00 s')")
        page.keyboard.press("/")
        page.keyboard.type("nowhere")
        page.keyboard.press("Enter")
        page.wait_for_function("() => document.getElementById('num-samples').textContent === '0 found'")

        page.fill("#search [name=words]", "")
        page.select_option("#runs", "one")
        page.wait_for_function("() => document.getElementById('num-samples').textContent === '7 found'")
        episode = page.locator("#samples article", has_text="A lamp.")
        assert [turn.strip() for turn in episode.locator(".turn > .soft").all_inner_texts()] == ["policy", "environment"]
        assert "I take it" in episode.inner_text() and "You have it." in episode.inner_text()
        light = page.evaluate("getComputedStyle(document.body).backgroundColor")
        page.emulate_media(color_scheme="dark")
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(20, 22, 26)" != light

        page.select_option("#others", ["one", "two"])
        page.locator(".compared-charts .card").first.scroll_into_view_if_needed()
        page.wait_for_selector(".compared-charts .plot .scatterlayer .trace", state="attached")
        assert "2 runs compared" in page.inner_text("#compared")
        assert complaints == []
        server = address.split("/watch/")[0]
        assert all(url.startswith((server, "blob:", "data:")) for url in requests)

        stranger = browser.new_page()
        stranger.goto(address.partition("#")[0])
        stranger.wait_for_function("() => document.getElementById('status').textContent.includes('needs the key')")
        browser.close()
    command.terminate()
    wait_for(lambda: command.poll() is not None)
    assert command.poll() == 0  # there is no other way to end it
