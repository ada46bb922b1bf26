"""Runs packed micro-batches through the stages of a model: one forward, one backward (1F1B), over sends and receives.

consumes: a round's micro-batches, which every stage has; hidden states from the stage before, their gradients from the one behind
waits for: the neighbouring stages, for at most `timeout_seconds`
is unblocked by: what a neighbour sends, or its end

    stage 0   F0 F1 F2       B0 F3 B1    B2    B3       F hidden states [P, H] -->  the next stage
    stage 1      F0 F1    B0 F2 B1 F3 B2    B3          B gradient [P, H]      -->  the stage before
    stage 2         F0 B0 F1 B1 F2 B2 F3 B3             loss, numbers          -->  every stage, at the end (`results_from_last`)

A stage keeps the activations of at most as many micro-batches as there are stages from it on. Every stage packs each micro-batch
itself, and so knows the shape of what comes: lengths need not be equal (decision 0007).

Left out: receiving beside a computation, and several stages in one process (interleaved schedules).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from itertools import zip_longest
from typing import Protocol, TypeVar

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from asyncflow.engines.base import MicroBatchResult
from asyncflow.engines.train.model.packing import Packed
from asyncflow.engines.train.parallel.one_f_one_b import Crossing, StagePass, crossing, one_forward_one_backward
from asyncflow.engines.train.parallel.stages import PipelineStage
from asyncflow.types import RunError

# P packed tokens of a micro-batch, H hidden elements.

T = TypeVar("T")


class StageModel(Protocol):
    """A stage's part of a model."""

    dtype: torch.dtype
    """Floating-point type of hidden states, on every stage."""

    def stage_forward(self, packed: Packed, hidden_PH: Tensor | None) -> Tensor:
        """The hidden states [P, H] behind the stage's layers, on the last stage behind the norm too.

        `hidden_PH`: those before them, None on the first stage, which has the token ids.
        """
        ...


@dataclass(frozen=True, slots=True, eq=False)
class _StageMessage:
    """Message to or from `peer`, a stage."""

    tensor: Tensor
    peer: int
    what: str


