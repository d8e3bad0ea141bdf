"""Optimizers, schedules, and quantized or offloaded state."""
