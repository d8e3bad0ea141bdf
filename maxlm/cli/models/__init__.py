"""Commands that list, evaluate, use, convert and serve checkpoints."""
