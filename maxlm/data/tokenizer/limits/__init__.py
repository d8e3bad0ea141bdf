"""Limits of tokenizer files: how much they expand texts, and how long their regular expressions take."""
