"""Episodes: what was sampled is the row, what was observed is masked, and every limit ends an episode in the way that it says."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from asyncflow.engines.base import NO_TOKENS, Response, SampleKey, Sampling
from asyncflow.environments.base import Action, EnvironmentFailure, Opening, TurnResult, seed_of
from asyncflow.loops.algorithm1 import Producer, produce
from asyncflow.loops.context import ResponseScoring
from asyncflow.loops.episode import EpisodeLimits, EpisodePlayer
from asyncflow.loops.samples import GroupRequest, Shape, schema
from asyncflow.rewards.base import Sample, Score
from asyncflow.rewards.scorings import by_environment
from asyncflow.types import Batch
from tests.builders import meta

BITS, END = 2, 31
PROMPT = np.array([5, 6, 7])
FIVE = EpisodeLimits(max_turns=5)


class Engine:
    """A turn of `length` tokens that begin with the sample's number and the position, and end with `END` unless there is no room.
    Its version is the number of turns before."""

    def __init__(self, length: int = 3) -> None:
        self.length, self.asked, self.forgotten = length, list[Any](), list[int]()

    async def generate(
        self, prompt_ids: np.ndarray, *, samples: Sequence[int], sampling: Sampling, key: SampleKey, after: np.ndarray = NO_TOKENS
    ) -> AsyncIterator[Response]:
        self.asked.append((prompt_ids.tolist(), list(samples), after.tolist(), sampling.max_new_tokens, sampling.keeps))
        turns = int((after == END).sum())
        for sample in samples:
            ids = np.array([sample, len(after), *[8] * (self.length - 3), END][: sampling.max_new_tokens])
            reason: Any = "stop" if ids[-1] == END else "length"
            yield Response(sample, ids, -np.arange(1, len(ids) + 1, dtype=np.float32), np.array([(0, turns)]), reason)

    def forget(self, key: SampleKey, sample: int) -> None:
        self.forgotten.append(sample)


class Environments:
    """Episodes that are done after `turns` turns; each turn but the last is rewarded with its number. `fails`: at which turn."""

    def __init__(self, turns: int = 2, words: str = "abc", opening: Opening | None = None, fails: Mapping[int, str] = {}) -> None:
        self.turns, self.words, self.opening, self.fails = turns, words, opening, fails
        self.seeds, self.actions, self.ended = list[int](), list[Action](), 0

    async def begin(self, example: Mapping[str, Any], seed: int) -> tuple[Any, Opening | None]:
        self.seeds.append(seed)
        if 0 in self.fails:
            raise EnvironmentFailure(self.fails[0], "no reset")
        return SimpleNamespace(step=self._stepper(), end=self._end), self.opening

    def _end(self) -> None:
        self.ended += 1

    def _stepper(self) -> Callable[[Action], Any]:
        count = 0

        async def step(action: Action) -> TurnResult:
            nonlocal count
            count += 1
            self.actions.append(action)
            await asyncio.sleep(0)
            if count in self.fails:
                raise EnvironmentFailure(self.fails[count], "it broke")
            done = count == self.turns
            calls = {"tool_calls": count, "tool_failures": 1}
            return TurnResult(None if done else self.words, None if done and count > 1 else float(count), done, calls)

        return step


class Format:
    """A letter is a token."""

    def opening(self, prompt_ids: np.ndarray, words: Any, tools: Any) -> np.ndarray:
        return np.array([ord(letter) for letter in words])

    def between(self, turn_ids: np.ndarray, words: Any, *, is_finished: bool) -> np.ndarray:
        return np.array([ord(letter) for letter in words])

    def branch(self, prompt_ids: np.ndarray, turns: Any) -> None:
        return None

    def action(self, turn_ids: np.ndarray, *, is_finished: bool) -> Action:
        return Action(" ".join(map(str, turn_ids)), is_finished, turn_ids.tolist())


class Made:
    """A group of two rows, produced: what was stored, failed and kept."""

    def __init__(self) -> None:
        self.stored: Batch | None = None
        self.failed: dict[int, tuple[str, bool]] = {}
        self.kept: list[Mapping[str, Any]] = []
        self.samples: list[Sample] = []
        self.waiting: list[int] = []

    async def complete(self, lease: Any, columns: Batch) -> list[bool]:
        self.stored = columns
        return [True] * len(columns.indices)

    async def fail(self, lease: Any, rows: Sequence[int], error: str, *, is_final: bool) -> None:
        self.failed |= dict.fromkeys(rows, (error, is_final))


async def made(engine: Engine, environments: Environments | None, limits: EpisodeLimits = FIVE, room: int = 40) -> Made:
    result = Made()

    async def score(sample: Sample) -> Score:
        result.samples.append(sample)
        return await by_environment(sample) if environments is not None else Score(1.0, (1.0,))

    shape = Shape(2, 2, BITS, 0, 1.0, room, 2, max_turns=limits.max_turns if environments is not None else None)
    anything: Any = (result, engine, environments, Format())
    client, its_engine, its_environments, its_format = anything
    player = EpisodePlayer(its_engine, its_environments, its_format, limits, result.waiting.append)
    scoring = ResponseScoring(score, lambda ids: ",".join(map(str, ids)), result.kept.append)
    by = Producer(client, its_engine, player, scoring, shape, lambda num_sampled: None, lambda: None)
    leased: Any = SimpleNamespace(lease=None)
    await asyncio.wait_for(produce(by, leased, GroupRequest(meta(1), [4, 5], PROMPT, {"a": 1}, 1.0), lambda: None), 30)
    assert sum(result.waiting) == 0
    return result


async def test_turns_and_observations_are_one_sequence() -> None:
    engine, environments = Engine(), Environments(turns=3)
    result = await made(engine, environments)
    batch = result.stored
    assert batch is not None and not result.failed
    first = batch.ragged("response_ids")[0].tolist()
    assert first == [0, 0, END, 97, 98, 99, 0, 6, END, 97, 98, 99, 0, 12, END]
    assert batch.ragged("loss_mask")[0].tolist() == [1, 1, 1, 0, 0, 0, 1, 1, 1, 0, 0, 0, 1, 1, 1]
    assert batch.ragged("rollout_logprobs")[0].tolist() == [-1, -2, -3, 0, 0, 0, -1, -2, -3, 0, 0, 0, -1, -2, -3]
    assert batch.ragged("version_spans")[0].reshape(-1, 2).tolist() == [[0, 0], [6, 1], [12, 2]]
    assert batch.ragged("turns")[0].reshape(-1, 4).tolist() == [[0, 3, 1, 1], [6, 3, 2, 1], [12, 3, 3, 1]]
    assert batch.ragged("turn_rewards")[0].tolist()[:2] == [1.0, 2.0] and np.isnan(batch.ragged("turn_rewards")[0][2])
    assert batch.dense("reward").tolist() == [3.0, 3.0] and batch.dense("truncated").tolist() == [0, 0]
    assert environments.seeds == [seed_of(0, 1)] * 2 and environments.ended == 2 and sorted(engine.forgotten) == [0, 1]
    schema(BITS, 1.0, 1, has_episodes=True).check_outputs("rollout", batch)


async def test_the_first_turns_of_a_group_are_asked_for_together_and_later_ones_have_all_that_was_said() -> None:
    engine = Engine()
    await made(engine, Environments(turns=2, opening=Opening("xy")), EpisodeLimits(max_turns=2, max_turn_tokens=9))
    begun = [*PROMPT.tolist(), ord("x"), ord("y")]
    assert engine.asked[0] == (begun, [0, 1], [], 9, True), "their environments were ready at one time"
    assert sorted(engine.asked[1:]) == [(begun, [sample], [sample, 0, END, 97, 98, 99], 9, False) for sample in (0, 1)]


async def test_what_is_observed_first_is_masked_and_counts_as_the_first_version_s() -> None:
    result = await made(Engine(), Environments(turns=1, opening=Opening("xy")))
    assert result.stored is not None
    assert result.stored.ragged("response_ids")[1].tolist() == [ord("x"), ord("y"), 1, 0, END]
    assert result.stored.ragged("loss_mask")[1].tolist() == [0, 0, 1, 1, 1]
    assert result.stored.ragged("version_spans")[1].tolist() == [0, 0]
    assert result.stored.ragged("turns")[1].tolist() == [2, 3, 1, 1]


async def test_the_kept_episode_is_a_conversation() -> None:
    result = await made(Engine(), Environments(turns=2))
    turns = result.kept[0]["turns"]
    assert [turn["by"] for turn in turns] == ["policy", "environment", "policy"]
    assert turns[0]["logprobs"] == [-1.0, -2.0, -3.0] and turns[0]["reward"] == 1.0 and turns[1]["tokens"] == [97, 98, 99]
    assert turns[1]["texts"] == ["97", "98", "99"]
    assert result.kept[0]["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("limits", "room", "length", "num_turns", "num_tokens"),
    [
        (EpisodeLimits(max_turns=2), 40, 3, 2, 9),  # the environment goes on for five
        (EpisodeLimits(max_turns=9), 12, 3, 2, 9),  # a second observation would leave no room
        (EpisodeLimits(max_turns=9), 14, 3, 3, 14),  # the third turn has two tokens
        (EpisodeLimits(max_turns=9, max_turn_tokens=2), 40, 3, 1, 2),
    ],
)
async def test_an_episode_that_reaches_a_limit_is_scored_with_what_it_has(
    limits: EpisodeLimits, room: int, length: int, num_turns: int, num_tokens: int
) -> None:
    environments = Environments(turns=5)
    result = await made(Engine(length), environments, limits, room)
    batch = result.stored
    assert batch is not None and batch.dense("truncated").tolist() == [1, 1] and environments.ended == 2
    assert len(batch.ragged("turns")[0]) == 4 * num_turns and len(batch.ragged("response_ids")[0]) == num_tokens
    assert batch.dense("reward").tolist() == [sum(range(1, num_turns + 1))] * 2
    assert result.kept[0]["finish_reason"] == "length" and not result.samples[0].is_finished


async def test_a_limit_fails_the_row_for_good_where_the_user_says_so() -> None:
    environments = Environments(turns=5)
    result = await made(Engine(), environments, EpisodeLimits(max_turns=2, fails=True))
    assert result.stored is None and environments.ended == 2
    assert result.failed == dict.fromkeys((4, 5), ("the episode reached a limit: it was not done after 2 turns", True))


async def test_a_late_environment_ends_the_episode() -> None:
    result = await made(Engine(), Environments(turns=5, fails={2: "timeout"}))
    assert result.stored is not None and result.stored.dense("timed_out").tolist() == [1, 1]
    assert result.stored.dense("reward").tolist() == [1.0, 1.0] and result.kept[0]["finish_reason"] == "timeout"
    failing = await made(Engine(), Environments(turns=5, fails={1: "timeout"}), EpisodeLimits(max_turns=5, fails=True))
    assert failing.failed == dict.fromkeys((4, 5), ("the episode reached a limit: it broke", False))


@pytest.mark.parametrize("turn", [0, 1, 2])
async def test_an_environment_that_breaks_fails_the_row_with_its_words(turn: int) -> None:
    environments = Environments(turns=5, fails={turn: "exited"})
    result = await made(Engine(), environments)
    assert result.stored is None and environments.ended == (2 if turn else 0)
    assert result.failed == dict.fromkeys((4, 5), ("it broke" if turn else "no reset", False))


async def test_an_opening_without_room_behind_it_fails_the_row() -> None:
    environments = Environments(opening=Opening("x" * 40))
    result = await made(Engine(), environments)
    assert environments.ended == 2 and result.failed[4][0].startswith("the environment's first observation has 40 tokens")


async def test_a_response_without_an_environment_is_the_episode_of_one_turn() -> None:
    engine = Engine()
    result = await made(engine, None)
    assert engine.asked == [(PROMPT.tolist(), [0, 1], [], 40, False)]
    assert result.stored is not None and "turns" not in result.stored.columns
    assert result.stored.ragged("loss_mask")[0].tolist() == [1, 1, 1] and "turns" not in result.kept[0]


async def test_rows_whose_environments_wait_for_room_hold_nobody_up() -> None:
    """A pool with one process: the second row's environment begins when the first row's episode has ended."""
    environments = Environments(turns=2)
    begin, end, room = environments.begin, environments._end, asyncio.Semaphore(1)

    async def begins(example: Mapping[str, Any], seed: int) -> tuple[Any, Opening | None]:
        await room.acquire()
        episode, opening = await begin(example, seed)
        return SimpleNamespace(step=episode.step, end=lambda: (end(), room.release())), opening

    environments.begin = begins  # type: ignore[method-assign]
    engine = Engine()
    result = await made(engine, environments)
    assert result.stored is not None and sorted(result.stored.indices.tolist()) == [4, 5] and environments.ended == 2
    assert [asked[1] for asked in engine.asked] == [[0], [0], [1], [1]]
