"""Losses, samples and scores of preference pairs on held-out data, their statistics, and tables of results."""
