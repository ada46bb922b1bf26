"""Journal of a run: prompts and rows that somebody outside was told are safe, from that moment on, until a checkpoint has them.

    put_prompts_data, put_experience_data --> journal (append) --> answer
    a server that is started again --> the checkpoint, and whatever of the journal is not in it

It outlives the process: an append has reached the kernel when it returns, or, where it raises (a full disk), has left nothing.
It does not outlive the machine.

    FOLDER/prompts.jsonl    a line of JSON for each prompt, in the order in which they were put
    FOLDER/rows.afp         frames of rows, as outside generators completed them, with a hash of their prompt
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from io import BytesIO, FileIO
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

from asyncflow.run_dir import append_whole
from asyncflow.run_dir import replace as replace_file
from asyncflow.telemetry.batches import joined
from asyncflow.transfer_queue.batches import taken
from asyncflow.transfer_queue.storage.packed import read_frames, write_frame
from asyncflow.types import Array, Batch, RunError

PROMPT_HASH: Final = "prompt_hash"
"""Column of the rows' file, int64: of the prompt that a row answers (`prompt_hash`)."""
MAX_BYTES: Final = 256 << 20
"""Size of the rows' file from which rows of committed steps are taken out."""


class PutPrompt(msgspec.Struct, frozen=True, array_like=True):
    """Prompt that was put, as a row of the data. `number`: how many had been put before it, ever; `first`: the number of the first
    one that was put with it, whose columns theirs are. `after`: see `asyncflow.data.order.Pushed`."""

    number: int
    first: int
    after: int
    row: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Kept:
    """Rows that a run resumes with beside its checkpoint: prompts that were put and are in none, and completed rows. `hashes`: by
    group, of the prompt that its rows answer."""

    prompts: Sequence[PutPrompt] = ()
    rows: Batch | None = None
    hashes: Mapping[int, int] = field(default_factory=dict)


