"""A model that a client trains: its train engine, and its requests in the order of their numbers.

    submit -> [request_order.py] -> one task: forward_backward, optim_step, save, load ... -> results.py
                                              |
                                     the engine's compute thread, or one that computes for several (training_passes.py)

consumes: requests with a number each, in any order, also repeated
waits for: the request with the next number
is unblocked by: `submit`

The models of several clients have an engine and a thread each, so their requests are computed side by side, or as rows of one pass
where there are more of them than cores. The gradient of a step is the sum over its `forward_backward` requests: `optim_step`
divides by nothing, as the API has it.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final

import numpy as np
import torch

from asyncflow.engines.base import TrainEngine
from asyncflow.service.tinker.answers import Answer, Failure, Fields, PassOutput
from asyncflow.service.tinker.checkpoint_store import MODEL_DIR, STATE_DIR, Checkpoint, CheckpointKind, Record
from asyncflow.service.tinker.context import ServerContext
from asyncflow.service.tinker.examples import LossInputs, loss_inputs
from asyncflow.service.tinker.losses import Loss, Recording, make_loss
from asyncflow.service.tinker.messages import AdamParams, LoraConfig, PassRequest, SaveWeights
from asyncflow.service.tinker.request_order import RequestOrder
from asyncflow.types import Array, Ragged, RunError, TokenBatch, UserError

log = logging.getLogger(__name__)
TrainingRequest = Callable[[], Awaitable[Answer]]
_BROKEN_STEP: Final = "optim_step leaves the weights as they are, and begins the next step"
TOKENIZER_FILES: Final = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "special_tokens_map.json")


class TrainedModel:
    """A model in training. `run` serves its requests until `close`. `last_request`: Unix time of the last one."""

    def __init__(self, model_id: str, context: ServerContext, *, rank: int, adapter: LoraConfig | None) -> None:
        """`rank`: of the adapter that the client asks for; older SDKs want to hear it again. `adapter`: the one that is trained;
        None: all weights are. A checkpoint that is loaded brings its own."""
        self.model_id, self.base, self.rank = model_id, context.base, rank
        self.is_lora, self._adapter = adapter is not None, adapter
        self.last_request = time.time()
        self._make_engine, self._store, self._results = context.make_engine, context.store, context.results
        self._passes = context.passes
        self._micro_batch_tokens = context.bounds.micro_batch_tokens
        self._order: RequestOrder[TrainingRequest] = RequestOrder(context.bounds.queue, context.bounds.queue_bytes)
        self._has_request = asyncio.Event()
        self._engine: TrainEngine | None = None
        self._broken = ""  # why the present step cannot be completed
        self._num_snapshots = 0

    async def open(self, checkpoint: Checkpoint | None = None, *, has_optimizer: bool = False) -> None:
        """Load the base model, or a checkpoint, with the optimiser's state or without. Raises `UserError`."""
        folder = None if checkpoint is None else checkpoint.model
        state = None if checkpoint is None or not has_optimizer else checkpoint.folder / STATE_DIR
        if checkpoint is not None and checkpoint.record.base_model != self.base.name:
            raise UserError(f"{checkpoint.path} is of {checkpoint.record.base_model}, and this model of {self.base.name}")
        if state is not None and not state.is_dir():
            raise UserError(f"{checkpoint.path if checkpoint else ''} has no optimiser state: it was saved for sampling")
        if self._engine is not None:  # first, so that no memory is needed for two
            await self._engine.close()
            self._engine = None
        engine = await self._made(folder)
        try:
            if state is not None:
                await engine.load_state(state)
            await engine.begin_step()
        except BaseException:  # also where the session ends meanwhile: nobody else knows of it
            await engine.close()
            raise
        self._engine, self._broken = engine, ""
        if checkpoint is not None:
            self.is_lora, self.rank = checkpoint.record.is_lora, checkpoint.record.rank

    def submit(self, number: int | None, content: bytes, work: TrainingRequest, num_bytes: int = 0) -> str:
        """Have work done after the requests before it. Returns the request's id, the same for a request that is repeated.

        Raises `ValueError` for a number that belongs to another request, and `Busy`.
        """
        owner = self.model_id.partition(":")[0]
        self._results.check_room(owner)  # before it has a number: that is not taken back
        number, is_new = self._order.offer(number, content, work, num_bytes)
        request_id = f"{self.model_id}:{number}"
        if is_new:
            self._results.begin(request_id, owner)
            self._has_request.set()
        return request_id

    async def run(self) -> None:
        """Do the work of one request after another."""
        while True:
            number = self._order.next_number
            work = self._order.take()
            if work is None:
                self._has_request.clear()
                await self._has_request.wait()
                continue
            self._results.settle(f"{self.model_id}:{number}", await answered(work()))

    async def close(self) -> None:
        """Let the engine go, and remove the snapshots, and what a save that was cut off has left."""
        if self._engine is not None:
            await self._engine.close()
            self._engine = None
        await asyncio.to_thread(self._store.forget_snapshots, self.model_id)
        await asyncio.to_thread(self._store.forget_unfinished, self.model_id)

    async def do_pass(self, request: PassRequest) -> Answer:
        """`forward`, or `forward_backward`, which adds to the step's gradient."""
        loss = make_loss(request.loss, request.loss_options)
        inputs = await asyncio.to_thread(
            loss_inputs,
            request.examples,
            loss,
            vocab_size=self.base.vocab_size,
            max_context=self.base.max_context,
        )
        if not request.is_forward_only and self._broken:
            raise UserError(self._broken)
        found: list[Array] = [np.zeros(0, np.float32)] * len(inputs.token_ids)
        total = 0.0
        for numbers, logprobs, loss_sum in await self._computed(inputs, loss, request.is_forward_only):
            total += loss_sum
            for number, values in zip(numbers, logprobs, strict=True):
                found[number] = values
        return PassOutput(Ragged.from_arrays(found, "float32"), {"loss:sum": total})

    async def _computed(self, inputs: LossInputs, loss: Loss, is_forward_only: bool) -> list[tuple[list[int], Ragged, float]]:
        """Results of a computation: of each micro-batch its examples, their log-probs, and its loss."""
        engine, recording, made = self.engine, Recording(loss), []
        for numbers, batch in inputs.micro_batches(self._micro_batch_tokens):
            if is_forward_only:
                logprobs = await engine.log_probs(batch.prompt_ids, batch.response_ids, batch.target_ids)
                made.append((numbers, logprobs, _loss_of(loss, logprobs, batch.rollout_logprobs, batch.token_advantages)))
                continue
            try:
                result = await self._passes.forward_backward(engine, batch, recording)
            except Exception as error:
                self._broken = f"a pass of this step has failed ({error}), so its gradient is incomplete: {_BROKEN_STEP}"
                raise
            logprobs = Ragged(recording.take(), batch.response_ids.offsets)
            if not result.is_finite:
                self._broken = (
                    f"the loss of datum {numbers[0]} or one after it was not finite, so the gradient of this step is incomplete: "
                    f"{_BROKEN_STEP}"
                )
                raise UserError(self._broken)
            made.append((numbers, logprobs, result.loss_sum))
        return made

    async def optim_step(self, params: AdamParams) -> Answer:
        """Update the weights by the step's gradient, and begin the next step."""
        engine = self.engine
        if self._broken:
            why, self._broken = self._broken, ""
            await engine.discard()
            await engine.begin_step()
            raise UserError(why)
        await engine.set_hyperparameters(params.hyperparameters)
        result = await engine.optim_step(1)
        await engine.begin_step()
        skipped = {"skipped": 1.0} if result.skipped else {}
        return Fields({"metrics": {"grad_norm": result.grad_norm, **skipped}, "type": "optim_step"})

    async def save(self, request: SaveWeights, kind: CheckpointKind, number: int | str) -> Checkpoint:
        """Save weights, and for the kind `weights` the optimiser's state. Raises `UserError`."""
        name, engine = request.path or f"step-{number}", self.engine
        partial = await asyncio.to_thread(lambda: self._store.begin(self.model_id, kind, name, overwrite=request.overwrite))
        try:
            await self._save_model(partial / MODEL_DIR)
            if kind == "weights":
                await (await engine.save_state(partial / STATE_DIR))
            now = time.time()
            record = Record(
                base_model=self.base.name,
                rank=self.rank,
                is_lora=self.is_lora,
                created=now,
                expires=None if request.ttl_seconds is None else now + request.ttl_seconds,
                user_metadata=request.user_metadata,
            )
            return await asyncio.to_thread(self._store.commit, self.model_id, kind, name, record)
        except Exception:  # of a full disk, say, which is then wanted back
            await asyncio.to_thread(self._store.forget_unfinished, self.model_id)
            raise

    async def save_snapshot(self) -> Path:
        """Save weights for a sampler without a name. Returns the model's folder; the newest snapshots stay."""
        self._num_snapshots += 1
        folder = await asyncio.to_thread(self._store.begin_snapshot, self.model_id, self._num_snapshots)
        await self._save_model(folder)
        await asyncio.to_thread(self._store.trim_snapshots, self.model_id)
        return folder

    @property
    def engine(self) -> TrainEngine:
        """The engine. Raises `RunError` if the model could not be loaded."""
        if self._engine is None:
            raise RunError(f"the model {self.model_id} is not loaded: its last load failed")
        return self._engine

    async def _made(self, folder: Path | None) -> TrainEngine:
        """A new engine. One that is made when nobody waits for it any more is closed."""
        making = asyncio.create_task(asyncio.to_thread(self._make_engine, folder, self._adapter))
        try:
            return await asyncio.shield(making)
        except asyncio.CancelledError:
            making.add_done_callback(_close_made)
            raise

    async def _save_model(self, folder: Path) -> None:
        await self.engine.save(folder)
        for name in TOKENIZER_FILES:
            if (self.base.folder / name).is_file():
                shutil.copyfile(self.base.folder / name, folder / name)


