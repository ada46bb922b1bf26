"""Weights in memory that vLLM's processes map.

    tensors (any float dtype) --copy, cast--> a file without a name (memfd) <--map-- each process of each vLLM instance

The file is found at /proc/<this process>/fd/<n> by processes of the same user, and is gone with this process, killed or not: there
is nothing to sweep, and no limit of /dev/shm applies. It is the engine's own copy: nobody writes over it while an instance reads,
and an instance that is started again can have it.
"""

from __future__ import annotations

import asyncio
import json
import math
import mmap
import os
from collections.abc import Collection, Iterator, Mapping, Set
from functools import cached_property
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
import torch
from safetensors import safe_open
from torch import Tensor

from asyncflow.engines.rollout.checks import check_tensors
from asyncflow.engines.rollout.vllm.look_up import look_up
from asyncflow.model_folder import FileTensors, is_weight, weight_files
from asyncflow.threads import ComputeThread
from asyncflow.types import RunError

_ALIGNMENT = 64

TensorShapes = Mapping[str, tuple[int, ...]]


class Differences(NamedTuple):
    """How tensors of servers, and of a model's files, differ from a version's. A version has what the trainer's module has: all
    experts of a layer in one tensor, say. `tied`: other names of tensors in a server's model. `wholes`: of tensors that are pieces
    of a version's, in files as a rule, that one's name. `constants`: names of tensors that no version has. `unused`: what is in
    files alone; each is read when it is asked for."""

    tied: Mapping[str, str] = {}
    wholes: Mapping[str, str] = {}
    constants: Set[str] = frozenset()
    unused: Mapping[str, Tensor] = {}


NO_DIFFERENCES: Final = Differences()


