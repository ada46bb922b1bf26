"""An environment of one to three turns, by the seed; answers and rewards depend on what was said."""

from __future__ import annotations

from typing import Any


class Game:
    """The environment of the soak's episodes."""

    def reset(self, example: Any, seed: int) -> str:
        """First words of an episode."""
        self.left = 1 + seed % 3
        return "Go.\n"

    def step(self, action: str) -> tuple[str | None, float, bool, dict[str, Any]]:
        """Answer to a turn, its reward, and whether that was the last one."""
        self.left -= 1
        return f" {len(action)}\n" if self.left else None, float(len(action) % 2), not self.left, {}
