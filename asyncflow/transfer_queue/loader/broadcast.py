"""One rank of a group reads, and its peers get the same by broadcast.

    lead   fetched --> header: length, then msgpack --> structure: indices and lengths, int64 --> values, column by column -->
    peers                                       the same order: allocate, receive, split by lengths

consumes: what the lead fetches, its end, its error
waits for: the other side of each broadcast; a peer meanwhile hears from its lead at least every `WAITING_SECONDS`
is unblocked by: the lead's next header, or the loss of a rank (the process group raises)

All ranks of the group call in step, each from the thread that iterates, so that these broadcasts keep their place among the
collectives of the model. Nothing is pickled. Values travel as bytes, since no backend knows all dtypes.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import NamedTuple

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from asyncflow.transfer_queue.loader.tensors import Jagged, Padded, TensorColumn
from asyncflow.types import CROSSING, RunError

WAITING_SECONDS = 20.0
"""Less than the timeout of any process group: peers are told so often that there is nothing yet."""


class BroadcastBatch(NamedTuple):
    """A batch on its way to the peers: `indices` int64 [n], and its columns, not padded."""

    indices: Tensor
    columns: Mapping[str, TensorColumn]
    group_bits: int


class _ColumnHeader(msgspec.Struct, array_like=True):
    """`shape`: of the values, all of them; `num_entries`: of a ragged column, -1 for a dense one."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    num_entries: int


class _MessageHeader(msgspec.Struct, array_like=True):
    """`kind`: batch, end, waiting or error."""

    kind: str
    num_rows: int = 0
    group_bits: int = 0
    columns: list[_ColumnHeader] = []
    error: str = ""
    message: str = ""


class GroupBroadcast:
    """The lead's `send*`, and its peers' `receive`, over one process group."""

    def __init__(self, group: dist.ProcessGroup, lead: int | None, device: torch.device) -> None:
        """`lead`: a global rank, the group's first if None. `device`: where a backend that has no use for host memory sends from.

        Raises `ValueError` when the lead or this process is not in the group.
        """
        ranks = dist.get_process_group_ranks(group)
        self.lead = ranks[0] if lead is None else lead
        if self.lead not in ranks or dist.get_rank() not in ranks:
            raise ValueError(f"rank {dist.get_rank()} with lead {self.lead}: both have to be in the group, which is {ranks}")
        self.is_lead = dist.get_rank() == self.lead
        self._group = group
        backend = dist.get_backend(group)
        self._device = torch.device("cpu") if backend in ("gloo", "mpi") or "cpu:" in backend else device

    def send(self, batch: BroadcastBatch | None) -> None:
        """A batch, or with None the end of the stream."""
        if batch is None:
            self._send_header(_MessageHeader("end"))
            return
        headers, structure, values = [], [batch.indices], list[Tensor]()
        for name, column in batch.columns.items():
            assert not isinstance(column, Padded), "padding comes after the broadcast"
            flat, num_entries = column, -1
            if isinstance(column, Jagged):
                flat, num_entries = column.values, len(column.offsets) - 1
                structure.append(column.lengths)
            assert isinstance(flat, Tensor)
            headers.append(_ColumnHeader(name, str(flat.dtype).removeprefix("torch."), tuple(flat.shape), num_entries))
            values.append(flat)
        self._send_header(_MessageHeader("batch", len(batch.indices), batch.group_bits, headers))
        self._broadcast([torch.cat(structure), *values])

    def send_waiting(self) -> None:
        """Tell the others that there is no batch yet."""
        self._send_header(_MessageHeader("waiting"))

    def send_error(self, error: Exception) -> None:
        """The peers raise what the lead raises: as itself where it may cross processes, else as a `RunError`."""
        name = type(error).__name__
        message = str(error) if name in CROSSING else f"{name}: {error}"
        self._send_header(_MessageHeader("error", error=name, message=message))

    def receive(self) -> BroadcastBatch | None:
        """Next message of the lead. Raises the lead's own error, and `RunError` when the lead has gone."""
        while (header := self._receive_header()).kind == "waiting":
            pass
        if header.kind == "error":
            raise CROSSING.get(header.error, RunError)(header.message)
        if header.kind == "end":
            return None
        counts = [header.num_rows, *(c.num_entries for c in header.columns if c.num_entries >= 0)]
        structure = torch.empty(sum(counts), dtype=torch.int64)
        values = [torch.empty(c.shape, dtype=getattr(torch, c.dtype)) for c in header.columns]
        structure, *values = self._broadcast([structure, *values])
        indices, *lengths = torch.split(structure.cpu(), counts)
        columns: dict[str, TensorColumn] = {}
        for column, flat in zip(header.columns, values, strict=True):
            columns[column.name] = flat
            if column.num_entries >= 0:
                columns[column.name] = Jagged(flat, torch.nn.functional.pad(lengths.pop(0).cumsum(0), (1, 0)))
        return BroadcastBatch(indices, columns, header.group_bits)

    def _send_header(self, header: _MessageHeader) -> None:
        encoded = torch.frombuffer(bytearray(msgspec.msgpack.encode(header)), dtype=torch.uint8)
        self._broadcast([torch.tensor([len(encoded)])])
        self._broadcast([encoded])

    def _receive_header(self) -> _MessageHeader:
        try:
            (length,) = self._broadcast([torch.zeros(1, dtype=torch.int64)])
            (encoded,) = self._broadcast([torch.empty(int(length), dtype=torch.uint8)])
        except RuntimeError as error:
            raise RunError(f"rank {self.lead}, which reads the transfer queue for this one, has gone: {error}") from error
        return msgspec.msgpack.decode(encoded.cpu().numpy().tobytes(), type=_MessageHeader)

    def _broadcast(self, tensors: list[Tensor]) -> list[Tensor]:
        """Broadcast the tensors one after another, all under way at once. Returns them as they are on this rank then, on the
        device that the backend needs."""
        buffers = [tensor.to(self._device).contiguous() for tensor in tensors]
        works = [
            dist.broadcast(buffer.reshape(-1).view(torch.uint8), self.lead, self._group, async_op=True)
            for buffer in buffers
            if prod(buffer.shape)
        ]
        for work in works:
            work.wait()
        return buffers
