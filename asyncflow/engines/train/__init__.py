"""Engines that train. `torch`: one process, one device."""

TRAIN_ENGINES = {"torch": "asyncflow.engines.train.torch_engine:TorchEngine"}
LOG_PROB_ENGINES = {"torch": "asyncflow.engines.train.frozen_engine:FrozenEngine"}
