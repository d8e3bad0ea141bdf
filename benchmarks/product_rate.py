"""What a product reaches on so many threads: `python -m benchmarks.product_rate THREADS` prints TFLOP/s in float32."""

from __future__ import annotations

import os
import sys

# Before JAX counts the processors.
os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: int(sys.argv[1])])

from maxlm.hardware.chips import measure_matmul_tflops  # noqa: E402

print(measure_matmul_tflops())
