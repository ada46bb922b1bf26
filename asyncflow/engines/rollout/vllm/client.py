"""Client of one vLLM server, over HTTP.

    generation      POST /inference/v1/generate             token ids in; token ids, log-probs and version spans out
    weights         POST /start_weight_update ... /finish_weight_update, /update_weight_version
    pausing         POST /pause, /resume
    attestation     POST /asyncflow/sums

consumes: requests, as many at a time as are made
waits for: the server's answer; for a response as long as `generation_seconds`, whether it is ready `HEALTH_SECONDS`, for all else
`deadline_seconds`
is unblocked by: the answer, the end of the connection, the deadline

A request that is cancelled hangs up, which makes the server drop it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlencode

import httpx2
import msgspec
import numpy as np

from asyncflow.engines.base import Response
from asyncflow.engines.rollout.vllm.options import MOVES_EXPERTS, PauseMode
from asyncflow.types import Array, UserError

CONNECT_SECONDS = 10.0
HEALTH_SECONDS = 20.0  # a front end says at once whether its engine lives, however much that has to do; so one that does not hangs
ON_ITS_OWN = {"Connection": "close"}  # after an error vLLM's server hangs up, maybe on the next request of that connection
NO_NUMBER = -9999.0  # what vLLM writes for a log-prob that is infinite, or no number
UNFINISHED = "unfinished"  # weights of which nobody knows what they are


class ServerLost(Exception):
    """The server is gone, or answers what makes no sense: it has to be started again."""


class RequestRefused(ValueError):
    """The server does not do what it is asked, and would not the next time. `status`: HTTP's."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class Aborted(Exception):
    """The server has dropped the request, as it was told to."""


class _LogProb(msgspec.Struct):
    token_id: int
    logprob: float


class _LogProbs(msgspec.Struct):
    content: list[_LogProb]


class _VersionSpan(msgspec.Struct):
    version: str
    start: int
    end: int


class _Completion(msgspec.Struct):
    finish_reason: str
    token_ids: list[int]
    logprobs: _LogProbs | None = None
    weight_versions: list[_VersionSpan] | None = None


class _Generated(msgspec.Struct):
    choices: list[_Completion]


class _TokenLogProb(msgspec.Struct):
    logprob: float


class _PromptLogProbs(msgspec.Struct):
    prompt_logprobs: list[dict[str, _TokenLogProb] | None] | None = None


class ServerSettings(msgspec.Struct):
    """Settings of a server, out of vLLM's `VllmConfig`."""

    max_model_len: int
    logprobs_mode: str
    enable_chunked_prefill: bool
    device_type: str
    enable_eplb: bool = False


class FoundSum(msgspec.Struct, frozen=True, array_like=True):
    """Sum of bits over a tensor, or a part of one, in a buffer of one worker (in_vllm/asyncflow_sums.py).

    `names`: the checkpoint's, one, or those of several tensors that are summed up together over all workers; of an adapter's
    tensor those that it may have. `numel`: elements of
    the one tensor that the worker has. `columns`: those of it that the sum is over, where the worker has `inputs` of them; empty:
    it is over all that the worker has. `is_quantised`: the sum is over what was loaded and perhaps quantised, if what was made of
    that lies there. `kept`: torch's name of the dtype that it is kept in, if that is not the model's. `unseen`: why nobody sees
    that kernels read this. `source`: the one tensor of the checkpoint's that alone was copied there; "" if there is none such.
    """

    names: list[str]
    numel: int
    found: int
    inputs: int
    columns: list[int]
    is_quantised: bool = False
    kept: str = ""
    unseen: str = ""
    source: str = ""


class WorkerSums(msgspec.Struct, frozen=True):
    """Sums over what one of a server's workers computes with; or `why` it cannot tell. `buffers`: of its model, by vLLM's names;
    most are in no file. `lora_rank`: up to which the matrices of an adapter are filled with zeros. `unseen` and
    `unseen_lora`: why it cannot tell of some layers, by their paths, and of an adapter there."""

    weights: list[FoundSum] = []
    buffers: list[FoundSum] = []
    lora: list[FoundSum] = []
    lora_rank: int = 0
    unseen: dict[str, str] = {}
    unseen_lora: dict[str, str] = {}
    why: str = ""


