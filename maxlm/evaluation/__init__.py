"""Evaluation: perplexity, samples, lm-eval tasks, CORE, code generation, long contexts, and tables of results."""
