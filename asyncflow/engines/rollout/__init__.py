"""Engines that generate. `slots`: the embedded one, continuous batching over a slot cache. `transformers`: any causal language
model, by the library's `generate`. `vllm`: servers of vLLM."""

ROLLOUT_ENGINES = {
    "slots": "asyncflow.engines.rollout.engine:SlotEngine",
    "transformers": "asyncflow.engines.rollout.transformers_engine:TransformersEngine",
    "vllm": "asyncflow.engines.rollout.vllm.engine:VllmEngine",
}
ROLLOUT_ENGINE_DEVICES = {"vllm": "asyncflow.engines.rollout.vllm.options:num_devices"}
"""Number of devices of a worker, where its engine's options say; else it is one."""
ROLLOUT_ENGINE_OWN_DEVICES = {"vllm": "asyncflow.engines.rollout.vllm.options:num_own_devices"}
"""Number of those that a cluster has to give it, likewise."""
ROLLOUT_ENGINE_CHECKS = {
    "slots": "asyncflow.engines.rollout.slot_options:check",
    "transformers": "asyncflow.engines.rollout.slot_options:check_transformers",
    "vllm": "asyncflow.engines.rollout.vllm.options:check",
}
"""Checks of the options of a run's engines, before it starts and before workers join it."""
ROLLOUT_ENGINE_ENVIRONMENTS = {"vllm": "asyncflow.engines.rollout.vllm.options:check_environment"}
"""Checks of what the engines of a run need on this machine before it starts: whether what they start is installed."""
ROLLOUT_ENGINE_WHYS = {
    "transformers": "asyncflow.engines.rollout.checks:why_transformers_is_not_deterministic",
    "vllm": "asyncflow.engines.rollout.vllm.options:why_not_deterministic",
}
"""Reasons why an engine is not deterministic, of those that never are; others say it of the machine that they run on."""
ROLLOUT_ENGINE_IMPORTS = {"slots": ("asyncflow.engines.rollout.engine",)}
"""Modules that one process may import for all the workers that are forked from it; others need an interpreter of their own, but
for a `file.py:Name` of the user's (worker_start.py)."""
