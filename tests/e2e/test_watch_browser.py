"""The live page in a real browser: it opens, follows a run that goes on, and is its owner's alone."""

from __future__ import annotations

import importlib.util
import json
import re
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import msgspec

from asyncflow.telemetry.situation import SeenGroup, SeenStep, SeenWorker, Situation, write_situation
from asyncflow.telemetry.tokens import TrainedTokens
from asyncflow.waits import ROUND, OpenWait
from tests.browser import browser_of, complaints_of, sync_api
from tests.depth import deep
from tests.e2e.commands import wait_for, write_config
from tests.patience import patience

_path = Path(__file__).parents[1] / "unit" / "telemetry" / "synthetic_run.py"
_spec = importlib.util.spec_from_file_location("synthetic_run", _path)
assert _spec is not None and _spec.loader is not None
synthetic_run = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(synthetic_run)


def lines(rows: list) -> bytes:
    return b"".join(msgspec.json.encode(row) + b"\n" for row in rows)


WAITERS = {"trainer/0": "rows", "trainer/1": "leader", "trainer/2": "leader", "rollout/3": "prompts"}


def scroll_to_group(page: sync_api.Page, responses: int) -> None:
    """Have the group of a step in view, below charts that may still be drawn, until so many of its responses are there."""
    page.wait_for_function(
        "few => { document.getElementById('groups').scrollIntoView();"
        " return document.querySelectorAll('#group article').length >= few; }",
        arg=responses,
    )


READABLE = 4.5  # contrast of small text and what is behind it, as WCAG has it

CONTRASTS = """
() => {
  const pen = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const seen = (name) => {
    pen.clearRect(0, 0, 1, 1);
    pen.fillStyle = name;
    pen.fillRect(0, 0, 1, 1);
    return [...pen.getImageData(0, 0, 1, 1).data];
  };
  const linear = (part) => part / 255 <= 0.03928 ? part / 255 / 12.92 : ((part / 255 + 0.055) / 1.055) ** 2.4;
  const brightness = ([red, green, blue]) => 0.2126 * linear(red) + 0.7152 * linear(green) + 0.0722 * linear(blue);
  const behind = (each) => {
    const own = seen(getComputedStyle(each).backgroundColor);
    return own[3] === 255 ? own : behind(each.parentElement);
  };
  const contrast = (ink, each) => {
    const [more, less] = [brightness(ink), brightness(behind(each))].sort((a, b) => b - a);
    return (more + 0.05) / (less + 0.05);
  };
  const texts = (selector, property) => [...document.querySelectorAll(selector)].filter((each) => each.textContent.trim())
    .map((each) => contrast(seen(getComputedStyle(each)[property]), each));
  const canvas = document.querySelector("#gantt canvas"), scale = devicePixelRatio;
  const drawn = (x, y, wide, high) => {
    const copy = document.createElement("canvas"), part = [wide * scale, high * scale];
    [copy.width, copy.height] = part;
    const brush = copy.getContext("2d", { willReadFrequently: true });
    brush.drawImage(canvas, x * scale, y * scale, ...part, 0, 0, ...part);
    const { data } = brush.getImageData(0, 0, ...part);
    let most = 0;
    for (let i = 0; i < data.length; i += 4) if (data[i + 3] > data[most + 3]) most = i;
    return contrast(data.slice(most, most + 3), canvas);
  };
  const { clientWidth: wide, clientHeight: high } = canvas;
  const all = { lanes: [drawn(0, 25, 50, high - 75)], axis: [drawn(wide / 2 - 80, high - 22, 160, 18)],
    tables: texts("main:not([hidden]) :is(td, th)", "color"), charts: texts(".plot :is(.xtick, .ytick, .g-xtitle) text", "fill") };
  return Object.fromEntries(Object.entries(all).map(([name, found]) => [name, found.length ? Math.min(...found) : 0]));
}
"""
"""The least contrast of what is written in each part of the page: the chart's lanes and axis, tables, the line charts."""


@contextmanager
def opened(background, folder: Path, **how) -> Iterator[tuple[sync_api.Page, list[str]]]:
    """The page of a folder, and what it complains about."""
    command = background("watch", folder, "--no-browser")
    (address,) = re.findall(r"http\S+", command.stdout.readline())
    with browser_of(viewport={"width": 400, "height": 800}, **how) as browser:
        page = browser.new_page()
        complaints = complaints_of(page)
        page.goto(address)
        yield page, complaints


