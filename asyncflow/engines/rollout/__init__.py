"""Engines that generate. `slots`: the embedded one, continuous batching over a slot cache. `vllm`: servers of vLLM."""

ROLLOUT_ENGINES = {"slots": "asyncflow.engines.rollout.engine:SlotEngine", "vllm": "asyncflow.engines.rollout.vllm:VllmEngine"}
