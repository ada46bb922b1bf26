"""The ledger, which owns the steps: a state machine (`steps.py` over `step_state.py`, `update_progress.py` and `candidates.py`),
and the service that workers call (`service.py`)."""

from asyncflow.workflows.ledger.candidates import Candidates, Sifted, num_to_admit
from asyncflow.workflows.ledger.figures import Consumed, StepTotals, Update
from asyncflow.workflows.ledger.service import LedgerService
from asyncflow.workflows.ledger.steps import Ledger

__all__ = ["Candidates", "Consumed", "Ledger", "LedgerService", "Sifted", "StepTotals", "Update", "num_to_admit"]
