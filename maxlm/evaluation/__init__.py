"""Perplexity, lm-eval tasks, programs, long contexts, and tables of the results."""
