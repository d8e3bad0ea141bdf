"""Batches of a step: mixture, shuffle, windows."""
