"""Evaluation: perplexity, lm-eval tasks, code generation, long contexts, and tables of results."""
