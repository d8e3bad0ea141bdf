"""Inference engine with continuous batching over cache slots."""
