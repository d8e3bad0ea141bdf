"""Options with which GPUs compute the same bits in each run (`train.deterministic`).

CPUs and TPUs need none: a compiled program has one order of additions.
"""

from __future__ import annotations

import os
from typing import Any

from maxlm.config.schema import Config

# XLA options for GPUs. The first one selects kernels without measuring them; otherwise, each compilation can select
# other kernels. It also sorts scatters instead of adding with atomics, and selects cuDNN's deterministic backward pass
# of attention. It excludes Triton's kernels for products since jax 0.11, so that products in fusions that only Triton
# supports could not be compiled. The second one forms no such fusions.
_GPU_OPTIONS = {'xla_gpu_exclude_nondeterministic_ops': True, 'xla_gpu_enable_triton_gemm': False}
# Sums in the switches of NVLink do not have a fixed order (NVIDIA/nccl issue 1497).
_NCCL_VARIABLE = 'NCCL_NVLS_ENABLE'


def deterministic_options(config: Config, platform: str) -> dict[str, Any]:
    """Returns the XLA options of a program whose results influence the training; empty unless the run needs any.

    Args:
        config: config of the run.
        platform: platform of the devices: cpu, gpu or tpu.
    """
    return dict(_GPU_OPTIONS) if config.train.deterministic and platform == 'gpu' else {}


def exclude_switch_sums(config: Config) -> None:
    """Disables sums in the switches of NVLink in this process if the run is deterministic.

    Must be called before the first collective operation, because NCCL then reads the environment. A value that the user
    has set is not changed.
    """
    if config.train.deterministic:
        os.environ.setdefault(_NCCL_VARIABLE, '0')
