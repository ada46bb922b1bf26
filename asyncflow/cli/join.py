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
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
import yaml

from asyncflow.devices import CPU, CUDA
from asyncflow.types import RunError, UserError

if TYPE_CHECKING:
    from asyncflow.client import AsyncGeneratorWorker, PromptToAnswer
    from asyncflow.engines.base import RolloutEngine

PATIENCE_SECONDS = 10.0
"""Seconds for which the service may be out of reach."""
POLL_SECONDS = 2.0
"""Seconds for which a request waits for prompts, or is a sign of life that is held."""


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
) -> None:
    """Generate for a served run until it stops, as one more of its rollout workers. Ctrl-C leaves: others make what is left."""
    chosen = yaml.safe_load(engine)
    named = {"name": chosen} if isinstance(chosen, str) else dict(chosen) if isinstance(chosen, dict) else {}
    if "name" not in named:
        raise UserError(f"--engine {engine} names no engine: take slots, or '{{name: vllm, python: ...}}'")
    options = {"dtype": dtype, "device": device, "num_threads": num_threads, "kv_on_install": kv_on_install}
    asyncio.run(_join(address, key_file, certificate, named, num_slots, options))


async def _join(
    address: str, key_file: Path, certificate: Path | None, chosen: dict[str, Any], num_slots: int, options: dict[str, Any]
) -> None:
    from asyncflow.client import AsyncClient
    from asyncflow.engines.rollout import ROLLOUT_ENGINES
    from asyncflow.registry import build

    stopped = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    with tempfile.TemporaryDirectory(prefix="asyncflow-") as folder:
        connecting = AsyncClient.connect(address, key_file=key_file, certificate=certificate, patience_seconds=PATIENCE_SECONDS)
        async with connecting as client:
            model = await client.model(Path(folder) / "model")
            worker = await client.join_generators(num_slots)
            name, own = chosen.pop("name"), {"model_path": model, "num_slots": num_slots, "max_context": worker.facts.max_context}
            vitals = Vitals(worker)
            alive = asyncio.create_task(vitals.run())  # an engine may take minutes to start
            given = {**own, **options}
            engine: RolloutEngine = await asyncio.to_thread(build, "rollout engine", name, chosen, ROLLOUT_ENGINES, given)
            print(f"generating for the run at {address} as {worker.name}", flush=True)
            try:
                attests = options["dtype"] == worker.facts.dtype  # sums are of one dtype
                await JoinedGenerator(vitals, engine, model, attests=attests).run(stopped)
            finally:
                alive.cancel()
                await engine.close()
                with contextlib.suppress(RunError):  # the run may be over
                    await worker.leave()


class Vitals:
    """Signs of life of a generator, and what they are answered."""

    def __init__(self, worker: AsyncGeneratorWorker) -> None:
        self.worker = worker
        self._is_over = False

    async def run(self) -> None:
        """Give signs of life until the run is over. Whoever makes another request is told what is wrong."""
        while not self._is_over:
            try:
                await self.worker.alive(POLL_SECONDS)
            except RunError:
                await self.goes_on()
                await asyncio.sleep(POLL_SECONDS)

    async def goes_on(self) -> bool:
        """Whether there is something wrong where a request has failed: the run goes on, or will, as of a service that was started
        again, or the service is out of reach. A run that is over takes no more of anybody, and says so before its service ends."""
        if not self._is_over:
            try:
                status = await self.worker.client.status()
            except RunError:
                return True
            self._is_over = bool(status["has_begun"] and not status["is_live"])
        return not self._is_over


class JoinedGenerator:
    """A generator of a served run over an engine of this process."""

    def __init__(self, vitals: Vitals, engine: RolloutEngine, model: Path, *, attests: bool = True) -> None:
        """`model`: folder of the model that the run started from. `attests`: whether it says what it generates with."""
        self._vitals, self._worker, self._engine, self._model = vitals, vitals.worker, engine, model
        self._weights = model.with_name("weights.safetensors")
        self._attests = attests and bool(getattr(engine, "attest", None))
        self._free = engine.num_slots
        self._changed = asyncio.Event()

    async def run(self, stopped: asyncio.Event) -> None:
        """Generate until the run stops, or `stopped` is set."""
        group_size = self._worker.facts.group_size
        async with asyncio.TaskGroup() as answering:
            while not stopped.is_set():
                if self._free <= 0:
                    self._changed.clear()
                    await asyncio.wait([asyncio.ensure_future(self._changed.wait())], timeout=POLL_SECONDS)
                    continue
                try:
                    work = await self._worker.get_prompts_data(max(1, self._free // group_size), POLL_SECONDS)
                    if work.is_over:
                        return
                    if work.install is not None:
                        await self._install(work.install)
                except RunError:
                    if await self._vitals.goes_on():
                        raise
                    return
                for prompt in work.prompts:
                    self._free -= len(prompt.rows)
                    answering.create_task(self._answer(prompt, work.version))

    async def _install(self, version: int) -> None:
        """Load a version. The service asks for it when the responses under way may go through it."""
        from safetensors.torch import load_file

        from asyncflow.run.engines import tensors_of

        if version:
            await self._worker.fetch_weights(version, self._weights)
            tensors = await asyncio.to_thread(load_file, self._weights)
        else:
            tensors = dict(await asyncio.to_thread(tensors_of, self._model))
        await self._engine.pause()
        await self._engine.install(version, tensors)
        attested = await self._engine.attest() if self._attests else None
        try:
            await self._worker.installed(version, attested)
        finally:  # of a run that is over, too: responses under way end by themselves
            await self._engine.resume()

    async def _answer(self, prompt: PromptToAnswer, version: int) -> None:
        """All responses to a prompt, each put when it has ended."""
        import numpy as np

        from asyncflow.client import ResponseData
        from asyncflow.engines.base import SampleKey, Sampling

        facts, ids = self._worker.facts, np.array(prompt.prompt_ids, np.int64)
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
        async for response in self._engine.generate(ids, samples=samples, sampling=sampling, key=SampleKey(facts.seed, group)):
            self._free += 1
            self._changed.set()
            given = ResponseData(
                row=(group << bits) + response.sample,
                token_ids=response.token_ids.tolist(),
                logprobs=response.logprobs.tolist(),
                finish_reason=response.finish_reason,
                versions=[(int(first), int(of)) for first, of in response.version_spans],
            )
            try:
                await self._worker.put_experience_data([given])
            except RunError:
                if await self._vitals.goes_on():
                    raise
                return
