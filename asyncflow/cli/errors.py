"""Sentences that users read about errors."""

from __future__ import annotations

from asyncflow.types import first_error


def sentence(group: BaseExceptionGroup) -> str:
    """Sentence that tells a user of the first error of a group."""
    error = first_error(group)
    return f"{error.filename or 'a file'}: {error.strerror}" if isinstance(error, OSError) and error.strerror else str(error)
