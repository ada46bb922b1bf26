"""Versions that are low-rank adapters, on vLLM's servers: each has a name, and a request names the one that makes it.

    install -> a folder of PEFT's files -> every server loads it by its name -> requests that begin from then on name it
    a version that no request names any more, and that is not the current one -> every server unloads it -> its folder goes

So a response is made by one version, whatever is installed meanwhile, and nothing is paused. The folders are private to this user,
and in shared memory where there is any. An adapter is checked against the model's modules, as the trainer has them, which a process
of its own looks up once: this one does without transformers.
"""

from __future__ import annotations

import itertools
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Final

from asyncflow.engines.lora import check_lora, read_lora
from asyncflow.engines.lora_files import write_lora
from asyncflow.engines.rollout.vllm.look_up import look_up
from asyncflow.types import LoraSpec, UserError

if TYPE_CHECKING:
    from torch import Tensor

_SHARED_MEMORY: Final = Path("/dev/shm")


@dataclass(slots=True, eq=False)
class LoraVersion:
    """Version that servers know by `name`, from the files in `folder`; both None for the base alone."""

    version: int
    name: str | None = None
    folder: Path | None = None
    num_requests: int = 0


class LoraVersions:
    """The versions of one engine. `current`: the one that requests name that begin now."""

    def __init__(self, model_path: Path, spec: LoraSpec, version: int, on_ended: Callable[[], None]) -> None:
        """`version` is that of the adapter in `spec.path`, or of the base alone. `on_ended` is called when a request that named a
        version has ended. Raises `UserError` for files that do not fit."""
        self._model_path, self.spec, self._on_ended = model_path, spec, on_ended
        self._root = Path(tempfile.mkdtemp(prefix="asyncflow-lora-", dir=_SHARED_MEMORY if _SHARED_MEMORY.is_dir() else None))
        self._numbers = itertools.count(1)
        self._older: list[LoraVersion] = []
        self.current = LoraVersion(version)
        if spec.path is not None:
            self.current = self.write(version, read_lora(Path(spec.path), spec))

    def write(self, version: int, tensors: Mapping[str, Tensor]) -> LoraVersion:
        """Write a version's files; without tensors it is the base. The first call takes seconds, to look up the shapes.

        Raises `ValueError` for an adapter that does not fit.
        """
        if not tensors:
            return LoraVersion(version)
        try:
            check_lora(tensors, self._shapes, "the adapter")
        except UserError as error:
            raise ValueError(str(error)) from error
        # Numbered, since a version may be installed again: vLLM would answer by the keys that it has of that name.
        name = f"version-{version}-{next(self._numbers)}"
        write_lora(self._root / name, self.spec, self._model_path, {n: t.float().cpu().numpy() for n, t in tensors.items()})
        return LoraVersion(version, name, self._root / name)

    @cached_property
    def _shapes(self) -> dict[str, tuple[int, int]]:
        """Shapes of the adapter that the trainer has, by name."""
        found = look_up("adapter_shapes", "the adapter's shapes", self._model_path, self.spec.rank, *self.spec.targets)
        return {name: (rows, columns) for name, (rows, columns) in found.items()}

    def tensors(self, version: LoraVersion) -> dict[str, Tensor]:
        """Tensors in a version's files, float32; of the base none."""
        return {} if version.folder is None else read_lora(version.folder, self.spec)

    def use(self, version: LoraVersion) -> None:
        """Have requests that begin from now on name this version."""
        self._older.append(self.current)
        self.current = version

    @contextmanager
    def request(self) -> Iterator[LoraVersion]:
        """Context of a request that names the current version, which stays on the servers until then."""
        version = self.current
        version.num_requests += 1
        try:
            yield version
        finally:
            version.num_requests -= 1
            self._on_ended()

    def take_unused(self) -> list[LoraVersion]:
        """Versions that no request names any more, to be unloaded; they are forgotten here."""
        unused = [version for version in self._older if not version.num_requests]
        self._older = [version for version in self._older if version.num_requests]
        return [version for version in unused if version.name is not None]

    def remove(self, version: LoraVersion) -> None:
        """Remove a version's files."""
        if version.folder is not None:
            shutil.rmtree(version.folder, ignore_errors=True)

    def close(self) -> None:
        """Remove all files."""
        shutil.rmtree(self._root, ignore_errors=True)
