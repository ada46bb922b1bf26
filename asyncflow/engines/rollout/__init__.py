"""Engines that generate. `slots`: the embedded one, continuous batching over a slot cache."""

ROLLOUT_ENGINES = {"slots": "asyncflow.engines.rollout.engine:SlotEngine"}
