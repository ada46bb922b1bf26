"""Theorem 1 (PA) on two runs: the same bits from a synchronous and from a periodic run, though their timing differed.

    fingerprints, certificates, spans of both --> compare --> Equivalence --> certificate.json, the lines that `verify` prints

A difference anywhere is a difference. Equal bits are a proof only where timing had its chance: the groups were taken in different
orders, and periodic trained while responses were missing. Otherwise the certificate is void.
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
from asyncflow.telemetry.spans import Span
from asyncflow.types import RunError

ABSENT = "absent"

Facts = dict[tuple[str, str], str]
"""What must not depend on timing, by (what, where)."""


class Difference(msgspec.Struct, frozen=True):
    """Where two runs part: the bits of `what` at `where` (a row, a micro-batch, a tensor), synchronous first."""

    step: int
    what: str
    where: str
    values: tuple[str, str]


class Equivalence(msgspec.Struct, frozen=True, kw_only=True):
    """The verdict with its evidence; pairs are (synchronous, periodic), hashes SHA-256.

    `reordered_steps`: steps whose groups were taken in different orders; `order_distance`: the mean Kendall distance of the two
    orders, 0 equal to 1 reversed. `lead_seconds`: by how much periodic began to train before the step's last response was scored,
    the median over the steps. `logprobs`: of the rollout engine's log-probs against the train engine's, in both runs together,
    (tokens, those with equal bits, largest absolute difference in nats).
    """

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
    lead_seconds: float
    logprobs: tuple[int, int, float]
    runs: tuple[Certificate, Certificate]

    @property
    def lines(self) -> list[str]:
        """As the terminal shows it."""
        (tokens, equal, largest), overlapped = self.logprobs, self.runs[1].overlapped_steps
        staleness, spans = max(run.max_staleness for run in self.runs), max(run.max_spans for run in self.runs)
        verdicts = {
            "equal": f"EQUAL: synchronous and periodic gave the same bits in {self.steps} steps",
            "differs": "DIFFERS: synchronous and periodic gave different bits",
            "void": f"VOID, no proof: {'; '.join(self.reasons)}",
        }
        shown = {
            "verdict": verdicts[self.verdict],
            "config": self.config_hash,
            "final weights": _pair(self.weights_hash),
            "everything": f"{_pair(self.everything_hash)} ({self.num_facts:,} hashes and numbers)",
            "versions": f"staleness {staleness}, spans per row {spans}",
            "order of groups": f"other in {self.reordered_steps} of {self.steps} steps, Kendall distance {self.order_distance:.3f}",
            "overlap": f"periodic trained before the last response in {overlapped} of {self.steps} steps, from "
            f"{self.lead_seconds:.2f} s ahead of it on (median)",
            "log-probs": f"train against rollout: {equal:,} of {tokens:,} bit-equal ({equal / max(1, tokens):.2%}), "
            f"largest difference {largest:.2g}",
        }
        lines = [f"{name:<16} {text}" for name, text in shown.items()]
        if self.difference is not None:
            where = f"step {self.difference.step}, {self.difference.what} of {self.difference.where}"
            lines[1:1] = [f"{'difference':<16} {where}: {self.difference.values[0]} against {self.difference.values[1]}"]
        return lines


def compare(
    config_hash: str,
    prints: tuple[Sequence[StepPrint], Sequence[StepPrint]],
    certificates: tuple[Certificate, Certificate],
    spans: Sequence[Span],
) -> Equivalence:
    """The verdict on a synchronous and a periodic run; `spans` are the periodic one's. Raises `RunError` for an incomplete one."""
    for steps, certificate in zip(prints, certificates, strict=True):
        if [step.step for step in steps] != list(range(certificate.planned_steps)):
            raise RunError(f"the {certificate.schedule} run left {len(steps)} of {certificate.planned_steps} steps to compare")
    synchronous, periodic = ([facts(step) for step in steps] for steps in prints)
    difference = next(_differences(synchronous, periodic), None)
    orders = [tuple([group.group for group in step.groups] for step in pair) for pair in zip(*prints, strict=True)]
    reordered = sum(first != second for first, second in orders)
    everything = [step for steps in prints for step in steps]
    reasons = [f"{certificate.schedule}: {reason}" for certificate in certificates for reason in certificate.voided]
    if not reordered:
        reasons.append("the groups were taken in the same order in every step")
    if not certificates[1].overlapped_steps:
        reasons.append("periodic began to train only after the last response, in every step")
    if not any(float.fromhex(loss) for step in everything for group in step.groups for loss in group.losses):
        reasons.append("every loss was 0, so nothing was learned")
    return Equivalence(
        verdict="differs" if difference is not None else "void" if reasons else "equal",
        reasons=reasons,
        difference=difference,
        config_hash=config_hash,
        steps=len(synchronous),
        num_facts=sum(map(len, synchronous)),
        weights_hash=(_weights_hash(synchronous[-1]), _weights_hash(periodic[-1])),
        everything_hash=(_hash(synchronous), _hash(periodic)),
        reordered_steps=reordered,
        order_distance=statistics.fmean(kendall_distance(first, second) for first, second in orders),
        lead_seconds=statistics.median(lead_seconds(spans).values() or [0.0]),
        logprobs=(
            sum(step.loss_tokens for step in everything),
            sum(step.equal_tokens for step in everything),
            max(float.fromhex(step.logprob_difference) for step in everything),
        ),
        runs=certificates,
    )


