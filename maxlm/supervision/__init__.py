"""Supervision of runs: restarts after failures, and elastic runs, whose number of hosts changes. Works without JAX."""
