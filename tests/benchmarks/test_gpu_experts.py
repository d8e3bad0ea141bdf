"""Tests that the check of the products of experts detects errors, with XLA's product in place of the kernels."""

import jax
import numpy as np

from benchmarks.gpu_experts import OUTPUTS, Shape, check, find_mistakes
from maxlm.training.known_answers import experts

SHAPE = Shape(rows=64, inputs=16, outputs=8, groups=4)


def test_correct_products_pass_and_wrong_ones_are_detected(monkeypatch):
    checks = check([SHAPE], 'ragged_dot')
    assert [result['loads'] for result in checks] == ['balanced', 'random', 'skewed', 'empty', 'unused_rows']
    assert find_mistakes(checks) == []
    # Control: one row in the group of a different expert is an error of every output.
    matmul = experts.grouped_matmul

    def shifted(x_RI, kernel_EIO, groups, kind):
        moved = groups.sizes_E.at[0].add(-1).at[1].add(1)
        return matmul(x_RI, kernel_EIO, groups._replace(sizes_E=moved), kind)

    monkeypatch.setattr(experts, 'grouped_matmul', shifted)
    jax.clear_caches()
    balanced = check([SHAPE], 'ragged_dot')[0]
    assert len(find_mistakes([balanced])) == len(OUTPUTS)
    blind = {**checks[0], 'errors': dict.fromkeys(OUTPUTS, np.nan) | {'moved_row': 0.0}}
    assert len(find_mistakes([blind])) == len(OUTPUTS) + 1
