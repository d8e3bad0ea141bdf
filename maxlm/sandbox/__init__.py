"""Runs untrusted Python programs with limits."""
