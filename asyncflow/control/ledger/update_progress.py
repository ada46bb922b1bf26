"""One update of a step by one task: who has consumed what of its mini-batch, and what is trained at the same time. Pure.

Trainers of several data-parallel groups step together, so they train in rounds: a round is given out when every one has a group to
train in it, or when nothing is left that they could wait for. The groups of a round are as nearly of one length as may be.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import chain


@dataclass(slots=True)
class UpdateProgress:
    """`members`: rows not yet consumed or failed, by group. `offered`: the groups that each rank has ready to train, with their
    tokens, in order; `order`: which of them came first; `asked`: how many rounds each rank has asked for; `rounds`: what all ranks
    train at the same time; `given`: the groups in them.
    """

    offered: list[dict[int, int]]
    asked: list[int]
    members: dict[int, set[int]] = field(default_factory=dict)
    order: dict[int, int] = field(default_factory=dict)
    rounds: list[list[list[int]]] = field(default_factory=list)
    given: set[int] = field(default_factory=set)
    tokens: int = 0
    sequences: int = 0
    non_finite_rows: list[int] = field(default_factory=list)

    def remove(self, group: int, rows: Iterable[int]) -> None:
        """These rows are members no longer, nor is a group without any."""
        if group in self.members:
            self.members[group].difference_update(rows)
            if not self.members[group]:
                del self.members[group]

    def offer(self, rank: int, group: int, tokens: int) -> None:
        """This rank has a group of so many tokens ready to train."""
        self.offered[rank][group], self.order[group] = tokens, len(self.order)

    def ask(self, rank: int, number: int) -> None:
        """This rank would take its part of the rounds up to this number."""
        self.asked[rank] = max(self.asked[rank], number + 1)

    def num_lacking(self, most: int) -> int:
        """Number of groups that the rounds which ranks have asked for lack, where each rank takes up to `most` in a round."""
        wanted = len(self.offered) * most * (max(self.asked) - len(self.rounds))
        return wanted - sum(len(groups) for groups in self.offered)

    @property
    def is_given_out(self) -> bool:
        """Whether all members are in rounds that were given out."""
        return self.members.keys() <= self.given

    def give_out(self, most: int, *, is_all: bool) -> None:
        """Give out the rounds that every rank has asked for and that are full. `is_all`: no more groups become members."""
        while min(self.asked) > len(self.rounds) and self._is_round_full(most, is_all=is_all):
            self.rounds.append([self._alike(offered, most) for offered in self.offered])
            for offered, given in zip(self.offered, self.rounds[-1], strict=True):
                self.given.update(given)
                for group in given:
                    del offered[group]

    def _is_round_full(self, most: int, *, is_all: bool) -> bool:
        """Whether every rank has what it can train in a round, or what they have is all that is left."""
        if all(len(groups) >= most for groups in self.offered):
            return True
        offered = set(chain(*self.offered))
        return is_all and bool(offered) and self.members.keys() - self.given == offered

    def _alike(self, offered: Mapping[int, int], most: int) -> list[int]:
        """A rank's part of a round, which lasts as long as the longest part: the groups whose tokens are nearest to those of the
        group that was offered first of all that are left."""
        first = min((next(iter(each)) for each in self.offered if each), key=lambda group: self.order[group])
        tokens = next(each[first] for each in self.offered if first in each)
        return sorted(offered, key=lambda group: (abs(offered[group] - tokens), self.order[group]))[:most]
