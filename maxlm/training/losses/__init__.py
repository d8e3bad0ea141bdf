"""Losses: cross-entropy, distillation, DPO, KTO, reward models, GRPO, and the losses of expert routers."""
