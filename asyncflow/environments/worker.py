"""The process of an environment: builds it, then plays episodes until its stdin ends.

consumes: frames on stdin, first an `EnvironmentSetup`, then questions about episodes; each gets one frame on stdout
waits for: the next frame (without end: the owner holds the deadline of each answer)
is unblocked by: the owner's next frame, or the end of stdin when the owner closes or dies

    one episode at a time     environment, built once --fork--> a child: one episode; it and what it started are killed at its end
    several at once           an instance for each, coroutines side by side; plain functions in threads

A child that dies takes this process with it: the owner learns of the status, and starts another one.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import inspect
import math
import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import msgspec

from asyncflow.environments.base import Action, Opening, TurnResult
from asyncflow.environments.messages import (
    CloseEpisode,
    EnvironmentReady,
    EnvironmentReply,
    EnvironmentSetup,
    EpisodeClosed,
    EpisodeOpened,
    EpisodeStepped,
    Question,
    ResetEpisode,
    StepEpisode,
)
from asyncflow.options import checked_options
from asyncflow.sandbox.child import OwnerPipes, end_with, why_not_built
from asyncflow.sandbox.frames import Broken, Failed, frame
from asyncflow.sandbox.limits import adopt_orphans, children, die_with_parent, end_children, limit_memory, limit_output
from asyncflow.user_file import named, words_of

_M_ARENA_MAX = -8  # glibc's malloc.h
MIN_THREADS = 32
"""Threads that a process of several episodes may have at least: as many as asyncio would start itself."""
Build = Callable[[], Any]
_QUESTIONS: msgspec.msgpack.Decoder[Question] = msgspec.msgpack.Decoder(Question)


class NotAnAnswer(Exception):
    """Error for what an environment returned and must not return."""


def load(path: str, options: Mapping[str, Any]) -> Build:
    """Function that builds the environment at `package.module:Name` or `/path/file.py:Name`. Raises `CannotImport`, and `UserError`
    for options that are not its own."""
    target = named(path)
    arguments = checked_options("it", target, options)
    return lambda: target(**arguments)


def opened(returned: Any) -> EpisodeOpened:
    """Result of `reset`, as a message. Raises `NotAnAnswer`."""
    opening = returned if isinstance(returned, Opening) else Opening(returned)
    words = _words(opening.words)
    return EpisodeOpened(None if words is None else Opening(words, list(opening.tools)))


def stepped(returned: Any) -> EpisodeStepped:
    """Result of `step`, as a message. Raises `NotAnAnswer`."""
    try:
        words, reward, done, facts = returned
    except (TypeError, ValueError):
        raise NotAnAnswer(f"step returned {returned!r:.100}, not (observation, reward, done, info)") from None
    if reward is not None:
        try:
            reward = float(reward)
        except (TypeError, ValueError):
            reward = math.nan
        if not math.isfinite(reward):
            raise NotAnAnswer("step returned a reward that is no finite number")
    return EpisodeStepped(TurnResult(_words(words), reward, bool(done), dict(facts or {})))


def _words(words: Any) -> str | list[dict[str, Any]] | None:
    if words is None or isinstance(words, str):
        return words
    if isinstance(words, list | tuple) and all(isinstance(message, Mapping) for message in words):
        return [dict(message) for message in words]
    raise NotAnAnswer(f"an observation must be text or a list of messages, not {words!r:.100}")


class Player:
    """The episodes of this process."""

    def __init__(self, build: Build, path: str, pool: ThreadPoolExecutor | None = None) -> None:
        """`pool`: threads in which plain functions run; None: they are called where they are."""
        self._build, self._path, self.pool = build, path, pool
        self._playing: dict[int, Any] = {}  # by the episode's number

    async def answer(self, question: Question) -> EnvironmentReply:
        """Ask the environment; whatever it does short of ending the process becomes an answer."""
        try:
            reply = await self._ask(question)
            frame(reply)  # what cannot be written is a failure of the row's too
            return reply
        except MemoryError:
            kind, what = "memory", "ran out of memory"
        except (NotAnAnswer, msgspec.ValidationError) as error:
            kind, what = "invalid", str(error)
        # The contract: any exception fails the row, and its owner is told. Only the environment's own code cancels an answer.
        except (Exception, asyncio.CancelledError) as error:
            kind, what = "raised", f"raised {words_of(error)}"
        return Failed(kind, f"environment {self._path}: {what}")

    async def _ask(self, question: Question) -> EnvironmentReply:
        playing = self._playing
        match question:
            case ResetEpisode():
                environment = playing[question.episode] = self._build()
                return opened(await self._call(environment.reset, question.example, question.seed))
            case StepEpisode():
                action = Action(question.text, question.is_finished, question.token_ids)
                return stepped(await self._call(playing[question.episode].step, action))
            case CloseEpisode():
                environment = playing.pop(question.episode, None)
                if hasattr(environment, "close"):
                    await self._call(environment.close)
                return EpisodeClosed()

    async def _call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        if self.pool is None or inspect.iscoroutinefunction(function):
            returned = function(*arguments)
        else:
            returned = await asyncio.get_running_loop().run_in_executor(self.pool, function, *arguments)
        return await returned if inspect.isawaitable(returned) else returned


def serve_one_by_one(environment: Any, setup: EnvironmentSetup, owner: OwnerPipes) -> None:
    """Episodes one after another, each in a fork of this process, which ends as its child does where that does not end well."""
    spared = children()
    while (asked := owner.receive(_QUESTIONS)) is not None:
        child = os.fork()
        if child == 0:
            end_with(partial(_in_fork, environment, setup, asked, owner, os.getppid()))
        _, status = os.waitpid(child, 0)
        end_children(spared)
        if os.WIFSIGNALED(status):
            if (number := os.WTERMSIG(status)) != signal.SIGKILL:
                signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        if status:
            os._exit(os.waitstatus_to_exitcode(status))


def _in_fork(environment: Any, setup: EnvironmentSetup, asked: tuple[bytes, Question], owner: OwnerPipes, parent: int) -> None:
    """The child: an episode, from its reset to its close."""
    die_with_parent(parent)
    limit_memory(setup.limits.memory_bytes)
    limit_output(setup.limits.output_bytes)
    asyncio.run(_play(Player(lambda: environment, setup.path), asked, owner))


async def _play(player: Player, asked: tuple[bytes, Question] | None, owner: OwnerPipes) -> None:
    while asked is not None:
        token, question = asked
        owner.send(token, await player.answer(question))
        if isinstance(question, CloseEpisode):
            return
        asked = owner.receive(_QUESTIONS)


async def serve_together(player: Player, owner: OwnerPipes) -> None:
    """Serve episodes side by side."""
    loop = asyncio.get_running_loop()
    if player.pool is not None:  # of asyncio's own threads there may be fewer than episodes
        loop.set_default_executor(player.pool)
    arrived: asyncio.Queue[tuple[bytes, Question] | None] = asyncio.Queue()

    def read() -> None:
        while (asked := owner.receive(_QUESTIONS)) is not None:
            loop.call_soon_threadsafe(arrived.put_nowait, asked)
        os._exit(0)  # the owner is gone, or done: threads of the user's hold nothing up

    async def reply(token: bytes, question: Question) -> None:
        owner.send(token, await player.answer(question))

    threading.Thread(target=read, daemon=True).start()
    answering: set[asyncio.Task[None]] = set()
    while (asked := await arrived.get()) is not None:
        task = asyncio.create_task(reply(*asked))
        answering.add(task)
        task.add_done_callback(answering.discard)


def spare_address_space() -> None:
    """Let threads reserve little: the limit of memory counts address space, and by default each takes 8 MB for its stack, and 64 MB
    for an arena of malloc's."""
    threading.stack_size(1 << 20)
    if sys.platform == "linux":
        import ctypes

        with contextlib.suppress(AttributeError):  # another libc
            ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 1)


