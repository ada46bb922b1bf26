"""Errors as the user reads them."""

from __future__ import annotations

from asyncflow.types import first_error


def sentence(group: BaseExceptionGroup) -> str:
    """The first error of a group, in one sentence."""
    error = first_error(group)
    return f"{error.filename or 'a file'}: {error.strerror}" if isinstance(error, OSError) and error.strerror else str(error)
