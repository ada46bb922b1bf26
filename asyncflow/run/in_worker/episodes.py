"""Environments below a rollout worker: their processes, and how the worker plays episodes with them.

consumes: episodes
waits for: the processes' start
is unblocked by: their answers
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from asyncflow.data.tokenizer import CheckpointTokenizer
from asyncflow.engines.base import RolloutEngine
from asyncflow.environments.joints import JointsByTools
from asyncflow.environments.pool import EnvironmentPool
from asyncflow.loops.captured import CapturePlayer, Served
from asyncflow.loops.episode import EpisodePlayer
from asyncflow.run.factories import environment_pool, episode_limits, turn_format
from asyncflow.run.in_worker.connection import RunConnection
from asyncflow.types import UserError


@asynccontextmanager
async def environments(run: RunConnection, name: str) -> AsyncIterator[EnvironmentPool | None]:
    """The environment processes below a worker, which end with it; None where a response is one turn."""
    pool = environment_pool(run.config, name)
    if pool is None:
        yield None
        return
    try:
        await pool.start()
        yield pool
    finally:
        await pool.close()


@asynccontextmanager
async def capture_endpoint(pool: EnvironmentPool | None) -> AsyncIterator[Served | None]:
    """The endpoint that programs speak to; None where turns are not captured. Raises `UserError` if its packages are missing."""
    if pool is None or not pool.facts.is_captured:
        yield None
        return
    try:
        from asyncflow.environments.capture.endpoint import CaptureEndpoint
    except ImportError as error:
        raise UserError(f"the capture endpoint needs {error.name}: pip install 'asyncflow-rl[service]'") from error
    endpoint = CaptureEndpoint()
    await endpoint.start()
    try:
        yield endpoint
    finally:
        await endpoint.stop()


def episode_player(
    run: RunConnection,
    engine: RolloutEngine,
    pool: EnvironmentPool,
    tokenizer: CheckpointTokenizer,
    endpoint: Served | None = None,
) -> EpisodePlayer:
    """Options of the episodes that the worker plays; with an `endpoint` their turns are the calls of programs.

    Raises `UserError` for an engine that generates single turns only.
    """
    if "after" not in inspect.signature(engine.generate).parameters:
        raise UserError(
            f"the rollout engine {run.config.rollout.engine.name} generates single turns only: its generate has no `after` "
            f"(asyncflow/engines/base.py); take another, or leave out the environment"
        )
    if not pool.facts.is_deterministic:
        run.reporter.why_not_deterministic = "the environment says that it is not deterministic"
    limits = episode_limits(run.config)
    if endpoint is not None:
        joints = JointsByTools(tokenizer, run.config.data.chat_template_options)
        return CapturePlayer(engine, pool, None, limits, endpoint=endpoint, joints=joints)
    return EpisodePlayer(engine, pool, turn_format(run.config, tokenizer), limits)
