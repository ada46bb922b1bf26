"""Folder of a run, as one attempt finds it and leaves it: what is there when it begins, and what is left when it ends.

    folder --begin--> nothing: made anew | a checkpoint: gone back to | all of it: told, and nothing is to be done
           <--end---- the model (the trainer's, or the last one published), which steps it is of, the report

consumes: the run's folder
waits for: the disk
is unblocked by: the disk
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import shutil
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec

from asyncflow.checkpoint.folder import Checkpoints
from asyncflow.cluster.torchrun import launch_of
from asyncflow.config import Config, dump
from asyncflow.engines.lora_files import write_published_lora
from asyncflow.run.factories import make_algorithm, queue_schema
from asyncflow.run.in_worker.connection import JobFile
from asyncflow.run.models.model_files import copy_tokenizer
from asyncflow.run.preparation.prepare import Prepared
from asyncflow.run.records.step_rows import StepRows
from asyncflow.run.state.driver_state import Resumed, data_hash, read_driver, write_added
from asyncflow.run.state.fork import copy_origin, forked_at, unfinished_fork
from asyncflow.run.state.resume import check_fits, cut_back, metrics_of, to_be_kept, usable
from asyncflow.run.state.saving import checkpoints_of, places_of
from asyncflow.run_dir import (
    CONFIG_FILE,
    JOB_FILE,
    KEY_FILE,
    RunDir,
    control_socket,
    remove_shared_dir,
    replace,
    sweep_shared_memory,
)
from asyncflow.telemetry.certificate import Certificate, read_certificate
from asyncflow.transport.stream import is_served
from asyncflow.types import RunError, UserError
from asyncflow.weight_sync.base import Manifest

Prepare = Callable[[Path, Resumed | None], Awaitable[Prepared]]


def write_published(folder: Path, published: Manifest, model: Path, config: Config) -> None:
    """Write a published version as a model, or as an adapter, into a new folder. `model`: what the run was started from."""
    folder.mkdir(parents=True)
    if config.lora is not None:
        write_published_lora(folder, config.lora, model, Path(published.address))
    else:
        shutil.copyfile(published.address, folder / "model.safetensors")
        shutil.copyfile(model / "config.json", folder / "config.json")
    copy_tokenizer(model, folder)


class RunFolder:
    """Folder of a run, for one attempt. `rows`: metrics by step, of the attempts before this one. `job`: what the workers read.
    `certificate`: of a finished run."""

    def __init__(self, config: Config, log: Callable[[str], None], *, resume: bool, memory: Path | None = None) -> None:
        """`memory`: folder of the run's checkpoints in shared memory, which the attempts of one process have in common."""
        self.memory = memory
        self.rows = StepRows(config.run_dir)
        self.certificate: Certificate | None = None
        self.weights_dir: Path | None = None
        self._config, self._log, self._resume = config, log, resume
        self._folder = RunDir(config.run_dir)
        self._model_before: int | None = None  # what was there when the run started
        self._model_version: int | None = None  # of what this attempt has saved

    async def begin(self, prepare: Prepare) -> tuple[Prepared, Resumed | None] | None:
        """Look at the folder, have the inputs prepared, in a folder that goes afterwards, and make the run's. Returns the inputs,
        and the checkpoint that the attempt resumes, if it does. Raises `UserError`.

        None, with nothing made, where the run that is to be resumed is finished already.
        """
        config = self._config
        scratch = Path(tempfile.mkdtemp(prefix="asyncflow-"))
        try:
            self._check_not_live()
            sweep_shared_memory()  # also where nothing is to be done: an attempt may have been killed as it ended
            resumed = await self._last_checkpoint()
            if resumed is None:
                self._check_free()
            prepared = await prepare(scratch, resumed)
            if resumed is None and self._resume and not config.run.overwrite and self._has_results_of(config.run.steps):
                self._report_end(prepared, None)  # which wrote no checkpoints
                return None
            if resumed is None:
                prepared = self._begin_anew(prepared, scratch)
            else:
                check_fits(config, resumed.state, await asyncio.to_thread(data_hash, prepared.prompts))
                if resumed.state.version == config.run.steps and self._has_results_of(config.run.steps):
                    self._report_end(prepared, resumed)
                    return None
                resumed = self._usable(resumed)
                await self._go_back(resumed)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
        self.weights_dir = self._folder.make_weights_dir()
        self._model_before = self._folder.model_id()
        self.write_job(self._job_file(prepared, resumed))
        return prepared, resumed

    def write_job(self, job: JobFile) -> None:
        """Write the job's file, which the workers read, into the folder."""
        self.job = job
        replace(self._config.run_dir / JOB_FILE, msgspec.json.encode(job))

    def save_published_model(self, published: Manifest | None, model: Path, committed: int) -> None:
        """Make the last version that was published the run's model, if the trainer has saved none: it is a safetensors file with
        the same names.

        A model of an earlier attempt stays where there is none that could take its place. `model`: what the run was started from.
        """
        folder = self._folder
        folder.restore_models()
        self._look_at_critic(committed)
        if folder.model_id() != self._model_before:  # of this attempt
            self._model_version = committed
            return
        if published is None:
            is_there = self._model_before is not None
            left = f"{folder.model} stays as it was" if is_there else "there is no model to save"
            self._log(f"no step was committed, so {left}")
            return
        if folder.model_version == published.version:
            return
        if not Path(published.address).exists():  # on another machine
            where = "the newest checkpoint has the model, if there is one"
            self._log(f"the trainer has saved no model, and its last published weights are not on this machine: {where}")
            return
        with folder.saving_model() as partial:
            shutil.rmtree(partial, ignore_errors=True)
            write_published(partial, published, model, self._config)
        self._model_version = published.version
        self._log(f"the trainer has saved no model: {folder.model} holds the last published weights")

    def _look_at_critic(self, committed: int) -> None:
        """Say so if the critic has not been saved: no other process has it."""
        version = self._folder.critic_version
        if self._has_critic and committed and (version is None or version < committed):
            left = "is not there" if version is None else f"stays as it was after {version} steps"
            where = "the newest checkpoint has it, if there is one"
            self._log(f"the critic has not been saved: {self._folder.critic} {left}; {where}")

    def note_end(self) -> None:
        """Note beside the model that this attempt has saved that the run has ended in order. To be called last of all."""
        if self._model_version is not None:
            self._folder.note_model(self._model_version)

    def remove_weights(self) -> None:
        """Remove this attempt's files from shared memory."""
        if self.weights_dir is not None:
            remove_shared_dir(self.weights_dir)
            self.weights_dir = None

    def next(self) -> RunFolder:
        """Folder for the attempt that follows in this process, which resumes the run."""
        return RunFolder(self._config, self._log, resume=True, memory=self.memory)

    # -- how it begins ------------------------------------------------------------------------------------------------------

    def _check_not_live(self) -> None:
        run_dir = self._config.run_dir
        if is_served(control_socket(run_dir)):  # by a process that may be stopped, or busy, and not by one that was killed
            raise UserError(f"a run is live in {run_dir}: wait for its end, interrupt it, or give this one another run.name")

    async def _last_checkpoint(self) -> Resumed | None:
        """Newest whole checkpoint; None if the run is to begin. Raises `RunError` if all of them are damaged."""
        if not self._resume:
            return None
        self._folder.restore_models()
        if (record := unfinished_fork(self._config)) is not None:
            self._log(f"the fork of {record.origin} after {record.step} steps was not made to its end: it is made now")
            await asyncio.to_thread(copy_origin, self._config, record, self._log)
        newest = None
        for checkpoints in self._places:
            after = -1 if newest is None else newest[1]
            if (version := await asyncio.to_thread(checkpoints.newest, self._log, after=after)) is not None:
                newest = checkpoints, version
        if newest is not None:
            checkpoints, version = newest
            return await asyncio.to_thread(read_driver, checkpoints.path(version), checkpoints.added(version))
        if checkpoints_of(self._config).versions():
            where = self._folder.checkpoints
            raise RunError(f"none of the checkpoints in {where} is whole: begin anew by run.overwrite=true, without --resume")
        return None

    def _check_free(self) -> None:
        """Check that the run may begin in its folder, where it may have been killed before its first checkpoint. Raises
        `UserError`."""
        folder, may_overwrite = self._folder, self._config.run.overwrite
        if self._resume and not may_overwrite and (kept := to_be_kept(self._config)):
            raise UserError(
                f"{folder.checkpoints} has no checkpoint to resume from, but {folder.path} holds {kept}: begin anew and remove "
                f"that by run.overwrite=true, or give this run another run.name"
            )
        folder.check(may_overwrite=may_overwrite or (self._resume and folder.is_run()))
        if folder.is_run() and not self._resume and not folder.has_results():
            self._log(f"{folder.path} holds a run that ended before its first step: this one begins in its place")
        if self._resume and folder.is_run():
            self._log(f"there is no whole checkpoint yet in {folder.checkpoints}: beginning anew, in the place of what is there")
        elif self._resume:
            self._log(f"there is no checkpoint in {folder.checkpoints}: the run begins at its start")

    def _begin_anew(self, prepared: Prepared, scratch: Path) -> Prepared:
        """Make the run's folder; a model made in `scratch` moves into it."""
        is_resumed = self._resume and not self._config.run.overwrite
        if is_resumed and (aside := self._folder.set_aside()) is not None:
            self._log(f"what an attempt before the first checkpoint has saved is in {aside} now")
        self._folder.claim(dump(self._config), keeps_aside=is_resumed)
        self._forget_after(-1)
        if prepared.model.is_relative_to(scratch):
            model = Path(shutil.move(prepared.model, self._folder.initial_model))
            return dataclasses.replace(prepared, model=model)
        return prepared

    @property
    def _places(self) -> list[Checkpoints]:
        """Places of the run's checkpoints, that of the newest ones first."""
        return [*places_of(self._config, self.memory).values()][::-1]

    def _forget_after(self, version: int) -> None:
        """Remove all later checkpoints, and all that were never whole."""
        for checkpoints in self._places:
            checkpoints.forget_after(version)
            checkpoints.sweep()

    @property
    def _has_critic(self) -> bool:
        return make_algorithm(self._config).critic is not None

    def _has_results_of(self, steps: int) -> bool:
        """Whether the final model, and the critic where there is one, have been trained for so many steps."""
        return self._folder.model_version == steps and (not self._has_critic or self._folder.critic_version == steps)

    def _report_end(self, prepared: Prepared, resumed: Resumed | None) -> None:
        """Say that the run is finished, with its model: nothing is to be done."""
        run_dir, steps = self._config.run_dir, self._config.run.steps
        self._log(
            f"this run is finished already: all of its {steps} steps are done, and {self._folder.model} is its model; raise "
            f"run.steps to go on"
        )
        self.rows = StepRows(run_dir, metrics_of(run_dir))
        self.certificate = read_certificate(run_dir)
        self.job = self._job_file(prepared, resumed)

    def _usable(self, resumed: Resumed) -> Resumed:
        """The checkpoint, with the rows that this attempt's queue can take."""
        rows = usable(resumed.rows, queue_schema(self._config))
        if resumed.rows is not None and rows is None:
            self._log(f"the {len(resumed.rows)} completed rows in {resumed.folder} lack a column: they are made again")
            resumed = dataclasses.replace(resumed, is_whole=False)
        return dataclasses.replace(resumed, rows=rows)

    async def _go_back(self, resumed: Resumed) -> None:
        """Let the run's folder be as it was when the checkpoint was written."""
        version, run_dir = resumed.state.version, self._config.run_dir
        self._log(f"resumed from {resumed.folder}: {version} of {self._config.run.steps} steps are done")
        if why := resumed.state.record.why_not_deterministic:
            self._log(
                f"what was under way is generated again and may come out otherwise, so later steps may have other bits ({why})"
            )
        await asyncio.to_thread(self._forget_after, version)
        # Not whole after this attempt, unless it says so itself; and resumed once more, whether it leaves a checkpoint or not.
        again = msgspec.structs.replace(resumed.state.record, resumed_at=resumed.record.resumed_at)
        state = msgspec.structs.replace(resumed.state, record=again)
        added = Checkpoints(resumed.folder.parent, keep=1).added(version)
        await asyncio.to_thread(write_added, added, state, is_whole=False)
        now = asyncio.get_running_loop().time()
        await asyncio.to_thread(cut_back, run_dir, resumed, now)
        self.rows = await asyncio.to_thread(lambda: StepRows(run_dir, metrics_of(run_dir)))
        (run_dir / KEY_FILE).unlink(missing_ok=True)
        replace(run_dir / CONFIG_FILE, dump(self._config).encode())

    def _job_file(self, prepared: Prepared, resumed: Resumed | None) -> JobFile:
        job = JobFile(
            str(prepared.model.resolve()),
            prepared.max_context,
            str(self.weights_dir or ""),
            launch_of(os.environ),
            num_held_out=len(prepared.held_out),
            memory=str(self.memory or ""),
            began=forked_at(self._config),
        )
        if resumed is not None:
            job = msgspec.structs.replace(job, first=resumed.state.version, checkpoint=str(resumed.folder.resolve()))
        return job