def test_a_run_that_goes_on_is_followed_without_a_reload(tmp_path, background, small):
    run = background("train", write_config(tmp_path, small(run={"steps": 500})))
    metrics = tmp_path / "runs" / "test" / "metrics.jsonl"
    wait_for(lambda: metrics.is_file() and metrics.read_text().count("\n") > 1, run)
    ends = "() => document.getElementById('gantt-view').textContent.match(/to ([0-9.]+) s of ([0-9.]+) s/).slice(1).map(Number)"
    num_steps = "() => Number(document.querySelector('#header .value').textContent)"
    with opened(background, tmp_path / "runs" / "test") as (page, complaints):
        page.wait_for_selector("#gantt canvas")
        page.evaluate("window.isTheSame = true")
        page.wait_for_function("() => document.getElementById('status').textContent === 'live'")
        assert page.is_checked("#follow")
        (end, wall), steps = page.evaluate(ends), page.evaluate(num_steps)
        assert end == wall
        page.wait_for_function("() => document.getElementById('now').innerText.includes('waits for')")
        workers = page.locator("#now table").first.locator("tr td:first-child").all_inner_texts()
        assert workers == ["rollout/0", "trainer/0"]
        page.wait_for_function(f"before => ({num_steps})() > before + 1", arg=steps)
        page.wait_for_function(f"before => ({ends})().every((each) => each > before + 1)", arg=wall)
        run.send_signal(signal.SIGINT)
        page.wait_for_function("() => document.getElementById('status').textContent === 'not running'")
        page.wait_for_function("() => document.getElementById('now').innerText.includes('it was interrupted')")
        assert page.evaluate("window.isTheSame")
        assert complaints == []
    wait_for(lambda: run.poll() is not None)


def test_a_token_is_told_to_the_keyboard_a_screen_reader_and_a_finger(tmp_path, background):
    synthetic_run.write_run(tmp_path / "one")
    said = [{"by": "policy", "texts": [f"word{number} " for number in range(60)], "logprobs": [-0.1] * 60}]
    with (tmp_path / "one" / "samples.jsonl").open("a") as file:
        file.write(json.dumps({"step": 0, "purpose": "eval", "row": 99, "prompt": "A lamp.", "turns": said}) + "\n")
    with opened(background, tmp_path / "one", has_touch=True) as (page, complaints):
        page.wait_for_function("() => document.getElementById('num-samples').textContent === '7 found'")
        card, told = page.locator("#samples article", has=page.locator("details")).first, page.locator("#token-told")
        card.locator("summary").focus()
        page.keyboard.press("Enter")
        card.locator(".token").nth(1).wait_for()
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.textContent") == "7 "
        assert "log-prob of the engine -0.5" in told.inner_text() and "version 3" in told.inner_text()
        before = page.inner_text("#gantt-view")
        page.keyboard.press("ArrowRight")
        assert "log-prob of the engine -1.5" in told.inner_text() and "clipped yes" in told.inner_text()
        assert page.inner_text("#gantt-view") == before  # the arrows move the chart elsewhere alone
        assert page.evaluate("getComputedStyle(document.activeElement).outlineWidth") == "2px"
        response = page.get_by_role("listbox", name=re.compile("2 tokens"))
        assert response.get_by_role("option").count() == 2
        assert response.get_by_role("option", selected=True).inner_text() == "8 "
        assert told.get_attribute("role") == "status"
        page.keyboard.press("Home")
        assert "version 3" in told.inner_text()
        page.keyboard.press("Escape")
        assert told.inner_text() == ""
        page.keyboard.press("End")
        page.keyboard.press("Tab")  # a response is one stop
        assert page.evaluate("document.activeElement.tagName") == "SUMMARY" and told.inner_text() == ""

        long = page.locator("#samples article", has_text="A lamp.").locator(".token")
        long.nth(1).focus()
        page.keyboard.press("ArrowDown")
        below = page.evaluate("document.activeElement.textContent")
        assert below not in ("word1 ", "word2 ") and f'"{below}"' in told.inner_text()
        page.keyboard.press("ArrowUp")
        assert page.evaluate("document.activeElement.textContent") == "word1 "

        card.locator(".token").nth(1).tap()
        assert "entropy 0.5" in told.inner_text()
        box, of = told.bounding_box(), card.locator(".token").nth(1).bounding_box()
        assert box["x"] >= 0 and box["x"] + box["width"] <= 400 and abs(box["y"] - of["y"]) < 250  # beside it
        page.locator("#gantt canvas").tap(position={"x": 200, "y": 103})
        page.wait_for_timeout(100)  # the finger has left
        bar = page.locator("#gantt .told")
        assert bar.is_visible() and "rollout/1" in bar.inner_text()
        before = page.inner_text("#gantt-view")
        page.locator("#header").tap()
        assert bar.is_hidden() and page.inner_text("#gantt-view") == before
        page.locator("#gantt canvas").scroll_into_view_if_needed()
        box, finger = page.locator("#gantt canvas").bounding_box(), page.context.new_cdp_session(page)
        for kind, x in (("touchStart", 150), ("touchMove", 190), ("touchMove", 250), ("touchEnd", None)):
            points = [] if x is None else [{"x": x, "y": box["y"] + 60}]
            finger.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": points})
        page.wait_for_function("before => document.getElementById('gantt-view').textContent !== before", arg=before)
        views = [re.findall(r"([\d.]+) s", words)[:2] for words in (before, page.inner_text("#gantt-view"))]
        (start, end), (earlier, ended) = (map(float, view) for view in views)
        assert earlier < start and abs((ended - earlier) - (end - start)) < 0.03  # dragged to an earlier time, not zoomed
        assert complaints == []


