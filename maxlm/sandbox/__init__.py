"""Runs untrusted Python programs with resource limits."""
