"""Checkpoints: saves, restores, checksums, initial parameters."""
