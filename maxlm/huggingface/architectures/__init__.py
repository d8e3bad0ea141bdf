"""Architectures of Transformers: their keys, and the models that they can express."""
