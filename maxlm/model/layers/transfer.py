"""Transfer of hyperparameters from a small model to a wider and deeper one.

Width: the maximal update parametrization of Yang et al. 2022, "Tensor Programs V" (table 3). Depth: Dey et al. 2025,
"CompleteP" (α = 1). The papers multiply the logits by 1 / m and each residual branch by 1 / d. Here, the head and the
residual outputs have smaller initial values and learning rates instead. Both forms give the same models, because the
updates of Adam and Muon do not depend on the scale of a gradient, and exported models need no multipliers.

With m = dim / base_dim and d = num_layers / base_num_layers:

| parameter | standard deviation | learning rate of Adam | of Muon |
|---|---|---|---|
| embeddings, scales, biases, gates of value embeddings | 1 | 1 | 1 |
| matrices of the blocks, router | 1 / √m | 1 / m | 1 |
| residual outputs, and their biases | also 1 / d | also 1 / d | also 1 / d |
| head | 1 / m | 1 / m | |

Weight decay is divided by the factor of the learning rate, so that weights are forgotten at the same rate.
"""

from __future__ import annotations

from typing import NamedTuple

from maxlm.config.schema import ModelConfig

# Modules of a block that write to the residual stream.
RESIDUAL_OUTPUTS = ('out', 'down')


class SizeRatio(NamedTuple):
    """Size of a model, relative to the one whose hyperparameters it uses.

    Attributes:
        width: m.
        depth: d.
    """

    width: float
    depth: float

    def rate_factor(self, path: tuple[str, ...], kind: str, *, by_muon: bool) -> float:
        """Returns the factor of a parameter's learning rate.

        Args:
            path: path of the parameter.
            kind: its kind; see `maxlm.model.parameters.kind_of`.
            by_muon: True if Muon trains it.
        """
        # The number of inputs of the other matrices, the gates of value embeddings, does not grow with the width.
        grows = kind in ('matrix', 'router', 'head') and path[-1] == 'kernel'
        of_width = 1 / self.width if grows and not by_muon else 1.0
        return of_width / self.depth if path[-2:-1] and path[-2] in RESIDUAL_OUTPUTS else of_width


def transfer_of(model: ModelConfig) -> SizeRatio:
    """Returns the factors of a resolved model; 1 if it does not name a base."""
    return SizeRatio(
        model.dim / model.base_dim if model.base_dim else 1.0,
        model.num_layers / model.base_num_layers if model.base_num_layers else 1.0,
    )
