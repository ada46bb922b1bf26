"""The certificate of a run: what its ledger has seen of staleness, and of all that could have bent what was trained.

    ledger, workers' reports --> Observed --> Certificate --> certificate.json, one line in the terminal and in the report

A schedule promises a largest staleness, and law 8 that timing decides nothing; what broke either is named under `voided`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import msgspec

from asyncflow.run_dir import replace
from asyncflow.types import Array, UserError

CERTIFICATE_FILE: Final = "certificate.json"


class Certificate(msgspec.Struct, frozen=True, kw_only=True):
    """`certificate.json`. It is called on-policy where the schedule promises a staleness of 0, and of bounded staleness elsewhere.

    `steps` of `planned_steps` are committed. `max_staleness` in versions and `max_spans` (policy versions that made one response)
    are the largest of all trained rows. `overlapped_steps`: steps of which a group was trained while responses of the step were
    still missing. `rows_redelivered` (but for evaluators'), `rows_dead` and `reward_failures` (by kind, timeouts among them) count
    over the whole run, as `episode_timeouts` do: trained rows whose environment missed its deadline. `resumed_at`: the numbers of
    committed steps from which the run was resumed, after it had ended in whatever way.
    `is_deterministic`: every rollout engine makes a lost response again exactly; if not, `why_not_deterministic` says why.
    """

    schedule: str
    steps: int
    planned_steps: int
    promised_staleness: int = 0
    max_staleness: int
    max_spans: int
    overlapped_steps: int
    rows_redelivered: int
    rows_dead: int
    reward_timeouts: int
    reward_failures: dict[str, int]
    episode_timeouts: int = 0
    skipped_updates: int
    is_deterministic: bool
    why_not_deterministic: str
    voided: list[str]
    resumed_at: list[int] = []

    @property
    def line(self) -> str:
        """The certificate in one line."""
        resumed = f"; resumed at step {', '.join(map(str, self.resumed_at))}" if self.resumed_at else ""
        kind = "bounded-staleness" if self.promised_staleness else "on-policy"
        allowed = f" of {self.promised_staleness} allowed" if self.promised_staleness else ""
        verdict = f"VOID: {'; '.join(self.voided)}" if self.voided else "holds"
        return (
            f"{kind} certificate {verdict} ({self.schedule}, {self.steps} of {self.planned_steps} steps; staleness "
            f"{self.max_staleness}{allowed}, spans per row {self.max_spans}, rows redelivered {self.rows_redelivered}, rows failed "
            f"{self.rows_dead}, reward timeouts {self.reward_timeouts}, "
            f"{f'episode timeouts {self.episode_timeouts}, ' if self.episode_timeouts else ''}"
            f"updates skipped {self.skipped_updates}"
            f"{'' if self.is_deterministic else f'; not deterministic: {self.why_not_deterministic}'}{resumed})"
        )

    def write(self, run_dir: Path) -> None:
        """Write the certificate into the run's folder, whole or not at all."""
        replace(run_dir / CERTIFICATE_FILE, msgspec.json.format(msgspec.json.encode(self), indent=2) + b"\n")


def read_certificate(run_dir: Path) -> Certificate | None:
    """Certificate of a run; None where it has none (yet). Raises `UserError` for a file that is not a certificate."""
    path = run_dir / CERTIFICATE_FILE
    try:
        return msgspec.json.decode(path.read_bytes(), type=Certificate) if path.exists() else None
    except msgspec.DecodeError as error:
        raise UserError(f"{path} is no certificate ({error}): move it away") from error


@dataclass(slots=True)
class Observed:
    """Facts that the ledger has reported so far."""

    max_staleness: int = 0
    max_spans: int = 0
    overlapped_steps: set[int] = field(default_factory=set)
    rows_dead: int = 0
    skipped_updates: int = 0
    episode_timeouts: int = 0

    def group(self, step: int, *, staleness: Array, num_spans: Array, is_overlapped: bool) -> None:
        """A trained group of R rows: staleness int64 [R], num_spans int64 [R]. `is_overlapped`: the step lacked responses then."""
        self.max_staleness = int(staleness.max(initial=self.max_staleness))
        self.max_spans = int(num_spans.max(initial=self.max_spans))
        if is_overlapped:
            self.overlapped_steps.add(step)

    def certificate(
        self,
        *,
        schedule: str,
        promised_staleness: int,
        steps: int,
        planned_steps: int,
        rows_redelivered: int,
        reward_failures: Mapping[str, int],
        why_not_deterministic: str,
        resumed_at: Sequence[int] = (),
        made_again_at: Sequence[int] = (),
    ) -> Certificate:
        """The verdict. A response in mid-air goes through at most one installation for each version of promised staleness.

        `made_again_at`: those of `resumed_at` where rows had been begun, or may have been, that were made again.
        """
        timeouts = reward_failures.get("timeout", 0)
        voided = []
        if self.max_staleness > promised_staleness:
            voided.append(f"a row was {self.max_staleness} versions old, and {schedule} promises {promised_staleness} at most")
        if self.max_spans > promised_staleness + 1:
            voided.append(
                f"a response was made by {self.max_spans} versions, and {schedule} promises {promised_staleness + 1} at most"
            )
        if rows_redelivered and why_not_deterministic:
            again = f"{rows_redelivered} rows were delivered again to an engine that does not make them again exactly"
            voided.append(f"{again} ({why_not_deterministic})")
        if made_again_at and why_not_deterministic:
            where = ", ".join(map(str, made_again_at))
            again = f"at step {where}, where the run was resumed, rows were made again by an engine that does not do so exactly"
            voided.append(f"{again} ({why_not_deterministic})")
        if self.rows_dead and timeouts:
            voided.append(f"{self.rows_dead} rows failed with {timeouts} reward timeouts: the machine's speed decided which")
        return Certificate(
            schedule=schedule,
            steps=steps,
            planned_steps=planned_steps,
            promised_staleness=promised_staleness,
            max_staleness=self.max_staleness,
            max_spans=self.max_spans,
            overlapped_steps=len(self.overlapped_steps),
            rows_redelivered=rows_redelivered,
            rows_dead=self.rows_dead,
            reward_timeouts=timeouts,
            reward_failures=dict(reward_failures),
            episode_timeouts=self.episode_timeouts,
            skipped_updates=self.skipped_updates,
            is_deterministic=not why_not_deterministic,
            why_not_deterministic=why_not_deterministic,
            voided=voided,
            resumed_at=list(resumed_at),
        )
