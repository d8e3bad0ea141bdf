"""Readers of input files: text, JSONL, Parquet, token files, Hugging Face datasets, TFDS."""
