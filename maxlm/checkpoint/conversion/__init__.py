"""Conversions of checkpoints: merged adapters, quantized kernels, experts from dense models, parameters alone."""
