"""`asyncflow why`: why nothing moves in a run, live, killed or finished: which process waits for which, and what ends each wait."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def why(
    run: Annotated[Path, typer.Argument(help="A run's folder, such as runs/quickstart.")],
    json: Annotated[bool, typer.Option("--json", help="Print the situation and the links as JSON.")] = False,
) -> None:
    """Say which process waits for which in a run, from the trainer back to the cause."""
    import msgspec

    from asyncflow.run.situations import state_of_driver
    from asyncflow.telemetry.situation import read_situation
    from asyncflow.telemetry.why import chain, graph

    situation = read_situation(run)
    links, others = chain(situation), graph(situation)
    if json:
        print(msgspec.json.encode({"situation": situation, "chain": links, "graph": others}).decode())
        return
    print(f"{run}: {situation.committed} of {situation.steps} steps are committed; {state_of_driver(situation)}")
    for depth, link in enumerate(links):
        print(f"{'  ' * depth}{link.text} [at the latest until: {link.ends}]")
    shown = {link.text for link in links}
    if rest := [link for link in others if link.text not in shown]:
        print("and the others:")
        for link in rest:
            print(f"  {link.text}{f' -> {link.on}' if link.on else ''} [at the latest until: {link.ends}]")
