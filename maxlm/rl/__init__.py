"""GRPO rollouts: generates responses, which may call tools, and makes training batches of them."""
