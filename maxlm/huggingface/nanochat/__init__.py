"""Reads and writes checkpoints in the format of nanochat, without PyTorch and without running pickles."""
