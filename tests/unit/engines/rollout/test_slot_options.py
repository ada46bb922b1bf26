"""Options of the embedded engine: what means nothing is one sentence, before a run starts."""

from typing import Any

import pytest

from asyncflow.config import parse
from asyncflow.engines.rollout.slot_options import check
from asyncflow.run.preparation.checks import check_rollout_engine
from asyncflow.types import UserError

NEEDED: dict[str, Any] = {"model": {"path": "m"}, "data": {"path": "d.jsonl"}}


def test_what_an_engine_takes() -> None:
    check()
    check(speculation="auto", prefill_chunk=1, num_workers=3)
    check(speculation=0)
    check(speculation=8)


@pytest.mark.parametrize("options", [{"speculation": "off"}, {"speculation": -1}, {"speculation": True}, {"prefill_chunk": 0}])
def test_what_means_nothing_is_refused_before_a_run_starts(options: dict[str, Any]) -> None:
    (name,) = options
    config = parse({**NEEDED, "rollout": {"engine": {"name": "slots", **options}}})
    with pytest.raises(UserError, match=rf"^rollout\.engine\.{name} is .*: take "):
        check_rollout_engine(config, 1)