def _close_made(making: asyncio.Task[TrainEngine]) -> None:
    if not making.cancelled() and making.exception() is None:
        _closing.add(closing := asyncio.create_task(making.result().close()))
        closing.add_done_callback(_closing.discard)


_closing: set[asyncio.Task[None]] = set()  # the event loop itself holds tasks only weakly


async def answered(work: Awaitable[Answer]) -> Answer:
    """Answer of some work, or why it failed."""
    try:
        return await work
    except (UserError, ValueError) as error:
        return Failure(str(error))
    except (RunError, OSError) as error:
        return Failure(str(error), "server")
    except Exception as error:  # whatever it is, the client that waits for the result must hear of it, and others are served
        log.exception("a request of the Tinker API failed")
        return Failure(f"the server failed: {type(error).__name__}", "server")


def _loss_of(loss: Loss, logprobs: Ragged, sampled: Ragged, coefficients: Array) -> float:
    """Loss of log-probs that have no gradient."""
    logprobs_T, sampled_T, coefficients_T = (torch.tensor(v) for v in (logprobs.values, sampled.values, coefficients))
    mask_T = (coefficients_T != 0).float()
    row_T = torch.from_numpy(np.repeat(np.arange(len(logprobs)), logprobs.lengths))
    batch = TokenBatch(
        logprobs_T=logprobs_T,
        old_logprobs_T=sampled_T,
        rollout_logprobs_T=sampled_T,
        ref_logprobs_T=None,
        entropy_T=torch.zeros_like(logprobs_T),
        advantages_T=coefficients_T,
        mask_T=mask_T,
        row_T=row_T,
        row_tokens_R=torch.zeros(len(logprobs)).index_add(0, row_T, mask_T),
    )
    return float(loss.loss(batch).loss)
