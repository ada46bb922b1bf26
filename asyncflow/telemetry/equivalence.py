"""Two runs compared: the same bits, though their timing differed. Of synchronous and periodic that is Theorem 1 (PA).

    fingerprints (a critic's too), certificates of both, spans of the second --> compare --> Equivalence
                                                                                 --> certificate.json, what `verify` prints

A difference anywhere is a difference. Equal bits are a proof only where timing had its chance: the groups were taken in different
orders, and the second run trained while responses were made or scored, and made again what a killed worker took along. Otherwise
the certificate is void.
"""

from __future__ import annotations

import hashlib
import statistics
from collections.abc import Iterator, Sequence
from typing import Literal

import msgspec
import numpy as np

from asyncflow.telemetry.certificate import Certificate
from asyncflow.telemetry.fingerprints import StepPrint
from asyncflow.telemetry.idle import covered_seconds
from asyncflow.telemetry.spans import Span
from asyncflow.types import RunError

ABSENT = "absent"
CRITIC = "critic/"

TimelessFacts = dict[tuple[str, str], str]
"""Facts that must not depend on timing, by (what, where)."""


class Difference(msgspec.Struct, frozen=True):
    """First place at which two runs differ: the bits of `what` at `where` (a row, a micro-batch, a tensor), the first run's value
    first."""

    step: int
    what: str
    where: str
    values: tuple[str, str]


class Kill(msgspec.Struct, frozen=True):
    """A rollout worker ended while a step was trained and `rows` were in its hands, `at` seconds of the spans' clock."""

    worker: str
    step: int
    rows: int
    at: float


class Equivalence(msgspec.Struct, frozen=True, kw_only=True):
    """The verdict with its evidence; pairs are of the two runs, `names`, in order, hashes SHA-256.

    `reordered_steps`: steps whose groups were taken in different orders; `order_distance`: the mean Kendall distance of the two
    orders, 0 equal to 1 reversed. `overlapped_steps`: those in whose training the second run also generated, and `overlap_seconds`:
    for how long, the median over the steps. `kill`: in the second run; `groups_after_kill`: what the worker made when it had been
    started again. `logprobs`: of the rollout engine's log-probs against the train engine's, in both runs together, (tokens, those
    with equal bits, largest absolute difference in nats).
    """

    names: tuple[str, str]
    verdict: Literal["equal", "differs", "void"]
    reasons: list[str]
    difference: Difference | None
    config_hash: str
    steps: int
    num_facts: int
    weights_hash: tuple[str, str]
    everything_hash: tuple[str, str]
    reordered_steps: int
    order_distance: float
    overlapped_steps: int
    overlap_seconds: float
    kill: Kill | None
    groups_after_kill: int
    logprobs: tuple[int, int, float]
    runs: tuple[Certificate, Certificate]

    @property
    def lines(self) -> list[str]:
        """The comparison as the terminal shows it."""
        (tokens, equal, largest), (first, second) = self.logprobs, self.names
        staleness, spans = max(run.max_staleness for run in self.runs), max(run.max_spans for run in self.runs)
        verdicts = {
            "equal": f"EQUAL: {first} and {second} gave the same bits in {self.steps} steps",
            "differs": f"DIFFERS: {first} and {second} gave different bits",
            "void": f"VOID, no proof: {'; '.join(self.reasons)}",
        }
        shown = {
            "verdict": verdicts[self.verdict],
            "config": self.config_hash,
            "final weights": self._pair(self.weights_hash),
            "everything": f"{self._pair(self.everything_hash)} ({self.num_facts:,} hashes and numbers)",
            "versions": f"staleness {staleness}, spans per row {spans}",
            "order of groups": f"other in {self.reordered_steps} of {self.steps} steps, Kendall distance {self.order_distance:.3f}",
            "overlap": f"{second} trained while responses were made or scored in {self.overlapped_steps} of {self.steps} steps, "
            f"for {self.overlap_seconds:.2f} s (median)",
            "killed": self._killed(),
            "log-probs": f"train against rollout{' by older weights' if staleness else ''}: {equal:,} of {tokens:,} bit-equal "
            f"({equal / max(1, tokens):.2%}), largest difference {largest:.2g}",
        }
        lines = [f"{name:<16} {text}" for name, text in shown.items()]
        if self.difference is not None and self.reasons:
            lines[1:1] = [f"{'no proof either':<16} {'; '.join(self.reasons)}"]
        if self.difference is not None:
            where = f"step {self.difference.step}, {self.difference.what} of {self.difference.where}"
            lines[1:1] = [f"{'difference':<16} {where}: {self.difference.values[0]} against {self.difference.values[1]}"]
        return lines

    def _killed(self) -> str:
        if self.kill is None:
            return "no worker"
        return (
            f"{self.kill.worker} in step {self.kill.step} of {self.names[1]}, holding {self.kill.rows} rows; "
            f"{self.runs[1].rows_redelivered} were made again; "
            + (f"started again, it made {self.groups_after_kill} groups" if self.groups_after_kill else "it was not back in time")
        )

    def _pair(self, hashes: tuple[str, str]) -> str:
        first, second = self.names
        return hashes[0] if hashes[0] == hashes[1] else f"{hashes[0]} ({first}), {hashes[1]} ({second})"


