"""Prompts, rewards and answer parsing for reinforcement learning."""
