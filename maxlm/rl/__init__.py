"""GRPO rollouts: generates responses, which may call tools, scores them, and makes training batches of them."""
