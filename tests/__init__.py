"""Tests of maxlm; the tree mirrors the package."""

import sys

# TensorFlow and Triton (part of PyTorch for GPUs) each contain LLVM; loading both aborts the process.
sys.modules['triton'] = None  # type: ignore[assignment]