class Journal:
    """The files of one run. `clear` begins the run anew."""

    def __init__(self, folder: Path, group_bits: int) -> None:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._prompts_path, self._rows_path, self._group_bits = folder / "prompts.jsonl", folder / "rows.afp", group_bits
        self._prompts: FileIO | None = None
        self._rows: FileIO | None = None
        self._limit = MAX_BYTES

    def clear(self) -> None:
        """Forget everything: the run begins anew."""
        self.close()
        for path in (self._prompts_path, self._rows_path):
            path.unlink(missing_ok=True)

    def add_prompts(self, prompts: Sequence[PutPrompt]) -> None:
        """Keep prompts that are put. Raises `OSError`, and keeps none."""
        if self._prompts is None:
            self._cut(self._prompts_path, self._prompts_path.read_bytes().rfind(b"\n") + 1 if self._prompts_path.exists() else 0)
            self._prompts = self._prompts_path.open("ab", buffering=0)
        append_whole(self._prompts, b"".join(msgspec.json.encode(prompt) + b"\n" for prompt in prompts))

    def add_rows(self, rows: Batch, hashes: Array) -> None:
        """Keep completed rows of a group; `hashes` int64 [n], of their prompts. Raises `OSError`, and keeps none."""
        if self._rows is None:
            self._cut(self._rows_path, self._whole_bytes())
            self._rows = self._rows_path.open("ab", buffering=0)
        frame = BytesIO()
        write_frame(frame, [], Batch(rows.indices, np.empty(0, np.int64), {**rows.columns, PROMPT_HASH: hashes}))
        append_whole(self._rows, frame.getvalue())

    def shorten(self, first_group: int) -> None:
        """Forget rows of groups before this one, which are committed and in a checkpoint, once the file is large."""
        if self._rows is None or self._rows.tell() < self._limit:
            return
        content = BytesIO()
        for batch in self._frames():
            if len(kept := _of_groups(batch, self._group_bits, first_group)):
                write_frame(content, [], kept)
        self._rows.close()
        self._rows = None
        replace_file(self._rows_path, content.getvalue())
        self._limit = max(MAX_BYTES, 2 * len(content.getvalue()))

    def read(self, num_prompts: int, first_group: int, completed: Batch | None, outputs: Container[str]) -> Kept:
        """Rows for a run whose checkpoint has the prompts with a number below this one and no group before `first_group` to train.

        Rows of a group that has had several prompts, in attempts that were lost, are those that answer the last one.

        `completed`: rows that are in the checkpoint. Where both have some, they are joined by the columns that generation
        gives (`outputs`): what other tasks have added is made again.
        """
        lines = self._prompts_path.read_bytes().split(b"\n")[:-1] if self._prompts_path.exists() else []
        try:
            prompts = [put for line in lines if (put := msgspec.json.decode(line, type=PutPrompt)).number >= num_prompts]
        except msgspec.DecodeError as error:
            raise RunError(f"{self._prompts_path} cannot be read, and has prompts that clients have put: {error}") from error
        frames = [_of_groups(batch, self._group_bits, first_group) for batch in self._frames()]
        frames = [batch for batch in frames if len(batch)]
        hashes = {
            row >> self._group_bits: int(of_prompt)
            for batch in frames
            for row, of_prompt in zip(batch.indices.tolist(), batch.dense(PROMPT_HASH).tolist(), strict=True)
        }
        if not frames:
            return Kept(prompts, completed)
        answering = [self._answering(batch, hashes) for batch in frames]
        return Kept(prompts, _joined([*([completed] if completed is not None else []), *answering], outputs), hashes)

    def _answering(self, rows: Batch, hashes: Mapping[int, int]) -> Batch:
        """Rows that answer the prompts that their groups have now."""
        groups = (rows.indices >> self._group_bits).tolist()
        current = np.array([hashes[group] for group in groups], np.int64)
        return _chosen(rows, np.flatnonzero(rows.dense(PROMPT_HASH) == current))

    def close(self) -> None:
        """Close the files."""
        for file in (self._prompts, self._rows):
            if file is not None:
                file.close()
        self._prompts = self._rows = None

    @staticmethod
    def _cut(path: Path, num_bytes: int) -> None:
        """Cut off whatever a process that died had not written whole."""
        if path.exists() and path.stat().st_size > num_bytes:
            os.truncate(path, num_bytes)

    def _whole_bytes(self) -> int:
        """Size of the rows' file up to its last whole frame."""
        end = 0
        if self._rows_path.exists():
            with self._rows_path.open("rb") as file, contextlib.suppress(ValueError):
                for _ in read_frames(file):
                    end = file.tell()
        return end

    def _frames(self) -> list[Batch]:
        """Whole frames of the file; one that was being written when the process died was not told of."""
        found: list[Batch] = []
        if self._rows_path.exists():
            with self._rows_path.open("rb") as file, contextlib.suppress(ValueError):
                for _, batch in read_frames(file):
                    found.append(batch)
        return found


def _of_groups(batch: Batch, group_bits: int, first: int) -> Batch:
    return _chosen(batch, np.flatnonzero(batch.indices >> group_bits >= first))


def _chosen(batch: Batch, chosen: Array) -> Batch:
    return Batch(batch.indices[chosen], batch.groups, {name: taken(values, chosen) for name, values in batch.columns.items()})


def _joined(batches: Sequence[Batch], outputs: Container[str]) -> Batch:
    """Rows of several batches, each once, as the last batch that has it, with these columns."""
    names = [name for name in batches[0].columns if name in outputs and all(name in batch.columns for batch in batches)]
    rows = joined([replace(batch, columns={name: batch.columns[name] for name in names}) for batch in reversed(batches)])
    indices, positions = np.unique(rows.indices, return_index=True)
    return Batch(indices, np.empty(0, np.int64), {name: taken(values, positions) for name, values in rows.columns.items()})
