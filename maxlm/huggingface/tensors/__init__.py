"""Tensors of Hugging Face checkpoints: safetensors files, quantized tensors, layouts of latent attention, and downloads."""
