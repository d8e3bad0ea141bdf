"""Tests operation counts of single matmuls, in lines as XLA writes them for a TPU v4 and for GPUs."""

import pytest

from maxlm.planning.compiled.hlo import Array, Instruction
from maxlm.planning.compiled.matmuls import product_flops

# Line, dimensions of its operands, number of multiply-adds.
PRODUCTS = {
    'dot': (
        'f32[1024,50000]{1,0} dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}',
        ((1024, 1536), (1536, 50000)),
        1024 * 50000 * 1536,
    ),
    'dot over two axes, in batches': (
        'f32[2,1536,1024]{1,2,0} dot(%a, %b), lhs_batch_dims={1}, lhs_contracting_dims={0,3}, rhs_batch_dims={1}, '
        'rhs_contracting_dims={0,2}',
        ((5, 2, 1536, 7), (5, 2, 7, 1024)),
        2 * 1536 * 1024 * 35,
    ),
    'matrix': (
        'bf16[2,512,2048]{2,1,0:T(8,128)(2,1)} convolution(%a, %b), window={size=1}, dim_labels=0bf_io0->0bf',
        ((2, 512, 512), (512, 2048, 1)),
        2 * 512 * 512 * 2048,
    ),
    'no window': (
        'bf16[512,512]{1,0:T(8,128)(2,1)S(3)} convolution(%a, %b), dim_labels=bf_oi->bf',
        ((512, 61), (512, 61)),
        512 * 512 * 61,
    ),
    # The window's positions are the heads; all but one are in the padding.
    'heads': (
        'bf16[2,512,4,128]{3,1,2,0:T(8,128)(2,1)} convolution(%a, %b), window={size=1x4 pad=0_0x3_3 rhs_reversal=0x1}, '
        'dim_labels=0bf1_1oi0->0b1f',
        ((2, 512, 512, 1), (4, 128, 512, 1)),
        2 * 512 * 512 * 4 * 128,
    ),
    # Two batches of four heads, spread by dilation: most window positions meet gaps.
    'scores': (
        'f32[2,4,256,512]{3,2,1,0:T(8,128)} convolution(%a, %b), window={size=2x4 stride=1x3 lhs_dilate=2x4}, '
        'dim_labels=01bf_01oi->01bf',
        ((2, 4, 256, 128), (2, 4, 512, 128)),
        2 * 4 * 256 * 512 * 128,
    ),
    # The window sums over rows.
    'gradient': (
        'bf16[2048,512,1]{0,1,2:T(8,128)(2,1)} convolution(%a, %b), window={size=2}, dim_labels=0fb_0io->bf0',
        ((2, 512, 2048), (2, 512, 512)),
        2 * 512 * 2048 * 512,
    ),
    'groups': (
        'f32[8,16,16,6]{3,2,1,0} convolution(%a, %b), window={size=3x3 pad=1_1x1_1}, dim_labels=b01f_01io->b01f, '
        'feature_group_count=6',
        ((8, 16, 16, 6), (3, 3, 1, 6)),
        # At either end of the 16 positions, one of the 3 window positions is padding.
        8 * 6 * (3 * 16 - 2) ** 2,
    ),
    'cuBLAS': (
        '(f32[64,48]{1,0}, s8[4194304]{0}) custom-call(%a, %b), custom_call_target="__cublas$lt$matmul$f8", '
        'backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],'
        '"rhs_contracting_dimensions":["1"]}}}',
        ((64, 32), (48, 32)),
        64 * 48 * 32,
    ),
    'no product': ('f32[64]{0} add(%a, %b)', ((64,), (64,)), 0),
    'a kernel': ('f32[64]{0} custom-call(%a), custom_call_target="__cudnn$fmhaSoftmax"', ((64,),), 0),
}


@pytest.mark.parametrize('name', PRODUCTS)
def test_operations(name):
    line, dims, products = PRODUCTS[name]
    operands = [Array('bf16', shape) for shape in dims]
    assert product_flops(Instruction('x', line, is_root=False), operands) == 2 * products


def test_another_window_has_another_count():
    line, dims, products = PRODUCTS['scores']
    closer = line.replace('lhs_dilate=2x4', 'lhs_dilate=2x1')
    assert closer != line
    operands = [Array('bf16', shape) for shape in dims]
    assert product_flops(Instruction('x', closer, is_root=False), operands) != 2 * products


@pytest.mark.parametrize('name', ['dot', 'matrix', 'cuBLAS'])
def test_dimensions_that_cannot_be_read(name):
    line, dims, _ = PRODUCTS[name]
    broken = line.replace('lhs_contracting', 'contracting').replace('dim_labels', 'labels')
    with pytest.raises(ValueError, match='cannot determine the dimensions'):
        product_flops(Instruction('x', broken, is_root=False), [Array('bf16', shape) for shape in dims])


def test_arrays():
    types = '((bf16[2,3]{1,0:T(8,128)(2,1)S(3)}, pred[]), f8e4m3fn[7]{0}, /*index=2*/s4[6], u32[]{:S(2)}, token[])'
    arrays = Instruction('x', f'{types} tuple()', is_root=True).arrays
    assert [array.bytes for array in arrays] == [12, 1, 7, 3, 4, 0]
    assert Instruction('x', 'c64[5]{0} copy(%a)', is_root=True).arrays == [Array('c64', (5,))]
    assert Array('c64', (5,)).bytes == 40
