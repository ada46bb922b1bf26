"""Errors as the user reads them."""

from __future__ import annotations


def sentence(group: BaseExceptionGroup) -> str:
    """The first error of a group, in one sentence."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{error.filename or 'a file'}: {error.strerror}" if isinstance(error, OSError) and error.strerror else str(error)
