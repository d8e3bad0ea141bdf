"""Reads and writes GGUF files, the format of llama.cpp."""
