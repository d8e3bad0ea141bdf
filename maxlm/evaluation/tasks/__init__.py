"""Tasks: lm-eval, CORE, code generation, exact answers and long contexts."""
