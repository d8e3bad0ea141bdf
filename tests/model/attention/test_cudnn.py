"""Lists of documents for cuDNN, and attention and gradients with formulas instead of the kernels."""

import dataclasses
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.cudnn import fused_attention_stablehlo as fused

from maxlm.model.attention import cudnn, kernels
from maxlm.parallel.partitioning import SINGLE_DEVICE
from maxlm.planning.compiled.program import read_program
from maxlm.training.state import abstract_state
from maxlm.training.step import make_train_step
from tests.model.attention import cudnn_on_cpu
from tests.model.attention.masked import masked_attention
from tests.model.attention.test_ring import value_and_gradients
from tests.small import small_batch, small_config, small_layout

B, T, N, H = 3, 32, 4, 8


def rows_of(*lengths_by_row):
    """Returns segment ids [B, T] of documents with the given lengths; the rest of each row is padding."""
    rows = np.zeros((len(lengths_by_row), T), np.int32)
    for row, lengths in zip(rows, lengths_by_row, strict=True):
        row[: sum(lengths)] = np.repeat(np.arange(len(lengths)) + 1, lengths)
    return rows


FEW = rows_of([32], [10, 22], [5, 20])
# With 2 documents per row and 6 per device, the packings need two, five and sixteen lists.
PACKINGS = {
    'few': FEW,
    'two_lists': rows_of([1, 2, 3, 4], [32], [8, 8]),
    'five_lists': rows_of([2] * 13, [1, 31], [3] * 10),
    'single_tokens': rows_of([1] * T, [1] * T, [1] * 31),
}


@pytest.fixture
def formulas(monkeypatch):
    monkeypatch.setattr(cudnn, 'run_forward', cudnn_on_cpu.run_forward)
    monkeypatch.setattr(cudnn, 'run_backward', cudnn_on_cpu.run_backward)
    monkeypatch.setattr(kernels, 'supports_documents', lambda *_: True)


def inputs(kv_heads):
    rng = np.random.default_rng(0)
    heads = (N, kv_heads, kv_heads, N)
    return tuple(rng.standard_normal((B, T, count, H), np.float32) for count in heads)


def by_documents(window):
    return lambda q, k, v, segments: cudnn.attend_documents(
        q, k, v, segments, window=window, partitioning=SINGLE_DEVICE
    )


@jax.jit
def _by_mask(q, k, v, do, mask):
    output, pull = jax.vjp(lambda q, k, v: masked_attention(q, k, v, mask), q, k, v)
    return output, *pull(do)


def by_mask(window, arrays, segments):
    """Returns output and gradients. The mask is an argument, so that one program serves all tests."""
    behind = np.arange(T)[:, None] - np.arange(T)[None, :]
    is_seen = (behind >= 0) & (behind < (window or T))
    return _by_mask(*arrays, is_seen & (segments[:, :, None] == segments[:, None, :]))


