"""Runs untrusted Python programs, and trusted functions of untrusted input, with resource limits."""
