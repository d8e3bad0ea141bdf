"""The training step, how it is compiled, and its FLOPs: pure functions, without file or clock access."""
