"""Reader of a run's folder, for the report, the live page and the comparison of runs: it reads, and nothing else.

    metrics.jsonl  eval.jsonl  samples.jsonl  unscored.jsonl  spans.jsonl --from where it stopped--> RunReader --> pages

It keeps no state of its own on the disk, so it works for a run that goes on, has ended, was killed, or was copied from elsewhere.
Each time it reads what was added since the last time. A file that has been cut back, as a resumed run does, or written anew, is
read from its beginning again.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Generic, TypeVar

import msgspec
import yaml

from asyncflow.run_dir import CONFIG_FILE, EVAL_FILE, METRICS_FILE, SAMPLES_FILE, UNSCORED_FILE
from asyncflow.telemetry.certificate import Certificate, read_certificate
from asyncflow.telemetry.gantt import first_view
from asyncflow.telemetry.hub import UnscoredResponse
from asyncflow.telemetry.situation import Situation, read_situation
from asyncflow.telemetry.span_index import SpanIndex
from asyncflow.telemetry.spans import Span
from asyncflow.telemetry.trace import SPANS_FILE
from asyncflow.types import UserError

T = TypeVar("T")

_CHUNK_BYTES: Final = 1 << 20
_TAIL_BYTES: Final = 2 << 20
_REMEMBERED_BYTES: Final = 256
LIVE_SECONDS: Final = 10.0
"""A run whose situation is older no longer goes on."""


class GrowingLines(Generic[T]):
    """Lines of a JSON Lines file that another process writes, as they come. `num_damaged`: lines that are not what they should
    be."""

    def __init__(self, path: Path, kind: type[T], what: str) -> None:
        """`what` each line is, in a message."""
        self.path, self._what = path, what
        self.num_damaged = 0
        self._decoder = msgspec.json.Decoder(kind)
        self._offset, self._before, self._number = 0, b"", 0

    def read(self, *, most_bytes: int | None = None, is_strict: bool = False) -> tuple[list[T], bool]:
        """Lines that were added since the last time, of so many bytes at most (None: all); and whether the file begins anew with
        them.

        A half-written last line is left for the next time. `is_strict`: a `UserError` names a line that is not what it should be;
        otherwise it is counted and passed over.
        """
        try:
            file = self.path.open("rb")
        except FileNotFoundError:
            return [], self._begin_anew()
        with file:
            file.seek(self._offset - len(self._before))
            is_anew = file.read(len(self._before)) != self._before and self._begin_anew()
            file.seek(self._offset)
            content = file.read(most_bytes)
            while b"\n" not in content and (more := file.read(most_bytes)):  # a line that is longer
                content += more
        content = content[: content.rfind(b"\n") + 1]
        self._offset += len(content)
        self._before = (self._before + content[-_REMEMBERED_BYTES:])[-_REMEMBERED_BYTES:]
        return self._decoded(content, is_strict), is_anew

    @property
    def num_unread_bytes(self) -> int:
        """Bytes that are still to be read, a half-written line included."""
        try:
            return max(0, self.path.stat().st_size - self._offset)
        except FileNotFoundError:
            return 0

    def _begin_anew(self) -> bool:
        """Forget how far the file was read. False: nothing was read of it yet."""
        was_read = self._offset > 0
        self._offset, self._before, self._number, self.num_damaged = 0, b"", 0, 0
        return was_read

    def _decoded(self, content: bytes, is_strict: bool) -> list[T]:
        found = []
        for line in content.split(b"\n")[:-1]:
            self._number += 1
            try:
                found.append(self._decoder.decode(line))
            except msgspec.DecodeError as error:
                if is_strict:
                    raise UserError(f"{self.path} line {self._number} is not {self._what} ({error}).") from error
                self.num_damaged += 1
        return found


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a JSON Lines file, each an object with an integer `step`; none when the file is missing.

    A half-written last line is left out. A `UserError` names any other line that is no such row.
    """
    rows, _ = GrowingLines(path, dict[str, Any], "a JSON object").read(is_strict=True)
    _check_steps(path, rows)
    return rows


def _check_steps(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    for number, row in enumerate(rows, 1):
        if not isinstance(row.get("step"), int):
            raise UserError(f"{path} line {number} has no integer 'step'.")


def _last_lines(path: Path, num_bytes: int) -> list[Span]:
    """The last whole spans of a file."""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - num_bytes))
        lines = file.read().split(b"\n")[1:-1]
    decoder, found = msgspec.json.Decoder(Span), []
    for line in lines:
        with contextlib.suppress(msgspec.DecodeError):
            found.append(decoder.decode(line))
    return found


