"""Rollout on servers of vLLM. Nothing else imports this folder: the registry names the engine, and its checks."""
