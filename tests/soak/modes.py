"""Runs that the soak disturbs: a tiny model in every mode, over every kind of process that a run can have."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, Final, NamedTuple

import yaml

from tests.conftest import merged
from tests.vllm.servers import VLLM_PYTHON, fake_python

ROOT: Final = Path(__file__).parents[2]
STEPS, PROMPTS, GROUP = 48, 4, 4
REAL_VLLM: Final = VLLM_PYTHON or str(ROOT / ".venv-vllm" / "bin" / "python")
HERE, VLLM = "@FOLDER@", "@VLLM@"
"""In a configuration: the round's folder, and an interpreter whose vLLM is the stand-in."""


class Mode(NamedTuple):
    """A mode. `tree`: what its configuration has beside `configuration`'s. `companions`: processes beside the run (companions.py).
    `has_own_prompts`: a client puts them. `needs`: a program, or a file, without which it is left out."""

    tree: dict[str, Any]
    is_deterministic: bool = True
    companions: tuple[str, ...] = ()
    is_served: bool = False
    has_own_prompts: bool = False
    needs: str = ""

    @property
    def is_missing(self) -> bool:
        """Whether this machine lacks what it needs."""
        return bool(self.needs) and shutil.which(self.needs) is None


def over_vllm(python: str, instances: int) -> dict[str, Any]:
    """Configuration of a run whose rollout engine is vLLM."""
    engine = {"name": "vllm", "python": python, "instances": instances, "max_restarts": 1000}
    schedule = {"name": "bounded", "max_staleness": 2}
    return {"schedule": schedule, "rollout": {"num_workers": 1, "engine": engine, "kv_on_install": "recompute"}}


MODES: Final[dict[str, Mode]] = {
    "synchronous": Mode({"schedule": "synchronous"}),
    "periodic": Mode({"schedule": "periodic", "eval": {"num_workers": 1}}),
    "delayed": Mode({"schedule": "delayed", "train": {"old": "previous"}}),
    "sub_step": Mode({"schedule": "sub_step"}, is_deterministic=False),
    "bounded": Mode({"schedule": {"name": "bounded", "max_staleness": 2}}, is_deterministic=False),
    "periodic, two ranks": Mode({"schedule": "periodic", "plan": {"train": {"dp": 2}}}),
    "delayed, tasks": Mode(
        {
            "schedule": "delayed",
            "train": {"reference": "task"},
            "algorithm": {"name": "grpo", "kl_coefficient": 0.1},
            "reward": {"place": "task"},
        }
    ),
    "periodic, critic": Mode(
        {
            "schedule": "periodic",
            "algorithm": {"name": "ppo"},
            "train": {"critic": {"learning_rate": 1e-3}},
            "plan": {"values": {"num_workers": 2}},
        }
    ),
    "delayed, units": Mode({"schedule": "delayed", "queue": {"place": "workers", "num_units": 2}}),
    "periodic, Redis": Mode(
        {
            "schedule": "periodic",
            "queue": {
                "place": "workers",
                "num_units": 2,
                "storage": {"name": "redis", "url": f"unix://{HERE}/redis.sock"},
            },
        },
        companions=("redis",),
        needs="redis-server",
    ),
    "periodic, episodes": Mode(
        {
            "schedule": "periodic",
            "environment": f"{Path(__file__).with_name('game.py')}:Game",
            # No process is stopped for so long: an episode that its deadline cuts off is other data.
            "episodes": {"max_turns": 3, "max_turn_tokens": 24, "num_workers": 2, "deadline_seconds": 240},
            "rollout": {"max_new_tokens": 96, "stop": ["a", "e", "i", "o", "."]},
            "eval": {"path": None},
        }
    ),
    "bounded, vLLM's stand-in": Mode(over_vllm(VLLM, 2), is_deterministic=False),
    "periodic, served": Mode(
        {"schedule": "periodic", "rollout": {"num_workers": 0}},
        companions=("client", "generator 0", "generator 1"),
        is_served=True,
    ),
    "synchronous, trained outside": Mode(
        {
            "schedule": "synchronous",
            "data": {"path": None},
            "model": {"max_context_tokens": 128},
            "train": {"engine": "outside"},
            "checkpoint": {"every_steps": 1},
        },
        is_deterministic=False,  # of which prompts it is made: those that a client has put before it was killed
        companions=("client, prompts", "trainer outside"),
        is_served=True,
        has_own_prompts=True,
    ),
    "bounded, vLLM": Mode(
        {**over_vllm(REAL_VLLM, 1), "run": {"stall_timeout_seconds": 200}}, is_deterministic=False, needs=REAL_VLLM
    ),
}


def configuration(mode: str, folder: Path) -> dict[str, Any]:
    """A run of the tiny model whose steps take some tenths of a second, the same for all attempts of a round."""
    tree: dict[str, Any] = {
        "run": {"name": "run", "dir": str(folder), "steps": STEPS, "stall_timeout_seconds": 60},
        "model": {"path": str(ROOT / "recipes" / "models" / "tiny-arithmetic")},
        "data": {"path": "generated:arithmetic", "limit": 256},
        "rollout": {"num_workers": 2, "num_slots": 16, "group_size": GROUP, "max_new_tokens": 32, "max_restarts": 1000},
        "train": {"prompts_per_step": PROMPTS, "learning_rate": 1e-4, "accumulate": "exact", "max_restarts": 1000},
        "queue": {"lease_seconds": 20},
        "eval": {"path": "generated:arithmetic", "num_prompts": 4, "every_steps": 4},
        "telemetry": {"trackers": [], "fingerprints": True},
        "checkpoint": {"every_steps": 2},
    }
    text = yaml.safe_dump(merged(tree, MODES[mode].tree))
    if VLLM in text:
        text = text.replace(VLLM, str(fake_python(folder)))
    found: dict[str, Any] = yaml.safe_load(text.replace(HERE, str(folder)))
    return found


def plain(mode: str, folder: Path) -> dict[str, Any]:
    """The run that a disturbed one is compared with: in one place, with rollout workers of its own."""
    return merged(configuration(mode, folder), {"queue": {"place": "driver", "storage": "memory"}, "rollout": {"num_workers": 2}})
