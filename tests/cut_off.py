"""Removes what a killed process has left of its coverage data: `coverage combine` stops at some of these files.

python -m tests.cut_off [FOLDER]
"""

from __future__ import annotations

import sqlite3
import sys
from contextlib import closing
from pathlib import Path


def is_whole(path: Path) -> bool:
    """Whether a file is a data file that was written to its end, page by page."""
    try:
        with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as file:
            return file.execute("PRAGMA quick_check").fetchone() == ("ok",) and bool(
                file.execute("SELECT version FROM coverage_schema").fetchone()
            )
    except sqlite3.DatabaseError:
        return False


def remove_cut_off(folder: Path) -> list[Path]:
    """Remove the data files of single processes that are not whole. Returns them."""
    removed = [path for path in sorted(folder.glob(".coverage.*")) if not is_whole(path)]
    for path in removed:
        path.unlink(missing_ok=True)  # of a process that ends only now
    return removed


if __name__ == "__main__":
    removed = remove_cut_off(Path(sys.argv[1] if len(sys.argv) > 1 else "."))
    if removed:
        print(f"left out: {len(removed)} data files of processes that were killed while they wrote them")
