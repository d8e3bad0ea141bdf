"""Losses: cross-entropy, DPO, GRPO."""
