"""Losses: cross-entropy, distillation, DPO, KTO, GRPO, and the losses of expert routers."""
