"""Tokenizers: byte- and character-level, BPE, extensions, fill-in-the-middle."""
