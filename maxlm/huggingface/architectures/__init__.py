"""Architectures of Transformers and GGUF: their keys, and the models that they can express."""
