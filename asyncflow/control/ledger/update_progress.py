"""One update of a step by one task: which rows of its mini-batch are consumed, and what is trained at the same time. Pure.

Trainers of several data-parallel groups step together, so they train in rounds: a round is given out when every one has a group to
train in it, or when nothing is left that they could wait for. The groups of a round are as nearly of one length as may be. Where a
round may have more groups than it must have, it is given out when it is full, or when all ranks have trained the one before: it
never waits for more.
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
    members: dict[int, set[int]] = field(init=False, default_factory=dict)
    order: dict[int, int] = field(init=False, default_factory=dict)
    rounds: list[list[list[int]]] = field(init=False, default_factory=list)
    given: set[int] = field(init=False, default_factory=set)
    tokens: int = field(init=False, default=0)
    sequences: int = field(init=False, default=0)
    non_finite_rows: list[int] = field(init=False, default_factory=list)
    has_computed: bool = field(init=False, default=False)  # whether anything of a group that was consumed was computed

    def remove(self, group: int, rows: Iterable[int]) -> None:
        """Remove these rows from the members, and a group without any."""
        if group in self.members:
            self.members[group].difference_update(rows)
            if not self.members[group]:
                del self.members[group]

    def offer(self, rank: int, group: int, tokens: int) -> None:
        """Note that this rank has a group of so many tokens ready to train."""
        self.offered[rank][group], self.order[group] = tokens, len(self.order)

    def ask(self, rank: int, number: int) -> None:
        """Note that this rank takes its part of the rounds up to this number."""
        self.asked[rank] = max(self.asked[rank], number + 1)

    def is_lacking(self, least: int, most_tokens: int | None, spare: int) -> bool:
        """Whether the rounds that ranks have asked for lack groups, `spare` ones counted as asked for, too. `least`, `most_tokens`:
        of a rank's part of a round, as in `UpdatePlan`."""
        num_parts = len(self.offered) * (max(self.asked) - len(self.rounds))
        if num_parts * least + spare > sum(len(groups) for groups in self.offered):
            return True
        return most_tokens is not None and num_parts * most_tokens > sum(sum(groups.values()) for groups in self.offered)

    @property
    def is_given_out(self) -> bool:
        """Whether all members are in rounds that were given out."""
        return self.members.keys() <= self.given

    def give_out(self, least: int, most_tokens: int | None, *, is_all: bool) -> None:
        """Give out the rounds that every rank has asked for and that may begin. `is_all`: no more groups become members."""
        while min(self.asked) > len(self.rounds) and self._may_begin(least, most_tokens, is_all=is_all):
            self.rounds.append([self._alike(offered, least, most_tokens) for offered in self.offered])
            for offered, given in zip(self.offered, self.rounds[-1], strict=True):
                self.given.update(given)
                for group in given:
                    del offered[group]

    def _may_begin(self, least: int, most_tokens: int | None, *, is_all: bool) -> bool:
        """Whether every rank has what it trains in a round, or what they have is all that is left."""
        if all(len(groups) >= least for groups in self.offered):
            is_full = most_tokens is None or all(sum(groups.values()) >= most_tokens for groups in self.offered)
            # A rank asks for a round when it begins the one before: one that has asked for the next one waits for this.
            if is_full or min(self.asked) > len(self.rounds) + 1:
                return True
        offered = set(chain(*self.offered))
        return is_all and bool(offered) and self.members.keys() - self.given == offered

    def _alike(self, offered: Mapping[int, int], least: int, most_tokens: int | None) -> list[int]:
        """A rank's part of a round, which lasts as long as the longest part: the groups whose tokens are nearest to those of the
        group that was offered first of all that are left, and those for which there is room, in the order in which they came."""
        first = min((next(iter(each)) for each in self.offered if each), key=lambda group: self.order[group])
        tokens = next(each[first] for each in self.offered if first in each)
        nearest = sorted(offered, key=lambda group: (abs(offered[group] - tokens), self.order[group]))
        chosen = nearest[:least]
        if most_tokens is not None:
            room = most_tokens - sum(offered[group] for group in chosen)
            for group, tokens in offered.items():
                if group not in chosen and tokens <= room:
                    chosen.append(group)
                    room -= tokens
        return chosen
