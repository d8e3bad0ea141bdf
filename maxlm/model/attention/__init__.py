"""The attention module and its kernels: chunked, cuDNN, Splash, Tokamax, ring, decode and tree."""
