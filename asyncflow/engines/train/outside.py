"""Train engine of a run that a process from outside trains: it hands micro-batches to a desk, and takes weights from there.

    train loop --forward_backward--> desk     (returns at once: the gradient is made outside)
               --optim_step--------> desk ... a file of weights, checked and loaded

What is left to it is all that makes a version of the run: publishing, checkpoints, the final model. The figures of losses and the
optimiser's state are the outside trainer's own.

Left out: several data-parallel ranks (outside trainers share the groups of a step among themselves), several updates a step.
"""

from __future__ import annotations

import asyncio
import hashlib
import shutil
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING

from asyncflow.engines.base import MicroBatch, MicroBatchResult, OptimResult, TrainEngineOptions
from asyncflow.engines.train.checks import check_outside, model_fields
from asyncflow.engines.train.experience import Desk, Experience
from asyncflow.types import Array, HeldWeights, Objective, Ragged, RunError, WeightSource

if TYPE_CHECKING:
    from torch import Tensor

STATE_FILE = "weights.safetensors"
UPDATES_FILE = "updates"


class OutsideTrainEngine:
    """Implements `TrainEngine`."""

    device = "cpu"
    data_parallel_rank: int | None = 0

    def __init__(self, model_path: Path, options: TrainEngineOptions, desk: Desk) -> None:
        """Loads the weights that the run starts from. Raises `UserError` for options that it does not have."""
        check_outside(options, model_fields(model_path))
        self._model_path, self._desk = model_path, desk
        self._weights = _loaded(model_path)
        self._updates = 0

    async def follow(self, objective: Objective, busy: Callable[[str], AbstractContextManager[object]]) -> None:
        """See `TrainEngine`. There is nobody to follow."""

    async def begin_step(self) -> None:
        """See `ModelTraining`."""
        await self._desk.begin(self._updates)

    async def forward_backward(self, micro_batches: Sequence[MicroBatch], objective: Objective) -> list[MicroBatchResult]:
        """Hand them to the desk. The results are known at once, but for the loss, which is reported as 0."""
        await self._desk.offer([Experience.of(batch) for batch in micro_batches])
        return [
            MicroBatchResult(
                loss_sum=0.0,
                loss_tokens=int(batch.loss_mask.values.sum()),
                physical_tokens=len(batch.prompt_ids) + len(batch.response_ids.values),
            )
            for batch in micro_batches
        ]

    async def optim_step(self, normaliser: int) -> OptimResult:
        """Wait for weights from outside, and take them."""
        while True:
            published = await self._desk.update(normaliser)
            try:
                if published.path:
                    self._weights = await asyncio.to_thread(self._taken, Path(published.path))
            except (OSError, ValueError) as error:
                await self._desk.report_taken(f"these weights cannot be taken: {error}")
                continue
            self._updates += 1
            await self._desk.report_taken("")
            return OptimResult(published.grad_norm, published.learning_rate, skipped=not published.path)

    async def discard(self) -> None:
        """See `ModelTraining`."""
        self._updates += 1  # the step is over
        await self._desk.discard()

    async def log_probs(
        self,
        prompt_ids: Array,
        response_ids: Ragged,
        target_ids: Ragged | None = None,
        temperature: float | None = None,
        rounded_to: str | None = None,
    ) -> Ragged:
        """Raises `RuntimeError`: no model is computed here."""
        raise RuntimeError("a run that is trained from outside computes no log-probs")

    async def export_weights(self) -> WeightSource:
        """See `TrainEngine`."""
        return HeldWeights(self._weights)

    async def fingerprint(self) -> Mapping[str, str]:
        """See `ModelTraining`; without the optimiser's state, which is not here."""

        def hashes() -> dict[str, str]:
            return {
                f"weights/{name}": hashlib.sha256(tensor.contiguous().view(-1).numpy().tobytes()).hexdigest()
                for name, tensor in self._weights.items()
            }

        return await asyncio.to_thread(hashes)

    async def save(self, path: Path) -> None:
        """See `ModelTraining`."""

        def write() -> None:
            path.mkdir(parents=True, exist_ok=True)
            _write(self._weights, path / "model.safetensors")
            for name in ("config.json", "generation_config.json"):
                if (self._model_path / name).exists():
                    shutil.copyfile(self._model_path / name, path / name)

        await asyncio.to_thread(write)

    async def save_state(self, folder: Path) -> Awaitable[None]:
        """See `ModelTraining`. The tensors are never changed in place, so they can be written behind the next step."""
        weights, updates = self._weights, self._updates

        def write() -> None:
            folder.mkdir(parents=True, exist_ok=True)
            _write(weights, folder / STATE_FILE)
            (folder / UPDATES_FILE).write_text(str(updates))

        return asyncio.ensure_future(asyncio.to_thread(write))

    async def load_state(self, folder: Path) -> None:
        """See `ModelTraining`."""
        try:
            self._weights = await asyncio.to_thread(self._taken, folder / STATE_FILE)
            self._updates = int((folder / UPDATES_FILE).read_text())
        except (OSError, ValueError) as error:
            raise RunError(f"the state in {folder} is not of this model: {error}") from error

    async def close(self) -> None:
        """See `ModelTraining`."""

    def _taken(self, path: Path) -> dict[str, Tensor]:
        """Weights of a file or folder. Raises `ValueError` where they are not this model's, or are no numbers."""
        import torch

        weights = _loaded(path)
        if "lm_head.weight" not in self._weights:  # it is tied to the embeddings, which are there
            weights.pop("lm_head.weight", None)
        if strange := sorted(weights.keys() ^ self._weights.keys()):
            raise ValueError(f"{strange[0]!r} is in one of the two models and not in the other")
        for name, tensor in weights.items():
            if tensor.shape != self._weights[name].shape:
                raise ValueError(f"{name!r} has shape {tuple(tensor.shape)} and not {tuple(self._weights[name].shape)}")
            if not bool(torch.isfinite(tensor).all()):
                raise ValueError(f"{name!r} holds what is no finite number")
        return weights


def _loaded(path: Path) -> dict[str, Tensor]:
    """Tensors of a safetensors file, or of all in a folder, in memory of their own; floating-point ones as float32, as the train
    engines have them. Raises `ValueError` for files of another format."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    if not files:
        raise ValueError(f"there is no safetensors file in {path}")
    try:
        found = {name: tensor for file in files for name, tensor in load_file(file).items()}
    except SafetensorError as error:
        raise ValueError(f"{path} is no safetensors file: {error}") from error
    return {name: (tensor.float() if tensor.is_floating_point() else tensor).clone() for name, tensor in sorted(found.items())}


def _write(weights: Mapping[str, Tensor], file: Path) -> None:
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file(dict(weights), file, metadata={"format": "pt"})
    except SafetensorError as error:  # of a full disk, too
        raise RunError(f"{file} could not be written: {error}") from error
