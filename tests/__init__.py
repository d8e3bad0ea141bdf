"""Tests of maxlm; the tree mirrors the package."""

import sys

# TensorFlow and Triton, which comes with PyTorch for GPUs, each bring an LLVM; two of them abort the process.
sys.modules['triton'] = None  # type: ignore[assignment]