def test_a_sampled_group_is_shown_side_by_side_without_a_kept_batch(tmp_path, background):
    synthetic_run.write_run(tmp_path / "one")
    said, of_group = {"step": 9, "purpose": "train", "prompt": "2 + 2?"}, {"group": 72, "finish_reason": "length"}
    responses = [said | of_group | {"row": 288 + i, "response": f"It is {i}. <b>", "reward": float(i == 3)} for i in range(4)]
    figures = {"ratio": [1.0, 1.5], "clipped": [0.0, 0.0]}
    trained = [TrainedTokens(288 + i, 9, 0, 2, advantage=1.5 if i == 3 else -0.5) for i in range(1, 4)]
    trained.append(TrainedTokens(288, 9, 0, 2, [7, 8], [-0.5, -1.5], [1, 1], [3, 4], figures, -0.5))
    (tmp_path / "one" / "samples.jsonl").write_bytes(lines(responses))
    (tmp_path / "one" / "tokens.jsonl").write_bytes(lines(trained))
    with opened(background, tmp_path / "one") as (page, complaints):
        scroll_to_group(page, 4)
        cards = page.locator("#group article")
        assert page.input_value("#batch-step") == "9" and "72: 4 responses, mean reward 0.25" in page.inner_text("#batch-group")
        heads = [card.locator(".lane-head").inner_text() for card in cards.all()]
        assert "row 291 \u00b7 reward 1 \u00b7 advantage 1.5" in heads[3] and "cut off" in heads[3]
        assert "row 288 \u00b7 reward 0 \u00b7 advantage -0.5" in heads[0]
        assert "It is 3. <b>" in cards.nth(3).inner_text() and page.inner_text("#group .prompt") == "2 + 2?"
        boxes = cards.evaluate_all(
            "all => all.map((each) => each.getBoundingClientRect().toJSON())"
        )  # at one time: charts come above
        assert len({box["y"] for box in boxes}) == 1 and all(b["x"] > a["x"] for a, b in pairwise(boxes))
        assert page.evaluate("document.documentElement.scrollWidth") <= 400
        assert cards.locator("details").count() == 1  # token by token: of one response
        cards.first.locator("summary").click()
        cards.first.locator(".token").nth(1).hover()
        assert "ratio 1.5" in page.inner_text("#token-told")
        assert complaints == []


