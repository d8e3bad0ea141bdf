"""Tensors of Hugging Face checkpoints: safetensors files, quantized tensors and layouts of latent attention."""
