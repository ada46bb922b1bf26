"""Engines that train. `torch` needs nothing else; `deepspeed` and `megatron` need the extras of those names."""

TRAIN_ENGINES = {
    "torch": "asyncflow.engines.train.torch_engine:TorchEngine",
    "deepspeed": "asyncflow.engines.train.deepspeed:DeepSpeedEngine",
    "megatron": "asyncflow.engines.train.megatron:MegatronEngine",
}
LOG_PROB_ENGINES = {"torch": "asyncflow.engines.train.frozen_engine:FrozenEngine"}
