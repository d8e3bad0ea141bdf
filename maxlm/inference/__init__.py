"""Inference with trained models: loading, sampling, scoring, tool calls and quantization."""