class RunReader:
    """Reader of one run's files. `refresh` reads what is new; everything else only looks at what was read.

    `rows`: of metrics; `evaluations`, `samples`: of their files; `unscored`: responses that could not be scored; `spans`: their
    index; `situation`: what the run has last said of itself; `certificate`: of a run that has ended, in order or not.
    """

    def __init__(self, path: Path) -> None:
        """Raises `UserError` where there is no folder."""
        if not path.is_dir():
            raise UserError(f"There is no run directory {path}.")
        self.path = path
        self.config: dict[str, Any] = {}
        self.rows: list[dict[str, Any]] = []
        self.evaluations: list[dict[str, Any]] = []
        self.samples: list[dict[str, Any]] = []
        self.unscored: list[UnscoredResponse] = []
        self.spans = SpanIndex()
        self.situation: Situation | None = None
        self.certificate: Certificate | None = None
        self._of_rows = [
            (GrowingLines(path / name, dict[str, Any], "a JSON object"), rows)
            for name, rows in ((METRICS_FILE, self.rows), (EVAL_FILE, self.evaluations), (SAMPLES_FILE, self.samples))
        ]
        self._of_unscored = GrowingLines(path / UNSCORED_FILE, UnscoredResponse, "a response that could not be scored")
        self._of_spans = GrowingLines(path / SPANS_FILE, Span, "a span")
        self._tail: SpanIndex | None = None  # the newest spans of a large file, until all of it has been read
        self._tail_start = 0.0
        self._has_read_spans = False  # the last look found no whole line
        self._config_stamp = 0

    @property
    def name(self) -> str:
        """Name of the run."""
        run = self.config.get("run")
        name = run.get("name") if isinstance(run, Mapping) else run
        return str(name or self.path.resolve().name)

    @property
    def wall(self) -> float:
        """Seconds from the first span's start to the last one's end."""
        return max(self.spans.wall, self._tail.wall if self._tail is not None else 0.0)

    @property
    def first_view(self) -> list[float]:
        """[from, to] in seconds: a part of the Gantt chart of a few steps."""
        spans = self._tail if self._tail is not None else self.spans
        return first_view(spans.steps, spans.wall)

    @property
    def is_live(self) -> bool:
        """Whether the run goes on, as far as its files tell."""
        situation = self.situation
        is_over = situation is None or bool(situation.ended) or self.certificate is not None
        return not is_over and situation is not None and time.time() - situation.time < LIVE_SECONDS

    @property
    def num_damaged(self) -> int:
        """Lines of the run's files that are not what they should be."""
        readers: list[GrowingLines[Any]] = [*(lines for lines, _ in self._of_rows), self._of_unscored, self._of_spans]
        return sum(lines.num_damaged for lines in readers)

    @property
    def share_of_spans_read(self) -> float:
        """Share of the spans' file that has been read: 1 once all whole lines have been."""
        left = 0 if self._has_read_spans else self._of_spans.num_unread_bytes
        size = self._of_spans.path.stat().st_size if left else 1
        return 1.0 - left / size

    def read_all(self) -> None:
        """Read the files to their end. A `UserError` names a line (not the last) that is not what it should be."""
        self._read_config()
        self.refresh_rows(is_strict=True)
        spans, _ = self._of_spans.read(is_strict=True)
        self.spans.add(spans, is_all=True)

    def refresh_rows(self, *, is_strict: bool = False) -> bool:
        """Read what is new of all files but the spans. Returns whether anything is."""
        is_new = self._read_config()
        for lines, rows in self._of_rows:
            found, is_anew = lines.read(is_strict=is_strict)
            if is_anew:
                rows.clear()
            if is_strict:
                _check_steps(lines.path, found)
            rows += [row for row in found if isinstance(row.get("step"), int)]
            is_new |= bool(found) or is_anew
        unscored, is_anew = self._of_unscored.read(is_strict=is_strict)
        self.unscored = [*([] if is_anew else self.unscored), *unscored]
        before = self.situation, self.certificate
        with contextlib.suppress(UserError):
            self.situation = read_situation(self.path)
        self.certificate = read_certificate(self.path)
        return is_new or bool(unscored) or is_anew or before != (self.situation, self.certificate)

    def refresh_spans(self, most_bytes: int = _CHUNK_BYTES) -> bool:
        """Read what is new of the spans, a part of it where it is much. Returns whether anything is."""
        found, is_anew = self._of_spans.read(most_bytes=most_bytes)
        self._has_read_spans = not found
        if is_anew:
            self.spans, self._tail = SpanIndex(), None
        is_first = self.spans.frame is None
        self.spans.add(found)
        left = self._of_spans.num_unread_bytes
        if is_first and self.spans.frame is not None and left > most_bytes:
            self._tail = SpanIndex(self.spans.frame.origin)
            newest = _last_lines(self._of_spans.path, _TAIL_BYTES)
            self._tail.add(newest, is_all=True)
            self._tail_start = min((span.start for span in newest), default=0.0) - self.spans.frame.origin
        elif not left:
            self._tail = None
        return bool(found) or is_anew

    def part(self, start: float, end: float, most: int) -> dict[str, Any]:
        """Part of the Gantt chart: see `SpanIndex.part`. Of a large file that is still being read, the newest spans are there
        already."""
        spans = self.spans
        if self._tail is not None and start >= min(self._tail_start, spans.wall):
            spans = self._tail
        return spans.part(start, end, most) | {"wall": self.wall}

    def _read_config(self) -> bool:
        path = self.path / CONFIG_FILE
        try:
            stamp = path.stat().st_mtime_ns
        except FileNotFoundError:
            return False
        if stamp == self._config_stamp:
            return False
        try:
            config = yaml.safe_load(path.read_text(encoding="utf-8"))
        except yaml.YAMLError as error:
            raise UserError(f"{path} is not YAML: {str(error).splitlines()[0]}.") from error
        self.config, self._config_stamp = config if isinstance(config, dict) else {}, stamp
        return True