def compare(
    names: tuple[str, str],
    config_hash: str,
    prints: tuple[Sequence[StepPrint], Sequence[StepPrint]],
    certificates: tuple[Certificate, Certificate],
    spans: Sequence[Span],
    kill: Kill | None,
    critics: tuple[Sequence[StepPrint], Sequence[StepPrint]] | None = None,
) -> Equivalence:
    """The verdict on two runs; `spans` and `kill` are the second one's. `prints` are the policies' fingerprints, `critics` those
    of the critics that the runs trained, None where they had none. Raises `RunError` for an incomplete run."""
    for whose, models in {"the": prints, "the critic of the": prints if critics is None else critics}.items():
        for name, steps, certificate in zip(names, models, certificates, strict=True):
            if [step.step for step in steps] != list(range(certificate.planned_steps)):
                raise RunError(f"{whose} {name} run left {len(steps)} of {certificate.planned_steps} steps to compare")
    first, second = ([facts(step) for step in steps] for steps in prints)
    if critics is not None:
        first, second = (
            [found | _of_critic(facts(step)) for found, step in zip(policy, critic, strict=True)]
            for policy, critic in zip((first, second), critics, strict=True)
        )
    difference = next(_differences(first, second), None)
    orders = [tuple([group.group for group in step.groups] for step in pair) for pair in zip(*prints, strict=True)]
    reordered = sum(one != other for one, other in orders)
    overlaps = overlap_seconds(spans)
    overlapped = sum(seconds > 0.0 for seconds in overlaps.values())
    everything = [step for steps in prints for step in steps]
    reasons = [f"{name}: {why}" for name, certificate in zip(names, certificates, strict=True) for why in certificate.voided]
    if not reordered:
        reasons.append("the groups were taken in the same order in every step")
    if not overlapped:
        reasons.append(f"{names[1]} never trained while responses were made or scored")
    if kill is None or not certificates[1].rows_redelivered:
        reasons.append(f"{names[1]} lost no row with a killed worker")
    if not any(float.fromhex(loss) for step in everything for group in step.groups for loss in group.losses):
        reasons.append("every loss was 0, so nothing was learned")
    return Equivalence(
        names=names,
        verdict="differs" if difference is not None else "void" if reasons else "equal",
        reasons=reasons,
        difference=difference,
        config_hash=config_hash,
        steps=len(first),
        num_facts=sum(map(len, first)),
        weights_hash=(_weights_hash(first[-1]), _weights_hash(second[-1])),
        everything_hash=(_hash(first), _hash(second)),
        reordered_steps=reordered,
        order_distance=statistics.fmean(kendall_distance(one, other) for one, other in orders),
        overlapped_steps=overlapped,
        overlap_seconds=statistics.median(overlaps.values() or [0.0]),
        kill=kill,
        groups_after_kill=0 if kill is None else groups_after(spans, kill),
        logprobs=(
            sum(step.loss_tokens for step in everything),
            sum(step.equal_tokens for step in everything),
            max(float.fromhex(step.logprob_difference) for step in everything),
        ),
        runs=certificates,
    )


def facts(step: StepPrint) -> TimelessFacts:
    """A step's facts, in an order of their own: rows and losses by group, then weights and optimiser state by name."""
    found: TimelessFacts = {}
    for group in sorted(step.groups, key=lambda group: group.group):
        for row in group.rows:
            facts = {"response": row.response, "rollout log-probs": row.logprobs, "reward": row.reward, "spans": str(row.spans)}
            found |= {(what, f"row {row.row}"): value for what, value in facts.items()}
        found |= {("loss", f"group {group.group}, micro-batch {i}"): loss for i, loss in enumerate(group.losses)}
    names = sorted(step.tensors, key=lambda name: (not name.startswith("weights/"), name))
    return found | {("tensor", name): step.tensors[name] for name in names}


def _of_critic(found: TimelessFacts) -> TimelessFacts:
    """Apart from the policy's, which are called the same."""
    return {(what, f"{CRITIC}{where}"): value for (what, where), value in found.items()}


def kendall_distance(first: Sequence[int], second: Sequence[int]) -> float:
    """Share of the pairs of common elements that the two orders have the other way round, 0 to 1."""
    place = {element: i for i, element in enumerate(second)}
    places = np.array([place[element] for element in first if element in place], np.int64)
    num_pairs = len(places) * (len(places) - 1) // 2
    return float(np.triu(places[:, None] > places, 1).sum()) / num_pairs if num_pairs else 0.0


def overlap_seconds(spans: Sequence[Span]) -> dict[int, float]:
    """Seconds of each step, from the start of its training to its update, in which groups of any step were under way."""
    groups = [span for span in spans if span.task == "generate_group"]
    training: dict[int, list[Span]] = {}
    for span in spans:
        if span.task in ("forward_backward", "optim_step"):
            training.setdefault(span.step, []).append(span)
    return {step: covered_seconds(groups, min(s.start for s in own), max(s.end for s in own)) for step, own in training.items()}


def groups_after(spans: Sequence[Span], kill: Kill) -> int:
    """Number of groups that the killed worker began, and made, after it was started again."""
    return sum(span.task == "generate_group" and span.worker == kill.worker and span.start > kill.at for span in spans)


def _differences(first: Sequence[TimelessFacts], second: Sequence[TimelessFacts]) -> Iterator[Difference]:
    for step, (ours, theirs) in enumerate(zip(first, second, strict=True)):
        for key in ours | theirs:
            values = ours.get(key, ABSENT), theirs.get(key, ABSENT)
            if values[0] != values[1]:
                yield Difference(step, *key, values)


def _hash(content: Sequence[TimelessFacts]) -> str:
    return hashlib.sha256(msgspec.json.encode([[[*key, value] for key, value in part.items()] for part in content])).hexdigest()


def _weights_hash(last: TimelessFacts) -> str:
    return _hash([{key: value for key, value in last.items() if key[0] == "tensor" and key[1].startswith("weights/")}])
