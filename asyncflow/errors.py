"""The two errors that are shown as one sentence.

Nothing is imported here: reward workers use them, and each of these processes would import numpy with `types.py`.
"""


class UserError(Exception):
    """Mistake that the user can mend: shown as one sentence without a traceback, exit code 2."""


class RunError(Exception):
    """Fault that ends a run: shown as one sentence without a traceback, exit code 1."""
