"""Evaluation: perplexity, lm-eval tasks, the CORE metric, code generation, long contexts, and tables of results."""