def test_waits_are_a_graph_from_each_to_the_cause_with_their_deadlines(tmp_path, background):
    synthetic_run.write_run(tmp_path / "one")
    workers = [SeenWorker(name=name, task="wait", cause=cause, seconds=41.0, silence=0.1) for name, cause in WAITERS.items()]
    group = SeenGroup(group=412, task="rollout", rows=4, state="leased", holder="rollout/3", seconds=41.0, left=101.0)
    step = SeenStep(topic="train", step=7, groups=[group], lacking=1)
    asked = OpenWait(name=ROUND.name, worker="trainer/0", seconds=41.0, facts={"step": 7, "number": 1})
    known = {"run": "one", "time": 0.0, "pid": 1, "host": "h", "committed": 7, "steps": 9, "idle": 41.0}
    limits = {"run.stall_timeout_seconds": 300.0, "queue.lease_seconds": 120.0}
    seen = Situation(**known, limits=limits, workers=workers, open_steps=[step], waits=[asked])
    write_situation(tmp_path / "one", seen)
    with opened(background, tmp_path / "one") as (page, complaints):
        graph = page.get_by_role("region", name="What waits for what")
        graph.wait_for()
        words = [box.inner_text().splitlines() for box in graph.locator(".wait").all()]
        assert [texts[0].split(" waits")[0].split(" follows")[0] for texts in words] == [
            "trainer/1",
            "trainer/2",
            "trainer/0",
            "rollout/3 has it for task rollout, since 41 s",
            "Cause rollout/3",
        ]
        assert all(texts[-1].startswith("until ") and " s)" in texts[-1] for texts in words)
        assert words[3][-1] == "until run.stall_timeout_seconds (300 s)"  # rollout/3 reports, and so it renews its lease
        assert graph.get_by_role("listitem").count() == 5
        for width, along, across in ((1400, "x", "width"), (400, "y", "height")):  # the arrows lead to the right, or down
            page.set_viewport_size({"width": width, "height": 800})
            first, second, *path = [box.bounding_box() for box in graph.locator(".wait").all()]
            assert second["y"] >= first["y"] + first["height"]  # two wait for the same
            for before, after in pairwise([second, *path]):
                assert after[along] >= before[along] + before[across] + 10
            assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert complaints == []


def test_a_run_that_begins_later_is_in_the_list_when_somebody_looks_into_it(tmp_path, background):
    runs = tmp_path / "runs"
    runs.mkdir()
    with opened(background, runs) as (page, complaints):
        page.wait_for_function("() => document.getElementById('status').textContent.includes('there is no run here yet')")
        synthetic_run.write_run(runs / "one")
        page.locator("#runs").click()
        page.wait_for_function("() => document.querySelector('#header .value')?.textContent === '10'")  # steps
        page.locator("#search [name=words]").focus()
        synthetic_run.write_run(runs / "two", num_steps=4)
        page.locator("#runs").focus()  # as the keyboard does
        page.locator("#runs option[value=two]").wait_for(state="attached")
        assert page.input_value("#runs") == "one" and page.locator("#others").is_visible()
        page.select_option("#others", ["two"])
        page.wait_for_function("() => document.getElementById('compared').innerText.includes('2 runs compared')")
        synthetic_run.write_run(runs / "three", num_steps=3)
        page.locator("#runs").click()  # it has the focus, perhaps
        page.locator("#runs option[value=three]").wait_for(state="attached")
        for name, chosen in (("runs", ["one"]), ("others", ["two"])):
            listed = page.locator(f"#{name} option")
            assert sorted(listed.all_inner_texts()) == ["one", "three", "two"]
            assert listed.evaluate_all("each => each.filter((one) => one.selected).map((one) => one.value)") == chosen
        page.select_option("#runs", "three")
        page.wait_for_function("() => document.querySelector('#header .value')?.textContent === '3'")
        assert complaints == []


