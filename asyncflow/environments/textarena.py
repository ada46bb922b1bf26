"""Games of `textarena` for one player, unchanged: `environment: {name: textarena, game: GuessTheNumber-v0}`.

The policy reads what is new to it since its last turn, and not its own words again. The reward comes with the last turn.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from asyncflow.environments.base import Action, Message, TurnResult
from asyncflow.types import UserError


class TextArena:
    """Adapter of one game."""

    def __init__(self, game: str, **options: Any) -> None:
        """`game`: a registered name without `-raw` or `-train`. `options`: its own, such as `max_turns`.

        Raises `UserError` if the package is not installed, or knows no such game.
        """
        try:
            import textarena
            from textarena.envs.registration import ENV_REGISTRY
        except ImportError as error:
            raise UserError("environment textarena needs the package textarena: pip install textarena") from error
        raw = f"{game}-raw"  # its wrappers repeat everything in each observation
        if raw not in ENV_REGISTRY:
            raise UserError(f"textarena has no game {game!r}; see textarena.pprint_registry_detailed()")
        self._own_words = textarena.ObservationType.PLAYER_ACTION
        self._game = textarena.make(raw, **options)

    def reset(self, example: Mapping[str, Any], seed: int) -> list[Message]:
        """See `Environment`. The rules, and the first position."""
        self._game.reset(num_players=1, seed=seed)
        return [{"role": "user", "content": self._news()}]

    def step(self, action: Action) -> TurnResult:
        """See `Environment`."""
        done, _ = self._game.step(str(action))
        if not done:
            return TurnResult([{"role": "user", "content": self._news()}], None, False, {})
        rewards, info = self._game.close()
        own = info.get(0, {})
        return TurnResult(
            None, float(rewards[0]), True, {"invalid_move": bool(own.get("invalid_move")), "turns": own.get("turn_count", 0)}
        )

    def _news(self) -> str:
        _, observed = self._game.get_observation()
        return "\n".join(message for _, message, kind in observed if kind is not self._own_words)
