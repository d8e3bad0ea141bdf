"""Environments of reinforcement learning: the protocol for users, their concurrent calls, and other packages."""
