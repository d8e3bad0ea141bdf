"""Tokenizers: byte- and character-level, BPE, vocabulary extension and fill-in-the-middle (FIM)."""
