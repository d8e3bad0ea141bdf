"""The attention module and its kernels: chunked, cuDNN, Splash, ring, decode and tree."""
