"""The environment of docs/extending.md, played."""

from __future__ import annotations

import re
from pathlib import Path

from asyncflow.environments.base import Action
from asyncflow.environments.pool import EnvironmentPool
from asyncflow.sandbox.limits import ProcessLimits
from tests.conftest import ROOT


async def test_the_environment_of_the_page_is_played_to_its_end(tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "extending.md").read_text(), re.DOTALL)
    (tmp_path / "guess.py").write_text(next(block for block in blocks if "class Guess" in block))
    limits = ProcessLimits(deadline_seconds=30, memory_bytes=1 << 30)
    pool = EnvironmentPool(f"{tmp_path / 'guess.py'}:Guess", {"top": 20}, limits, num_workers=1, name="test")
    await pool.start()
    try:
        episode, opening = await pool.begin({}, 11)
        assert opening is None
        assert (await episode.step(Action("a number?"))).words == "Say a number.\n"
        low, high, result = 1, 20, None
        while result is None or not result.done:
            guess = (low + high) // 2
            result = await episode.step(Action(f"It is {guess}."))
            if not result.done:
                low, high = (guess + 1, high) if "low" in str(result.words) else (low, guess - 1)
        assert result.reward == 1.0 and result.info == {"guess": guess} and low <= guess <= high
        episode.end()
    finally:
        await pool.close()
