"""Saves, restores, verifies and lists checkpoints."""
