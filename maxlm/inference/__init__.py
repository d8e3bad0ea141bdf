"""Inference with trained models: loading, sampling, scoring, rollouts and quantization."""
