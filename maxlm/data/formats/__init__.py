"""Readers of input formats: text, JSONL, Parquet, token files, Hugging Face datasets and TFDS."""
