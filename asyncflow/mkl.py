"""MKL's products of matrices, which torch takes on x86 CPUs: on one thread a row has the same bits, whichever rows are beside it.

On Intel's processors MKL has kernels of its own for few rows, with other bits, unless it is told not to take them; it reads what it
is told when it computes for the first time. Products of small matrices take a little longer then. On others it has no such kernels.
"""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Final

VARIABLE: Final = "MKL_CBWR"
STRICT: Final = "AUTO,STRICT"


def is_intels() -> bool:
    """Whether this machine's processor is one of Intel's."""
    facts = Path("/proc/cpuinfo")
    return "GenuineIntel" in (facts.read_text(errors="replace") if facts.is_file() else platform.processor())


def environment() -> dict[str, str]:
    """Variable of a process's environment that tells MKL; what the user has told it stays."""
    return {VARIABLE: os.environ.get(VARIABLE, STRICT)} if is_intels() else {}


def keep_bits_of_rows() -> None:
    """Tell MKL in this process."""
    os.environ.update(environment())
    if os.environ.get(VARIABLE) == STRICT and not is_intels():  # said by a driver on another machine
        del os.environ[VARIABLE]
