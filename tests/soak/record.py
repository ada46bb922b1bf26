"""What the soak has seen, sitting by sitting: docs/soak.jsonl, a line each, and docs/soak.md, which is made of it."""

from __future__ import annotations

import json
import statistics
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final

from tests.soak.laws import Round
from tests.soak.modes import ROOT

RECORD: Final = ROOT / "docs" / "soak.jsonl"


@dataclass
class Sitting:
    """A call of `make soak-run`. `seeds`: first and last. `load`: of the machine, when it began. `recovery`: (how many, median,
    ninth decile), seconds, after all faults, and after kills alone."""

    date: str
    commit: str
    load: float
    seeds: tuple[int, int] = (0, 0)
    hours: float = 0.0
    rounds: dict[str, int] = field(default_factory=dict)
    attempts: int = 0
    faults: dict[str, int] = field(default_factory=dict)
    impossible: dict[str, int] = field(default_factory=dict)
    recovery: tuple[int, float, float] = (0, 0.0, 0.0)
    recovery_of_kills: tuple[int, float, float] = (0, 0.0, 0.0)
    violations: list[str] = field(default_factory=list)

    def count(self, rounds: Sequence[Round]) -> None:
        """Say of it what these rounds were."""
        self.seeds = rounds[0].seed, rounds[-1].seed
        self.hours = round(sum(each.seconds for each in rounds) / 3600, 3)
        self.attempts = sum(each.attempts for each in rounds)
        self.rounds = dict(Counter(each.mode for each in rounds))
        for what in ("faults", "impossible"):
            counts = Counter[str]()
            for each in rounds:
                counts.update(getattr(each, what))
            setattr(self, what, dict(sorted(counts.items())))
        seconds = [found for each in rounds for found in each.recoveries]
        self.recovery = _deciles([after for _, after in seconds])
        self.recovery_of_kills = _deciles([after for name, after in seconds if name.startswith("kill")])
        self.violations = [_placeless(f"seed {each.seed} ({each.mode}): {why}") for each in rounds for why in each.violations]


def _placeless(why: str) -> str:
    """The words without the folders of this machine."""
    return why.replace(f"{ROOT}/", "").replace(f"{sys.base_prefix}/", "")


def _deciles(seconds: Sequence[float]) -> tuple[int, float, float]:
    if len(seconds) < 2:
        return len(seconds), *([seconds[0]] * 2 if seconds else (0.0, 0.0))
    return len(seconds), round(statistics.median(seconds), 2), round(statistics.quantiles(seconds, n=10)[-1], 2)


def read(record: Path) -> list[Sitting]:
    """All sittings so far."""
    return [Sitting(**json.loads(line)) for line in record.read_text().splitlines()] if record.exists() else []


def write(record: Path, sittings: Sequence[Sitting]) -> None:
    """Write the record, and its page beside it."""
    record.write_text("".join(json.dumps(asdict(each), separators=(",", ":")) + "\n" for each in sittings))
    record.with_suffix(".md").write_text(page(sittings))


HEAD: Final = """# Hours of faults

`make soak-run` writes this page: whole runs of a tiny model, in every mode and over every kind of process, each with faults at
random times. Processes of every role are killed, stopped, slowed, starved of memory or of file handles, their connections are cut,
and the disk is full. After each attempt `--resume` goes on. [The laws](checkpoints.md#seen) are checked on what is on the disk. A
seed gives the mode and the faults: `python -m tests.soak.run --only SEED`. Seconds are from the end of a fault to the next
committed step, less a step: the median, and what nine of ten are under. The load is the machine's when the sitting began; a sitting
goes on with the seeds where the last one ended, and where several go on at once (neighbours of one commit and load, which slow one
another), hours are those of all. Aimed for on a quiet machine, over all faults: a median below 3 s, nine of ten below 8 s.

| date | commit | load | seeds | hours | rounds | attempts | faults | violations | seconds | after kills |
|---|---|---|---|---|---|---|---|---|---|---|
"""


def page(sittings: Sequence[Sitting]) -> str:
    """The page."""
    rows = [
        (
            *(each.date, each.commit, each.load, "{} to {}".format(*each.seeds), f"{each.hours:.2f}"),
            *(sum(each.rounds.values()), each.attempts, sum(each.faults.values()), len(each.violations)),
            *("{1}, {2}".format(*seconds) for seconds in (each.recovery, each.recovery_of_kills)),
        )
        for each in sittings
    ]
    faults, rounds, impossible = Counter[str](), Counter[str](), Counter[str]()
    for each in sittings:
        faults.update(each.faults)
        rounds.update(each.rounds)
        impossible.update(each.impossible)
    hours = sum(each.hours for each in sittings)
    violations = [f"* {each.date}, {each.commit}, {' '.join(why.split())}\n" for each in sittings for why in each.violations]
    kinds = sorted({name.partition(" ")[0] for name in faults})
    roles = sorted({name.partition(" ")[2] for name in faults})
    table = [(role, *(faults[f"{kind} {role}"] or "" for kind in kinds)) for role in roles]
    return "".join(
        [
            HEAD,
            *map(_row, rows),
            f"\nIn all {sum(faults.values()):,} faults in {hours:.2f} hours, {len(violations)} violations",
            ":\n\n" if violations else ".\n",
            *violations,
            "\n## Faults\n\n",
            _row(("role", *kinds)),
            _row(["---"] * (1 + len(kinds))),
            *map(_row, table),
            f"\nRounds: {_counts(rounds)}.\n",
            "\nCould not happen: " + ", ".join(f"{n} {count}" for n, count in sorted(impossible.items())) + ".\n"
            if impossible
            else "",
        ]
    )


def _counts(counts: Counter[str]) -> str:
    return "; ".join(f"{name} {count}" for name, count in sorted(counts.items()))


def _row(cells: Sequence[object]) -> str:
    return f"| {' | '.join(str(cell).replace('|', '/') for cell in cells)} |\n"