class _SumsAnswer(msgspec.Struct):
    workers: list[WorkerSums]


_generated = msgspec.json.Decoder(_Generated)
_prompt = msgspec.json.Decoder(_PromptLogProbs)
_settings = msgspec.json.Decoder(ServerSettings)
_sums = msgspec.json.Decoder(_SumsAnswer)


class VllmClient:
    """Client of one server. `address`: `unix:PATH`, or `http://HOST:PORT`."""

    def __init__(self, address: str, key: str, *, generation_seconds: float, deadline_seconds: float) -> None:
        self.address = address
        self._generation_seconds = generation_seconds
        headers = {"Authorization": f"Bearer {key}"}
        path = address.removeprefix("unix:")
        url, uds = ("http://vllm", path) if path != address else (address, None)
        # No limit of connections: the engine has one of its own (slots), and a request that waits here could not be aborted there.
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=None)
        self._http = httpx2.AsyncClient(
            base_url=url,
            headers=headers,
            timeout=httpx2.Timeout(deadline_seconds, connect=CONNECT_SECONDS),
            transport=httpx2.AsyncHTTPTransport(uds=uds, limits=limits),
        )

    async def generate(
        self, sample: int, prompt_ids: Sequence[int], sampling: Mapping[str, Any], cache_salt: str, model: str | None = None
    ) -> Response:
        """Response of a sample; NaN for log-probs that are not finite. `model`: name of the adapter that makes it; None: none does.

        Raises `RequestRefused` for what exceeds the context, `Aborted`, and `ServerLost`.
        """
        body = {"token_ids": prompt_ids, "sampling_params": sampling, "cache_salt": cache_salt}
        if model is not None:
            body["model"] = model
        timeout = httpx2.Timeout(self._generation_seconds, connect=CONNECT_SECONDS)
        content = await self._ask("POST", "/inference/v1/generate", body, timeout)
        try:
            (choice,) = _generated.decode(content).choices
        except (msgspec.DecodeError, ValueError) as error:
            raise ServerLost(f"{self.address} answers what is no response: {error}") from error
        if choice.finish_reason == "abort":
            raise Aborted
        return self._checked(sample, choice)

    async def prompt_log_probs(self, token_ids: Sequence[int], cache_salt: str, model: str | None = None) -> Array | None:
        """Log-probs (float32 [L - 1]) of a sequence's tokens after its first, with the adapter `model` if it is given; None if the
        server tells none. Raises `RequestRefused` and `ServerLost`."""
        sampling = {"max_tokens": 1, "prompt_logprobs": 0, "detokenize": False}
        body = {"token_ids": token_ids, "sampling_params": sampling, "cache_salt": cache_salt}
        if model is not None:
            body["model"] = model
        content = await self._ask("POST", "/inference/v1/generate", body)
        try:
            log_probs = _prompt.decode(content).prompt_logprobs
            if log_probs is None:
                return None
            found = [each[str(token)].logprob for token, each in zip(token_ids[1:], log_probs[1:], strict=True) if each is not None]
        except (msgspec.DecodeError, KeyError, ValueError) as error:
            raise ServerLost(f"{self.address} answers what are no log-probs of a prompt: {error}") from error
        values = np.array(found, np.float32)
        return np.where(values <= NO_NUMBER, np.float32(np.nan), values)

    def _checked(self, sample: int, choice: _Completion) -> Response:
        count, reason = len(choice.token_ids), choice.finish_reason
        logprobs = choice.logprobs.content if choice.logprobs is not None else []
        spans = choice.weight_versions or []
        if reason not in ("stop", "length"):
            raise ServerLost(f"{self.address} ended a response for the reason {reason!r}")
        if [entry.token_id for entry in logprobs] != choice.token_ids:
            raise ServerLost(f"{self.address} answers {count} tokens with the log-probs of others")
        if [s.start for s in spans] != [0, *(s.end for s in spans[:-1])] or (spans[-1].end if spans else 0) != count:
            raise ServerLost(f"{self.address} does not say which weights made each of {count} tokens, but {spans}")
        if unknown := [s.version for s in spans if not s.version.isdecimal()]:
            raise ServerLost(f"{self.address} answers by weights {unknown[0]!r}, which this run has not given it")
        values = np.array([entry.logprob for entry in logprobs], np.float32)
        return Response(
            sample=sample,
            token_ids=np.array(choice.token_ids, np.int64),
            logprobs=np.where(values <= NO_NUMBER, np.float32(np.nan), values),
            version_spans=np.array([(s.start, int(s.version)) for s in spans], np.int64).reshape(-1, 2),
            finish_reason="stop" if reason == "stop" else "length",
        )

    async def is_ready(self) -> bool:
        """Whether the server answers, and its engine lives. Raises `RequestRefused` (401) where it does not take the key."""
        try:
            await self._ask("GET", "/health", timeout=httpx2.Timeout(HEALTH_SECONDS, connect=CONNECT_SECONDS))
        except ServerLost:
            return False
        except RequestRefused as error:
            if error.status == 401:  # it would not the next time
                raise
            return False
        return True

    async def wants_a_key(self) -> bool:
        """Whether the server refuses requests without a key, also those that vLLM's own --api-key leaves open."""
        try:
            await self._ask("GET", "/weight_info", headers={"Authorization": ""})
        except RequestRefused as error:
            return error.status == 401
        return False

    async def settings(self) -> ServerSettings:
        """Settings of the server that AsyncFlow relies on. Raises `ServerLost` if it does not answer."""
        content = await self._ask("GET", "/asyncflow/settings")  # in_vllm/asyncflow_vllm.py
        try:
            return _settings.decode(content)
        except msgspec.DecodeError as error:
            raise ServerLost(f"{self.address} does not say how it was started: {error}") from error

    async def sums(self, seed: int, *, lora: str | None, has_weights: bool) -> list[WorkerSums]:
        """Sums over what each worker computes with, for requests that name the adapter `lora`; of the model's own weights with
        `has_weights`. `seed`: which columns of matrices that only their kernels can read.

        Raises `ServerLost` if it does not answer.
        """
        query: dict[str, int | str] = {"seed": seed, "weights": int(has_weights)}
        if lora is not None:
            query["lora"] = lora
        content = await self._ask("POST", f"/asyncflow/sums?{urlencode(query)}")  # in_vllm/asyncflow_vllm.py
        try:
            return _sums.decode(content).workers
        except msgspec.DecodeError as error:  # of modules of another version
            return [WorkerSums(why=f"it says that in another form: {error}")]

    async def set_weight_version(self, version: int) -> None:
        """Name the weights that are there."""
        await self._ask("POST", "/update_weight_version", {"new_version": str(version)})

    async def load_lora(self, name: str, folder: str) -> None:
        """Load a low-rank adapter from PEFT's files, for requests that name it."""
        await self._ask("POST", "/v1/load_lora_adapter", {"lora_name": name, "lora_path": folder}, headers=ON_ITS_OWN)

    async def unload_lora(self, name: str) -> None:
        """Unload an adapter. Raises `RequestRefused` if there is none of that name."""
        await self._ask("POST", "/v1/unload_lora_adapter", {"lora_name": name}, headers=ON_ITS_OWN)

    async def pause(self, mode: PauseMode, *, clear_cache: bool) -> None:
        """Make no more tokens. `clear_cache`: responses under way are to have their keys and values computed again."""
        timeout = httpx2.Timeout(self._generation_seconds, connect=CONNECT_SECONDS) if mode == "wait" else None
        await self._ask("POST", f"/pause?mode={mode}&clear_cache={str(clear_cache).lower()}", None, timeout)

    async def resume(self) -> None:
        """Let generation go on."""
        await self._ask("POST", "/resume")

    async def init_weight_transfer_engine(self, init_info: Mapping[str, Any]) -> None:
        """Have the server meet the process that sends the weights."""
        await self._ask("POST", "/init_weight_transfer_engine", {"init_info": init_info})

    async def start_weight_update(self) -> None:
        """The next three calls replace the weights of a paused server. One that fails leaves it unusable.

        An update that a caller which was cut off has left open is ended first: what it has loaded is replaced by this one.
        """
        try:
            await self._ask("POST", "/start_weight_update", headers=ON_ITS_OWN)
        except ServerLost as error:
            if "already active" not in str(error):
                raise
            await self._ask("POST", "/finish_weight_update", {"weight_version": UNFINISHED})
            await self._ask("POST", "/start_weight_update")

    async def update_weights(self, update_info: Mapping[str, Any]) -> None:
        """Have the server load weights, in the way that it was started with."""
        await self._ask("POST", "/update_weights", {"update_info": update_info}, headers=ON_ITS_OWN)

    async def finish_weight_update(self, version: int) -> None:
        """Tell the server that the weights are whole, and have this name."""
        await self._ask("POST", "/finish_weight_update", {"weight_version": str(version)})

    async def close(self) -> None:
        """Hang up."""
        await self._http.aclose()

    async def _ask(
        self,
        method: str,
        path: str,
        body: object = None,
        timeout: httpx2.Timeout | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> bytes:
        content = None if body is None else msgspec.json.encode(body)
        headers = {**({} if body is None else {"Content-Type": "application/json"}), **(headers or {})}
        wait = self._http.timeout if timeout is None else timeout
        try:
            answer = await self._http.request(method, path, content=content, headers=headers, timeout=wait)
        except httpx2.TimeoutException as error:
            raise ServerLost(f"{self.address} did not answer {path} within {wait.read:g} s") from error
        except httpx2.HTTPError as error:
            raise ServerLost(f"{self.address} hung up on {path}: {error or type(error).__name__}") from error
        if answer.status_code < 300:
            return answer.content
        message = f"{self.address} answers {path} with status {answer.status_code}: {answer.text:.500}"
        if answer.status_code < 500:
            raise RequestRefused(message, answer.status_code)
        raise ServerLost(message)


async def check_settings(client: VllmClient, *, max_context: int, seeded: bool) -> None:
    """Check that a server was started as docs/vllm.md asks, by AsyncFlow or another. Raises `UserError`.

    `max_context`: tokens of the longest prompt and response. `seeded`: requests have a seed.
    """
    if not await client.wants_a_key():
        raise UserError(
            f"{client.address} answers without a key, so anybody on its machine can change its weights: start it with "
            f"--middleware asyncflow_vllm.RequireKey (docs/vllm.md)"
        )
    settings = await client.settings()
    if settings.logprobs_mode != "processed_logprobs":
        raise UserError(
            f"{client.address} has --logprobs-mode {settings.logprobs_mode}, whose log-probs are not those of the distribution "
            f"that it samples from: start it with processed_logprobs (docs/vllm.md)"
        )
    if settings.enable_eplb:
        raise UserError(f"{client.address} has --enable-eplb: {MOVES_EXPERTS}; start it without (docs/vllm.md)")
    if settings.max_model_len < max_context:
        raise UserError(
            f"{client.address} has --max-model-len {settings.max_model_len}, and this run's prompts and responses have up to "
            f"{max_context} tokens: start it with so many (docs/vllm.md)"
        )
    if seeded and settings.device_type == "cpu" and settings.enable_chunked_prefill:
        raise UserError(
            f"{client.address} is on a CPU and cuts long prompts, of which vLLM dies where a request has a seed: start it with "
            f"--no-enable-chunked-prefill, or set rollout.engine.seeded=false (docs/vllm.md)"
        )
