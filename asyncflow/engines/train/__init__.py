"""Engines that train. `torch` needs nothing else; `deepspeed` and `megatron` need the extras of those names."""

TRAIN_ENGINES = {
    "torch": "asyncflow.engines.train.torch_engine:TorchEngine",
    "deepspeed": "asyncflow.engines.train.deepspeed:DeepSpeedEngine",
    "megatron": "asyncflow.engines.train.megatron:MegatronEngine",
}
TRAIN_ENGINE_CHECKS = {
    "torch": "asyncflow.engines.train.checks:check_torch",
    "deepspeed": "asyncflow.engines.train.checks:check_deepspeed",
    "megatron": "asyncflow.engines.train.checks:check_megatron",
}
TRAIN_ENGINE_IMPORTS = {"torch": ("asyncflow.engines.train.torch_engine",)}
"""What one process may import for all the workers that are forked from it; others want an interpreter of their own."""
CRITIC_ENGINES = {"torch": "asyncflow.engines.train.critic_engine:TorchCritic"}
CLASSIFIER_ENGINES = {"torch": "asyncflow.engines.train.reward_model:RewardModelEngine"}
LOG_PROB_ENGINES = {"torch": "asyncflow.engines.train.frozen_engine:FrozenEngine"}
