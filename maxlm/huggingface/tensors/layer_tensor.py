"""A tensor of the layers of a Hugging Face checkpoint, and the parameters that it contains."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

Shape = tuple[int, ...]


class LayerTensor(NamedTuple):
    """A tensor of any layer; fields as in `maxlm.huggingface.state_dict.Tensor`, with `#` for the layer's index."""

    name: str
    sources: tuple[str, ...]
    shape: Shape
    source_shapes: tuple[Shape, ...]
    to_hf: Callable[[Sequence[np.ndarray]], np.ndarray]
    from_hf: Callable[[np.ndarray], Sequence[np.ndarray]]
    expert: int | None = None
