"""Matrix products in 8-bit floats, and the GPU kernels that round their arrays."""
