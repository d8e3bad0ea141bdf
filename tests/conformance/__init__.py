"""Tests that files of other systems mean what their authors meant, one table per kind of file.

The expected values come from Transformers, tokenizers, TRL, lm-eval or llama.cpp, or are stated beside the case.
"""
