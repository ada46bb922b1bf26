"""The verbs of the command line. A mistake of the user's is one sentence and exit code 2, a failed run exit code 1."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys

import typer

from asyncflow.cli.arguments import UsageError, sentence_of
from asyncflow.cli.check import check
from asyncflow.cli.cluster import app as cluster
from asyncflow.cli.display import sentence
from asyncflow.cli.eval import evaluate
from asyncflow.cli.init import init
from asyncflow.cli.join import join
from asyncflow.cli.merge import merge
from asyncflow.cli.output import keep_going
from asyncflow.cli.plan import plan
from asyncflow.cli.queue import app as queue
from asyncflow.cli.quickstart import quickstart
from asyncflow.cli.replay import replay
from asyncflow.cli.report import report
from asyncflow.cli.reward import reward
from asyncflow.cli.serve import serve
from asyncflow.cli.simulate import simulate
from asyncflow.cli.status import status
from asyncflow.cli.train import train
from asyncflow.cli.verify import verify
from asyncflow.cli.watch import compare, watch
from asyncflow.cli.why import why
from asyncflow.types import RunError, UserError
from asyncflow.user_file import status_of

app = typer.Typer(
    help="Post-train language models with reinforcement learning, generation and training side by side.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
VERBS = (
    quickstart, init, train, serve, join, evaluate, replay, merge, verify, simulate, plan, reward, report, watch, compare, status,
    why, check,
)  # fmt: skip
for _verb in VERBS:
    app.command(name="eval" if _verb is evaluate else None)(_verb)
app.add_typer(cluster, name="cluster")
app.add_typer(queue, name="queue")


def run() -> None:
    """Run the command line's verb, and end the process."""
    keep_going()
    logging.basicConfig(format="%(levelname)s: %(message)s", level=logging.WARNING)
    try:
        sys.exit(_called())
    except* UserError as group:
        _end(group, status_of(group))
    except* (RunError, OSError) as group:
        _end(group, 1)
    except* asyncio.CancelledError:
        print("asyncflow: a second signal has ended it at once", file=sys.stderr)
        sys.exit(128 + signal.SIGINT)


def _called() -> int:
    """Call the verb. Returns the exit status. Raises `UserError` for arguments that it does not take."""
    try:
        return app(standalone_mode=False, prog_name="asyncflow") or 0
    except typer.Abort:
        return 1
    except UsageError as error:
        if "\n" in str(error):  # a verb of verbs, which is told what there is
            error.show()
            return 2
        raise UserError(sentence_of(error)) from error


def _end(group: BaseExceptionGroup, code: int) -> None:
    print(f"asyncflow: {sentence(group)}", file=sys.stderr)
    sys.exit(code)
