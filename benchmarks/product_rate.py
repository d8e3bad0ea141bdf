"""Prints the float32 TFLOP/s of a large matrix product: `python -m benchmarks.product_rate THREADS`."""

import os
import sys

# Set before JAX counts the processors.
os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: int(sys.argv[1])])

from maxlm.hardware.chips import measure_matmul_tflops  # noqa: E402

print(measure_matmul_tflops())