def facts(step: StepPrint) -> Facts:
    """A step's facts, in an order of their own: rows and losses by group, then weights and optimiser state by name."""
    found: Facts = {}
    for group in sorted(step.groups, key=lambda group: group.group):
        for row in group.rows:
            told = {"response": row.response, "rollout log-probs": row.logprobs, "reward": row.reward, "spans": str(row.spans)}
            found |= {(what, f"row {row.row}"): value for what, value in told.items()}
        found |= {("loss", f"group {group.group}, micro-batch {i}"): loss for i, loss in enumerate(group.losses)}
    names = sorted(step.tensors, key=lambda name: (not name.startswith("weights/"), name))
    return found | {("tensor", name): step.tensors[name] for name in names}


def kendall_distance(first: Sequence[int], second: Sequence[int]) -> float:
    """Share of the pairs of common elements that the two orders have the other way round, 0 to 1."""
    place = {element: i for i, element in enumerate(second)}
    places = np.array([place[element] for element in first if element in place], np.int64)
    num_pairs = len(places) * (len(places) - 1) // 2
    return float(np.triu(places[:, None] > places, 1).sum()) / num_pairs if num_pairs else 0.0


def lead_seconds(spans: Sequence[Span]) -> dict[int, float]:
    """By step: from the start of training to the moment when the step's last group was complete; negative if it came after."""
    began: dict[int, float] = {}
    completed: dict[int, float] = {}
    for span in spans:
        if span.task == "forward_backward":
            began[span.step] = min(span.start, began.get(span.step, span.start))
        elif span.task == "generate_group":
            completed[span.step] = max(span.end, completed.get(span.step, span.end))
    return {step: completed[step] - start for step, start in began.items() if step in completed}


def _differences(first: Sequence[Facts], second: Sequence[Facts]) -> Iterator[Difference]:
    for step, (ours, theirs) in enumerate(zip(first, second, strict=True)):
        for key in ours | theirs:
            values = ours.get(key, ABSENT), theirs.get(key, ABSENT)
            if values[0] != values[1]:
                yield Difference(step, *key, values)


def _hash(content: Sequence[Facts]) -> str:
    return hashlib.sha256(msgspec.json.encode([[[*key, value] for key, value in part.items()] for part in content])).hexdigest()


def _weights_hash(last: Facts) -> str:
    return _hash([{key: value for key, value in last.items() if key[0] == "tensor" and key[1].startswith("weights/")}])


def _pair(hashes: tuple[str, str]) -> str:
    return hashes[0] if hashes[0] == hashes[1] else f"{hashes[0]} (synchronous), {hashes[1]} (periodic)"
