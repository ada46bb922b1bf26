"""`asyncflow join`: generate for a served run from any machine, by any rollout engine of AsyncFlow's, such as vLLM.

consumes: prompts, which the service leases to this process; versions that it is to serve
waits for: prompts, while slots are free; its own responses, before it changes its weights
is unblocked by: the service; the engine
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
import yaml

from asyncflow.devices import CPU, CUDA
from asyncflow.types import RunError, UserError, first_error

if TYPE_CHECKING:
    from torch import Tensor

    from asyncflow.attestation import Attestation
    from asyncflow.client import AsyncClient, AsyncGeneratorWorker, ProbeData, PromptToAnswer
    from asyncflow.engines.base import RolloutEngine

POLL_SECONDS = 2.0
"""Seconds for which a request waits for prompts, or is a heartbeat whose answer is held back."""

MOST_PAUSE_SECONDS = 30.0
"""Seconds after which this process joins again, at most, where that has been of no use before."""


def join(
    address: Annotated[str, typer.Argument(help="The service's address: https://HOST:PORT, http://127.0.0.1:PORT or unix:PATH.")],
    key_file: Annotated[Path, typer.Option(help="A file with a key of the service: its own key file, or a copy with one key.")],
    certificate: Annotated[Path | None, typer.Option(help="What a server with TLS is trusted by (its tls.crt).")] = None,
    engine: Annotated[str, typer.Option(help="Engine as rollout.engine has it, in YAML: slots, or '{name: vllm, ...}'.")] = "slots",
    num_slots: Annotated[int, typer.Option(min=1, help="Responses at once.")] = 128,
    dtype: Annotated[str, typer.Option(help="Of weights, keys and values: float32 or bfloat16.")] = "float32",
    device: Annotated[str, typer.Option(help=f"Where it computes: {CPU}, {CUDA}, {CUDA}:1.")] = "cpu",
    num_threads: Annotated[int, typer.Option(min=1, help="Computing threads (CPU).")] = 1,
    kv_on_install: Annotated[str, typer.Option(help="Keys and values of responses under way: keep or recompute.")] = "keep",
    patience: Annotated[float, typer.Option(min=0.0, help="Seconds for which the service may be out of reach.")] = 60.0,
) -> None:
    """Generate for a served run until it stops, as one more of its rollout workers, also if its service is started again meanwhile.
    Ctrl-C leaves: others make what is left."""
    chosen = yaml.safe_load(engine)
    named = {"name": chosen} if isinstance(chosen, str) else dict(chosen) if isinstance(chosen, dict) else {}
    if "name" not in named:
        raise UserError(f"--engine {engine} names no engine: take slots, or '{{name: vllm, python: ...}}'")
    options = {"dtype": dtype, "device": device, "num_threads": num_threads, "kv_on_install": kv_on_install}
    from asyncflow.client import AsyncClient

    client = AsyncClient.connect(address, key_file=key_file, certificate=certificate, patience_seconds=patience)
    asyncio.run(_join(client, named, num_slots, options))


async def _join(connecting: AsyncClient, chosen: dict[str, Any], num_slots: int, options: dict[str, Any]) -> None:
    from asyncflow.engines.rollout import ROLLOUT_ENGINES
    from asyncflow.registry import build

    stopped = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    with tempfile.TemporaryDirectory(prefix="asyncflow-") as folder:
        async with connecting as client:
            model = await client.model(Path(folder) / "model")
            place = RunPlace(client, await client.join_generators(num_slots), num_slots)
            facts, name = place.worker.facts, chosen.pop("name")
            alive = asyncio.create_task(place.send_heartbeats())  # an engine may take minutes to start
            given = {"model_path": model, "num_slots": num_slots, "max_context": facts.max_context, **options}
            engine: RolloutEngine = await asyncio.to_thread(build, "rollout engine", name, chosen, ROLLOUT_ENGINES, given)
            generator = JoinedGenerator(place, engine, model, attests=options["dtype"] == facts.dtype)  # sums are of one dtype
            print(f"generating for the run at {client.address} as {place.worker.name}", flush=True)
            try:
                while await generator.run(stopped) == "forgotten" and await place.join_again(stopped, is_new=generator.has_put):
                    print(f"the service did not know this process any more: it has joined again as {place.worker.name}", flush=True)
                if stopped.is_set():
                    await place.leave()
            finally:
                alive.cancel()
                await engine.close()


Verdict = Literal["over", "forgotten", "wrong"]
"""Reason why a request has failed. The run is over. Or its service does not know this process any more: it was started again, or
had heard nothing for too long. Or anything else, such as that the service is out of reach."""


class RunPlace:
    """Place of this process among a run's workers, which it may lose. `worker`: what it is there."""

    is_over = False
    """Whether the run is known to be over."""

    def __init__(self, client: AsyncClient, worker: AsyncGeneratorWorker, num_slots: int) -> None:
        self.worker = worker
        self._client, self._num_slots, self._pause = client, num_slots, 0.0

    async def send_heartbeats(self) -> None:
        """Send heartbeats until the run is over. Any other request is told what else is wrong."""
        from asyncflow.client import RunOver

        while not self.is_over:
            try:
                await self.worker.alive(POLL_SECONDS)
            except RunError as error:
                self.is_over = isinstance(error, RunOver)
                await asyncio.sleep(POLL_SECONDS)

    async def verdict(self, error: BaseException) -> Verdict:
        """Verdict on a request that has failed by this error."""
        from asyncflow.client import OutOfReach, RunOver

        if not self.is_over and not isinstance(error, RunOver | OutOfReach):
            try:
                await self.worker.alive()
            except (RunOver, OutOfReach) as answer:
                error = answer
            except RunError:
                return "forgotten"
        self.is_over = self.is_over or isinstance(error, RunOver)
        return "over" if self.is_over else "wrong"

    async def join_again(self, stopped: asyncio.Event, *, is_new: bool) -> bool:
        """Join the same run as another worker, when it has begun. Returns whether it goes on.

        `is_new`: the last place was of use; if not, the next one is asked for later each time. Raises `RunError` where the service
        is out of reach, serves another run, or takes nobody.
        """
        self._pause = 0.0 if is_new else min(MOST_PAUSE_SECONDS, 2 * self._pause or 1.0)
        await _rest(stopped, self._pause)
        while not stopped.is_set():
            status = await self._client.status()
            if not status["has_begun"]:
                await _rest(stopped, POLL_SECONDS)
            elif not status["is_live"]:
                self.is_over = True
                return False
            else:
                worker = await self._client.join_generators(self._num_slots)
                if worker.facts != self.worker.facts:
                    await worker.leave()
                    raise RunError("the service has another run or another model now: join it anew")
                self.worker = worker
                return True
        return False

    async def leave(self) -> None:
        """Leave the run, if it knows this process."""
        with contextlib.suppress(RunError):
            await self.worker.leave()


