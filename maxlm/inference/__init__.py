"""A trained model in use: loading, sampling, scoring, rollouts, quantization."""
