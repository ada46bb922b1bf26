"""`asyncflow plan`: how many devices do each task of a run, how each is sharded; or what another configuration would have taken."""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from asyncflow.cli.arguments import refuse
from asyncflow.config import Config, load, named_plan
from asyncflow.types import UserError

if TYPE_CHECKING:
    from asyncflow.planner.plan import PlanRequest
    from asyncflow.planner.search import Found

AUTO = "auto"
TOP = 8
WIDTH = 160
"""Characters of the table where no terminal says how many it has."""


def plan(
    config: Annotated[Path | None, typer.Argument(help="The run's YAML file; with --from, none.")] = None,
    overrides: Annotated[list[str] | None, typer.Argument(help="key.path=value, as many as you like.")] = None,
    devices: Annotated[int | None, typer.Option(min=1, help="How many there are.")] = None,
    hardware: Annotated[str | None, typer.Option(help="What they are: a name, such as h100-80gb, or a YAML file.")] = None,
    nodes: Annotated[int | None, typer.Option(min=1, help="How many nodes there are, in place of --devices.")] = None,
    per_node: Annotated[int | None, typer.Option(min=1, help="Devices of a node, if not as the hardware says.")] = None,
    measure: Annotated[bool, typer.Option(help="Make a short run of the configuration here first, and scale costs to it.")] = False,
    from_run: Annotated[Path | None, typer.Option("--from", help="What if? From the folder of a run, with overrides.")] = None,
    top: Annotated[int | None, typer.Option(min=1, help=f"How many plans are shown; {TOP} by default.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="With --from: print JSON.")] = False,
) -> None:
    """Plan a run: which devices train and which generate, and how each task is sharded. Writes plan.yaml and a page."""
    given = list(overrides or [])
    if from_run is not None:
        refuse(
            {
                "--devices": devices,
                "--hardware": hardware,
                "--nodes": nodes,
                "--per-node": per_node,
                "--measure": measure,
                "--top": top,
            },
            "is for a new plan, and --from takes the devices that the run had: leave it out",
        )
        if config is not None:
            given.insert(0, str(config))  # the first override stands where the file would
        _what_if(from_run, given, as_json=as_json)
        return
    refuse({"--json": as_json or None}, "is for --from: a new plan is in plan.yaml")
    if config is None:
        raise UserError("name the run's YAML file, or with --from the folder of a run: asyncflow plan CONFIG --devices 64")
    if nodes is not None:
        refuse({"--devices": devices}, "and --nodes both say how many devices there are: take one of them")
    resolved = load(config, given)
    if devices is None and nodes is None and resolved.plan.devices is None:
        refuse({"--per-node": per_node}, "says how large a node is, and nothing says how many there are: give --nodes or --devices")
    machine = {"devices": devices, "device": hardware, "nodes": nodes, "per_node": per_node}
    asked, found = asyncio.run(_plan(resolved, _folder(resolved), is_measured=measure, **machine))
    _print(asked, found, TOP if top is None else top)
    _print_files(resolved)
    print(f"  asyncflow train {config} plan={_folder(resolved) / 'plan.yaml'}")


def load_planned(config: Path, overrides: Sequence[str], *, is_tried: bool = False) -> Config:
    """Configuration of `asyncflow train`; with `plan=auto` it is planned first, and said what is taken and why. `is_tried`: the
    plan's files are not kept."""
    if AUTO not in map(named_plan, overrides):
        return load(config, overrides)
    others = [override for override in overrides if named_plan(override) != AUTO]
    resolved = load(config, others)
    with tempfile.TemporaryDirectory(prefix="asyncflow-") as scratch:
        folder = Path(scratch) if is_tried else _folder(resolved)
        asked, found = asyncio.run(_plan(resolved, folder))
        _print(asked, found, 1)
        if not is_tried:
            _print_files(resolved)
        return load(config, [*others, f"plan={folder / 'plan.yaml'}"])


def _folder(config: Config) -> Path:
    return config.run.dir / f"{config.run.name}-plan"


async def _plan(config: Config, folder: Path, *, is_measured: bool = False, **machine: Any) -> tuple[PlanRequest, Found]:
    """`folder`: of the plan's files. `machine`: see `request`."""
    from asyncflow.planner.measured import measure
    from asyncflow.planner.plan import calibrated, find_plan, request, write

    asked = await request(config, **machine)
    if is_measured:
        measurement = await asyncio.to_thread(measure, config, folder.with_name(f"{folder.name}-measured"))
        print("\n".join(measurement.lines()))
        asked = calibrated(asked, measurement, config)
    processes = min(2, os.cpu_count() or 1)
    found = await find_plan(asked, processes=processes)
    await write(found, asked, folder, processes=processes)
    return asked, found


def _print(asked: PlanRequest, found: Found, top: int) -> None:
    from asyncflow.planner.plan import described, why

    table = Table(title=f"{asked.config.run.name} on {asked.devices} x {asked.model.hardware.name}")
    for name in ("plan", "step, s", "TPSPD", "GiB a device", "busy", "binds"):
        table.add_column(name, justify="left" if name in ("plan", "binds") else "right", overflow="fold")
    for each in found.plans[:top]:
        table.add_row(
            described(each),
            f"{each.step_seconds:.4g}",
            f"{each.tpspd:,.1f}",
            ", ".join(f"{gib:.1f}" for gib in each.memory_gib.values()),
            ", ".join(f"{pool} {share:.0%}" for pool, share in each.busy.items()),
            each.bound.binds,
        )
    console = Console()
    (console if console.is_terminal else Console(width=WIDTH)).print(table)
    counts = found.counts
    print(
        f"{counts['enumerated']:,} plans: {counts['too large']:,} too large, {counts['beaten']:,} beaten in every cost, "
        f"{counts['bounded away']:,} bounded away, {counts['simulated']:,} simulated, {counts['left']:,} left"
    )
    if counts["left"]:
        print(f"the search has ended before its proof: those left take at least {found.left_bound:.4g} s")
    if found.ties > 1:
        print(f"{found.ties} plans are within 1% of the best: they are not told apart")
    print(why(found))
    for broken in found.broken:
        print(f"warning: {broken}")
    used = found.plans[0].devices
    if used < asked.devices:
        print(f"{asked.devices - used} of the devices are left over: no plan that uses them is faster")
    for assumption in asked.assumptions:
        print(f"assumed: {assumption}")


def _print_files(config: Config) -> None:
    print(f"{_folder(config) / 'plan.yaml'}, {_folder(config) / 'plan.html'}")


def _what_if(run: Path, overrides: Sequence[str], *, as_json: bool) -> None:
    from asyncflow.planner.measured import what_if

    found = what_if(run, overrides)
    if as_json:
        print(msgspec.json.encode({"measured": found.measured, "predicted": found.predicted}).decode())
        return
    print("\n".join(found.measurement.lines()))
    table = Table(title=f"What if: from {run}")
    for name in ("", "step, s", "TPSPD"):
        table.add_column(name, justify="right" if name else "left")
    for label, each in (("measured", found.measured), (" ".join(overrides) or "the same again", found.predicted)):
        table.add_row(label, f"{each.step_seconds:.4g}", f"{each.tpspd:,.1f}")
    Console().print(table)
