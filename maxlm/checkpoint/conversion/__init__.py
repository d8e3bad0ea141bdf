"""Readers of checkpoints that merge adapters, or quantize or dequantize kernels, one layer at a time."""
