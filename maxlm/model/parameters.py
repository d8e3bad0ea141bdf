"""Lists the parameters of a model from its abstract arrays, and counts them.

Nothing is computed. Tracing a model takes about 0.05 s, and its result is cached.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, NamedTuple

from flax import nnx

from maxlm.config.schema import ModelConfig
from maxlm.errors import InputError
from maxlm.model.decoder import Decoder
from maxlm.model.experts.router import BALANCE_BIAS, ROUTER
from maxlm.model.layers.lora import LORA_A, LORA_B
from maxlm.model.layers.weight_only_quantization import CODES, KERNEL, SCALES, quantized_kernels, weights_of
from maxlm.model.stream import StreamParameters
from maxlm.model.value_embedding import VALUE_GATES, VALUE_TABLES

# Kinds of parameters that are matrices or tables.
MATRICES = ('table', 'head', 'matrix', 'router')
# Module of the head of a reward model, and its parameter.
SCORE = 'score'
SCORE_KERNEL = f'{SCORE}.kernel'
# Module of the value head of PPO.
VALUE_HEAD = 'value_head'
# Axes of the number of layers or experts, which precede the axes of a parameter.
STACKS = ('layers', 'dense_layers', 'experts')


class Kernel(NamedTuple):
    """Matrices of a block with the same shape.

    Attributes:
        inputs, outputs: shape of a matrix.
        num: number of matrices: 1, or the number of experts.
        num_per_token: number of the matrices that multiply a token.
    """

    inputs: int
    outputs: int
    num: int = 1
    num_per_token: int = 1

    @property
    def size(self) -> int:
        return self.num * self.inputs * self.outputs

    @property
    def active_size(self) -> int:
        return self.num_per_token * self.inputs * self.outputs

    @property
    def is_of_experts(self) -> bool:
        return self.num > 1


class Tables(NamedTuple):
    """Numbers of elements outside of the blocks.

    Attributes:
        tokens: elements of the token embedding.
        positions: elements of learned positions.
        head: elements of a separate head or the head of a reward model; 0 if the token embedding is the head.
        values: elements of all tables of value embeddings.
    """

    tokens: int
    positions: int
    head: int
    values: int


def layer_stacks(model: ModelConfig) -> list[ModelConfig]:
    """Returns a model for each kind of layer, dense layers first, with the number of layers of this kind."""
    num_dense = model.num_dense_layers
    if not num_dense:
        return [model]
    rest = dataclasses.replace(model, num_layers=model.num_layers - num_dense, num_dense_layers=0)
    dense = dataclasses.replace(
        rest, num_layers=num_dense, num_experts=0, num_experts_per_token=0, num_shared_experts=0
    )
    return [dense, rest]


def block_kernels(model: ModelConfig) -> dict[str, Kernel]:
    """Returns the matrices of one block of a resolved model without first dense layers; see `layer_stacks`.

    They are named by their path in the block, without `attention.` or `feedforward.`.
    """
    kernels = {}
    for weight in weights(model):
        stack, _, path = weight.name.rpartition('.')[0].partition('.')
        if stack == 'blocks' and weight.kind in ('matrix', 'router'):
            of_experts = (model.num_experts, model.num_experts_per_token) if weight.is_of_experts else ()
            name = path.removeprefix('attention.').removeprefix('feedforward.')
            kernels[name] = Kernel(*weight.matrix_shape, *of_experts)
    return kernels


def block_parameters(model: ModelConfig) -> int:
    """Returns the number of elements of the matrices of one block; see `block_kernels`."""
    return sum(kernel.size for kernel in block_kernels(model).values())


def tables(model: ModelConfig) -> Tables:
    """Returns the table sizes of a resolved model."""
    sizes = {weight.name: weight.size for weight in weights(model) if weight.kind in ('table', 'head')}
    head = sizes.get(SCORE_KERNEL, 0) or sizes.get('head.kernel', 0)
    return Tables(sizes['embedding'], sizes.get('position_embedding', 0), head, sizes.get(VALUE_TABLES, 0))


def value_elements(model: ModelConfig) -> int:
    """Returns the number of elements that a token looks up in the value embeddings of all layers."""
    return tables(model).values // model.vocab_size


class Weight(NamedTuple):
    """A parameter of the decoder. Parameters of blocks are stacked over layers.

    Codes and scales of a quantized kernel are one parameter, with the name of the codes and the shape of the kernel.

    Attributes:
        name: dotted path in the tree of parameters.
        shape: shape of the array.
        axes: logical axes, as in `maxlm.parallel.layout.TABLE`.
        kind: kind of the parameter; see `kind_of`.
        num_in: for matrices, the number of their axes that are inputs.
    """

    name: str
    shape: tuple[int, ...]
    axes: tuple[str, ...]
    kind: str
    num_in: int = 1

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def is_of_experts(self) -> bool:
        return 'experts' in self.axes

    @property
    def matrix_shape(self) -> tuple[int, int]:
        """Returns the numbers of inputs and outputs of a matrix, for one layer and one expert."""
        sizes = [size for size, axis in zip(self.shape, self.axes, strict=True) if axis not in STACKS]
        return math.prod(sizes[: self.num_in]), math.prod(sizes[self.num_in :])

    def active_size(self, model: ModelConfig) -> int:
        """Returns the number of elements that a token uses."""
        if not self.is_of_experts:
            return self.size
        return self.size // model.num_experts * model.num_experts_per_token


@functools.lru_cache(maxsize=128)
def weights(model: ModelConfig) -> tuple[Weight, ...]:
    """Returns all parameters of a resolved model."""
    # A search over layouts changes these settings, which do not change the parameters.
    traced = dataclasses.replace(
        model, remat_policy='none', scan_layers=True, attention='xla', weight_quantization='float'
    )
    found = _trace(traced)
    if weights_of(model) is None:
        return found
    quantized = quantized_kernels(model)
    return tuple(
        weight._replace(name=weight.name.removesuffix(KERNEL) + CODES) if weight.name in quantized else weight
        for weight in found
    )


@functools.lru_cache(maxsize=128)
def _trace(model: ModelConfig) -> tuple[Weight, ...]:
    decoder = nnx.eval_shape(lambda: Decoder(model, rngs=nnx.Rngs(0)))

    def weight(path: tuple[Any, ...], variable: nnx.Variable) -> Weight:
        *modules, _ = names = tuple(map(str, path))
        module = functools.reduce(getattr, modules, decoder)
        num_in = getattr(module, 'num_in', 1)
        return Weight('.'.join(names), tuple(variable.shape), tuple(variable.axes), kind_of_names(names), num_in)

    return tuple(weight(path, variable) for path, variable in nnx.to_flat_state(nnx.state(decoder, nnx.Param)))


def kind_of(path: tuple[Any, ...]) -> str:
    """Returns the kind of a parameter, from its path in the tree of parameters.

    The kinds are table, head, matrix (of a block), router (of a layer with experts), adapter (of a matrix), vector, and
    codes. Codes are the codes or scales of a quantized matrix.

    Raises:
        InputError: the parameter has an unknown name.
    """
    return kind_of_names(names(path))


def kind_of_names(path: tuple[str, ...]) -> str:
    """Returns the kind of a parameter from its path as names; see `kind_of`."""
    *modules, name = path
    if name in ('embedding', 'position_embedding', VALUE_TABLES):
        return 'table'
    if name == VALUE_GATES:
        return 'matrix'
    if name in ('scale', 'bias', 'sinks', BALANCE_BIAS, *StreamParameters._fields):
        return 'vector'
    if name in (LORA_A, LORA_B):
        return 'adapter'
    if name in (CODES, SCALES):
        return 'codes'
    if name != 'kernel':
        # Only blocks of the user (`model.block`) have other names.
        raise InputError(f'parameter {".".join(path)}: rename it to kernel (a matrix), scale or bias (a vector)')
    if ROUTER in modules:
        return 'router'
    return 'head' if 'head' in modules or modules in ([SCORE], [VALUE_HEAD]) else 'matrix'


def names(path: tuple[Any, ...]) -> tuple[str, ...]:
    """Returns the names of the modules that contain a parameter, followed by its own name."""
    return tuple(key.key for key in path)


def model_parameters(model: ModelConfig) -> int:
    """Returns the elements of the matrices and tables of a resolved model, without scales, biases and adapters."""
    return sum(weight.size for weight in weights(model) if weight.kind in MATRICES)


def expert_parameters(model: ModelConfig) -> int:
    """Returns the elements of the matrices of all experts, without shared experts."""
    return sum(weight.size for weight in weights(model) if weight.kind == 'matrix' and weight.is_of_experts)


def count_parameters(model: ModelConfig) -> int:
    """Returns the elements of all parameters of a resolved model, embeddings included."""
    return sum(weight.size for weight in weights(model))


def count_active_parameters(model: ModelConfig) -> int:
    """Returns the elements of all parameters that a token uses: all but those of experts that it does not select."""
    return sum(weight.active_size(model) for weight in weights(model))


def parameters_text(model: ModelConfig) -> str:
    """Returns the number of parameters for log lines, with the active ones of a model with experts."""
    text = f'{count_parameters(model):,} parameters'
    return f'{text} ({count_active_parameters(model):,} active per token)' if model.num_experts else text
