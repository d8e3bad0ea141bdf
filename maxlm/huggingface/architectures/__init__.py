"""Architectures of Transformers: their keys in config.json, and the models that they can express."""
