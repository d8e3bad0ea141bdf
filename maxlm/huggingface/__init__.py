"""Reads and writes the formats of Hugging Face."""
