"""The tool `python`: a program in a process of its own, behind the walls of the sandbox."""

from __future__ import annotations

import ast
import contextlib
import io
import traceback
from typing import Final

import msgspec

from asyncflow.sandbox.forked import in_child
from asyncflow.sandbox.frames import Failed
from asyncflow.sandbox.limits import ProcessLimits, children

DEADLINE_SECONDS: Final = 5.0
MEMORY_BYTES: Final = 512 << 20
OUTPUT_BYTES: Final = 1 << 16


class ProgramOutput(msgspec.Struct, tag=True):
    """Output of a program: what it has printed, and the value of its last expression."""

    text: str


def python(code: str) -> str:
    """Run a Python program and return what it prints. The value of a last line that is an expression is printed, too.

    Args:
        code: The program. It has 5 seconds and 512 MB, and nothing of an earlier program.
    """
    limits = ProcessLimits(deadline_seconds=DEADLINE_SECONDS, memory_bytes=MEMORY_BYTES, output_bytes=OUTPUT_BYTES)
    reply = in_child(lambda: ProgramOutput(_run(code)), ProgramOutput, limits, "python", spared=children())
    if isinstance(reply, Failed):
        raise RuntimeError(reply.message)
    return reply.text


def _run(code: str) -> str:
    """Run in the child. Errors are part of the text, as an interpreter prints them."""
    printed, names = io.StringIO(), {"__name__": "__main__"}
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        try:
            tree = ast.parse(code, "<program>")
            last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
            exec(compile(tree, "<program>", "exec"), names)
            if last is not None and isinstance(last, ast.Expr):
                value = eval(compile(ast.Expression(last.value), "<program>", "eval"), names)
                if value is not None:
                    print(repr(value))
        except SystemExit as ended:  # what was printed before stays
            if ended.code is not None and not isinstance(ended.code, int):
                print(ended.code)
        except Exception as error:
            print("".join(traceback.format_exception_only(error)).strip())
    text = printed.getvalue()
    return text if len(text) <= OUTPUT_BYTES else f"{text[:OUTPUT_BYTES]}..."
