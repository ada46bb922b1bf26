"""Requirements of a run towards Ray: options, nodes that a worker may run on, and files that go there with it. Nothing of Ray is
imported here.

    specs --pool by pool, in_order--> a bundle for each worker --> on the driver's node (why_here) | on any

consumes: `cluster: {name: ray, ...}`, the run's configuration, worker specs
waits for: nothing
is unblocked by: nothing
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal

import msgspec

from asyncflow.cluster.base import WorkerSpec
from asyncflow.cluster.remote_node import host_of, is_loopback
from asyncflow.config import Config
from asyncflow.devices import COUNTED_AS, VISIBLE
from asyncflow.options import checked_options
from asyncflow.types import UserError

FORWARDED: Final = (
    "ASYNCFLOW_", "OMP_", "MKL_", "OPENBLAS_", "NUMEXPR_", "KMP_", "MALLOC_", "TORCH", "PYTORCH_", "NCCL_", "GLOO_", "CUDA_",
    "CUBLAS_", "HCCL_", "ASCEND_", "HF_", "TRANSFORMERS_", "TOKENIZERS_", "SAFETENSORS_", "VLLM_", "UCX_", "FI_", "PYTHONHASHSEED",
    "PYTHONWARNINGS", "LANG", "LC_", "TZ",
)  # fmt: skip
"""Beginnings of variables of the driver's environment that workers on other nodes get as well, but for those that end as below;
`forward` names more."""
_SECRET: Final = ("_TOKEN", "_KEY", "_SECRET", "_PASSWORD")
_SMALLEST: Final = 1e-4
"""Smallest amount of a resource, in Ray's arithmetic."""
_WHOLE: Final = tuple(COUNTED_AS.values())
_FIRST_TRAINER: Final = "trainer/0"

PoolName = Literal["rollout", "evaluator", "trainer", "reward", "reference", "critic", "values", "storage"]
Strategy = Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"]
Wish = tuple[WorkerSpec, dict[str, float]]
"""A worker, and the bundle that it needs."""


class RayOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The keys of `cluster: {name: ray, ...}`."""

    address: str | None = None
    """Address of a cluster that is running, as `ray.init` takes it (`auto`, `10.0.0.1:6379`); this machine is one of its nodes.
    None: one is started here, for this run alone."""
    placement: dict[PoolName, Strategy] = {}
    """Strategy of each pool's workers on the nodes; PACK unless told."""
    resources: dict[PoolName, dict[str, float]] = {}
    """Resources of each worker of a pool, by Ray's names (`CPU`, `GPU`, `NPU`, one of the user's own), over what follows from its
    device and threads."""
    forward: list[str] = []
    """Variables of the driver's environment that workers on other nodes are to have, besides those of the libraries in use."""
    start_seconds: float = 120.0
    """Seconds that a pool may wait for room in the cluster, and a worker for its process."""
    shares_files: bool | None = None
    """Whether the other nodes see the run's folder. None: each is asked."""
    trainers: Literal["driver", "anywhere"] = "driver"
    """Nodes of the trainers but the first: on the driver's node, or on any that sees the run's folder. On several nodes they
    exchange gradients by gloo or NCCL, which authenticate nobody."""

    def strategy(self, pool: str) -> Strategy:
        """Ray's placement strategy for a pool's workers."""
        return self.placement.get(pool, "PACK")  # type: ignore[call-overload]

    def wish(self, pool: str, spec: WorkerSpec) -> Wish:
        """The worker of a pool, with its bundle."""
        need: dict[str, float] = {**spec.needs, **self.resources.get(pool, {})}  # type: ignore[call-overload]
        return spec, {kind: count for kind, count in need.items() if count} or {"CPU": 1.0}

    def forwarded(self, environment: Mapping[str, str]) -> dict[str, str]:
        """Variables of the driver's environment that a worker on another node gets."""
        usual = {name for name in environment if name.startswith(FORWARDED) and not name.endswith(_SECRET)} - {*VISIBLE}
        named = tuple(self.forward)
        return {name: value for name, value in environment.items() if name in usual or name.startswith(named)}

    def in_order(self, specs: Sequence[WorkerSpec], config: Config) -> list[str]:
        """The pools in the order in which room is taken for them: trainers, then others that cannot go elsewhere."""
        pools = {pool_of(spec) for spec in specs}
        return sorted(pools, key=lambda pool: (pool != "trainer", not self.why_here(pool, config), pool))

    def why_here(self, pool: str, config: Config) -> str:
        """Reason why workers of a pool stay on the driver's node; empty if they may be anywhere (but for the first trainer)."""
        if pool == "trainer":
            return "trainers stay on this machine, as cluster.trainers=driver" if self.trainers == "driver" else ""
        if pool == "critic":
            return "the critic stays on this machine, as it writes its part of a checkpoint"
        if pool == "values" and config.train.critic.path is not None:
            return "values workers stay on this machine, as the model of train.critic.path is on it"
        if pool in ("rollout", "evaluator") and config.rollout.engine.options.get("addresses"):  # evaluators with none
            return "rollout workers stay on this machine, as the servers of rollout.engine.addresses are on it"
        doors = {"queue.listen": config.queue.listen}
        if pool in ("rollout", "evaluator", "values"):
            doors["weight_sync.listen"] = config.weight_sync.listen
        for key, listen in doors.items():
            if why_closed := self._why_closed(key, listen):
                return f"{pool} workers stay on this machine, as {why_closed}"
        return ""

    def _why_closed(self, key: str, listen: str | None) -> str:
        """Reason why other nodes do not come through a door; empty if they may. Nodes on loopback addresses are all on one
        machine."""
        if listen is None:
            return f"{key} is not set"
        if is_loopback(host_of(listen)) and self.address is not None and not is_loopback(host_of(self.address)):
            return f"others do not reach {key}={listen}"
        return ""

    def labels(self, pool: str, wanted: Sequence[Wish], config: Config, here: Mapping[str, str]) -> list[dict[str, str]] | None:
        """The labels that the node of each bundle must have; None where it may be any. `here`: those of the driver's."""
        stay = [bool(self.why_here(pool, config)) or spec.name == _FIRST_TRAINER for spec, _ in wanted]
        return [dict(here) if stays else {} for stays in stay] if any(stay) else None

    def check(self, pool: str, count: int, config: Config) -> None:
        """Check that there can be a cluster on which `count` workers of a pool are placed so. Raises `UserError`."""
        if pool == "trainer" and self.trainers == "anywhere" and count > 1:
            self._check_apart(config)
        why_here = self.why_here(pool, config)
        if count > 1 and why_here and self.strategy(pool) == "STRICT_SPREAD":
            raise UserError(
                f"cluster.placement.{pool}=STRICT_SPREAD asks for {count} nodes, but {why_here}: take another placement, "
                "or leave it out"
            )

    def _check_apart(self, config: Config) -> None:
        way_out = "or leave cluster.trainers out, and all trainers stay on this machine"
        if why_closed := self._why_closed("queue.listen", config.queue.listen):
            raise UserError(
                f"cluster.trainers=anywhere, but trainers on other nodes do not find this machine, as {why_closed}: set it to "
                f"tls:HOST:0, HOST being its address, {way_out}"
            )
        if self.shares_files is False:
            raise UserError(
                f"cluster.trainers=anywhere, but trainers write checkpoints into the run's folder, which other nodes do not see "
                f"by cluster.shares_files=false: share it, {way_out}"
            )


def options_of(given: Mapping[str, Any]) -> RayOptions:
    """Options, checked. Raises `UserError` for options that are none, and for amounts that no worker can be given."""
    try:
        options = msgspec.convert(checked_options("cluster 'ray'", RayOptions, given), RayOptions)
    except msgspec.ValidationError as error:  # of what is inside resources
        raise UserError(f"cluster ray does not take these options: {error}") from error
    if options.start_seconds <= 0:
        raise UserError(f"cluster.start_seconds={options.start_seconds:g} is no time to wait: take a number above 0")
    for pool, amounts in options.resources.items():
        for kind, amount in amounts.items():
            if amount != 0 and not _SMALLEST <= amount < math.inf:
                raise UserError(
                    f"cluster.resources.{pool}.{kind}={amount:g} cannot be given to a worker: take 0, or {_SMALLEST:g} or more"
                )
            if kind in _WHOLE and amount > 1 and amount % 1:
                raise UserError(
                    f"cluster.resources.{pool}.{kind}={amount:g} is neither a part of one device nor several whole ones: take "
                    f"{amount // 1:g} or {amount // 1 + 1:g}"
                )
    return options


def pool_of(spec: WorkerSpec) -> str:
    """`rollout` for `rollout/3`."""
    return spec.name.partition("/")[0]