def test_the_page_follows_a_run_and_compares_it(tmp_path, background):
    synthetic_run.write_run(tmp_path / "runs" / "one")
    synthetic_run.write_run(tmp_path / "runs" / "two", num_steps=4)
    said = [{"by": "policy", "texts": ["I take", " it"], "logprobs": [-0.1, -2.0]}]
    said.append({"by": "environment", "texts": ["You have it."]})
    with (tmp_path / "runs" / "one" / "samples.jsonl").open("a") as file:
        file.write(json.dumps({"step": 0, "purpose": "train", "row": 99, "prompt": "A lamp.", "turns": said, "reward": 1.0}) + "\n")
    command = background("watch", tmp_path / "runs", "--no-browser")
    (address,) = re.findall(r"http\S+", command.stdout.readline())
    requests: list[str] = []
    with browser_of(viewport={"width": 400, "height": 800}) as browser:
        page = browser.new_page()
        complaints = complaints_of(page)
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
        assert page.locator("#groups").is_hidden()  # samples of an older run do not name their groups
        assert page.inner_text("#num-samples") == "6 found"
        assert page.evaluate("document.documentElement.scrollWidth") <= 400  # nothing is wider than a narrow screen
        assert page.evaluate("window.hacked") is None and synthetic_run.HOSTILE in page.text_content("#samples")

        card = page.locator("#samples article").first
        card.locator("details.trained summary").click()
        card.locator("details.trained .token.clipped").wait_for()
        told = page.locator("#token-told")
        card.locator("details.trained .token").nth(1).hover()
        assert "log-prob of the engine -1.5" in told.inner_text() and "log-prob of the trainer -1.25" in told.inner_text()
        assert all(part in told.inner_text() for part in ("version 4", "clipped yes", "entropy 0.5", "in the loss", "ratio 1.284"))
        page.mouse.move(1, 1)
        assert told.inner_text() == ""
        with (tmp_path / "runs" / "two" / "samples.jsonl").open("a") as file:
            file.write(
                json.dumps({"step": 3, "purpose": "train", "row": 98, "prompt": "A door.", "response": "Open.", "reward": 0.0})
                + "\n"
            )
        page.wait_for_function("() => document.getElementById('num-samples').textContent.startsWith('more have come')")
        assert card.locator("details.trained .token").first.is_visible()  # what is read stays
        page.get_by_role("button", name="Search").click()
        page.wait_for_function("() => document.getElementById('num-samples').textContent === '7 found'")

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
        page.select_option("#others", ["one", "two"])
        page.locator(".compared-charts .card").first.scroll_into_view_if_needed()
        page.wait_for_selector(".compared-charts .plot .scatterlayer .trace", state="attached")
        assert "2 runs compared" in page.inner_text("#compared")
        page.evaluate("window.seen = document.querySelector('.compared-charts .card')")
        with (tmp_path / "runs" / "two" / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"step": 5, "reward/mean": 0.5}) + "\n")
        page.wait_for_function("() => document.querySelector('#compared tbody').innerText.match(/steps\\s+10\\s+6/)")
        assert page.evaluate("window.seen === document.querySelector('.compared-charts .card')")  # what a reader looks at stays
        light = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert all(contrast >= READABLE for contrast in page.evaluate(CONTRASTS).values()), page.evaluate(CONTRASTS)
        page.emulate_media(color_scheme="dark")
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(20, 22, 26)" != light
        assert all(contrast >= READABLE for contrast in page.evaluate(CONTRASTS).values()), page.evaluate(CONTRASTS)
        assert complaints == []
        server = address.split("/watch/")[0]
        assert all(url.startswith((server, "blob:", "data:")) for url in requests)

        stranger = browser.new_page()
        stranger.goto(address.partition("#")[0])
        stranger.wait_for_function("() => document.getElementById('status').textContent.includes('needs the key')")
    command.terminate()
    wait_for(lambda: command.poll() is not None)
    assert command.poll() == 0  # there is no other way to end it


@deep
def test_another_run_shows_nothing_of_the_one_before(tmp_path, background):
    """Neither what was there, nor an answer about the run before that comes late."""
    synthetic_run.write_run(tmp_path / "runs" / "one")
    synthetic_run.write_run(tmp_path / "runs" / "two", num_steps=4)
    said = {"step": 9, "purpose": "train", "prompt": "2 + 2?", "group": 72, "finish_reason": "stop", "response": "4", "reward": 1.0}
    (tmp_path / "runs" / "one" / "samples.jsonl").write_bytes(lines([said | {"row": 288 + i} for i in range(60)]))
    for name in ("samples", "tokens"):
        (tmp_path / "runs" / "two" / f"{name}.jsonl").write_bytes(b"")

    def is_empty(page: sync_api.Page) -> bool:
        drawn = page.locator("#samples article, #group > *, #batch-group option").count()
        return not drawn and page.locator("#groups, #more-samples").evaluate_all("each => each.every((one) => one.hidden)")

    held: list[sync_api.Route] = []
    with opened(background, tmp_path / "runs") as (page, complaints):

        def choose(run: str, steps: int) -> None:
            page.select_option("#runs", run)
            page.wait_for_function("steps => document.querySelector('#header .value')?.textContent === steps", arg=str(steps))

        for paths in ("none", "groups|samples", "group"):
            choose("two", 4)
            held.clear()
            page.route(re.compile(rf"/api/({paths})\?.*run=one"), lambda route: held.append(route))
            choose("one", 10)
            page.locator("#batch-step option[value='9']").wait_for(state="attached")
            if paths == "none":
                scroll_to_group(page, 1)
                page.locator("#more-samples").wait_for()
            num_asked = {"none": 0, "group": 1}.get(paths, 2)
            deadline = time.monotonic() + patience(10.0)
            while len(held) < num_asked and time.monotonic() < deadline:
                page.evaluate("document.getElementById('groups').scrollIntoView()")
                page.wait_for_timeout(20)
            assert len(held) == num_asked
            choose("two", 4)
            for route in held:
                with page.expect_event("requestfinished", lambda request, url=route.request.url: request.url == url):
                    route.continue_()
            page.unroute_all()
            page.evaluate("fetch('page.css').then((answer) => answer.text())")  # which is asked for after them
            assert is_empty(page)
        assert complaints == []
