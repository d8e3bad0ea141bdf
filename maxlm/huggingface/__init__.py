"""Formats of Hugging Face and GGUF, read and written without their libraries."""
