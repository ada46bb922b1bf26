"""Client of a service (`asyncflow serve`): the calls of `Trainer` and of AF's section 5, over HTTP. No torch here.

    with Client.connect("http://127.0.0.1:8321", key_file="runs/quickstart.service/keys.json") as client:
        client.init_engines()
        while (metrics := client.step()) is not None:
            print(metrics["reward/mean"])

`AsyncClient` has the same methods as coroutines; `Client` runs them on an event loop in a thread of its own. Every request that
changes something has an id, so it is repeated where its answer was lost, and has one effect.
"""

from __future__ import annotations

import asyncio
import functools
import importlib
import ssl
import tempfile
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Concatenate, Generic, Literal, ParamSpec, Self, TypeVar

import msgspec
import numpy as np

from asyncflow.attestation import Attestation
from asyncflow.repeated_requests import OutOfReach as OutOfReach
from asyncflow.repeated_requests import RepeatedRequests
from asyncflow.repeated_requests import RunOver as RunOver
from asyncflow.types import Array, UserError

P = ParamSpec("P")
T = TypeVar("T")
W = TypeVar("W")
EngineHost = Literal["own", "outside"]
KeyScope = Literal["read", "drive", "admin"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptToAnswer:
    """Prompt that a generator has leased: one response is wanted for each of `rows`, sampled as `rollout` of the run's
    configuration says."""

    rows: list[int]
    prompt_ids: list[int]
    prompt: str
    temperature: float
    max_new_tokens: int
    top_p: float
    top_k: int
    min_p: float
    stop: list[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """Facts that a generator is told when it joins: the names of `run` and of `dtype`, in which the run's own rollout workers
    generate, and a hash of its model; `max_context` tokens of a prompt and its response at most; a row is group << group_bits |
    sample, and sampling noise of (seed, group, sample, position) alone has a lost row made again as it was.
    """

    group_size: int
    max_context: int
    seed: int
    group_bits: int
    dtype: str
    run: str
    model: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeData:
    """Sequence of which the trainer has computed log-probs, at temperature 1."""

    token_ids: list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptsData:
    """Work of a generator: prompts to answer under `version`; or `install`, a version to load first; or, with `is_over`, none any
    more. `probe`: of whose tokens `installed` may be given the log-probs of the loaded version."""

    version: int
    prompts: list[PromptToAnswer]
    install: int | None
    is_over: bool
    probe: ProbeData | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseData:
    """Response of L tokens for a row: `token_ids` with the end token, `logprobs` under the distribution that was sampled from.

    `versions`: pairs (first token, version) where there are several; None: all tokens are of the version that the generator serves.
    """

    row: int
    token_ids: Sequence[int]
    logprobs: Sequence[float]
    finish_reason: Literal["stop", "length"]
    versions: Sequence[tuple[int, int]] | None = None


@dataclass(frozen=True, slots=True)
class GroupData:
    """Group of a step: R rows with one prompt. Ragged columns are lists of R arrays.

    indices int64 [R]; prompt_ids int64 [Lp]; response_ids int64; loss_mask uint8; rollout_logprobs float32; advantages float32, of
    the run's algorithm; rewards float32 [R]; staleness int64 [R].
    """

    number: int
    indices: Array
    prompt_ids: Array
    response_ids: list[Array]
    loss_mask: list[Array]
    rollout_logprobs: list[Array]
    advantages: list[Array]
    rewards: Array
    staleness: Array


@dataclass(frozen=True, slots=True)
class ExperienceData:
    """Groups of the step that is being trained.

    `normaliser`: what the sum over all groups of the step is divided by, once all of them are handed out; None before.
    """

    step: int
    groups: list[GroupData]
    normaliser: int | None

    @property
    def is_complete(self) -> bool:
        """Whether the step has no more groups."""
        return self.normaliser is not None


class AsyncClient:
    """Client of one service, for an event loop. A context; `connect` makes it."""

    def __init__(self, address: str, key: str, *, trusted: ssl.SSLContext | None = None, patience_seconds: float = 30.0) -> None:
        """See `connect`. `trusted`: what a server with TLS is trusted by; None: by the system's authorities."""
        self.address = address
        self._requests = RepeatedRequests(address, key, trusted, patience_seconds)

    @classmethod
    def connect(
        cls,
        address: str,
        *,
        key: str | None = None,
        key_file: str | Path | None = None,
        certificate: str | Path | None = None,
        patience_seconds: float = 30.0,
    ) -> Self:
        """Client of the service at an address (`http://HOST:PORT`, `https://HOST:PORT`, `unix:PATH`), with a key, or the first one
        of a key file. `certificate`: what a server with TLS is trusted by, if not by the system's authorities.

        Raises `UserError` for a key file that has none, and for an address of another kind.
        """
        if not address.startswith(("http://", "https://", "unix:")):
            raise UserError(f"{address!r} is no address of a service: take http://HOST:PORT, https://HOST:PORT or unix:PATH")
        if key is None:
            if key_file is None:
                raise UserError("the service asks for a key: give key, or key_file, which the server names when it starts")
            key = read_key(Path(key_file))
        trusted = None
        try:
            if certificate is not None:
                trusted = ssl.create_default_context(cafile=str(certificate))
        except OSError as error:  # ssl.SSLError is one
            raise UserError(f"the certificate {certificate} cannot be used: name the server's tls.crt, or a copy") from error
        return cls(address, key, trusted=trusted, patience_seconds=patience_seconds)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.close()

    async def close(self) -> None:
        """Hang up. The run goes on."""
        await self._requests.close()

    # -- the run ------------------------------------------------------------------------------------------------------------

    async def init_engines(self, rollout: EngineHost | None = None, train: EngineHost | None = None) -> int | None:
        """Say which engines the run starts itself (`own`) and which clients provide (`outside`), in one call or one by one; without
        any the configuration says it. Returns the step that the run begins with, None while an engine is still to be named."""
        return (await self._requests.post("/v1/init_engines", {"rollout": rollout, "train": train}))["step"]

    async def step(self) -> dict[str, float] | None:
        """Train one step and return its metrics; None when `run.steps` are done. See `Trainer.step`."""
        metrics = (await self._requests.post("/v1/step"))["metrics"]
        return None if metrics is None else _numbers(metrics)

    async def allow(self, steps: int) -> None:
        """Let the run train up to so many steps by itself."""
        await self._requests.post("/v1/allow", {"steps": steps})

    async def steps(self, first: int = 0) -> dict[int, dict[str, float]]:
        """Metrics of the committed steps from `first` on."""
        return {int(step): _numbers(row) for step, row in (await self._requests.get(f"/v1/steps?first={first}")).items()}

    async def put_prompts_data(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Train on these rows next. See `Trainer.put_prompts_data`."""
        await self._requests.post("/v1/prompts", {"rows": list(rows)})

    async def weight_sync_notify(self, timeout_seconds: float = 60.0) -> int:
        """Have all rollout workers serve the weights of the last committed step; returns their version. See `Trainer`."""
        return (await self._requests.post("/v1/weight_sync_notify", {"timeout_seconds": timeout_seconds}))["version"]

    async def scale_rollout(self, num_workers: int, grace_seconds: float = 60.0) -> str:
        """Let rollout workers join or leave. See `Trainer.scale_rollout`."""
        answer = await self._requests.post("/v1/scale", {"num_workers": num_workers, "grace_seconds": grace_seconds})
        return str(answer["message"])

    async def checkpoint(self) -> int:
        """Have a checkpoint written with the next step that is committed; returns its version."""
        return (await self._requests.post("/v1/checkpoint"))["version"]

    async def status(self) -> dict[str, Any]:
        """State of the run, its workers and its queue."""
        return await self._requests.get("/v1/status")

    async def metrics(self) -> str:
        """The queue's metrics in Prometheus' text form."""
        return (await self._requests.request("GET", "/v1/metrics")).content.decode()

    async def make_key(self, name: str, scope: KeyScope, expires_seconds: float | None = None) -> str:
        """Make a key for another client, perhaps with an end; returns its secret. Needs a key of scope `admin`."""
        asked = {"name": name, "scope": scope, "expires_seconds": expires_seconds}
        return str((await self._requests.post("/v1/keys", asked))["secret"])

    async def remove_key(self, name: str) -> None:
        """Remove a key: it is refused from now on. Needs a key of scope `admin`."""
        await self._requests.request("DELETE", f"/v1/keys/{name}")

    async def stop(self) -> None:
        """Stop the run: its model, trace and report are written. Needs a key of scope `admin`."""
        await self._requests.post("/v1/stop")

    async def model(self, folder: str | Path) -> Path:
        """Fetch the model that the run started from (version 0) into a folder."""
        target = Path(folder)
        target.mkdir(parents=True, exist_ok=True)
        for name in await self._requests.get("/v1/model"):
            if Path(name).name == name:
                await self._requests.download(f"/v1/model/{name}", target / name)
        return target

    # -- working for it -----------------------------------------------------------------------------------------------------

    async def join_generators(self, num_slots: int = 64) -> AsyncGeneratorWorker:
        """Generate for the run from now on, so many responses at once."""
        joined = await self._requests.post("/v1/generators", {"num_slots": num_slots})
        name, version = joined.pop("worker"), joined.pop("version")
        return AsyncGeneratorWorker(self, name, version, RunFacts(**joined))

    async def join_trainers(self, *, is_fresh: bool = True) -> AsyncTrainerWorker:
        """Train for the run from now on. `is_fresh`: this process has no gradient of the present step."""
        joined = await self._requests.post("/v1/trainers", {"is_fresh": is_fresh})
        return AsyncTrainerWorker(self, joined["trainer"])


class AsyncGeneratorWorker:
    """A process that generates for a run. `version`: the one that it serves."""

    def __init__(self, client: AsyncClient, name: str, version: int, facts: RunFacts) -> None:
        self.name, self.version, self.facts, self.client = name, version, facts, client
        self._client, self._path = client, f"/v1/generators/{name}"

    async def get_prompts_data(self, prompts: int = 1, timeout_seconds: float = 20.0) -> PromptsData:
        """Lease prompts, so many at most, under the version that this process serves. Waits for some; asking is a heartbeat."""
        found = await self._client._requests.post(f"{self._path}/prompts", {"prompts": prompts, "timeout_seconds": timeout_seconds})
        return msgspec.convert(found, PromptsData)

    async def put_experience_data(self, responses: Sequence[ResponseData]) -> list[str]:
        """Put responses. Returns for each `stored`, or why it does not count, such as that another one was first."""
        return (await self._client._requests.post(f"{self._path}/experience", {"responses": list(responses)}))["outcomes"]

    async def fetch_weights(self, version: int, target: str | Path) -> Path:
        """Fetch the version that this process is to install (`PromptsData.install`, not 0) as a safetensors file."""
        await self._client._requests.download(f"{self._path}/weights/{version}", Path(target))
        return Path(target)

    async def installed(self, version: int, attested: Attestation | None = None) -> None:
        """Say that this process generates under the version from now on. `attested`: the sums of what it generates with, in the
        run's dtype (`RunFacts.dtype`), and its log-probs of `PromptsData.probe`: a run that finds others than its trainer's asks
        for the version again."""
        body: dict[str, Any] = {"version": version}
        if attested is not None:
            parts = None if attested.parts is None else [{"names": names, "found": found} for names, found in attested.parts]
            body["attested"] = {**msgspec.structs.asdict(attested), "parts": parts}
        await self._client._requests.post(f"{self._path}/installed", body)
        self.version = version

    async def alive(self, timeout_seconds: float = 0.0) -> None:
        """Say that this process lives, where it asks for nothing else for a while. Any request does. The answer is held for so
        long: if this process dies meanwhile, what it has is given to others three seconds later, and else after
        `queue.lease_seconds`."""
        await self._client._requests.post(f"{self._path}/alive", {"timeout_seconds": timeout_seconds})

    async def leave(self) -> None:
        """Generate no more: what this process has is given to others."""
        await self._client._requests.request("DELETE", self._path)


class AsyncTrainerWorker:
    """A process that trains for a run."""

    def __init__(self, client: AsyncClient, name: str) -> None:
        self.name = name
        self._client, self._path = client, f"/v1/trainers/{name}"

    async def get_experience_data(self, groups: int = 0, tokens: int = 0, timeout_seconds: float = 20.0) -> ExperienceData:
        """Take groups of the present step that no other trainer has: so many at most, or a budget of tokens (0: no limit). Waits
        for some."""
        body = {"groups": groups, "tokens": tokens, "timeout_seconds": timeout_seconds, "form": "msgpack"}
        answer = await self._client._requests.request("POST", f"{self._path}/experience", body)
        found = msgspec.msgpack.decode(answer.content)
        columns = {
            name: np.frombuffer(column["data"], column["dtype"]).reshape(column["shape"])
            for name, column in found["columns"].items()
        }
        return ExperienceData(found["step"], list(_groups(columns)), found["normaliser"])

    async def acknowledge(self, groups: Sequence[GroupData]) -> None:
        """Say that these groups are in this process's gradient."""
        await self._client._requests.post(f"{self._path}/acknowledge", {"groups": [group.number for group in groups]})

    async def publish(
        self,
        step: int,
        weights: Mapping[str, Any] | str | Path,
        *,
        grad_norm: float = 0.0,
        learning_rate: float = 0.0,
        timeout_seconds: float = 120.0,
    ) -> int:
        """Publish what the step has made of the weights: tensors by Hugging Face names (of torch or numpy), or a safetensors file.
        Returns the version, when the step is committed."""
        if isinstance(weights, Mapping):
            with tempfile.TemporaryDirectory(prefix="asyncflow-") as folder:
                file = Path(folder) / "weights.safetensors"
                await asyncio.to_thread(_save, weights, file)
                figures = {"grad_norm": grad_norm, "learning_rate": learning_rate, "timeout_seconds": timeout_seconds}
                return await self.publish(step, file, **figures)
        query = f"grad_norm={grad_norm}&learning_rate={learning_rate}&timeout_seconds={timeout_seconds}"
        answer = await self._client._requests.request("PUT", f"/v1/weights/{self.name}/{step}?{query}", file=Path(weights))
        return msgspec.json.decode(answer.content)["version"]

    async def publish_folder(
        self, step: int, path: str | Path, *, grad_norm: float = 0.0, learning_rate: float = 0.0, timeout_seconds: float = 120.0
    ) -> int:
        """`publish` for a folder in Hugging Face format, or a file, on the server's machine; "": the update is skipped."""
        body = {"step": step, "path": str(path), "grad_norm": grad_norm, "learning_rate": learning_rate}
        answer = await self._client._requests.post(f"{self._path}/weights", {**body, "timeout_seconds": timeout_seconds})
        return answer["version"]

    async def leave(self) -> None:
        """Train no more: groups that were not acknowledged are given to others."""
        await self._client._requests.request("DELETE", self._path)


class _Blocking(Generic[W]):
    """An object of the asynchronous client for code without an event loop: it runs on one in another thread."""

    def __init__(self, of: W, loop: asyncio.AbstractEventLoop) -> None:
        self._of, self._loop = of, loop

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()


def _blocking(call: Callable[Concatenate[W, P], Coroutine[Any, Any, T]]) -> Callable[Concatenate[_Blocking[W], P], T]:
    """A call of the asynchronous client, with the same arguments, as one that blocks until it is done."""

    @functools.wraps(call)
    def blocking(self: _Blocking[W], /, *arguments: P.args, **named: P.kwargs) -> T:
        return self._call(call(self._of, *arguments, **named))

    return blocking


class Client(_Blocking[AsyncClient]):
    """`AsyncClient` for code without an event loop: every method blocks until it is done, and has the arguments of that one's. A
    context; `connect` makes it."""

    def __init__(self, client: AsyncClient, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(client, loop)
        self._thread = threading.Thread(target=loop.run_forever, name="asyncflow-client", daemon=True)
        self._thread.start()

    @classmethod
    def connect(cls, address: str, **options: Any) -> Self:
        """See `AsyncClient.connect`."""
        return cls(AsyncClient.connect(address, **options), asyncio.new_event_loop())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Hang up. The run goes on."""
        if self._thread.is_alive():
            self._call(self._of.close())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def join_generators(self, num_slots: int = 64) -> GeneratorWorker:
        """See `AsyncClient.join_generators`."""
        return GeneratorWorker(self._call(self._of.join_generators(num_slots)), self._loop)

    def join_trainers(self, *, is_fresh: bool = True) -> TrainerWorker:
        """See `AsyncClient.join_trainers`."""
        return TrainerWorker(self._call(self._of.join_trainers(is_fresh=is_fresh)), self._loop)

    init_engines = _blocking(AsyncClient.init_engines)
    step = _blocking(AsyncClient.step)
    allow = _blocking(AsyncClient.allow)
    steps = _blocking(AsyncClient.steps)
    put_prompts_data = _blocking(AsyncClient.put_prompts_data)
    weight_sync_notify = _blocking(AsyncClient.weight_sync_notify)
    scale_rollout = _blocking(AsyncClient.scale_rollout)
    checkpoint = _blocking(AsyncClient.checkpoint)
    status = _blocking(AsyncClient.status)
    metrics = _blocking(AsyncClient.metrics)
    make_key = _blocking(AsyncClient.make_key)
    remove_key = _blocking(AsyncClient.remove_key)
    stop = _blocking(AsyncClient.stop)
    model = _blocking(AsyncClient.model)


class GeneratorWorker(_Blocking[AsyncGeneratorWorker]):
    """`AsyncGeneratorWorker` for code without an event loop."""

    @property
    def name(self) -> str:
        """Name of this process in the run."""
        return self._of.name

    @property
    def version(self) -> int:
        """The version that this process serves."""
        return self._of.version

    get_prompts_data = _blocking(AsyncGeneratorWorker.get_prompts_data)
    put_experience_data = _blocking(AsyncGeneratorWorker.put_experience_data)
    fetch_weights = _blocking(AsyncGeneratorWorker.fetch_weights)
    installed = _blocking(AsyncGeneratorWorker.installed)
    alive = _blocking(AsyncGeneratorWorker.alive)
    leave = _blocking(AsyncGeneratorWorker.leave)


class TrainerWorker(_Blocking[AsyncTrainerWorker]):
    """`AsyncTrainerWorker` for code without an event loop."""

    @property
    def name(self) -> str:
        """Name of this process in the run."""
        return self._of.name

    get_experience_data = _blocking(AsyncTrainerWorker.get_experience_data)
    acknowledge = _blocking(AsyncTrainerWorker.acknowledge)
    publish = _blocking(AsyncTrainerWorker.publish)
    publish_folder = _blocking(AsyncTrainerWorker.publish_folder)
    leave = _blocking(AsyncTrainerWorker.leave)


def read_key(path: Path) -> str:
    """Secret of the first key in a service's key file. Raises `UserError`."""
    try:
        return msgspec.json.decode(path.read_bytes())["keys"][0]["secret"]
    except (OSError, msgspec.DecodeError, LookupError, TypeError) as error:
        why = f" ({error.strerror})" if isinstance(error, OSError) else ""
        raise UserError(
            f"{path} holds no key of a service{why}: name the server's runs/NAME.service/keys.json, or a copy"
        ) from error


def _groups(columns: Mapping[str, Array]) -> list[GroupData]:
    """Groups from the columns of all of them, end to end (asyncflow/service/experience.py says which)."""
    found, row, token, prompt = [], 0, 0, 0
    sizes = zip(columns["numbers"].tolist(), columns["rows_per_group"].tolist(), columns["prompt_lengths"].tolist(), strict=True)
    for number, num_rows, prompt_length in sizes:
        rows, lengths = slice(row, row + num_rows), columns["lengths"][row : row + num_rows]
        tokens, ends = slice(token, token + int(lengths.sum())), np.cumsum(lengths)[:-1]
        ragged = {
            name: np.split(columns[name][tokens], ends) for name in ("response_ids", "loss_mask", "rollout_logprobs", "advantages")
        }
        found.append(
            GroupData(
                number=number,
                indices=columns["indices"][rows],
                prompt_ids=columns["prompt_ids"][prompt : prompt + prompt_length],
                rewards=columns["rewards"][rows],
                staleness=columns["staleness"][rows],
                **ragged,
            )
        )
        row, token, prompt = rows.stop, tokens.stop, prompt + prompt_length
    return found


def _numbers(metrics: Mapping[str, float | None]) -> dict[str, float]:
    return {name: float("nan") if value is None else value for name, value in metrics.items()}


def _save(weights: Mapping[str, Any], file: Path) -> None:
    kind = "numpy" if all(isinstance(values, np.ndarray) for values in weights.values()) else "torch"
    importlib.import_module(f"safetensors.{kind}").save_file(dict(weights), file)
