"""Problems with answers that can be checked, made by rule: what supervised fine-tuning and GRPO are tried out on."""