class Pipeline:
    """Pipeline, as one stage sees it. All stages make the same calls, in the same order, with the same micro-batches.

    Every method raises `RunError` when a neighbour is lost or does not answer in time; the pipeline is of no use after that.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        stage: PipelineStage,
        *,
        hidden_size: int,
        device: str | torch.device,
        timeout_seconds: float,
    ) -> None:
        """`group` has a rank for each stage, in order. Hidden states are on `device`, and whole on each rank of a stage.

        Waits for all stages. On other devices than the CPU the deadline of a wait is the group's own.
        """
        self._group, self.stage, self._hidden_size = group, stage, hidden_size
        self._device, self._timeout_seconds = torch.device(device), timeout_seconds
        self._sending: dict[int, tuple[dist.Work, _StageMessage]] = {}  # by peer; a tensor lives until it is received
        # Some backends want all ranks of a group in the first call, which sends and receives between neighbours are not.
        self._broadcast(torch.zeros(1, device=self._device), "greeting")

    def forward_backward(
        self,
        model: StageModel,
        packed: Sequence[Packed],
        loss: Callable[[int, Tensor], Tensor],
        before_backward: Callable[[int], None] = lambda i: None,
        after_backward: Callable[[int], None] = lambda i: None,
        within: Callable[[int], AbstractContextManager[None]] = lambda i: nullcontext(),
    ) -> None:
        """Add the gradients of the micro-batches' losses to `p.grad`, one after the other.

        `loss`, on the last stage alone, is given a micro-batch's number and hidden states [P, H], and returns a scalar that carries
        a gradient to them. One that is not finite makes gradients that are not, on all stages. `before_backward` and
        `after_backward` are called on each stage around a micro-batch's backward pass, which come in their order. `within` makes
        the context that a micro-batch's forward pass and loss are computed in, and its backward pass.
        """
        stage = self.stage
        alive: dict[int, tuple[Tensor | None, Tensor]] = {}  # a micro-batch's hidden states before the stage, and what it makes

        def run(this: StagePass, arrived_PH: Tensor | None) -> Tensor | None:
            i = this.micro_batch
            if this.kind == "forward":
                if arrived_PH is not None:
                    arrived_PH.requires_grad_()
                with within(i):
                    hidden_PH = model.stage_forward(packed[i], arrived_PH)
                    alive[i] = arrived_PH, (loss(i, hidden_PH) if stage.is_last else hidden_PH)
                return hidden_PH.detach()
            before_backward(i)
            before_PH, made = alive.pop(i)
            with within(i):
                torch.autograd.backward(made, arrived_PH)
            return None if before_PH is None else before_PH.grad

        def after(this: StagePass) -> None:
            if this.kind == "backward":
                after_backward(this.micro_batch)

        order = one_forward_one_backward(stage.index, stage.num_stages, len(packed))
        self._run(order, packed, model.dtype, run, after)

    @torch.no_grad()
    def forward(self, model: StageModel, packed: Sequence[Packed], outcome: Callable[[int, Tensor], T]) -> list[T]:
        """On the last stage what `outcome` makes of each micro-batch's number and hidden states [P, H], elsewhere nothing."""
        outcomes = []

        def run(this: StagePass, arrived_PH: Tensor | None) -> Tensor:
            hidden_PH = model.stage_forward(packed[this.micro_batch], arrived_PH)
            if self.stage.is_last:
                outcomes.append(outcome(this.micro_batch, hidden_PH))
            return hidden_PH

        self._run([StagePass("forward", i) for i in range(len(packed))], packed, model.dtype, run)
        return outcomes

    def results_from_last(self, results: Sequence[MicroBatchResult]) -> list[MicroBatchResult]:
        """The last stage's results, on every stage. What the others give is not looked at."""
        content = msgspec.msgpack.encode(list(results)) if self.stage.is_last else b""
        num_bytes = torch.tensor([len(content)])
        self._broadcast(num_bytes, "size of the results")
        content_B = torch.frombuffer(bytearray(content or int(num_bytes)), dtype=torch.uint8)
        self._broadcast(content_B, "results")
        return msgspec.msgpack.decode(content_B.numpy().tobytes(), type=list[MicroBatchResult])

    def log_probs_from_last(self, log_probs_T: Tensor | None, num_tokens: int) -> Tensor:
        """The last stage's log-probs, float32 [num_tokens], on every stage's CPU. Elsewhere `log_probs_T` is None."""
        values_T = torch.empty(num_tokens) if log_probs_T is None else log_probs_T.to("cpu", torch.float32).contiguous()
        self._broadcast(values_T, "log-probs")
        return values_T

    def add_tied_(self, gradient: Tensor) -> None:
        """Add to `gradient`, a rank's own part of a tied matrix's, in place, that of the other stage that has the matrix.

        For the first and the last stage of a tied model alone. The bits are the same on both, so that equal weights stay equal.
        """
        peer = self.stage.num_stages - 1 if self.stage.is_first else 0
        what = f"gradient of {self.stage.tied_name}"
        mine = _StageMessage(gradient.clone(memory_format=torch.contiguous_format), peer, what)
        other = _StageMessage(torch.empty_like(mine.tensor), peer, what)
        self._wait_for(self._post(mine, other), other)
        self._wait_for_sends()
        gradient.add_(other.tensor)

    def _run(
        self,
        order: Sequence[StagePass],
        packed: Sequence[Packed],
        dtype: torch.dtype,
        run: Callable[[StagePass, Tensor | None], Tensor | None],
        after: Callable[[StagePass], None] = lambda done: None,
    ) -> None:
        """Make the passes in order, each with what arrives for it, and send on what it makes; `after` runs beside the sending."""
        place = (self.stage.index, self.stage.num_stages)
        made_PH: Tensor | None = None
        for done, this in zip_longest([None, *order], order):
            send, receive = None, None
            if (out := crossing(done, *place, is_before=False)) is not None:
                send = self._message(out, packed, dtype, made_PH)
            if (into := crossing(this, *place, is_before=True)) is not None:
                receive = self._message(into, packed, dtype)
            works = self._post(send, receive)
            if done is not None:
                after(done)
            if receive is not None:
                self._wait_for(works, receive)
            if this is not None:
                made_PH = run(this, None if receive is None else receive.tensor)
        self._wait_for_sends()

    def _message(
        self, crossing: Crossing, packed: Sequence[Packed], dtype: torch.dtype, made_PH: Tensor | None = None
    ) -> _StageMessage:
        shape = (packed[crossing.micro_batch].num_tokens, self._hidden_size)
        if made_PH is None:
            made_PH = torch.empty(shape, dtype=dtype, device=self._device)
        elif (made_PH.shape, made_PH.dtype) != (shape, dtype):  # the neighbour would wait for other bytes
            raise ValueError(f"a stage made {crossing.what} {tuple(made_PH.shape)}, {made_PH.dtype}, and not {shape}, {dtype}")
        return _StageMessage(made_PH.contiguous(), crossing.stage, f"{crossing.what} of micro-batch {crossing.micro_batch}")

    def _post(self, send: _StageMessage | None, receive: _StageMessage | None) -> Sequence[dist.Work]:
        """Begin both, and return what the receive has to wait for. A peer is sent nothing before it has what it was sent last."""
        operations = []
        if send is not None:
            self._wait_for_sends(send.peer)
            operations.append(dist.P2POp(dist.isend, send.tensor, group=self._group, group_peer=send.peer))
        if receive is not None:
            operations.append(dist.P2POp(dist.irecv, receive.tensor, group=self._group, group_peer=receive.peer))
        if not operations:
            return []
        with self._named(send or receive):
            works = dist.batch_isend_irecv(operations)  # one for each, or one for all
        if send is not None:
            self._sending[send.peer] = works[0], send
        return works[-1:]

    def _wait_for_sends(self, *peers: int) -> None:
        """Wait until the peers, by default all, have what was sent to them."""
        for peer in peers or tuple(self._sending):
            if peer in self._sending:
                work, message = self._sending.pop(peer)
                self._wait_for([work], message)

    def _broadcast(self, tensor: Tensor, what: str) -> None:
        """Broadcast a tensor from the last stage to all, in place."""
        last = self.stage.num_stages - 1
        message = _StageMessage(tensor, 0 if self.stage.is_last else last, what)
        with self._named(message):
            work = dist.broadcast(tensor, group=self._group, group_src=last, async_op=True)
        self._wait_for([work], message)

    def _wait_for(self, works: Sequence[dist.Work], message: _StageMessage) -> None:
        with self._named(message):
            for work in works:
                # Elsewhere than on the CPU a deadline would keep the host from going on before the device.
                if message.tensor.is_cpu:
                    work.wait(timedelta(seconds=self._timeout_seconds))
                else:
                    work.wait()

    @contextmanager
    def _named(self, message: _StageMessage | None) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            assert message is not None
            rank = dist.get_global_rank(self._group, message.peer)
            reason = str(error).partition("\n")[0].split("] ", 1)[-1].split(". ")[0]  # without the library's own file and advice
            raise RunError(
                f"The {message.what} did not pass between stages {self.stage.index} and {message.peer} of the pipeline: rank "
                f"{rank} has died, or was silent for {self._timeout_seconds:g} s ({reason}); see what it said last."
            ) from error
