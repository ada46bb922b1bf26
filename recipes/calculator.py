"""A calculator that answers a product or a sum at a time: the environment of calculator.yaml.

prompt        Calculate 17*8+45.
policy        17*8              a call
environment   =136
policy        136+45            another one
environment   =181
policy        #### 181          the answer ends the episode
"""

import re
from collections.abc import Mapping
from typing import Any

ANSWER = "#### "
CALL = re.compile(r"(\d{1,6})([*+])(\d{1,6})")


class Calculator:
    """An episode of one problem. A call that it cannot read is answered, too, and counted as one that failed."""

    episodes_per_process = 64

    def reset(self, example: Mapping[str, Any], seed: int) -> None:
        """The prompt of the data says it all."""
        self._answer = str(example["answer"])

    def step(self, action: str) -> tuple[str | None, float | None, bool, dict[str, int]]:
        """A call gets its result, an answer its reward: 1.0 if it is right."""
        if action.startswith(ANSWER):
            return None, float(action.removeprefix(ANSWER) == self._answer), True, {}
        if (call := CALL.fullmatch(action)) is None:
            return "=?\n", None, False, {"tool_calls": 1, "tool_failures": 1}
        left, right = int(call[1]), int(call[3])
        return f"={left * right if call[2] == '*' else left + right}\n", None, False, {"tool_calls": 1}
