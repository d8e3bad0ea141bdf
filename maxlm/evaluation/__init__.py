"""What a trained model is worth: held-out text, benchmarks, programs, long contexts, and tables of it."""
