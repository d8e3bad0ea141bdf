"""Known-answer tests: the kernels of a run and formulas in float32 on the same inputs and devices."""
