"""The ledger, which owns the steps: `steps.py` is the state machine, `service.py` its face for the loops."""

from asyncflow.workflows.ledger.service import LedgerService
from asyncflow.workflows.ledger.steps import Consumed, Ledger, StepTotals, Update

__all__ = ["Consumed", "Ledger", "LedgerService", "StepTotals", "Update"]
