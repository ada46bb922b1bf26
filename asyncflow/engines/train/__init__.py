"""Engines that train, by name. `torch` needs no extra package; `deepspeed` and `megatron` need the extras of these names."""

OUTSIDE = "outside"
"""The engine of a run that a process from outside trains."""
TRAIN_ENGINES = {
    OUTSIDE: "asyncflow.engines.train.outside:OutsideTrainEngine",
    "torch": "asyncflow.engines.train.torch_engine:TorchEngine",
    "deepspeed": "asyncflow.engines.train.adapters.deepspeed:DeepSpeedEngine",
    "megatron": "asyncflow.engines.train.adapters.megatron.engine:MegatronEngine",
}
TRAIN_ENGINE_CHECKS = {
    OUTSIDE: "asyncflow.engines.train.checks:check_outside",
    "torch": "asyncflow.engines.train.checks:check_torch",
    "deepspeed": "asyncflow.engines.train.adapters.checks:check_deepspeed",
    "megatron": "asyncflow.engines.train.adapters.checks:check_megatron",
}
TRAIN_ENGINE_IMPORTS = {
    "torch": (
        "torch.distributed.tensor",
        "torch._dynamo",
        "transformers.utils",
        "transformers.modeling_utils",
        "asyncflow.engines.train.torch_engine",
    )
}
"""Modules of an engine that one process may import for all workers forked from it. What takes long comes piece by piece, since a
worker can be forked between two of them.

Engines that are not listed need a fresh interpreter for each worker, but for a `file.py:Name` of the user's (worker_start.py).
"""
CRITIC_ENGINES = {"torch": "asyncflow.engines.train.critic_engine:TorchCritic"}
CLASSIFIER_ENGINES = {"torch": "asyncflow.engines.train.reward_model:RewardModelEngine"}
LOG_PROB_ENGINES = {"torch": "asyncflow.engines.train.frozen_engine:FrozenEngine"}
