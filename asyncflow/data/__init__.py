"""Prompts: data sets, the order in which they are drawn, and the tokenizer of a checkpoint."""
