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
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from asyncflow.engines.rollout.checks import check_tensors
from asyncflow.engines.rollout.vllm.look_up import look_up
from asyncflow.model_folder import is_weight, weight_files
from asyncflow.threads import ComputeThread
from asyncflow.types import RunError

_ALIGNMENT = 64

TensorShapes = Mapping[str, tuple[int, ...]]


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
        self._ties_head = bool(json.loads((model_path / "config.json").read_text()).get("tie_word_embeddings"))
        self._thread = ComputeThread("vllm weights")

    @cached_property
    def _shapes(self) -> TensorShapes:
        return shapes_of(self._model_path)

    @cached_property
    def _pieces(self) -> dict[str, tuple[str, int, int]]:
        """Rows of a version's tensors that are tensors of their own in files: see `asyncflow.engines.train.file_pieces`."""
        if not any(".experts." in name for name in self._shapes):
            return {}
        return {name: tuple(piece) for name, piece in look_up("file_pieces", "the experts' tensors", self._model_path).items()}

    @property
    def wholes(self) -> dict[str, str]:
        """For tensors that are pieces of a version's, in files as a rule: that one's name. A version has what the trainer's module
        has: all experts of a layer in one tensor."""
        return {name: whole for name, (whole, *_) in self._pieces.items()}

    def _checked(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        cut = {
            name: _rows(tensors[whole], first, count, self._shapes[name])
            for name, (whole, first, count) in self._pieces.items()
            if name in self._shapes and whole in tensors and whole not in self._shapes
        }
        if cut:
            gone = {whole for whole, *_ in self._pieces.values()}
            tensors = {**{name: tensor for name, tensor in tensors.items() if name not in gone}, **cut}
        return check_tensors(tensors, self._shapes, ties_head=self._ties_head)

    @property
    def file(self) -> WeightsFile | None:
        """File that holds `version`; None where the model's own files do."""
        return self._file if self._is_in_file else None

    def hold(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy the tensors of `version`. Raises `ValueError` for what the model does not take."""
        self._file.write(self.version, self._checked(tensors))
        self._is_in_file = True

    async def prepare(self, version: int, tensors: Mapping[str, Tensor]) -> None:
        """Copy the next version's tensors, in a thread of its own. Raises `ValueError` for what the model does not take."""
        self.prepared = None
        await self._thread.run(lambda: self.next_file.write(version, self._checked(tensors)))
        self.prepared = version

    async def write_over(self, version: int, tensors: Mapping[str, Tensor]) -> None:
        """Copy the tensors of the version that servers are to have next over those that they have, while none reads them.

        Ends with the copy, also where it is cancelled. Raises `ValueError`, changing nothing, for what the model does not take.
        """

        def write() -> None:
            self._file.write(version, self._checked(tensors))
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
        return TensorsInFiles(self._model_path, without=[*self.tied])

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
        """`dtype`: torch's name of the one that all tensors are kept in."""
        self.version: int | None = None
        self._dtype: torch.dtype = getattr(torch, dtype)
        self._dtype_name = dtype
        self._fd = os.memfd_create("asyncflow-weights", os.MFD_CLOEXEC)
        self._num_bytes = 0
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._tensors: list[tuple[str, list[int], int]] = []

    def write(self, version: int, tensors: Mapping[str, Tensor]) -> None:
        """Copy a version's tensors. Raises `RunError` if there is no memory for them."""
        self.version = None
        places, end = [], 0
        for name, tensor in sorted(tensors.items()):
            places.append((name, list(tensor.shape), end))
            end += -(-math.prod(tensor.shape) * self._dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
        self._reserve(end)
        self._tensors = places
        with torch.no_grad():
            for name, shape, offset in places:
                self._view(shape, offset).copy_(tensors[name])
        self.version = version

    def description(self) -> dict[str, Any]:
        """Facts that a process needs in order to read it; goes over the wire as JSON."""
        assert self.version is not None, "`write` first"
        return {
            "path": f"/proc/{os.getpid()}/fd/{self._fd}",
            "num_bytes": self._num_bytes,
            "dtype_name": self._dtype_name,
            "tensors": self._tensors,
        }

    def tensors(self) -> dict[str, Tensor]:
        """Views of what is held, by name."""
        return {name: self._view(shape, offset) for name, shape, offset in self._tensors}

    def close(self) -> None:
        """Give up the file; a process that has mapped it keeps it until then."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _view(self, shape: list[int], offset: int) -> Tensor:
        return self._buffer[offset : offset + math.prod(shape) * self._dtype.itemsize].view(self._dtype).view(shape)

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

    def __init__(self, model_path: Path, without: Sequence[str] = ()) -> None:
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