async def _rest(stopped: asyncio.Event, seconds: float) -> None:
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(stopped.wait(), seconds)


class JoinedGenerator:
    """A generator of a served run over an engine of this process."""

    def __init__(self, place: RunPlace, engine: RolloutEngine, model: Path, *, attests: bool = True) -> None:
        """`model`: folder of the model that the run started from. `attests`: whether it says what it generates with."""
        self._place, self._engine, self._model = place, engine, model
        self._weights = model.with_name("weights.safetensors")
        self._attests = attests and bool(getattr(engine, "attest", None))
        self._version: int | None = 0  # None: a change was cut off
        self._free = engine.num_slots
        self._changed = asyncio.Event()
        self.has_put = False  # a response, since it was told to run

    async def run(self, stopped: asyncio.Event) -> Verdict:
        """Generate for the present worker until the run is over, `stopped` is set, or the service does not know it any more.

        Raises `RunError` where anything else is wrong.
        """
        self._free, self.has_put = self._engine.num_slots, False
        failed: list[BaseException] = []
        try:
            if self._version != 0:  # a process that joins has version 0
                await self._change(0)
            async with asyncio.TaskGroup() as answering:
                await self._generate(answering, stopped)
        except* RunError as group:
            failed.append(first_error(group))
        if not failed:
            return "over"
        if (verdict := await self._place.verdict(failed[0])) == "wrong":
            raise failed[0]
        return verdict

    async def _generate(self, answering: asyncio.TaskGroup, stopped: asyncio.Event) -> None:
        worker = self._place.worker
        while not stopped.is_set():
            if self._free <= 0:
                self._changed.clear()
                await asyncio.wait([asyncio.ensure_future(self._changed.wait())], timeout=POLL_SECONDS)
                continue
            work = await worker.get_prompts_data(max(1, self._free // worker.facts.group_size), POLL_SECONDS)
            if work.is_over:
                self._place.is_over = True
                raise RunError("the run is over")  # nobody wants the responses under way
            if work.install is not None:
                await self._change(work.install, worker, work.probe)
            for prompt in work.prompts:
                self._free -= len(prompt.rows)
                answering.create_task(self._answer(prompt))

    async def _change(self, version: int, worker_api: AsyncGeneratorWorker | None = None, probe: ProbeData | None = None) -> None:
        """Change to a version, and say so where it was asked for: the service does when the responses under way may go through it.
        It may be cut off at any point."""
        tensors = await self._tensors(version)
        self._version = None
        try:
            await self._engine.pause()
            await self._engine.install(version, tensors)
            attested = await self._engine.attest() if self._attests else None
            if self._attests and probe is not None:
                attested = await self._probed(attested, probe)
            if worker_api is not None:
                await worker_api.installed(version, attested)
            self._version = version
        finally:
            await self._engine.resume()

    async def _probed(self, attested: Attestation | None, probe: ProbeData) -> Attestation | None:
        """The attestation with the engine's log-probs of a probe, if it can tell them."""
        import msgspec
        import numpy as np

        from asyncflow.attestation import Attestation

        score: Any = getattr(self._engine, "log_probs", None)
        found = None if score is None else await score(np.array(probe.token_ids, np.int64))
        if found is None:
            return attested
        return msgspec.structs.replace(attested or Attestation(None), log_probs=found.tolist())

    async def _tensors(self, version: int) -> Mapping[str, Tensor]:
        from safetensors.torch import load_file

        from asyncflow.run.in_worker.engines import tensors_of

        if not version:
            return dict(await asyncio.to_thread(tensors_of, self._model))
        await self._place.worker.fetch_weights(version, self._weights)
        return await asyncio.to_thread(load_file, self._weights)

    async def _answer(self, prompt: PromptToAnswer) -> None:
        """All responses to a prompt, each put when it has ended."""
        import numpy as np

        from asyncflow.client import ResponseData
        from asyncflow.engines.base import SampleKey, Sampling

        worker = self._place.worker
        facts, ids = worker.facts, np.array(prompt.prompt_ids, np.int64)
        group, bits = prompt.rows[0] >> facts.group_bits, facts.group_bits
        sampling = Sampling(
            temperature=prompt.temperature,
            max_new_tokens=prompt.max_new_tokens,
            top_p=prompt.top_p,
            top_k=prompt.top_k,
            min_p=prompt.min_p,
            stop=tuple(prompt.stop),
        )
        samples = [row - (group << bits) for row in prompt.rows]
        generating = self._engine.generate(ids, samples=samples, sampling=sampling, key=SampleKey(facts.seed, group))
        try:
            async for response in generating:
                self._free += 1
                self._changed.set()
                given = ResponseData(
                    row=(group << bits) + response.sample,
                    token_ids=response.token_ids.tolist(),
                    logprobs=response.logprobs.tolist(),
                    finish_reason=response.finish_reason,
                    versions=[(int(first), int(of)) for first, of in response.version_spans],
                )
                await worker.put_experience_data([given])
                self.has_put = True
        finally:
            if (close := getattr(generating, "aclose", None)) is not None:
                await close()  # at once, so that its slots are free where this was cut off
