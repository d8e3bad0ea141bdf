"""Terminal dashboard. It starts without JAX."""
