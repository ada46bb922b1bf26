"""Captured episodes as rows, and rows of several sequences: each sampled token is trained once, behind what stood before it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest

from asyncflow.data.tokenizer import CheckpointTokenizer
from asyncflow.engines.base import NO_TOKENS, Response, SampleKey, Sampling
from asyncflow.environments.base import Action, EnvironmentFailure, Opening, TurnResult
from asyncflow.environments.capture.endpoint import CaptureEndpoint
from asyncflow.environments.chat import ChatFormat
from asyncflow.environments.joints import JointsByTools
from asyncflow.loops.captured import CapturePlayer
from asyncflow.loops.episode import EpisodeLimits, EpisodePlayer, LimitReached, branch_key
from asyncflow.loops.samples import GroupRequest, ScoredRow, outputs
from asyncflow.loops.training_batches import micro_batches
from asyncflow.loops.transcript import Played
from asyncflow.rewards.base import Sample, Score
from asyncflow.types import Array, Batch, GroupMeta, Interval, Ragged
from tests.chat_families import FAMILIES, save_family
from tests.patience import patience

KEY = SampleKey(5, 7)
Program = Callable[[httpx2.AsyncClient], Awaitable[float | None]]


class ScriptedEngine:
    """Says what it is told, and keeps a record of its own: keys, contexts and answers."""

    is_deterministic, why_not_deterministic = True, ""

    def __init__(self, tokenizer: CheckpointTokenizer, answers: list[str], version: int = 2) -> None:
        self.tokenizer, self.answers, self.version = tokenizer, answers, version
        self.record: list[tuple[SampleKey, list[int], list[int]]] = []
        self.forgotten: set[SampleKey] = set()

    async def generate(
        self, prompt_ids: Array, *, samples: list[int], sampling: Sampling, key: SampleKey, after: Array = NO_TOKENS
    ) -> AsyncIterator[Response]:
        ids = np.append(self.tokenizer.encode(self.answers.pop(0)), self.tokenizer.end_token_ids[0])[: sampling.max_new_tokens]
        self.record.append((key, [*prompt_ids.tolist(), *after.tolist()], ids.tolist()))
        await asyncio.sleep(0)
        reason: Any = "stop" if int(ids[-1]) in self.tokenizer.end_token_ids else "length"
        logprobs = -np.arange(1, len(ids) + 1, dtype=np.float32)
        yield Response(samples[0], ids, logprobs, np.array([[0, self.version]]), reason)

    def forget(self, key: SampleKey, sample: int) -> None:
        self.forgotten.add(key)


class Scripted:
    """An environment that says what it is told, or runs a program."""

    def __init__(self, words: list[str], program: Program | None = None) -> None:
        self.words, self.program, self.has_ended = words, program, False

    async def begin(self, example: Mapping[str, Any], seed: int) -> tuple[Any, None]:
        return self, None

    async def step(self, action: Action) -> TurnResult:
        if self.program is None:
            return TurnResult(self.words.pop(0), None, False, {}) if self.words else TurnResult(None, 1.0, True, {})
        place = json.loads(action)
        headers = {"Authorization": f"Bearer {place['api_key']}"}
        async with httpx2.AsyncClient(base_url=place["base_url"] + "/", headers=headers) as http:
            return TurnResult(None, await self.program(http), True, {})

    def end(self) -> None:
        self.has_ended = True


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, CheckpointTokenizer]:
    folder: Path = tmp_path_factory.mktemp("families")
    return {family.name: save_family(family, folder / family.name) for family in FAMILIES if "qwen" in family.name}


def request(tokenizer: CheckpointTokenizer, question: str) -> GroupRequest:
    prompt = tokenizer.encode(tokenizer.render([{"role": "user", "content": question}]))
    return GroupRequest(GroupMeta(7, 2, 0, Interval(0, 3)), [56], prompt, {}, 1.0)


async def played_by(player: EpisodePlayer, asked: GroupRequest, sampling: Sampling) -> Played:
    ((row,),) = [rows async for rows in player.begin(asked, [0], sampling, KEY)]
    ((of_turn, (row,)),) = player.first([row], sampling)
    if of_turn is None:
        return await player.play(row, None, sampling, KEY)
    (turn,) = [each async for each in player.engine.generate(row.prompt_ids, samples=[0], sampling=of_turn, key=KEY)]
    return await player.play(row, turn, sampling, KEY)


def trained(played: Played, prompt_ids: Array) -> list[tuple[list[int], list[int]]]:
    """Of each sampled stretch what stood before it in its micro-batch, and itself."""
    row = ScoredRow(28, played, Sample("", "", {}, True), Score(1.0, ()))
    made = outputs(7, [row], has_episodes=True)
    batch = Batch(made.indices, made.groups, {**made.columns, "prompt_ids": Ragged.from_arrays([prompt_ids], "int64")})
    found = []
    for piece in micro_batches(2, batch, np.array([0.5], np.float32), 4):
        assert piece.indices.tolist() == [28] and set(piece.advantages.tolist()) == {0.5}
        before, said = piece.prompt_ids.tolist(), []
        for token, is_sampled in zip(piece.response_ids.values.tolist(), piece.loss_mask.values.tolist(), strict=True):
            if is_sampled:
                said.append(token)
            elif said:
                found.append((before, said))
                before, said = [*before, *said, token], []
            else:
                before = [*before, token]
        assert ((piece.rollout_logprobs.values < 0) == (piece.loss_mask.values == 1)).all()
        found += [(before, said)] if said else []
    return found


async def test_a_turn_that_changes_what_came_before_is_a_branch_of_the_row(tokenizers: dict[str, CheckpointTokenizer]) -> None:
    """Qwen 3: thoughts go when the user speaks again, and stay behind results of tools."""
    tokenizer = tokenizers["qwen3"]
    answers = ["<think>\nhm\n</think>\n\n4", "<think>\nso\n</think>\n\n5", "6"]
    engine, asked = ScriptedEngine(tokenizer, [*answers]), request(tokenizer, "2 + 2?")
    player = EpisodePlayer(engine, Scripted(["And one more?", "And again?"]), ChatFormat(tokenizer), EpisodeLimits(max_turns=4))
    played = await played_by(player, asked, Sampling(max_new_tokens=2000))
    assert played.ended == "stop" and len(played.branches) == 2
    assert trained(played, asked.prompt_ids) == [(context, said) for _, context, said in engine.record]
    assert (
        [key for key, _, _ in engine.record]
        == [KEY, branch_key(KEY, 1), branch_key(KEY, 2)]
        == [*dict.fromkeys(key for key, _, _ in engine.record)]
    )
    assert engine.forgotten == {key for key, _, _ in engine.record}
    assert tokenizer.decode_all(np.array(engine.record[2][1])) == tokenizer.render([
        {"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": answers[0]},
        {"role": "user", "content": "And one more?"}, {"role": "assistant", "content": answers[1]},
        {"role": "user", "content": "And again?"},
    ])  # fmt: skip


async def test_turns_that_change_nothing_are_one_sequence(tokenizers: dict[str, CheckpointTokenizer]) -> None:
    tokenizer = tokenizers["qwen2.5"]
    engine, asked = ScriptedEngine(tokenizer, ["4", "5"]), request(tokenizer, "2 + 2?")
    player = EpisodePlayer(engine, Scripted(["And one more?"]), ChatFormat(tokenizer), EpisodeLimits(max_turns=4))
    played = await played_by(player, asked, Sampling(max_new_tokens=2000))
    assert not len(played.branches)
    assert trained(played, asked.prompt_ids) == [(context, said) for _, context, said in engine.record]


@pytest.fixture
async def endpoint() -> AsyncIterator[CaptureEndpoint]:
    served = CaptureEndpoint()
    await served.start()
    yield served
    await served.stop()


async def ask(http: httpx2.AsyncClient, messages: list[Any]) -> list[Any]:
    reply = await http.post("chat/completions", json={"messages": messages, "max_tokens": 20})
    return [*messages, reply.raise_for_status().json()["choices"][0]["message"]]


async def plan_and_parts(http: httpx2.AsyncClient) -> float:
    """A conversation, two sub-agents side by side, and one of its own."""
    talk = await ask(http, [{"role": "user", "content": "2 + 2?"}])
    talk = await ask(http, [*talk, {"role": "user", "content": "And one more?"}])
    await asyncio.gather(*(ask(http, [*talk, {"role": "user", "content": f"Part {i}."}]) for i in range(2)))
    await ask(http, [{"role": "user", "content": "Something else."}])
    return 0.25


async def test_a_captured_episode_trains_every_sampled_token_once(
    endpoint: CaptureEndpoint, tokenizers: dict[str, CheckpointTokenizer]
) -> None:
    tokenizer = tokenizers["qwen2.5"]
    engine, asked = ScriptedEngine(tokenizer, ["4", "5", "one", "two", "else"]), request(tokenizer, "2 + 2?")
    environment, waits = Scripted([], plan_and_parts), []
    player = CapturePlayer(
        engine, environment, None, EpisodeLimits(max_turns=9), waits.append, endpoint=endpoint, joints=JointsByTools(tokenizer)
    )
    played = await played_by(player, asked, Sampling(max_new_tokens=2000))
    assert played.ended == "stop" and environment.has_ended and sum(waits) == 0
    assert sorted(trained(played, asked.prompt_ids)) == sorted((context, said) for _, context, said in engine.record)
    assert len(played.turns) == 5 and played.turn_rewards[-1] == 0.25 and len(played.branches) == 2
    assert engine.forgotten == {key for key, _, _ in engine.record} and len(engine.forgotten) == 3
    assert played.num_sampled == sum(len(said) for _, _, said in engine.record)


async def test_a_program_that_asks_for_too_much_or_for_nothing(
    endpoint: CaptureEndpoint, tokenizers: dict[str, CheckpointTokenizer]
) -> None:
    tokenizer, sampling = tokenizers["qwen2.5"], Sampling(max_new_tokens=60)
    asked, refused = request(tokenizer, "2 + 2?"), []

    async def much(http: httpx2.AsyncClient) -> float:
        talk: list[Any] = [{"role": "user", "content": "2 + 2?"}]
        for _ in range(3):
            reply = await http.post("chat/completions", json={"messages": talk})
            if reply.status_code == 400:
                refused.append(reply.json()["error"]["code"])
                break
            talk += [reply.json()["choices"][0]["message"], {"role": "user", "content": "a longer question " * 3}]
        return 0.0

    async def nothing(http: httpx2.AsyncClient) -> float:
        return 1.0

    def player(program: Program, **limits: Any) -> CapturePlayer:
        engine = ScriptedEngine(tokenizer, ["4", "5", "6"])
        return CapturePlayer(
            engine, Scripted([], program), None, EpisodeLimits(**limits), endpoint=endpoint, joints=JointsByTools(tokenizer)
        )

    played = await played_by(player(much, max_turns=9), asked, sampling)
    assert played.ended == "length" and len(played.response.token_ids) <= 60 and refused == ["episode_limit"]
    assert (await played_by(player(much, max_turns=1), asked, Sampling(max_new_tokens=900))).ended == "length"
    with pytest.raises(LimitReached, match="its program asked for more"):
        await played_by(player(much, max_turns=1, fails=True), asked, Sampling(max_new_tokens=900))
    with pytest.raises(EnvironmentFailure, match="without a call that was answered"):
        await played_by(player(nothing), asked, sampling)


async def test_rows_for_which_there_is_no_room_begin_when_others_have_ended(tokenizers: dict[str, CheckpointTokenizer]) -> None:
    """A group of three, and environments for one episode at a time: nobody waits for what only the others' end gives."""
    tokenizer, room = tokenizers["qwen2.5"], asyncio.Semaphore(1)
    asked, sampling = request(tokenizer, "2 + 2?"), Sampling(max_new_tokens=2000)

    class OneAtATime(Scripted):
        async def begin(self, example: Mapping[str, Any], seed: int) -> tuple[Any, None]:
            await room.acquire()
            return Scripted([]), None

    engine = ScriptedEngine(tokenizer, ["4", "5", "6"])
    player = EpisodePlayer(engine, OneAtATime([]), ChatFormat(tokenizer), EpisodeLimits(max_turns=2))
    begun = []
    async with asyncio.timeout(patience(20)):
        async for rows in player.begin(asked, [0, 1, 2], sampling, KEY):
            begun.append([row.sample for row in rows])
            for of_turn, alike in player.first(rows, sampling):
                assert of_turn is not None
                for row in alike:
                    stream = engine.generate(row.prompt_ids, samples=[row.sample], sampling=of_turn, key=KEY)
                    (turn,) = [each async for each in stream]
                    assert (await player.play(row, turn, sampling, KEY)).ended == "stop"
                    room.release()
    assert begun == [[0], [1], [2]]


async def test_an_environment_whose_first_words_cannot_follow_the_prompt_gives_its_place_back(
    tokenizers: dict[str, CheckpointTokenizer],
) -> None:
    tokenizer, environment = tokenizers["qwen2.5"], Scripted([])

    class Texts(Scripted):
        async def begin(self, example: Mapping[str, Any], seed: int) -> tuple[Any, Any]:
            return environment, Opening("a text behind a chat's prompt")

    player = EpisodePlayer(ScriptedEngine(tokenizer, []), Texts([]), ChatFormat(tokenizer), EpisodeLimits(max_turns=2))
    ((row,),) = [rows async for rows in player.begin(request(tokenizer, "2 + 2?"), [0], Sampling(max_new_tokens=99), KEY)]
    assert "no text can stand behind" in str(row.failure) and environment.has_ended