class ServerWeights:
    """The version that the servers are to have, and, where it is prepared beside generation, the one that is to come next, each in
    a file."""

    def __init__(self, model_path: Path, dtype: str, version: int) -> None:
        """`version` is that of the model's own files, which servers start from, and in no file here before `hold`."""
        self.version, self.dtype = version, dtype
        self.prepared: int | None = None
        """The version in `next_file`."""
        self.next_file = WeightsFile(dtype)
        self._file, self._is_in_file = WeightsFile(dtype), False
        self._model_path = model_path
        self._found: FileTensors | None = None
        self._is_looked_up = False
        self.constants: dict[str, Tensor] = {}
        """Tensors that servers have, and no version, as they are in the model's files."""
        self._unused: Mapping[str, Tensor] = {}
        self._ties_head = bool(json.loads((model_path / "config.json").read_text()).get("tie_word_embeddings"))
        self._thread = ComputeThread("vllm weights")

    @cached_property
    def _in_files(self) -> TensorShapes:
        return shapes_of(self._model_path)

    @property
    def _files(self) -> FileTensors:
        if self._found is None:
            self._found = FileTensors()
            if any(".experts." in name for name in self._in_files):
                self.find_differences()
        return self._found

    def find_differences(self) -> bool:
        """Look up how the model's files differ from a version, if nobody has. Returns whether that has told anything new. Blocks
        for seconds."""
        if self._is_looked_up:
            return False
        self._found = msgspec.convert(look_up("file_tensors", "the tensors in the model's files", self._model_path), FileTensors)
        self._is_looked_up = True
        in_files, unused = TensorsInFiles(self._model_path), {*self._found.unused}
        self.constants = {name: in_files[name] for name in self._found.constants}
        self._unused = TensorsInFiles(self._model_path, without=in_files.keys() - unused) if unused else {}
        return self._found != FileTensors()

    @property
    def differences(self) -> Differences:
        """Differences between servers' tensors and a version's."""
        wholes = {name: whole for name, (whole, *_) in self._files.pieces.items()}
        return Differences(self.tied, wholes, self.constants.keys(), self._unused)

    def _checked(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        if self._in_files.keys() - tensors.keys() - self.tied.keys() and self._files == FileTensors():
            self.find_differences()
        files = self._files
        of_files = {*files.unused, *files.constants}
        given = {name: tensor for name, tensor in tensors.items() if name not in of_files}
        for name, right in self.constants.items():
            if name in tensors and not right.to(tensors[name].dtype).equal(tensors[name]):
                raise ValueError(f"{name} is another than in the model's files, and nothing trains it")
        shapes = {name: shape for name, shape in self._in_files.items() if name not in of_files}
        pieces: dict[str, dict[str, Tensor | None]] = {}
        for name, (whole, first, count) in files.pieces.items():
            if whole in given and whole not in shapes:
                piece = _rows(given[whole], first, count, shapes[name]) if name in shapes else None
                pieces.setdefault(whole, {})[name] = piece
        for whole, cut in pieces.items():
            own = {name: piece for name, piece in cut.items() if piece is not None}
            if len(own) == len(cut):  # else nobody would take a part of it
                del given[whole]
                given |= own
        return {**self.constants, **check_tensors(given, shapes, ties_head=self._ties_head)}

    def _write(self, file: WeightsFile, version: int, tensors: Mapping[str, Tensor]) -> None:
        file.write(version, self._checked(tensors), as_they_are=self.constants.keys())

    @property
    def file(self) -> WeightsFile | None:
        """File that holds `version`; None where the model's own files do."""
        return self._file if self._is_in_file else None

    def hold(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy the tensors of `version`. Raises `ValueError` for what the model does not take."""
        self._write(self._file, self.version, tensors)
        self._is_in_file = True

    async def prepare(self, version: int, tensors: Mapping[str, Tensor]) -> None:
        """Copy the next version's tensors, in a thread of its own. Raises `ValueError` for what the model does not take."""
        self.prepared = None
        await self._thread.run(lambda: self._write(self.next_file, version, tensors))
        self.prepared = version

    async def write_over(self, version: int, tensors: Mapping[str, Tensor]) -> None:
        """Copy the tensors of the version that servers are to have next over those that they have, while none reads them.

        Ends with the copy, also where it is cancelled. Raises `ValueError`, changing nothing, for what the model does not take.
        """

        def write() -> None:
            self._write(self._file, version, tensors)
            self.version, self._is_in_file = version, True

        writing = asyncio.ensure_future(self._thread.run(write))
        try:
            await asyncio.shield(writing)
        finally:
            await asyncio.wait([writing])

    def take_prepared(self) -> None:
        """Take what was prepared: from here on the servers are to have the next version."""
        assert self.prepared is not None, "`prepare` first"
        self.version, self.prepared, self._is_in_file = self.prepared, None, True
        self._file, self.next_file = self.next_file, self._file

    def tensors(self) -> Mapping[str, Tensor]:
        """Tensors of `version`, valid until the next one is there; those of the model's own files are read one at a time."""
        if self._is_in_file:
            return self._file.tensors()
        return TensorsInFiles(self._model_path, without=[*self.tied, *self._files.unused])

    @property
    def tied(self) -> dict[str, str]:
        """Names of tensors that are in no version, each with that of the tensor that it is."""
        return {"lm_head.weight": "model.embed_tokens.weight"} if self._ties_head else {}

    def close_thread(self) -> None:
        """Prepare no more."""
        self._thread.close()

    def close(self) -> None:
        """Give up both files; a server that has mapped one keeps it."""
        self._file.close()
        self.next_file.close()


def _rows(tensor: Tensor, first: int, count: int, shape: tuple[int, ...]) -> Tensor:
    rows = (tensor.reshape(-1, tensor.shape[-1]) if tensor.ndim > 1 else tensor)[first : first + count]
    return rows.reshape(shape) if rows.numel() == math.prod(shape) else rows  # which `check_tensors` names


class WeightsFile:
    """Holds one version at a time; its memory is allocated once."""

    def __init__(self, dtype: str) -> None:
        """`dtype`: torch's name of the one that tensors are kept in."""
        self.version: int | None = None
        self._dtype: torch.dtype = getattr(torch, dtype)
        self._dtype_name = dtype
        self._fd = os.memfd_create("asyncflow-weights", os.MFD_CLOEXEC)
        self._num_bytes = 0
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._tensors: list[tuple[str, list[int], int]] = []
        self._dtypes: dict[str, torch.dtype] = {}

    def write(self, version: int, tensors: Mapping[str, Tensor], *, as_they_are: Set[str] = frozenset()) -> None:
        """Copy a version's tensors; those named in `as_they_are` keep their dtype. Raises `RunError` if there is no memory for
        them."""
        self.version = None
        places, end = [], 0
        dtypes = {name: tensors[name].dtype for name in as_they_are & tensors.keys() if tensors[name].dtype != self._dtype}
        for name, tensor in sorted(tensors.items()):
            places.append((name, list(tensor.shape), end))
            end += -(-math.prod(tensor.shape) * dtypes.get(name, self._dtype).itemsize // _ALIGNMENT) * _ALIGNMENT
        self._reserve(end)
        self._tensors, self._dtypes = places, dtypes
        with torch.no_grad():
            for name, own in self.tensors().items():
                own.copy_(tensors[name])
        self.version = version

    def description(self) -> dict[str, Any]:
        """Facts that a process needs in order to read it; goes over the wire as JSON."""
        assert self.version is not None, "`write` first"
        others = {name: str(dtype).removeprefix("torch.") for name, dtype in self._dtypes.items()}
        return {
            "path": f"/proc/{os.getpid()}/fd/{self._fd}",
            "num_bytes": self._num_bytes,
            "dtype_name": self._dtype_name,
            "tensors": self._tensors,
            **({"dtype_names": others} if others else {}),
        }

    def tensors(self) -> dict[str, Tensor]:
        """Views of what is held, by name."""
        found = {}
        for name, shape, begin in self._tensors:
            dtype = self._dtypes.get(name, self._dtype)
            found[name] = self._buffer[begin : begin + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)
        return found

    def close(self) -> None:
        """Give up the file; a process that has mapped it keeps it until then."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _reserve(self, num_bytes: int) -> None:
        if num_bytes == self._num_bytes:
            return
        os.ftruncate(self._fd, num_bytes)
        try:
            # A store into a mapped page that cannot be had would kill the process; here it is an error.
            os.posix_fallocate(self._fd, 0, num_bytes)
        except OSError as error:
            raise RunError(f"no memory for {num_bytes:,} bytes of weights beside vLLM: {error.strerror}") from error
        self._num_bytes = num_bytes
        self._buffer = torch.frombuffer(mmap.mmap(self._fd, num_bytes), dtype=torch.uint8)


class TensorsInFiles(Mapping[str, Tensor]):
    """Weights in a checkpoint's safetensors files, each read when it is asked for."""

    def __init__(self, model_path: Path, without: Collection[str] = ()) -> None:
        self._files: dict[str, Path] = {}
        for file in weight_files(model_path):
            with safe_open(file, framework="pt") as opened:
                self._files |= {name: file for name in filter(is_weight, opened.keys()) if name not in without}

    def __getitem__(self, name: str) -> Tensor:
        with safe_open(self._files[name], framework="pt") as opened:
            tensor: Tensor = opened.get_tensor(name)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)


def shapes_of(model_path: Path) -> dict[str, tuple[int, ...]]:
    """The weights in a checkpoint's safetensors files, by name; nothing but the files' heads is read."""
    shapes: dict[str, tuple[int, ...]] = {}
    for file in weight_files(model_path):
        with safe_open(file, framework="pt") as opened:
            shapes |= {name: tuple(opened.get_slice(name).get_shape()) for name in filter(is_weight, opened.keys())}
    return shapes
