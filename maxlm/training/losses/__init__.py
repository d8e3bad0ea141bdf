"""Losses: cross-entropy, distillation, DPO, KTO, reward models, GRPO and PPO, and the losses of expert routers."""