def main() -> None:
    """`python -m asyncflow.environments.worker PARENT_PID`."""
    die_with_parent(int(sys.argv[1]))
    owner = OwnerPipes()
    first = owner.receive(msgspec.msgpack.Decoder(EnvironmentSetup))
    if first is None:
        return
    token, setup = first
    try:
        build = load(setup.path, setup.options)
        environment = build()
    except (Exception, SystemExit) as error:  # the user's class may raise anything; it is told to the user by the owner
        return owner.send(token, Broken(setup.path, why_not_built(error, setup.options)))
    if missing := [name for name in ("reset", "step") if not callable(getattr(environment, name, None))]:
        return owner.send(token, Broken(setup.path, f"has no {missing[0]}: asyncflow/environments/base.py says what is needed"))
    at_once = int(getattr(environment, "episodes_per_process", 1))
    tools = [dict(tool) for tool in getattr(environment, "tools", ())]
    is_deterministic, is_captured = getattr(environment, "is_deterministic", True), getattr(environment, "is_captured", False)
    ready = EnvironmentReady(at_once, bool(is_deterministic), bool(is_captured), tools)
    if at_once > 1:
        spare_address_space()
        limit_memory(setup.limits.memory_bytes)
        limit_output(setup.limits.output_bytes)
        owner.send(token, ready)
        player = Player(build, setup.path, ThreadPoolExecutor(max(at_once, MIN_THREADS)))
        asyncio.run(serve_together(player, owner))
    else:
        adopt_orphans()
        gc.collect()
        gc.freeze()  # a child's collector leaves what is built alone, and shared
        owner.send(token, ready)
        serve_one_by_one(environment, setup, owner)


if __name__ == "__main__":
    main()
