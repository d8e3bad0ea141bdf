"""Generation of responses for reinforcement learning, with calls of tools and conversations with environments."""
