"""The live page: a run's files, read as they grow, in a browser.

    runs/*/metrics.jsonl spans.jsonl ... --> WatchedRun --server-sent events--> the page
                                                       <--a part of the Gantt chart, charts, samples, a group--

consumes: the files of runs; requests of the page
waits for: the files to grow, `LOOK_SECONDS` at a time, while anybody looks
is unblocked by: the clock

The page itself (`/watch/` and its scripts) holds nothing of any run and needs no key. Whatever it shows comes from `/watch/api/`,
which does. No run knows of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Final
from urllib.parse import urlsplit

import msgspec
import yaml
from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from plotly.offline import get_plotlyjs

from asyncflow.run.situations import state_of_driver
from asyncflow.run_dir import CONFIG_FILE
from asyncflow.service.app import Receive, Send
from asyncflow.service.groups import group_figures, groups_of, steps_with_groups, token_figures
from asyncflow.service.limits import Denied
from asyncflow.service.reference import HEADERS
from asyncflow.service.server import LOOPBACK
from asyncflow.telemetry import sections
from asyncflow.telemetry.advice import Advice, advice
from asyncflow.telemetry.charts import metric_charts
from asyncflow.telemetry.compare import RunsCompared
from asyncflow.telemetry.report import page_template
from asyncflow.telemetry.run_reader import RunReader
from asyncflow.telemetry.sample_search import SampleQuery, find

LOOK_SECONDS: Final = 1.0
PAGE: Final = "/watch/"
_SCRIPTS: Final = {**dict.fromkeys(("charts.js", "gantt.js", "tokens.js", "live.js"), "text/javascript"), "page.css": "text/css"}
PUBLIC: Final = (PAGE, *(f"{PAGE}{name}" for name in (*_SCRIPTS, "plotly.js")))
"""Paths that need no key: nothing of a run is there."""
_HEAVY_SECONDS: Final = 3.0
"""Sums over all spans are made anew so often at most; and so seldom that they take a tenth of the time."""
_CATCH_UP_SECONDS: Final = 0.3
"""A large file of spans is read for so long between two looks, part by part: whoever asks for something gets in between. A live run
has its cores to itself for as long afterwards."""
_QUIET_SECONDS: Final = 15.0
_FEW_SPANS: Final = 10_000
"""Number of spans, at most, that are summed at once whenever they change."""
_SAMPLES_AT_ONCE: Final = 20
_MOST_BARS: Final = 20_000
_DEPTH: Final = 3
"""Folders of runs are looked for so many levels below the one that is watched."""
_HEADERS: Final = {
    **HEADERS,
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; connect-src 'self'; "
    "img-src data: blob:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
}


Predict = Callable[[Path, str], Awaitable[str]]
"""Sentence about what a run would take with a changed configuration (`key.path=value`), by what it has measured; "": not known."""


class WatchedRun:
    """A run that somebody looks at. Its files are read in a thread, by one at a time.

    `predict` is asked once about each change that advice names, when the run has ended: a live one keeps its cores.
    """

    def __init__(self, path: Path, predict: Predict | None = None) -> None:
        self.reader = RunReader(path)
        self._predict, self._predictions = predict, dict[str, asyncio.Task[str]]()
        self.lock = asyncio.Lock()
        self._parts = page_template("parts.html.j2").module
        self._steps_with_groups: list[int] = []
        self._heavy: dict[str, Any] = {}
        self._heavy_next, self._heavy_of = time.monotonic() + _HEAVY_SECONDS / 2, -1

    async def of(self, look: Callable[[RunReader], Any]) -> Any:
        """Result of `look` at the run as it is now."""
        return await look_at([self], lambda: look(self.reader))

    async def changes(self) -> AsyncIterator[Mapping[str, Any]]:
        """Parts of the page, by name: all of them, then those that change; {} now and then where none does."""
        known: dict[str, Any] = {}
        sent_at = 0.0
        while True:
            parts = dict(await self.of(self._look))
            if "advice" in parts:
                parts["advice"] = [self._with_prediction(each, is_live=parts["facts"]["is_live"]) for each in parts["advice"]]
            changed = {name: part for name, part in parts.items() if known.get(name) != part}
            if changed or time.monotonic() - sent_at > _QUIET_SECONDS:
                yield changed
                sent_at = time.monotonic()
            is_behind = bool(known) and parts["facts"]["share"] < 1  # a page that has just been opened asks for more first
            known |= changed
            if is_behind:
                await self._catch_up()
            if not is_behind or parts["facts"]["is_live"]:
                await asyncio.sleep(_CATCH_UP_SECONDS if is_behind else LOOK_SECONDS)

    async def _catch_up(self) -> None:
        until = time.monotonic() + _CATCH_UP_SECONDS
        while await self.of(lambda run: run.refresh_spans()) and time.monotonic() < until:
            pass

    def _with_prediction(self, advice: Advice, *, is_live: bool) -> str:
        """Words of a piece of advice, with what its change brings as soon as that is known."""
        if self._predict is None or not advice.change or is_live:
            return advice.words
        if advice.change not in self._predictions:
            self._predictions[advice.change] = asyncio.create_task(self._predict(self.reader.path, advice.change))  # type: ignore[arg-type]
        asked = self._predictions[advice.change]
        return f"{advice.words} {asked.result()}".rstrip() if asked.done() else advice.words

    def _look(self, run: RunReader) -> dict[str, Any]:
        if run.refresh_rows():
            self._steps_with_groups = steps_with_groups(run)
        run.refresh_spans()
        facts = {
            "title": run.name,
            "is_live": run.is_live,
            "steps": f"{len(run.rows)} {len(run.evaluations)}",
            "wall": run.wall,
            "share": round(run.share_of_spans_read, 3),
            "samples": len(run.samples) + len(run.unscored),
            "groups": self._steps_with_groups,
            "first_view": run.first_view,
            "num_damaged": run.num_damaged,
        }
        line = run.certificate.line if run.certificate is not None else ""
        config = yaml.safe_dump(run.config, sort_keys=False, allow_unicode=True) if run.config else ""
        parts: Any = self._parts
        driver = state_of_driver(run.situation, run.path) if run.situation is not None else ""
        return {
            "facts": facts,
            "header": str(parts.header(run.name, sections.facts(run), line, sections.figures(run))),
            "now": str(parts.now(run, driver, sections.workers_now(run), sections.queue_now(run), sections.waits_now(run))),
            "unscored": str(parts.unscored_responses(sections.unscored(run.unscored))),
            "config": str(parts.configuration(config)),
            **self._sums(run),
        }

    def _sums(self, run: RunReader) -> Mapping[str, Any]:
        """Parts that are made of all spans."""
        began, parts = time.monotonic(), self._parts
        is_due = began >= self._heavy_next or run.spans.num_spans < _FEW_SPANS
        if self._heavy_of != run.spans.num_spans and is_due:
            times = parts.times(sections.planned(run), sections.mean_step(run.spans), sections.activities(run.spans))  # type: ignore[attr-defined]
            self._heavy = {"times": str(times), "advice": advice(run)}
            now = time.monotonic()
            self._heavy_of, self._heavy_next = run.spans.num_spans, now + max(_HEAVY_SECONDS, 10 * (now - began))
        return self._heavy


async def look_at(runs: Iterable[WatchedRun], look: Callable[[], Any]) -> Any:
    """Result of `look`, in a thread, while nobody else reads any of these runs."""
    with contextlib.ExitStack() as held:
        for run in sorted(runs, key=lambda run: run.reader.path):  # in one order, or two would wait for one another
            await run.lock.acquire()
            held.callback(run.lock.release)
        looking, locks = asyncio.create_task(asyncio.to_thread(look)), held.pop_all()
    looking.add_done_callback(lambda _: locks.close())  # where a page is closed meanwhile, its thread goes on
    return await asyncio.shield(looking)


async def comparisons(runs: Mapping[str, WatchedRun]) -> AsyncIterator[Mapping[str, Any]]:
    """Several runs over each other: now, and again when one of them has trained a step or has been evaluated, in a tenth of
    the time at most; {} now and then where none has."""
    known: list[tuple[int, int]] = []
    sent_at = 0.0

    def compare() -> Mapping[str, Any]:
        compared = RunsCompared({name: run.reader for name, run in runs.items()})
        return {"html": str(compared.html()), "charts": compared.charts}

    while True:
        began, made = time.monotonic(), dict[str, Any]()
        ends = [await run.of(_read_to_the_end) for run in runs.values()]
        if ends != known:
            known, made = ends, await look_at(runs.values(), compare)
        pause = min(max(LOOK_SECONDS, 10 * (time.monotonic() - began)), _QUIET_SECONDS)
        if made or began - sent_at > _QUIET_SECONDS:
            yield made
            sent_at = time.monotonic()
        await asyncio.sleep(pause)


class Watched:
    """Runs in a folder, or the folder of one run."""

    def __init__(self, folder: Path, predict: Predict | None = None) -> None:
        self._folder, self._predict = folder, predict
        self._runs: dict[Path, WatchedRun] = {}

    def names(self) -> list[str]:
        """Names of the runs, the one that was written to last first."""
        return list(self._paths())

    def run(self, name: str) -> WatchedRun:
        """The run of this name. Raises `Denied`."""
        path = self._paths().get(name)
        if path is None:
            raise Denied(404, f"there is no run {name} here")
        if path not in self._runs:
            self._runs[path] = WatchedRun(path, self._predict)
        return self._runs[path]

    def _paths(self) -> dict[str, Path]:
        if (self._folder / CONFIG_FILE).is_file():
            return {self._folder.resolve().name: self._folder}
        found = [path.parent for depth in range(1, _DEPTH + 1) for path in self._folder.glob("*/" * depth + CONFIG_FILE)]
        return {path.relative_to(self._folder).as_posix(): path for path in sorted(found, key=_last_change, reverse=True)}


def _last_change(path: Path) -> float:
    return max((file.stat().st_mtime for file in path.glob("*.json*")), default=0.0)


def watch_routes(watched: Watched) -> APIRouter:
    """The page, and what it asks for."""
    router = APIRouter(prefix=PAGE.rstrip("/"))

    def add(name: str, content: str, kind: str, **headers: str) -> None:
        async def route() -> Response:
            return Response(content, media_type=kind, headers={**_HEADERS, **headers})

        router.add_api_route(f"/{name}", route, include_in_schema=False)

    add("", page_template("live.html.j2").render(), "text/html")
    add("plotly.js", get_plotlyjs(), "text/javascript", **{"Cache-Control": "private, max-age=86400"})
    for name, kind in _SCRIPTS.items():
        add(name, resources.files("asyncflow.telemetry").joinpath(name).read_text(encoding="utf-8"), kind)

    @router.get("/api/runs", summary="Names of the runs")
    async def runs() -> Response:
        return _json(await asyncio.to_thread(watched.names))

    @router.get("/api/events", summary="Parts of a run's page, as they change")
    async def events(run: str) -> StreamingResponse:
        return _events(watched.run(run).changes())

    @router.get("/api/gantt", summary="A part of the Gantt chart")
    async def gantt(run: str, start: float, end: float, most: Annotated[int, Query(ge=100, le=_MOST_BARS)] = 2_500) -> Response:
        return _json(await watched.run(run).of(lambda reader: reader.part(start, end, most)))

    @router.get("/api/charts", summary="Charts of a run's metrics")
    async def charts(run: str) -> Response:
        return _json(await watched.run(run).of(lambda reader: metric_charts(reader.rows, reader.evaluations)))

    @router.get("/api/samples", summary="Samples that match")
    async def samples(request: Request, run: str, skip: Annotated[int, Query(ge=0)] = 0) -> Response:
        query = _query(request.query_params.items())
        found = await watched.run(run).of(lambda reader: find(reader.samples, reader.unscored, query))
        return _json({"total": len(found), "samples": found[skip : skip + _SAMPLES_AT_ONCE]})

    @router.get("/api/tokens", summary="A response of the samples as it was trained, token by token")
    async def tokens(run: str, row: int) -> Response:
        return _json(await watched.run(run).of(lambda reader: token_figures(reader.path, row)))

    @router.get("/api/groups", summary="Groups of a step that were kept or sampled")
    async def groups(run: str, step: int) -> Response:
        return _json(await watched.run(run).of(lambda reader: groups_of(reader, step)))

    @router.get("/api/group", summary="A group's responses side by side")
    async def group(run: str, step: int, group: int) -> Response:
        return _json(await watched.run(run).of(lambda reader: group_figures(reader, step, group)))

    @router.get("/api/compare", summary="Several runs over each other, as they go on")
    async def compare(run: Annotated[list[str], Query(min_length=2, max_length=16)]) -> StreamingResponse:
        return _events(comparisons({name: watched.run(name) for name in dict.fromkeys(run)}))

    return router


class LocalOnly:
    """ASGI application before another one that serves a browser of this machine: a request is answered only where the browser was
    sent to this machine by name, and by this page.

    Without it a page from elsewhere could have its own name point here (DNS rebinding), or send requests from its own scripts.
    """

    def __init__(self, app: Callable[..., Awaitable[None]]) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] == "http" and (why := self._refusal(dict(scope["headers"]))):
            await JSONResponse({"error": {"message": why}}, 403, headers=_HEADERS)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    @staticmethod
    def _refusal(headers: Mapping[bytes, bytes]) -> str:
        host = headers.get(b"host", b"").decode("latin-1")
        try:
            name = urlsplit(f"//{host}").hostname
        except ValueError:
            name = None
        if name not in LOOPBACK:
            return "this page answers to 127.0.0.1 and localhost alone"
        origin = headers.get(b"origin", b"").decode("latin-1")
        is_elsewhere = origin and urlsplit(origin).netloc != host
        if is_elsewhere or headers.get(b"sec-fetch-site", b"none") not in (b"none", b"same-origin"):
            return "this page answers to its own scripts alone"
        return ""


def _read_to_the_end(run: RunReader) -> tuple[int, int]:
    """Numbers of its steps and of its evaluations."""
    run.refresh_rows()
    while run.refresh_spans():
        pass
    return len(run.rows), len(run.evaluations)


def _query(given: Iterable[tuple[str, str]]) -> SampleQuery:
    fields = {field.name for field in msgspec.structs.fields(SampleQuery)}
    try:
        return msgspec.convert({name: value for name, value in given if name in fields and value}, SampleQuery, strict=False)
    except msgspec.ValidationError as error:
        raise Denied(422, str(error)) from error


def _events(changes: AsyncIterator[Mapping[str, Any]]) -> StreamingResponse:
    """Server-sent events; of {} a comment, which keeps the connection."""

    async def stream() -> AsyncIterator[bytes]:
        async for parts in changes:
            yield b"event: change\ndata: " + msgspec.json.encode(parts) + b"\n\n" if parts else b": still here\n\n"

    return StreamingResponse(stream(), media_type="text/event-stream", headers=_HEADERS)


def _json(content: object) -> Response:
    return Response(msgspec.json.encode(content), media_type="application/json", headers=_HEADERS)
