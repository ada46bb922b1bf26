"""The sleeping engines keep the contracts of the real ones, and take the time that they are told to."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, Literal, cast

import msgspec
import numpy as np
import pytest

from asyncflow.cluster.clock import VirtualLoop
from asyncflow.engines.base import MicroBatch, Response, SampleKey, Sampling
from asyncflow.engines.costs import Costs, Lengths
from asyncflow.engines.sleeping.rollout import SleepingRolloutEngine
from asyncflow.engines.sleeping.train import SleepingPasses, SleepingTrainEngine
from asyncflow.types import Ragged

COSTS = Costs(
    decode_step_seconds=0.01,
    decode_slot_seconds=0.001,
    prefill_token_seconds=0.0,
    install_seconds=0.5,
    forward_backward_seconds=0.1,
    train_token_seconds=0.01,
    optim_step_seconds=0.25,
    reference_token_seconds=0.001,
    lengths=Lengths(response_median=20.0, response_sigma=0.8),
)
KEY = SampleKey(seed=1, prompt_index=3)
PROMPT = np.zeros(8, np.int64)


def run(main: Coroutine[Any, Any, Any]) -> float:
    """In virtual time, to the end of everything; how long it took, in virtual seconds."""
    loop = VirtualLoop()
    loop.run_until_complete(loop.create_task(main, name="test"))
    assert not loop.errors
    took = loop.now
    loop.finish()
    return took


async def take(engine: SleepingRolloutEngine, samples: range, key: SampleKey = KEY, most: int = 1000) -> list[Response]:
    found = engine.generate(PROMPT, samples=samples, sampling=Sampling(max_new_tokens=most), key=key)
    return [response async for response in found]


def lengths(samples: range, key: SampleKey = KEY, most: int = 1000) -> list[int]:
    return [COSTS.lengths.draw(key, sample, most)[0] for sample in samples]


def test_responses_are_a_function_of_key_and_sample_alone() -> None:
    async def main(num_slots: int, others: int) -> dict[int, Response]:
        engine = SleepingRolloutEngine(COSTS, num_slots=num_slots, max_context=2000)
        beside = [take(engine, range(5), SampleKey(1, 100 + other)) for other in range(others)]
        found, *_ = await asyncio.gather(take(engine, range(6)), *beside)
        await engine.close()
        return {response.sample: response for response in found}

    loops = VirtualLoop(), VirtualLoop()
    alone, crowded = (
        loop.run_until_complete(main(slots, others)) for loop, slots, others in zip(loops, (8, 3), (0, 4), strict=True)
    )
    for loop in loops:
        loop.finish()
    assert [alone[sample].token_ids.tolist() for sample in range(6)] == [crowded[sample].token_ids.tolist() for sample in range(6)]
    assert [len(alone[sample].token_ids) for sample in range(6)] == lengths(range(6))
    assert len({alone[sample].token_ids[0] for sample in range(6)}) == 6


def test_the_time_is_that_of_the_decode_steps() -> None:
    async def main() -> None:
        engine = SleepingRolloutEngine(COSTS, num_slots=4, max_context=2000)
        await take(engine, range(3))
        await engine.close()

    ends = sorted(lengths(range(3)))  # the first token of each comes with the prefill, which costs nothing here
    expected = (ends[0] - 1) * 0.013 + (ends[1] - ends[0]) * 0.012 + (ends[2] - ends[1]) * 0.011
    assert run(main()) == pytest.approx(expected)


def test_a_prompt_is_copied_from_a_slot_that_has_it_under_the_same_weights() -> None:
    costs = msgspec.structs.replace(COSTS, decode_step_seconds=1.0, decode_slot_seconds=0.0, prefill_token_seconds=100.0)

    async def main(*, installs: bool) -> None:
        engine = SleepingRolloutEngine(costs, num_slots=2, max_context=2000)
        taking = asyncio.create_task(take(engine, range(3)))
        await asyncio.sleep(len(PROMPT) * 100.0 + 0.5)  # the first two are in their first decode step
        if installs:
            await engine.install(1, {})
        await taking
        await engine.close()

    one = len(PROMPT) * 100.0
    assert one < run(main(installs=False)) < 2 * one  # the third has its prompt from the other's slot
    assert 2 * one < run(main(installs=True)) < 3 * one


def test_more_samples_than_slots_wait() -> None:
    engines = []

    async def main() -> None:
        engine = SleepingRolloutEngine(COSTS, num_slots=2, max_context=2000)
        engines.append(engine)
        responses = engine.generate(PROMPT, samples=range(5), sampling=Sampling(max_new_tokens=9), key=KEY)
        first = await anext(responses)
        rest = [response async for response in responses]
        assert sorted([first.sample, *(response.sample for response in rest)]) == list(range(5))
        await engine.close()

    run(main())


def test_the_limit_ends_a_response() -> None:
    async def main() -> None:
        engine = SleepingRolloutEngine(COSTS, num_slots=64, max_context=2000)
        found = await take(engine, range(64), most=20)
        assert {(len(r.token_ids) == 20, r.finish_reason) for r in found} == {(True, "length"), (False, "stop")}
        with pytest.raises(ValueError, match="exceed"):
            engine.generate(PROMPT, samples=[0], sampling=Sampling(max_new_tokens=1993), key=KEY)
        await engine.close()

    run(main())


def test_an_install_in_flight_begins_a_span_at_the_next_token() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        engine = SleepingRolloutEngine(COSTS, num_slots=1, max_context=2000, version=4)
        generating = asyncio.create_task(take(engine, range(1)))
        await asyncio.sleep(0.0495)  # in the middle of the fifth decode step: token 6
        await engine.install(5, {})
        assert loop.time() == pytest.approx(5 * 0.011 + 0.5)
        await engine.install(6, {})  # no token was made under 5
        await engine.pause()
        paused = loop.time()
        await asyncio.sleep(100.0)
        await engine.resume()
        (response,) = await generating
        assert response.version_spans.tolist() == [[0, 4], [6, 6]]
        assert loop.time() - paused == pytest.approx(100.0 + (len(response.token_ids) - 6) * 0.011)
        assert engine.installed_version == 6
        await engine.close()

    assert lengths(range(1))[0] > 8
    run(main())


def test_recomputing_takes_a_prefill_of_what_is_under_way() -> None:
    async def main(kv_on_install: Literal["keep", "recompute"], seconds: list[float]) -> None:
        costs = msgspec.structs.replace(COSTS, prefill_token_seconds=0.001)
        engine = SleepingRolloutEngine(costs, num_slots=2, max_context=2000, kv_on_install=kv_on_install)
        generating = asyncio.create_task(take(engine, range(2)))
        await asyncio.sleep(0.008 + 3.5 * 0.012)  # the prefill, then into the fourth decode step
        await engine.install(1, {})
        seconds.append(asyncio.get_running_loop().time())
        await generating
        await engine.close()

    assert min(lengths(range(2))) > 5
    seconds: list[float] = []
    for kv_on_install in ("keep", "recompute"):
        run(main(kv_on_install, seconds))  # type: ignore[arg-type]
    assert seconds[0] == pytest.approx(0.008 + 4 * 0.012 + 0.5)
    assert seconds[1] - seconds[0] == pytest.approx((8 + 2 * 5) * 0.001)


def test_new_requests_wait_while_it_is_paused_and_nothing_is_lost() -> None:
    async def main() -> None:
        engine = SleepingRolloutEngine(COSTS, num_slots=4, max_context=2000)
        await engine.pause()
        await engine.pause()
        generating = asyncio.create_task(take(engine, range(2)))
        await asyncio.sleep(50.0)
        assert not generating.done()
        await engine.install(1, {})
        await engine.resume()
        assert {tuple(map(tuple, r.version_spans.tolist())) for r in await generating} == {((0, 1),)}
        await engine.close()

    run(main())


def test_leaving_a_generator_frees_its_slots() -> None:
    async def main() -> None:
        engine = SleepingRolloutEngine(COSTS, num_slots=3, max_context=2000)
        leaving = engine.generate(PROMPT, samples=range(3), sampling=Sampling(max_new_tokens=1000), key=KEY)
        await anext(leaving)
        waiting = asyncio.create_task(take(engine, range(2), SampleKey(1, 9)))
        await leaving.aclose()
        await asyncio.sleep(0)
        assert len(await waiting) == 2
        await engine.close()

    run(main())


def test_closing_ends_what_is_pending() -> None:
    async def main() -> None:
        engine = SleepingRolloutEngine(COSTS, num_slots=1, max_context=2000)
        generating = asyncio.create_task(take(engine, range(3)))
        installing = asyncio.create_task(engine.install(1, {}))
        await asyncio.sleep(0.1)
        await engine.close()
        for pending in (generating, installing):
            with pytest.raises(RuntimeError, match="closed"):
                await pending
        with pytest.raises(RuntimeError, match="closed"):
            await engine.install(1, {})
        await engine.close()

    run(main())


def test_the_train_engine_takes_one_call_at_a_time() -> None:
    responses = Ragged.from_arrays([np.zeros(5, np.int64), np.zeros(7, np.int64)], "int64")
    ones = Ragged(np.ones(12, np.uint8), responses.offsets)
    logprobs = Ragged(np.full(12, -1.0, np.float32), responses.offsets)
    micro = MicroBatch(np.arange(2), PROMPT, responses, ones, logprobs, np.zeros(2, np.float32), np.zeros(2, np.int64))

    async def main() -> None:
        engine = SleepingTrainEngine(COSTS, learning_rate=0.5)
        before = await engine.fingerprint()
        await engine.begin_step()
        results = await asyncio.gather(*(engine.forward_backward([micro], None) for _ in range(3)))  # type: ignore[arg-type]
        assert [(r.loss_tokens, r.physical_tokens, r.is_finite) for (r,) in results] == [(12, 20, True)] * 3
        assert asyncio.get_running_loop().time() == pytest.approx(3 * (0.1 + 20 * 0.01))
        update = await engine.optim_step(36)
        assert (update.learning_rate, update.skipped) == (0.5, False)
        assert await engine.fingerprint() != before
        found = await engine.log_probs(PROMPT, responses)
        assert found.lengths.tolist() == [5, 7] and found.values.dtype == np.float32

    assert run(main()) == pytest.approx(0.9 + 0.25 + 0.02)


def test_slowed_costs_are_slower_in_everything_but_lengths() -> None:
    slow = COSTS.slowed(3.0)
    assert slow.decode_step(7) == pytest.approx(3 * COSTS.decode_step(7))
    assert slow.forward_backward(100) == pytest.approx(3 * COSTS.forward_backward(100))
    assert slow.install_seconds == pytest.approx(3 * COSTS.install_seconds)
    assert (slow.lengths, slow.weight_bytes) == (COSTS.lengths, COSTS.weight_bytes)


def test_costs_of_ones_own_are_slowed_too() -> None:
    class Steps(Costs, frozen=True, kw_only=True):
        def decode_step(self, num_active: int) -> float:
            return 0.5 if num_active < 4 else 0.75

    slow = Steps().slowed(4.0)
    assert (slow.decode_step(1), slow.decode_step(4)) == (2.0, 3.0)


def test_lengths_are_lognormal() -> None:
    drawn = np.array([Lengths(response_median=100.0, response_sigma=0.5).draw(SampleKey(0, p), 0, 10**6)[0] for p in range(4000)])
    assert np.median(drawn) == pytest.approx(100, rel=0.05)
    assert np.log(drawn).std() == pytest.approx(0.5, rel=0.05)


def test_a_decode_step_takes_longer_the_more_tokens_it_attends_to() -> None:
    costs = msgspec.structs.replace(
        COSTS, decode_slot_seconds=0.0, decode_context_seconds=0.001, lengths=Lengths(response_sigma=0.0)
    )

    async def main() -> None:
        engine = SleepingRolloutEngine(costs, num_slots=4, max_context=2000)
        await take(engine, range(2))
        await engine.close()

    contexts = [2 * (len(PROMPT) + count) for count in range(1, 128)]  # before each of the 127 decode steps of two slots
    assert run(main()) == pytest.approx(sum(0.01 + 0.001 * (context + 1) for context in contexts))


def test_responses_to_some_prompts_are_longer() -> None:
    def spread(drawn: Lengths) -> tuple[float, float]:
        """Standard deviations of the logarithms of lengths: within prompts, and of their means."""
        logs = np.log([[drawn.draw(SampleKey(0, prompt), sample, 10**6)[0] for sample in range(16)] for prompt in range(300)])
        return float(logs.std(axis=1).mean()), float(logs.mean(axis=1).std())

    within, between = spread(Lengths(response_median=1e4, response_sigma=0.1, prompt_sigma=0.5))
    assert within == pytest.approx(0.1, rel=0.1) and between == pytest.approx(0.5, rel=0.1)


def test_ranks_meet_in_each_round_where_collectives_take_time() -> None:
    costs = msgspec.structs.replace(COSTS, collectives_seconds=0.5)

    async def main(costs: Costs) -> list[float]:
        ranks, loop = asyncio.Barrier(2), asyncio.get_running_loop()

        async def rank(number: int, batches: list[int]) -> float:
            engine = SleepingTrainEngine(costs, data_parallel_rank=number, ranks=ranks)
            await engine.forward_backward([micro_batch(tokens) for tokens in batches], cast(Any, None))
            return loop.time()

        return list(await asyncio.gather(rank(0, [30]), rank(1, [])))

    loops = VirtualLoop(), VirtualLoop()
    together, apart = (loop.run_until_complete(main(each)) for loop, each in zip(loops, (costs, COSTS), strict=True))
    for loop in loops:
        loop.finish()
    assert together == pytest.approx([0.1 + 30 * 0.01 + 0.5] * 2)
    assert apart == pytest.approx([0.1 + 30 * 0.01, 0.0])


@pytest.mark.parametrize(("allowed", "seconds"), [(0, 4 * 1.1), (1, 2 * 1.1), (2, 2 * 1.1)])
def test_helpers_take_passes_while_they_may(allowed: int, seconds: float) -> None:
    seen: list[tuple[float, float]] = []

    async def main() -> None:
        helpers = SleepingPasses(num_helpers=2)
        helpers.on_pass = lambda start, end: seen.append((start, end))
        helpers.allow(range(allowed))
        engine = SleepingTrainEngine(COSTS, passes=helpers)
        results = await engine.forward_backward([micro_batch(100) for _ in range(4)], cast(Any, None))
        assert [result.physical_tokens for result in results] == [100] * 4

    assert run(main()) == pytest.approx(seconds)
    assert len(seen) == 2 * min(allowed, 1) and all(end - start == pytest.approx(1.1) for start, end in seen)


def test_a_helper_gives_its_core_back_within_a_pass() -> None:
    async def main() -> None:
        helpers, loop = SleepingPasses(num_helpers=1), asyncio.get_running_loop()
        loop.call_later(0.5, helpers.allow, (0,))
        loop.call_later(2.0, helpers.allow, ())
        engine = SleepingTrainEngine(COSTS, passes=helpers)
        await engine.forward_backward([micro_batch(100) for _ in range(5)], cast(Any, None))

    assert run(main()) == pytest.approx(3 * 1.1)  # the helper's two are from 0.5 to 2.7


def micro_batch(tokens: int) -> MicroBatch:
    """Of one row, with so many tokens."""
    ragged = Ragged.from_arrays([np.zeros(tokens - 1)], "int64")
    return MicroBatch(
        indices=np.zeros(1, np.int64), prompt_ids=np.zeros(1, np.int64), response_ids=ragged, loss_mask=ragged,
        rollout_logprobs=ragged, advantages=np.zeros(1, np.float32), staleness=np.zeros(1, np.int64),
    )  # fmt: skip


def test_costs_by_bytes_scorers_and_critic_replace_the_others_where_they_are_given() -> None:
    given = Costs(
        weight_bytes=1000, publish_seconds=1.0, publish_byte_seconds=0.002, fetch_seconds=0.0, fetch_byte_seconds=0.003,
        install_seconds=0.5, reward_seconds=0.25, scorer_seconds={"maths": 2.0}, critic_token_seconds=0.5,
    )  # fmt: skip
    assert (given.publish(), given.fetch(), given.install()) == pytest.approx((3.0, 3.0, 0.5))
    assert given.reward(["maths"]) == 2.0 and given.reward(["maths", "other"]) == 2.25 and given.reward([]) == 0.25
    assert given.of_critic().forward_backward(10) == pytest.approx(0.005 + 5.0)
    assert given.slowed(2.0).of_critic().forward_backward(10) == pytest.approx(2 * (0.005 + 5.0))
    assert given.values(10) == given.log_probs(10)
    assert Costs(value_token_seconds=1.0).values(10) == 10.0


@pytest.mark.parametrize(("num_parked", "prefilled"), [(4, 3 * 6), (0, 3 * (8 + 20 + 5) + 3 * 1)])
def test_a_later_turn_costs_what_is_new_where_its_episode_was_kept(num_parked: int, prefilled: int) -> None:
    """Three episodes on one slot: a turn, an observation of 5 tokens, a turn. A turn's last token is computed with what follows."""
    costs = msgspec.structs.replace(COSTS, lengths=Lengths(response_median=10.0**6))

    async def main() -> None:
        engine = SleepingRolloutEngine(costs, num_slots=1, num_parked=num_parked, max_context=200)
        before = []
        for length, after in ((20, 0), (10, 25)):
            before.append(engine.num_computed)
            for number in range(3):
                sampling, tokens = Sampling(max_new_tokens=length, keeps=not after), np.zeros(after, np.int64)
                stream = engine.generate(PROMPT, samples=[0], sampling=sampling, key=SampleKey(1, number), after=tokens)
                (made,) = [response async for response in stream]
                assert len(made.token_ids) == length
        assert engine.num_computed - before[1] == prefilled + 3 * 9 - (3 if not num_parked else 0)
        await engine.close()

    run(main())


def test_costs_that_fail_end_the_requests_with_their_words() -> None:
    class Wrong(Lengths, frozen=True):
        def draw(self, key: SampleKey, sample: int, most: int, position: int = 0) -> tuple[int, int]:
            raise ZeroDivisionError("no length")

    async def main() -> None:
        engine = SleepingRolloutEngine(msgspec.structs.replace(COSTS, lengths=Wrong()), num_slots=2, max_context=2000)
        with pytest.raises(RuntimeError, match="generation ended: ZeroDivisionError: no length"):
            await take(engine, range(4))
        with pytest.raises(RuntimeError, match="the rollout engine is closed"):
            await take(engine, range(4))

    run(main())
