"""Sums of tensors over ranks, added up in the order of the ranks wherever in the tensor an element is; and rows of several ranks.

    rank 0: [a0 b0 c0 d0] --+--> rank 0: a0 + a1, b0 + b1       `summed_rows`: each rank gets its own rows of the sum
    rank 1: [a1 b1 c1 d1] --+--> rank 1: c0 + c1, d0 + d1       `gathered_rows`: all ranks get all rows; `summed` is both

A library's own sum over three and more ranks may begin with another rank at another place of the tensor, as gloo's does. Here no
bit of an element depends on its place, so none depends on what else is in a pass.

Rows are cut into pieces of one size, but for the last ones, as DTensor cuts them.

consumes: tensors of the ranks of a group, of one shape
waits for: the other ranks of the group, in each exchange for at most its timeout
is unblocked by: the same call there
"""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor

# P rows, Q of them on this rank.


def summed(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Sum of the ranks' tensors, the same on all of them."""
    flat = tensor.reshape(-1)
    return gathered_rows(summed_rows(flat, group), len(flat), group).view(tensor.shape)


def summed_rows(rows_PX: Tensor, group: dist.ProcessGroup) -> Tensor:
    """This rank's rows of the sum of the ranks' tensors."""
    num_ranks, num_rows = group.size(), len(rows_PX)
    begins = [begin_of(rank, num_ranks, num_rows) for rank in range(num_ranks + 1)]
    counts = [end - begin for begin, end in pairwise(begins)]
    own = counts[group.rank()]
    arrived = rows_PX.new_empty(num_ranks * own, *rows_PX.shape[1:])
    dist.all_to_all_single(arrived, rows_PX.contiguous(), [own] * num_ranks, counts, group=group)
    total = arrived[:own].clone()
    for rank in range(1, num_ranks):
        total += arrived[rank * own : (rank + 1) * own]
    return total


def gathered_rows(own_QX: Tensor, num_rows: int, group: dist.ProcessGroup) -> Tensor:
    """All of so many rows, from each rank's own."""
    largest = -(-num_rows // group.size())
    if missing := largest - len(own_QX):  # rows of the last ranks alone, so they are behind all others
        own_QX = torch.cat([own_QX, own_QX.new_zeros(missing, *own_QX.shape[1:])])
    pieces = [own_QX.new_empty(own_QX.shape) for _ in range(group.size())]
    dist.all_gather(pieces, own_QX.contiguous(), group=group)
    return torch.cat(pieces)[:num_rows]


def begin_of(index: int, num_parts: int, size: int) -> int:
    """First index of part `index` of so many elements or rows: DTensor shards into parts of equal sizes, but for the last ones."""
    return min(-(-size // num_parts) * index, size)
