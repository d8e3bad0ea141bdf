"""Predicts the memory, time and cost of a run."""
