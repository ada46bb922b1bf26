"""Faults of a simulated run, and the moments at which they happen."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

GRACES_SECONDS = (0.0, 0.5, 5.0, 60.0)
"""Seconds that a worker which leaves may take to end what it holds, in simulated runs."""
HANG_SECONDS = (5.0, 60.0, 400.0)
"""Seconds that a fetch which hangs may take: `weight_sync.deadline_seconds`, or less, or, where some bytes come now and then,
more."""


@dataclass(frozen=True, slots=True)
class Resize:
    """Change of the number of rollout workers, at some time; leavers may take so long."""

    when: float
    size: int
    grace_seconds: float


@dataclass(frozen=True, slots=True)
class Hangs:
    """Fetches of a worker that hang: this share of them take so many seconds, and then fail."""

    share: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Faults:
    """Faults to inject, at virtual seconds from the start. `slow`: by worker, how many times as long everything takes."""

    slow: Mapping[str, float] = field(default_factory=dict)
    deaths: tuple[tuple[float, str], ...] = ()
    stalls: tuple[tuple[float, str, float], ...] = ()
    """(when, worker, for how long); for ever: until the run is stopped."""
    late_rewards: float = 0.0
    """Share of rewards that take fifty times as long."""
    broken_fetches: Mapping[str, float] = field(default_factory=dict)
    """By worker, the share of fetches whose weights do not arrive whole."""
    hanging_fetches: Mapping[str, Hangs] = field(default_factory=dict)
    """By worker, the fetches that hang for some seconds, and then fail."""
    resizes: tuple[Resize, ...] = ()
    """Rollout workers that join and leave."""
    calls: tuple[float, ...] = ()
    """Moment when a caller asks for the weights of the last committed step."""

    @classmethod
    def drawn(
        cls, seed: int, workers: Sequence[str], begin_seconds: float, end_seconds: float, *, sizes: Sequence[int] = ()
    ) -> Faults:
        """A plan by seed: one worker in four is slow, and every other run has deaths, stalls, late rewards, broken fetches;
        one in three has fetches that hang.

        The first worker is never slow, never dies and always has its weights, so that somebody is left. Where there are `sizes`
        that a run may have, every other one changes its size, and what goes wrong with workers that join is drawn as for the
        others.
        """
        rng, mortals = random.Random(f"{seed}/faults"), workers[1:]

        def times(most: int) -> list[float]:
            return sorted(rng.uniform(begin_seconds, end_seconds) for _ in range(rng.choice((0, rng.randint(1, most)))))

        is_endless = mortals and rng.random() < 0.2
        endless = ((rng.uniform(begin_seconds, end_seconds), rng.choice(mortals), math.inf),) if is_endless else ()
        plan = cls(
            slow={worker: rng.uniform(1.5, 8.0) for worker in mortals if rng.random() < 0.25},
            deaths=tuple((time, rng.choice(mortals)) for time in times(4) if mortals),
            stalls=tuple((time, rng.choice(workers), rng.uniform(0, end_seconds / 2)) for time in times(3)) + endless,
            late_rewards=rng.choice((0.0, 0.02)),
            broken_fetches=dict.fromkeys(mortals, 0.1) if rng.random() < 0.5 else {},
        )
        rng = random.Random(f"{seed}/resizes")  # of its own, so that the rest of a plan is the same with and without
        whens = times(5) if sizes else []
        resizes = tuple(Resize(when, rng.choice(sizes), rng.choice(GRACES_SECONDS)) for when in whens)
        most = max((resize.size for resize in resizes), default=0)
        joiners = [name for i in range(1, most) if (name := f"rollout/{i}") not in workers]
        hangs = _drawn_hangs(random.Random(f"{seed}/hangs"), [*mortals, *joiners])
        mortals, others = joiners, random.Random(f"{seed}/calls")
        calls = tuple(sorted(others.uniform(begin_seconds, end_seconds) for _ in range(others.choice((0, 1, 5)))))
        return replace(
            plan,
            hanging_fetches=hangs,
            resizes=resizes,
            calls=calls,
            slow={**plan.slow, **{worker: rng.uniform(1.5, 8.0) for worker in mortals if rng.random() < 0.25}},
            deaths=plan.deaths + tuple((time, rng.choice(mortals)) for time in times(4) if mortals),
            stalls=plan.stalls
            + tuple((time, rng.choice(mortals), rng.uniform(0, end_seconds / 2)) for time in times(3) if mortals),
            broken_fetches={**plan.broken_fetches, **(dict.fromkeys(mortals, 0.1) if rng.random() < 0.5 else {})},
        )


def _drawn_hangs(rng: random.Random, workers: Sequence[str]) -> Mapping[str, Hangs]:
    is_hanging, seconds = rng.random() < 1 / 3, rng.choice(HANG_SECONDS)
    return dict.fromkeys(workers, Hangs(0.3, seconds)) if is_hanging else {}
