"""Plan of a step, the same for all steps of a run: the tasks that its rows pass, and how training is cut into updates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class TaskPlan:
    """Tasks of a step's rows, in order."""

    before: tuple[str, ...] = ("rollout",)
    """Tasks that a row passes before training; the first makes responses."""
    trained: tuple[str, ...] = ("train",)
    """Tasks that train a model each, the policy's first; the others have one rank."""
    by_step: tuple[str, ...] = ()
    """Tasks, the last ones of `before`, that such a model does under the version of each step: they end with a step, and a resumed
    run does them again."""
    chosen_by: str = ""
    """Task of `before` behind which a step's members are chosen among its candidates; none: a step trains all that it is opened
    with."""
    num_members: int = 0
    """Groups that are chosen."""

    @property
    def policy(self) -> str:
        """Task that trains the policy."""
        return self.trained[0]

    @property
    def of_candidates(self) -> tuple[str, ...]:
        """Tasks that candidates pass too."""
        return self.before[: self.before.index(self.chosen_by)] if self.chosen_by else self.before

    @property
    def of_members(self) -> tuple[str, ...]:
        """Tasks that members alone pass."""
        return self.before[self.before.index(self.chosen_by) + 1 :] if self.chosen_by else ()

    @property
    def last_kept(self) -> str:
        """Last task whose outputs a resumed run keeps."""
        return next(task for task in reversed(self.before) if task not in (*self.by_step, self.chosen_by))

    @property
    def kept(self) -> tuple[str, ...]:
        """Tasks whose outputs a resumed run keeps; members it chooses again."""
        return tuple(task for task in self.before[: self.before.index(self.last_kept) + 1] if task != self.chosen_by)

    def task_before(self, task: str) -> str:
        """Task whose outputs this one takes."""
        return self.before[self.before.index(task) - 1] if task in self.before else self.before[-1]


@dataclass(frozen=True, slots=True)
class UpdatePlan:
    """Updates of a step, and the ranks that make them."""

    num_ranks: int = 1
    """Data-parallel groups that train the policy."""
    groups_per_round: int = 1
    """Groups of rows that each of them trains between two exchanges, at least, while there are so many."""
    tokens_per_round: int | None = None
    """Tokens up to which each of them takes more groups, of those that are there when it would begin; None: it takes no more."""
    epochs: int = 1
    mini_batches: int = 1

    @property
    def num_updates(self) -> int:
        """Number of updates of a step, for each task that trains."""
        return self.epochs * self.mini_batches


ONE_MODEL: Final = TaskPlan()
"""Responses, and one model that is trained on them."""
ONE_UPDATE: Final = UpdatePlan()
"""One update a step, by one rank."""
