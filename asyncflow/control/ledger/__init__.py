"""The ledger, which owns the steps: a state machine (`steps.py` over `step_tasks.py`, `step_state.py`, `update_progress.py` and
`candidates.py`), and the service that workers call (`service.py`)."""

from asyncflow.control.ledger.candidates import Candidates, Decided, num_to_admit
from asyncflow.control.ledger.messages import Consumed, StepTotals, TrainedGroup, Update
from asyncflow.control.ledger.service import LedgerService, RoundGroup
from asyncflow.control.ledger.step_tasks import TaskPlan, UpdatePlan
from asyncflow.control.ledger.steps import Ledger

__all__ = [
    "Candidates",
    "Consumed",
    "Decided",
    "Ledger",
    "LedgerService",
    "RoundGroup",
    "StepTotals",
    "TaskPlan",
    "TrainedGroup",
    "Update",
    "UpdatePlan",
    "num_to_admit",
]
