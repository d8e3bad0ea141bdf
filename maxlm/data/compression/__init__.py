"""Compression of tokenizers: bytes per token on sample texts, beside GPT-2 and cl100k_base."""
