"""Routes of a hosted run: the calls of AsyncFlow's service (AF, section 5), and of people that drive or watch a run.

/v1/...                            the run: init_engines, step, status, prompts, ... (run.py)
/v1/generators/...                 clients that generate (generators.py)
/v1/trainers/... /v1/weights/...   clients that train (trainers.py)
/v1/keys/...                       the service's keys (keys.py)
"""

from __future__ import annotations

from typing import Final

from fastapi import APIRouter

from asyncflow.service.hosted import HostedRun
from asyncflow.service.keys import KeyRing
from asyncflow.service.routes.generators import add_generators, add_installs, add_rows
from asyncflow.service.routes.keys import add_keys
from asyncflow.service.routes.run import add_calls, add_state
from asyncflow.service.routes.trainers import add_trainers

STREAMED: Final = ("/v1/weights/",)
"""Beginnings of paths whose bodies go into files as they come."""
AT_ONCE: Final = ("/v1/stop",)
"""Paths that do not wait for a run that is being resumed."""


def routes(hosted: HostedRun, keys: KeyRing) -> APIRouter:
    """The routes of this run, and of the service's keys."""
    router = APIRouter(prefix="/v1")
    add_calls(router, hosted)
    add_state(router, hosted)
    add_generators(router, hosted)
    add_rows(router, hosted)
    add_installs(router, hosted)
    add_trainers(router, hosted)
    add_keys(router, keys)
    return router
