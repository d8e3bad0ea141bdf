"""Attention kernels: chunked, cuDNN, Splash, ring, decode, tree."""
