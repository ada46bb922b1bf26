"""Train engines on DeepSpeed and Megatron-Core. Nothing else imports this folder: the registry names engines and checks."""
