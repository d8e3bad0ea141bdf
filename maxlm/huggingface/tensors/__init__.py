"""Tensors of Hugging Face checkpoints: safetensors files, quantized tensors, latent attention, and downloads."""
