"""The terminal dashboard. Starts without JAX."""
