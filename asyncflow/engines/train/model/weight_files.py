"""A model's files: its weights, read one at a time or in parts, so that no more is read than is needed, and written."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig, GenerationConfig

from asyncflow.model_folder import weight_files
from asyncflow.types import UserError


class WeightFiles(Mapping[str, Tensor]):
    """Weights by Hugging Face name, in the files' own dtype, on the CPU; each is read when it is looked up."""

    def __init__(self, model_path: Path | str) -> None:
        """Open the files of the model at `model_path`. Raises `UserError` if there are none, or if they cannot be read."""
        self._path = Path(model_path)
        self._files: dict[str, Any] = {}  # opened file of each weight
        try:
            for path in weight_files(self._path):
                opened: Any = safe_open(path, framework="pt")
                self._files |= dict.fromkeys(opened.keys(), opened)
        except (OSError, ValueError, SafetensorError) as error:
            reason = str(error).partition("\n")[0]
            raise UserError(f"The weights of the model at {self._path} cannot be read ({reason}): get the files again.") from error

    def __getitem__(self, name: str) -> Tensor:
        return self._files[name].get_tensor(name)

    def __contains__(self, name: object) -> bool:
        return name in self._files

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of all weights by name."""
        return {name: tuple(file.get_slice(name).get_shape()) for name, file in self._files.items()}

    def check(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Check that every weight of `shapes` is there and has that shape. Raises `UserError`."""
        own = self.shapes
        lacking = sorted(name for name, shape in shapes.items() if own.get(name) != shape)
        if lacking:
            raise UserError(
                f"The model at {self._path} lacks {len(lacking)} of its weights, {lacking[0]} the first: get the files again."
            )

    @torch.no_grad()
    def fill(self, part: Tensor, name: str, begin: Sequence[int]) -> None:
        """Copy a part of the weight `name` into `part`, which may have any dtype and device.

        `begin`: the part's first index in each dimension; its extent is the shape of `part`.
        """
        if part.numel():
            part.copy_(self._files[name].get_slice(name)[part_at(begin, part.shape)])


def part_at(begin: Sequence[int], shape: Sequence[int]) -> tuple[slice, ...]:
    """Place of a part of this shape in a whole tensor, from its first index in each dimension."""
    return tuple(slice(at, at + size) for at, size in zip(begin, shape, strict=True))


def write_model(path: Path, source: Path, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Write a model in Hugging Face format: config, generation config (those of the model at `source`) and weights, to `path`.

    `tensors`: (Hugging Face name, tensor on any device), tied ones once, all of one dtype, which is written to the config. All
    tensors are kept in host memory until the last one has come.
    """
    held = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors}
    config = AutoConfig.from_pretrained(source)
    config.dtype = next((tensor.dtype for tensor in held.values()), torch.float32)
    path.mkdir(parents=True, exist_ok=True)
    config.save_pretrained(path)
    if (source / "generation_config.json").is_file():
        GenerationConfig.from_pretrained(source).save_pretrained(path)
    save_file(held, path / "model.safetensors", metadata={"format": "pt"})
