"""`asyncflow why`: why nothing moves in a run, live, killed or finished: which process waits for which, and what ends each wait."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from asyncflow.telemetry.why import Link


def why(
    run: Annotated[Path, typer.Argument(help="A run's folder, such as runs/quickstart.")],
    json: Annotated[bool, typer.Option("--json", help="Print the situation and the links as JSON.")] = False,
) -> None:
    """Say which process waits for which in a run, from the trainer back to the cause."""
    import msgspec

    from asyncflow.run.situations import state_of_driver
    from asyncflow.telemetry.situation import read_situation
    from asyncflow.telemetry.why import chain, graph, paths

    situation = read_situation(run)
    if json:
        print(msgspec.json.encode({"situation": situation, "chain": chain(situation), "graph": graph(situation)}).decode())
        return
    print(f"{run}: {situation.committed} of {situation.steps} steps are committed; {state_of_driver(situation, run)}:")
    first, *others = paths(situation)
    _print(first, 0, set())
    explained = {link.text for link in first}
    if others:
        print("and the others:")
    for path in others:
        _print(path, 1, explained)
        explained.update(link.text for link in path)


def _print(path: Sequence[Link], depth: int, explained: Collection[str]) -> None:
    """Print which process waits for which, a line each with what ends that wait; what was printed before is not explained again."""
    for number, link in enumerate(path):
        arrow = f"{'  ' * number}-> " if number else ""
        ends = "as above" if link.text in explained else f"at the latest until: {link.ends}"
        print(f"{'  ' * depth}{arrow}{link.text} [{ends}]")
