"""A rollout engine that makes nothing again: its noise is that of its process."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

from asyncflow.engines.base import Response, SampleKey, Sampling
from asyncflow.engines.rollout.engine import SlotEngine
from asyncflow.types import Array


class UnsteadySlots(SlotEngine):
    """`slots`, told by files in `folder`.

    `asked.jsonl` has a line of every request: `process`, `group`, `samples`. `held.json`, where it is there, has samples by group
    that are not to end, as long as they are there.
    """

    def __init__(self, *, folder: str, **options: Any) -> None:
        super().__init__(**options)
        self._folder = Path(folder)
        self.is_deterministic, self.why_not_deterministic = False, "the noise is that of the process"

    async def generate(
        self, prompt_ids: Array, *, samples: list[int], sampling: Sampling, key: SampleKey
    ) -> AsyncGenerator[Response, None]:
        group = key.prompt_index
        with (self._folder / "asked.jsonl").open("a") as file:
            file.write(json.dumps({"process": os.getpid(), "group": group, "samples": samples}) + "\n")
        own, left = SampleKey(os.getpid(), group), samples
        while left:
            held = self._held(group)
            if ending := [sample for sample in left if sample not in held]:
                async for response in super().generate(prompt_ids, samples=ending, sampling=sampling, key=own):
                    yield response
            if left := [sample for sample in left if sample in held]:
                await asyncio.sleep(0.02)

    def _held(self, group: int) -> list[int]:
        path = self._folder / "held.json"
        held: list[int] = json.loads(path.read_text()).get(str(group), []) if path.exists() else []
        return held
