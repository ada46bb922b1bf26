"""Run seeds of the simulation, `python -m tests.sim.run --seeds 0:20000`; one with all that happens, `--seeds 7:8 --trace`."""

from __future__ import annotations

import argparse
import multiprocessing
import sys
from collections import Counter
from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from tests.sim.world import Result, simulate

CHUNK = 20


def replay(seed: int) -> str:
    """The command that shows what happens in a seed."""
    return f"python -m tests.sim.run --seeds {seed}:{seed + 1} --trace"


def report(result: Result) -> str:
    """What was wrong with a seed, and how to see it."""
    head = f"seed {result.seed}, {len(result.violations)} violations"
    return "\n".join([head, *result.violations, f"replay: {replay(result.seed)}"])


def _seeds(words: str) -> range:
    """`A:B`, or `A`."""
    first, _, end = words.partition(":")
    return range(int(first), int(end or int(first) + 1))


def _results(seeds: Sequence[int], processes: int) -> Iterator[Result]:
    if processes == 1:
        yield from map(simulate, seeds)
        return
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        yield from pool.imap(simulate, seeds, CHUNK)


def main(arguments: list[str] | None = None) -> int:
    """Returns 1 if a law was broken."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", default="0:2000", metavar="A:B", help="from A, up to but without B; A alone; A:B,C,...")
    parser.add_argument("--trace", action="store_true", help="print every event")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("-x", "--first", action="store_true", help="stop at the first seed that fails")
    chosen = parser.parse_args(arguments)
    seeds, console = [seed for part in chosen.seeds.split(",") for seed in _seeds(part)], Console()
    if chosen.trace:
        results = [simulate(seed, keeps_trace=True) for seed in seeds]
        for result in results:
            print(*result.trace, sep="\n")
            print(f"trace hash {result.digest}, {result.seconds:.3f} virtual seconds")
    else:
        results = []
        columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
        with Progress(*columns, console=console) as progress:
            bar = progress.add_task("seeds", total=len(seeds))
            for result in _results(seeds, chosen.processes):
                results.append(result)
                if result.violations:
                    progress.console.print(report(result), markup=False, highlight=False)
                    if chosen.first:
                        break
                num_failed = sum(bool(r.violations) for r in results)
                progress.update(bar, advance=1, description=f"seeds, {num_failed} failed")
                if not console.is_terminal and len(results) % 1000 == 0:  # a log shows no bar
                    print(f"{len(results)} of {len(seeds)} seeds, {num_failed} failed", flush=True)
    counts: Counter[str] = sum((result.counts for result in results), Counter())
    for what, count in sorted(counts.items()):
        print(f"{count:10,}  {what}")
    failed = [result for result in results if result.violations]
    if chosen.trace:
        for result in failed:
            print(report(result))
    print(f"{len(results)} seeds, {len(failed)} of them with violations")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
