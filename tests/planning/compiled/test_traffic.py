"""Bytes of small GPU programs: fusions, slices, updates in place, loops, products and causes."""

import pytest

from maxlm.planning.compiled.hlo import parse_hlo
from maxlm.planning.compiled.traffic import (
    ATTENTION,
    COMMUNICATION,
    PRODUCTS,
    bytes_by_cause,
    elementwise_bytes,
    read_traffic,
)

# Bytes of f32[8,16].
SIZE = 4 * 8 * 16


def traffic(entry, *computations):
    """Returns the kernels of a program with the given instructions of the entry computation."""
    named = '\n\n'.join(f'%{name} (x: f32[]) -> f32[] {{\n{body}\n}}' for name, body in computations)
    return read_traffic(parse_hlo(f'HloModule m\n\n{named}\n\nENTRY %main (x: f32[]) -> f32[] {{\n{entry}\n}}\n'))


def fusion(body, operands='%x', result='f32[8,16]', metadata=''):
    """Returns the bytes of a fusion of the array %x and the number %i."""
    entry = f"""  %x = f32[8,16] parameter(0)
  %i = s32[] parameter(1)
  ROOT %f = {result} fusion({operands}), kind=kLoop, calls=%fused{metadata}"""
    (kernel,) = traffic(entry, ('fused', body))
    return kernel


def test_an_elementwise_fusion_reads_each_operand_once():
    body = """  %p = f32[8,16] parameter(0)
  %square = f32[8,16] multiply(%p, %p)
  ROOT %sum = f32[8,16] add(%square, %p)"""
    assert fusion(body).bytes == 2 * SIZE


def test_a_fusion_with_several_results_writes_all():
    body = """  %p = f32[8,16] parameter(0)
  %half = bf16[8,16] convert(%p)
  %negative = f32[8,16] negate(%p)
  ROOT %both = (bf16[8,16], f32[8,16]) tuple(%half, %negative)"""
    assert fusion(body, result='(bf16[8,16], f32[8,16])').bytes == SIZE + SIZE / 2 + SIZE


@pytest.mark.parametrize('first', ['', '  %c = f32[8,16] negate(%p)\n'], ids=['parameter', 'converted'])
def test_a_slice_reads_only_its_elements(first):
    array = '%c' if first else '%p'
    body = f"""  %p = f32[8,16] parameter(0)
  %i = s32[] parameter(1)
  %zero = s32[] constant(0)
{first}  ROOT %row = f32[1,16] dynamic-slice({array}, %i, %zero), dynamic_slice_sizes={{1,16}}"""
    # The index has 4 bytes.
    assert fusion(body, '%x, %i', 'f32[1,16]').bytes == 2 * SIZE / 8 + 4


def test_a_reduction_reads_all_elements_although_a_slice_reads_few():
    body = """  %p = f32[8,16] parameter(0)
  %zero = f32[] constant(0)
  %row = f32[1,16] slice(%p), slice={[0:1], [0:16]}
  %sum = f32[] reduce(%p, %zero), dimensions={0,1}, to_apply=%add
  ROOT %both = (f32[1,16], f32[]) tuple(%row, %sum)"""
    assert fusion(body, result='(f32[1,16], f32[])').bytes == SIZE + SIZE / 8 + 4


def test_an_update_in_place_writes_only_the_update():
    body = """  %p = f32[8,16] parameter(0)
  %i = s32[] parameter(1)
  %row = f32[1,16] constant({...})
  %zero = s32[] constant(0)
  ROOT %updated = f32[8,16] dynamic-update-slice(%p, %row, %i, %zero)"""
    kernel = fusion(body, '%x, %i')
    assert kernel.bytes == SIZE / 8 + 4
    assert kernel.cause == 'saved activations'


@pytest.mark.parametrize(('updated', 'written'), [('%p', 1 / 8), ('%zeros', 1)])
def test_a_scatter_in_place_writes_only_the_updates(updated, written):
    body = f"""  %p = f32[8,16] parameter(0)
  %i = s32[1] parameter(1)
  %row = f32[1,16] constant({{...}})
  %zero = f32[] constant(0)
  %zeros = f32[8,16] broadcast(%zero), dimensions={{}}
  ROOT %new = f32[8,16] scatter({updated}, %i, %row), update_window_dims={{1}}, to_apply=%add"""
    # An array that the fusion computes is written completely.
    assert fusion(body, '%x, %i').bytes == SIZE * written + 4


def test_kernels_of_a_loop_are_multiplied():
    entry = """  %x = f32[8,16] parameter(0)
  %zero = s32[] constant(0)
  %start = (s32[], f32[8,16]) tuple(%zero, %x)
  %loop = (s32[], f32[8,16]) while(%start), condition=%condition, body=%body, \
backend_config={"known_trip_count":{"n":"5"}}
  ROOT %y = f32[8,16] get-tuple-element(%loop), index=1"""
    body = """  %state = (s32[], f32[8,16]) parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  %y = f32[8,16] get-tuple-element(%state), index=1
  %z = f32[8,16] negate(%y)
  ROOT %next = (s32[], f32[8,16]) tuple(%i, %z)"""
    condition = """  %state = (s32[], f32[8,16]) parameter(0)
  ROOT %more = pred[] constant(true)"""
    (kernel,) = traffic(entry, ('body', body), ('condition', condition))
    assert (kernel.bytes, kernel.executions, kernel.total) == (2 * SIZE, 5, 10 * SIZE)


def test_causes():
    kernels = traffic("""  %x = f32[8,16] parameter(0)
  %w = f32[16,16] parameter(1)
  %norm = f32[8,16] negate(%x), metadata={op_name="jit(step)/attention/norm/mul"}
  %backward = f32[8,16] negate(%norm), metadata={op_name="jit(step)/transpose(jvp(activation))/mul"}
  %unnamed = f32[8,16] negate(%backward), metadata={op_name="jit(step)/normal/mul"}
  %copy = f32[8,16] copy(%unnamed)
  %product = (f32[8,16], s8[4096]) custom-call(%copy, %w), custom_call_target="__cublas$gemm"
  %y = f32[8,16] get-tuple-element(%product), index=0
  %sum = f32[8,16] all-reduce(%y), replica_groups={}
  ROOT %mix = f32[8,16] custom-call(%sum), custom_call_target="__cudnn$fmhaSoftmax\"""")
    assert [(kernel.name, kernel.cause) for kernel in kernels] == [
        ('norm', 'norm'),
        ('backward', 'activation'),
        ('unnamed', 'other'),
        ('copy', 'copies and concatenations'),
        ('product', PRODUCTS),
        ('sum', COMMUNICATION),
        ('mix', ATTENTION),
    ]
    sums = bytes_by_cause(kernels)
    # A product reads both operands and writes its result; its workspace does not count.
    assert sums[PRODUCTS] == 2 * SIZE + 4 * 16 * 16
    assert (
        elementwise_bytes(kernels)
        == 4 * 2 * SIZE
        == sum(sums.values()) - sum(sums[cause] for cause in (PRODUCTS, COMMUNICATION, ATTENTION))
    )
    assert list(sums.values()) == sorted(sums.values(), reverse=True)
