"""Bounds of a step's seconds in steady state, from its graph alone: no schedule of the same work is faster.

Three arguments (PA 6-7, and its restatement for a chain of tasks), of which the largest binds:

    pool     no step takes less than its busiest pool works on it, whether weights wait for that or not
    path     weights of step s are needed by the rollout of step s + 1 + n (n: the greatest staleness), so 1 + n steps take at least
             as long as one step takes from its first prompt until its weights serve
    stream   where tasks stream, the path is the longest over tasks and k of: the k-th group's arrival, the work that is left to
             the task then, the last group through all tasks behind it; where they do not stream, it is the sum of all

With two tasks the third is the paper's max_k (a_(k) + sum_{j >= k} tau_(j)) + W. Simulation adds which worker gets which group.
"""

from __future__ import annotations

from dataclasses import dataclass

from asyncflow.planner.graph import Graph


@dataclass(frozen=True, slots=True)
class Bound:
    """Least seconds of a step. `binds`: the task whose pool is the busiest, or `path of` the task that is longest on the path."""

    seconds: float
    binds: str


def bound(graph: Graph) -> Bound:
    """Bound of a step of this graph."""
    busiest = max((*graph.tasks, *graph.side_tasks), key=lambda task: task.busy)
    pool = Bound(busiest.busy, busiest.name)
    if graph.is_streamed:
        rollout, *later = graph.tasks
        lengths = [rollout.span + sum(task.last for task in later)]
        for i, own in enumerate(later):
            left = float((rollout.arrivals + own.rest).max(1).mean())
            lengths.append(sum(task.first for task in later[:i]) + left + sum(task.last for task in later[i + 1 :]))
    else:
        lengths = [sum(task.span for task in graph.tasks)] * len(graph.tasks)
    longest = max(range(len(lengths)), key=lambda i: (lengths[i], graph.tasks[i].span))
    path = Bound((lengths[longest] + graph.weights) / (1 + graph.max_staleness), f"path of {graph.tasks[longest].name}")
    return max(pool, path, key=lambda each: each.seconds)
