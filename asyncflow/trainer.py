"""The same run from Python, step by step; docs/python.md has all that it can do.

with Trainer.from_config("recipes/quickstart.yaml", "run.steps=5") as trainer:
    while (metrics := trainer.step()) is not None:
        print(metrics["reward/mean"])
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Iterable, Mapping
from pathlib import Path
from types import TracebackType, UnionType
from typing import Any, Final, TypeVar

from asyncflow.config import Config, load, parse
from asyncflow.run.job import Listener
from asyncflow.run.stepwise import StepwiseRun
from asyncflow.types import RunError, UserError

T = TypeVar("T")
_PLAIN: Final = (str, int, float, bool, type(None))


class Trainer:
    """A run driven step by step. Its event loop lives in a thread of its own; every method blocks until it is done."""

    def __init__(self, config: Config, listener: Listener | None = None, *, resume: bool = False) -> None:
        """With `resume` the run continues from its newest whole checkpoint, or begins if there is none. `listener`: told of each
        line of the log, step and evaluation."""
        _check_kind(config, Config, "write Trainer.from_config(...): Trainer itself takes a checked configuration")
        self.config = config
        self._listener, self._resume = listener, resume
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="asyncflow", daemon=True)
        self._run: StepwiseRun | None = None

    @classmethod
    def from_config(
        cls, config: str | Path | Mapping[str, Any], *overrides: str, listener: Listener | None = None, resume: bool = False
    ) -> Trainer:
        """Make a trainer from a YAML file, or from nested mappings, with `key.path=value` overrides. Raises `UserError`."""
        _check_kind(config, str | Path | Mapping, "from_config takes the path of a YAML file, or nested mappings")
        for override in overrides:
            _check_kind(override, str, "an override is text such as 'run.steps=3', one for each key")
        if not isinstance(config, Mapping):
            return cls(load(Path(config), overrides), listener, resume=resume)
        _check_plain(config)
        return cls(parse(config, overrides), listener, resume=resume)

    def start(self) -> None:
        """Check everything and start the workers. Raises `UserError` before anything is started."""
        if self._run is not None:
            raise RunError("this trainer has been started already")
        self._thread.start()
        self._run = StepwiseRun(self.config, self._listener, resume=self._resume)
        self._call(self._run.start())

    def step(self) -> Mapping[str, float] | None:
        """Train one step and return its metrics; None when `run.steps` are done. Starts the run if it is not running.

        Raises `RunError` when the run cannot go on; call `stop` then, to have the model and the report written.
        """
        if self._run is None:
            self.start()
        return self._call(self._started.step())

    def put_prompts_data(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Train on these rows (the columns that make the prompt, and those that the reward reads) before the data set's.

        They enter with the next step that is not admitted yet: prompts are admitted as far ahead as the schedule generates.
        Raises `UserError` for a row that lacks a column or is too long.
        """
        self._call(self._started.put_prompts_data(rows))

    def weight_sync_notify(self, timeout_seconds: float = 60.0) -> int:
        """Have every rollout worker serve the weights of the last committed step now; returns their version (AF, section 5).

        Workers get new weights by themselves, when the schedule lets them: this is for driving a run from outside. They change
        all at once, in `sub_step` too, where they otherwise do it in turn; but no row is made by a version that its step may not
        have, so that under a schedule that is ahead with generating they first finish what only the older version may make. Returns
        when all serve it. Raises `RunError` naming the workers that do not in time: the call stands, and they change when they can.
        """
        _check_kind(timeout_seconds, float | int, "weight_sync_notify takes a number of seconds")
        return self._call(self._started.weight_sync_notify(timeout_seconds))

    def scale_rollout(self, num_workers: int, grace_seconds: float = 60.0) -> str:
        """Let rollout workers join or leave, as `asyncflow cluster scale` does. Returns what is begun, in words.

        `grace_seconds`: how long those that leave may take to end what they hold. Raises `UserError` for a number that the run
        cannot have.
        """
        _check_kind(num_workers, int, "scale_rollout takes a whole number of workers")
        _check_kind(grace_seconds, float | int, "scale_rollout takes a number of seconds for grace_seconds")
        return self._call(self._started.scale_rollout(num_workers, grace_seconds))

    def evaluate(self) -> Mapping[str, float]:
        """Evaluate the model after the last committed step on the prompts of `eval.path`, and return the figures, as `eval.jsonl`
        has them. One that is planned (before the first step, after the last, every `eval.every_steps`) is waited for.

        Raises `UserError` without `eval.path`, `RunError` when the run cannot go on.
        """
        return self._call(self._started.evaluate())

    def save(self, folder: str | Path) -> int:
        """Write the model after the last committed step into a new folder, as Hugging Face does, or its adapter (`model.lora`), in
        the dtype in which weights travel (`weight_sync.dtype`). Returns the number of its steps.

        Raises `UserError` for a folder that is there, or before the first step; `RunError` where the weights are in no file of this
        machine.
        """
        _check_kind(folder, str | Path, "save takes the path of a new folder")
        return self._call(self._started.save(Path(folder)))

    def checkpoint(self) -> int:
        """Have a checkpoint written with the next step that is committed; returns the number of its steps. `--resume` continues
        from it. Raises `UserError` where the run keeps none (`checkpoint.keep`), or has no step left."""
        return self._call(self._started.checkpoint())

    def stop(self) -> None:
        """Stop the workers and write the model, the trace and the report. Nothing if the run is not running."""
        if self._run is not None:
            self._call(self._run.stop())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()
            self._run = None

    def __enter__(self) -> Trainer:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()

    @property
    def _started(self) -> StepwiseRun:
        if self._run is None:
            raise RunError("this trainer is not running: call start first")
        return self._run

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        if not self._thread.is_alive():
            work.close()
            raise RunError("this trainer is not running: call start first")
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()


def _check_plain(tree: Mapping[str, Any], above: str = "") -> None:
    """Check that a configuration holds what YAML can say. Raises `UserError` naming the key that does not."""
    for name, value in tree.items():
        key = f"{above}{name}"
        for each in value if isinstance(value, list | tuple) else [value]:
            if isinstance(each, Mapping):
                _check_plain(each, f"{key}.")
            elif callable(each):
                name_of_it = getattr(each, "__name__", "name")
                raise UserError(
                    f"{key} is {name_of_it} itself, and other processes have to find it: write it into a file of its own and name "
                    f"that, {{'path': 'my_file.py:{name_of_it}'}}"
                )
            elif not (type(each) in _PLAIN or isinstance(each, Path | list | tuple)):
                kind = type(each).__name__
                raise UserError(f"{key} is a {kind}, which YAML cannot say: write a plain number, text, list or mapping")


def _check_kind(value: object, kind: type | UnionType, what: str) -> None:
    """Check what a caller gives. Raises `UserError`: `what` is taken, and not that."""
    if isinstance(value, bool) or not isinstance(value, kind):
        raise UserError(f"{what}, not a {type(value).__name__}")