def largest_error(ours, theirs):
    assert all(np.isfinite(x).all() for x in ours)
    return max(np.abs(np.asarray(a) - np.asarray(b)).max() for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize(('window', 'kv_heads'), [(0, N), (5, 2)])
def test_document_lists_equal_the_mask(formulas, window, kv_heads):
    arrays = inputs(kv_heads)
    ours = value_and_gradients(by_documents(window))
    by_packing = {packing: ours(*arrays, segments) for packing, segments in PACKINGS.items()}
    for packing, segments in PACKINGS.items():
        expected = by_mask(window, arrays, segments)
        for other, found in by_packing.items():
            # Negative control: other documents give another result.
            assert (largest_error(found, expected) < 1e-5) == (other == packing)
    assert largest_error(by_packing['few'], by_mask(4, arrays, FEW)) > 1e-2


def test_the_kernel_runs_once_for_each_list(formulas, monkeypatch):
    lists = []

    def run(*arguments, window):
        jax.debug.callback(lambda start: lists.append(start.tolist()), arguments[-1])
        return cudnn_on_cpu.run_forward(*arguments, window=window)

    monkeypatch.setattr(cudnn, 'run_forward', run)
    attend_documents, arrays = jax.jit(by_documents(0)), inputs(N)[:3]
    for packing, num_lists in [('few', 1), ('two_lists', 2), ('five_lists', 5)]:
        lists.clear()
        jax.block_until_ready(attend_documents(*arrays, PACKINGS[packing]))
        jax.effects_barrier()
        assert len(lists) == num_lists
        # Each document is in one list: a list starts at the end of the previous one.
        starts = [start for listed in sorted(lists) for start in listed[:-1] if start < B * T]
        expected = np.flatnonzero(np.insert(np.diff(PACKINGS[packing], axis=1) != 0, 0, True, axis=1))
        assert starts == expected.tolist()


def test_lists_against_numpy():
    rng = np.random.default_rng(0)
    for _ in range(10):
        is_first = rng.random((B, T)) < rng.random()
        is_first[:, 0] = True
        segments = np.where(rng.random((B, 1)) < 0.5, is_first.cumsum(1), is_first.cumsum(1) - 1).astype(np.int32)
        number, start = jax.jit(cudnn.list_documents)(segments)
        firsts = np.flatnonzero(is_first)
        np.testing.assert_array_equal(number, is_first.reshape(-1).cumsum().reshape(B, T) - 1)
        np.testing.assert_array_equal(start.reshape(-1)[: len(firsts)], firsts)
        assert (np.asarray(start).reshape(-1)[len(firsts) :] == B * T).all()


@pytest.mark.parametrize('kv_heads', [1, 2, N])
def test_lengths_and_offsets(kv_heads):
    q, k, *_ = inputs(kv_heads)
    start = np.asarray(jax.jit(cudnn.list_documents)(FEW).start_BX).reshape(-1)[:7]
    assert start.tolist() == [0, 32, 42, 64, 69, 89, 96]
    lengths, kv_lengths, offsets, kv_offsets = jax.jit(cudnn._lengths_and_offsets)(q, k, start)
    assert lengths.reshape(-1).tolist() == kv_lengths.reshape(-1).tolist() == [32, 10, 22, 5, 20, 7]
    assert offsets.reshape(-1)[:7].tolist() == [place * N * H for place in start.tolist()]
    assert kv_offsets.reshape(-1)[:7].tolist() == [place * kv_heads * H for place in start.tolist()]
    # Compares with the arguments that JAX passes to cuDNN, where they are correct in all versions.
    of_rows = jnp.array([[32, -1], [10, 22], [5, 20]]), jnp.array([[0, -1, -1], [0, 10, -1], [0, 5, -1]])
    theirs = fused._fix_seqlen_offsets(of_rows[0], of_rows[0], of_rows[1], of_rows[1], q, q)
    assert theirs[0].reshape(-1)[:5].tolist() == lengths.reshape(-1)[:5].tolist()
    assert theirs[2].reshape(-1)[:5].tolist() == offsets.reshape(-1)[:5].tolist()
    assert theirs[0].shape == lengths.shape
    assert theirs[2].shape == offsets.shape


@pytest.fixture
def hopper(monkeypatch):
    monkeypatch.setattr(fused, 'check_cudnn_version', lambda: 91300)
    monkeypatch.setattr(fused, 'check_compute_capability', lambda _: True)
    monkeypatch.setattr(fused, 'is_cuda_compute_capability_equal', lambda _: False)


def kernel_calls(function, *arrays):
    """Returns the configuration, types and layouts of each lowered call by target."""
    text = jax.jit(function).trace(*arrays).lower(lowering_platforms=('cuda',)).as_text()
    calls = {}
    for line in text.splitlines():
        if found := re.search(r'custom_call @(\S+?)\(.*backend_config = "((?:[^"\\]|\\.)*)"', line):
            config = json.loads(found[2].replace('\\22', '"').replace('\\"', '"'))
            layouts = re.findall(r'(?:operand|result)_layouts = (\[[^=]*\])[,}]', line)
            calls.setdefault(found[1], []).append((config, layouts, line.rpartition(' : ')[2]))
    return calls


def test_calls_equal_those_of_jax(hopper):
    q = jax.ShapeDtypeStruct((2, 1024, 4, 64), jnp.bfloat16)
    lengths, offsets = jax.ShapeDtypeStruct((2, 4), jnp.int32), jax.ShapeDtypeStruct((2, 5), jnp.int32)

    def theirs(q, k, v, do, lengths, offsets):
        def run(q, k, v):
            return fused.dot_product_attention(
                q,
                k,
                v,
                q_seqlen=lengths,
                kv_seqlen=lengths,
                q_offsets=offsets,
                kv_offsets=offsets,
                scale=0.125,
                mask_type=fused.MaskType.PADDING_CAUSAL,
                sliding_window_length=100,
                seed=0,
            )

        return jax.vjp(run, q, k, v)[1](do)

    def ours(q, k, v, do, segments):
        return jax.vjp(lambda q, k, v: by_documents(100)(q, k, v, segments), q, k, v)[1](do)

    found_calls = kernel_calls(ours, q, q, q, q, jax.ShapeDtypeStruct((2, 1024), jnp.int32))
    expected_calls = kernel_calls(theirs, q, q, q, q, lengths, offsets)
    assert set(found_calls) == set(expected_calls) == {'__cudnn$fmhaSoftmax', '__cudnn$fmhaSoftmaxBackward'}
    for target, calls in found_calls.items():
        # There is one call for the first list and one for the following lists.
        assert calls == 2 * expected_calls[target]
    config = found_calls['__cudnn$fmhaSoftmax'][0][0]['cudnn_fmha_backend_config']
    assert (config['mask_type'], config['max_seg_per_batch']) == ('PADDING_CAUSAL', 4)
    assert config['sliding_window_length'] == 100


def on_gpu(config):
    return dataclasses.replace(config, model=dataclasses.replace(config.model, attention='cudnn'))


@pytest.mark.parametrize('sizes', [{'fsdp': 2, 'data': 2, 'tensor': 2}, {'fsdp': 8}], ids=['heads', 'rows'])
def test_devices_do_not_communicate(formulas, sizes):
    overrides = {f'mesh__{axis}': size for axis, size in sizes.items()}
    layout = small_layout(small_config(num_devices=8, model__vocab_size=64, **overrides))
    axes = ('batch', 'length', 'heads', 'head_dim')
    segments = np.concatenate([*PACKINGS.values()])[:8]

    def attend_on_mesh(q, k, v, segments):
        q, k, v = (layout.constrain(x, axes) for x in (q, k, v))
        return cudnn.attend_documents(q, k, v, segments, window=0, partitioning=layout)

    arrays = tuple(np.concatenate([x, x, x])[:8] for x in inputs(2))
    placed = [jax.device_put(x, layout.named(*axes)) for x in arrays]
    run = value_and_gradients(attend_on_mesh).lower(*placed, jax.device_put(segments, layout.batch)).compile()
    ours = run(*placed, jax.device_put(segments, layout.batch))
    assert largest_error(ours, by_mask(0, arrays, segments)) < 1e-5
    assert largest_error(ours, by_mask(0, arrays, segments[::-1])) > 1e-2
    # Neither rows nor heads are gathered, and the lists need no communication.
    assert read_program(run.as_text(), layout.mesh.shape).transfers == []
    assert ours[0].sharding.shard_shape(ours[0].shape) == placed[0].sharding.shard_shape(placed[0].shape)


@pytest.mark.parametrize(('remat', 'runs'), [('dots', 1), ('dots_no_batch', 1), ('full', 2)])
def test_remat_keeps_the_results_of_the_kernel(formulas, remat, runs):
    config = on_gpu(small_config(model__num_layers=4, model__remat_policy=remat))
    layout = small_layout(config)
    batch = layout.put_batch(small_batch(config), config.train.global_batch_size)
    program = jax.make_jaxpr(make_train_step(config, layout))(abstract_state(config, layout), batch)
    # The body of the loop is one layer.
    assert str(program).count('documents_dot_product_attention_fwd[') == runs


def test_cases_that_support_documents(hopper, monkeypatch):
    q = jax.ShapeDtypeStruct((2, 256, 4, 64), jnp.bfloat16)
    assert cudnn.supports_documents(q, SINGLE_DEVICE)
    # The starts of documents are int32.
    assert not cudnn.supports_documents(jax.ShapeDtypeStruct((2**16, 2**13, 4, 64), jnp.bfloat16), SINGLE_DEVICE)
    stages = small_layout(small_config(num_devices=2, mesh__stage=2, mesh__fsdp=1, train__per_device_batch_size=4))
    assert not cudnn.supports_documents(q, stages)
    monkeypatch.setattr(fused, 'check_compute_capability', lambda capability: float(capability) <= 8.0)
    assert not cudnn.supports_documents(q, SINGLE_DEVICE)
