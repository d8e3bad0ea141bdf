"""Tests the estimated work of a step, against the matmuls in the step's trace and by hand."""

import dataclasses
import math

import jax
import jax.extend
import pytest

from maxlm.config.loading import load
from maxlm.config.resolve import resolve
from maxlm.model.parameters import layer_stacks, model_parameters
from maxlm.planning.estimate.experts import rows_of, whole_parameters
from maxlm.planning.estimate.work import estimate_work
from maxlm.training.flops import matmul_parameters
from maxlm.training.objectives import BATCH_TYPES
from maxlm.training.state import abstract_state
from maxlm.training.step import make_train_step
from tests.conftest import ROOT
from tests.small import VOCAB, small_config, small_layout

SHAPE = {
    'model__num_layers': 4,
    'model__dim': 64,
    'model__num_kv_heads': 2,
    'train__global_batch_size': 16,
    'train__per_device_batch_size': 2,
}


def traced_flops(config):
    """Returns the operations of all matmuls in the trace of the real step."""
    layout = small_layout(config)
    shape = (config.train.global_batch_size, config.data.seq_len)
    batch = {name: jax.ShapeDtypeStruct(shape, kind, sharding=layout.batch) for name, kind in BATCH_TYPES.items()}
    traced = jax.jit(make_train_step(config, layout)).trace(abstract_state(config, layout), batch)
    return product_flops(traced.jaxpr.jaxpr)


def product_flops(jaxpr):
    total = 0
    for equation in jaxpr.eqns:
        if equation.primitive.name == 'dot_general':
            (contracted, _), _ = equation.params['dimension_numbers']
            operand = equation.invars[0].aval.shape
            total += 2 * math.prod(equation.outvars[0].aval.shape) * math.prod(operand[axis] for axis in contracted)
        times = equation.params['length'] if equation.primitive.name == 'scan' else 1
        for value in equation.params.values():
            for inner in value if isinstance(value, tuple | list) else [value]:
                if isinstance(inner, jax.extend.core.ClosedJaxpr):
                    total += times * product_flops(inner.jaxpr)
                elif isinstance(inner, jax.extend.core.Jaxpr):
                    total += times * product_flops(inner)
    return total


# Each remat policy occurs at least once, and each family and window several times.
@pytest.mark.parametrize(
    ('family', 'remat', 'window'),
    [
        ('llama', 'none', 512),
        ('gpt_neox', 'dots', 32),
        ('llama', 'dots_no_batch', 32),
        ('gpt_neox', 'full', 512),
        ('llama', 'offload', 512),
        ('gpt_neox', 'none', 32),
    ],
)
def test_products_equal_the_trace(family, remat, window):
    config = small_config(model__family=family, model__remat_policy=remat, data__seq_len=window, **SHAPE)
    assert estimate_work(config).all_flops == traced_flops(config)
    # Control: another policy has other matmuls.
    other = dataclasses.replace(config.model, remat_policy='none' if remat in ('full', 'offload') else 'full')
    assert estimate_work(dataclasses.replace(config, model=other)).all_flops != traced_flops(config)


EXPERTS = {
    'model__family': 'llama',
    'model__num_experts': 4,
    'model__num_experts_per_token': 2,
    'model__expert_ffn_dim': 48,
    'model__num_shared_experts': 1,
    'model__num_dense_layers': 1,
}


@pytest.mark.parametrize(
    ('remat', 'capacity'), [('none', 0), ('none', 1.25), ('dots_no_batch', 0), ('dots', 1.25), ('full', 0)]
)
def test_products_of_experts_equal_the_trace(remat, capacity):
    overrides = {'model__remat_policy': remat, 'model__expert_capacity_factor': capacity}
    config = small_config(**{**SHAPE, **EXPERTS, **overrides})
    assert estimate_work(config).all_flops == traced_flops(config)
    # Control: a token with one more expert has more products.
    more = dataclasses.replace(config.model, num_experts_per_token=3)
    assert estimate_work(dataclasses.replace(config, model=more)).all_flops > traced_flops(config)


WINDOWS = {'model__attention_pattern': 'SL', 'model__sliding_window': 64, 'data__seq_len': 256}
TEACHERS = {
    'windows': {**SHAPE, **WINDOWS, 'model__family': 'llama', 'model__num_layers': 3, 'model__dim': 48},
    'experts': {**SHAPE, **EXPERTS},
}


@pytest.mark.parametrize(
    'overrides',
    [
        {**WINDOWS, 'model__mtp_depth': 2, 'model__remat_policy': 'full', 'model__family': 'llama'},
        {**EXPERTS, 'model__mtp_depth': 1, 'model__remat_policy': 'full'},
        {'model__mtp_depth': 2, 'model__remat_policy': 'dots_no_batch'},
        {'model__mtp_depth': 2, 'optimizer__name': 'muon'},
    ],
    ids=['windows', 'experts', 'saved', 'muon'],
)
def test_products_of_multi_token_prediction_equal_the_trace(overrides):
    config = small_config(**{**SHAPE, **overrides})
    flops = traced_flops(config)
    assert estimate_work(config).all_flops == flops
    # Control: without a module, there are fewer products.
    fewer = dataclasses.replace(config.model, mtp_depth=config.model.mtp_depth - 1)
    assert estimate_work(dataclasses.replace(config, model=fewer)).all_flops < flops


@pytest.mark.parametrize('name', TEACHERS)
def test_products_of_a_teacher_equal_the_trace(name):
    teacher = small_config(**TEACHERS[name]).model
    config = small_config(**SHAPE, data__seq_len=256, teacher=teacher, model__remat_policy='full')
    flops = traced_flops(config)
    assert estimate_work(config).all_flops == flops
    assert estimate_work(dataclasses.replace(config, teacher=None)).all_flops < flops


def test_modules_and_a_teacher_move_memory():
    plain = estimate_work(small_config(**SHAPE)).memory_bytes
    modules = estimate_work(small_config(**SHAPE, model__mtp_depth=2)).memory_bytes
    # Each module has more than the memory traffic of one of 4 layers, because it has logits of its own.
    assert modules - plain > 2 / 5 * plain
    # A forward pass of the same model has about a third of the traffic of the activations, and no update.
    taught = estimate_work(small_config(**SHAPE, teacher=small_config(**SHAPE).model)).memory_bytes
    assert 0.05 * plain < taught - plain < 0.3 * plain


def test_all_tokens_could_be_sent_to_each_device():
    config = small_config(num_devices=4, mesh__expert=4, mesh__fsdp=1, **{**SHAPE, **EXPERTS})
    N = config.train.per_device_batch_size * config.data.seq_len
    rows = rows_of(config, layer_stacks(config.model)[1])
    # A token can send one row to each of 4 devices, which have one expert each.
    assert (rows.assigned, rows.sent) == (2 * N, 4 * N)
    assert rows.stored >= rows.sent
    # Other devices have the other experts, so no device has more weights to read than without them.
    alone = dataclasses.replace(config, mesh=dataclasses.replace(config.mesh, expert=1, data=4))
    assert rows_of(alone, layer_stacks(config.model)[1]).sent == 0
    assert whole_parameters(config) < whole_parameters(alone) == model_parameters(config.model)


def test_unselected_experts_cost_no_operations_for_kernels_of_groups_of_rows():
    config = small_config(**{**SHAPE, **EXPERTS})
    tokamax = dataclasses.replace(config, model=dataclasses.replace(config.model, expert_matmul='tokamax'))
    more = dataclasses.replace(tokamax, model=dataclasses.replace(tokamax.model, num_experts=8))
    tokens = config.train.global_batch_size * config.data.seq_len
    # The router has more outputs, with a mean probability each.
    router = (6 * config.model.dim + 4) * (8 - 4) * (config.model.num_layers - 1) * tokens
    assert estimate_work(more).flops == estimate_work(tokamax).flops + router
    # With XLA's `ragged_dot`, the gradient of the kernels is a product of all rows for every expert.
    ragged = dataclasses.replace(config, model=dataclasses.replace(config.model, expert_matmul='ragged_dot'))
    of_experts = 2 * 3 * config.model.dim * config.model.expert_ffn_dim * (config.model.num_layers - 1) * tokens
    assert estimate_work(ragged).flops == estimate_work(tokamax).flops + 2 * (4 - 1) * of_experts


def test_products_of_muon():
    config = small_config(optimizer__name='muon', **SHAPE)
    assert estimate_work(config).all_flops == traced_flops(config)
    plain = small_config(**SHAPE)
    assert estimate_work(config).all_flops > estimate_work(plain).all_flops


@pytest.mark.parametrize('remat', ['none', 'dots_no_batch', 'full'])
def test_products_of_a_pipeline(remat):
    config = small_config(num_devices=4, mesh__stage=2, model__remat_policy=remat, **SHAPE)
    work = estimate_work(config)
    # Stages also compute in idle rounds, on values that are discarded. The loss has no idle rounds.
    tokens = config.train.global_batch_size * config.data.seq_len / config.batch_shards
    head = 6 * tokens * config.model.dim * VOCAB / 2
    rounds = (config.accumulation + 1) / config.accumulation
    assert 4 * ((work.all_flops - head) * rounds + head) == pytest.approx(traced_flops(config))
    assert work.idle == pytest.approx(1 - 1 / rounds)


def test_products_of_a_fused_kernel_by_hand():
    config = small_config(data__seq_len=32, data__document_mask=False, **SHAPE)
    fused = dataclasses.replace(config, model=dataclasses.replace(config.model, attention='cudnn'))
    per_pair = 2 * 4 * config.model.num_heads * config.model.head_dim
    tokens = config.train.global_batch_size * config.data.seq_len
    # A token sees (window + 1) / 2 tokens on average. The gradient recomputes scores: 2 + 5 products.
    assert estimate_work(fused).attention_flops == 7 * per_pair * tokens * 33 / 2
    # Without the fused kernel, such a short window is a single block of queries and keys, which is computed completely.
    assert estimate_work(config).attention_flops == 7 * per_pair * tokens * 32


def test_documents_need_a_mask_if_the_kernel_does_not_support_them():
    config = small_config(data__seq_len=32, **SHAPE)
    fused = dataclasses.replace(config, model=dataclasses.replace(config.model, attention='cudnn'))
    unmasked = dataclasses.replace(fused, data=dataclasses.replace(fused.data, document_mask=False))
    causal, all_scores = (estimate_work(unmasked), estimate_work(fused))
    # A mask makes the kernel compute all scores, and is read from memory. Ampere and unknown GPUs need it.
    assert all_scores.attention_flops == causal.attention_flops * 64 / 33
    assert all_scores.memory_bytes > causal.memory_bytes
    assert estimate_work(fused, (8, 0)) == all_scores
    # Kernels on Hopper support document starts, but not in a pipeline.
    assert estimate_work(fused, (9, 0)) == estimate_work(unmasked, (9, 0)) == causal
    staged = dataclasses.replace(fused, mesh=dataclasses.replace(fused.mesh, stage=2))
    assert estimate_work(staged, (9, 0)) == estimate_work(staged)


def test_ranges_of_queries_by_hand():
    config = small_config(data__seq_len=512, **SHAPE)
    per_pair = 2 * 4 * config.model.num_heads * config.model.head_dim
    tokens = config.train.global_batch_size * 512
    # Blocks of 128 queries meet 128, 256, 384 and 512 keys.
    assert estimate_work(config).attention_flops == 7 * per_pair * tokens * 320
    narrow = small_config(data__seq_len=512, model__attention_pattern='S', model__sliding_window=128, **SHAPE)
    # With a window of 128, each block after the first meets 127 keys before its own 128.
    assert estimate_work(narrow).attention_flops == 7 * per_pair * tokens * (128 + 3 * 255) / 4


def test_products_of_8_bits_are_those_of_the_blocks():
    config, plain = one_billion(), one_billion()
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, matmul_precision='fp8'))
    work, base = estimate_work(config, (9, 0)), estimate_work(plain, (9, 0))
    tokens = config.train.global_batch_size * config.data.seq_len / 8
    assert work.fp8_flops == work.flops - 6 * tokens * config.model.dim * config.model.vocab_size
    assert (work.flops, base.fp8_flops) == (base.flops, 0)
    # Quantization reads arrays twice more.
    assert work.memory_bytes > base.memory_bytes


def test_a_ring_shares_the_causal_part():
    config = small_config(num_devices=4, mesh__context=4, mesh__fsdp=1, data__seq_len=128, **SHAPE)
    alone = small_config(data__seq_len=128, **SHAPE)
    # Of 16 pairs of chunks, 2 · 4 + 1 are computed, shared by 4 devices.
    share = estimate_work(config).attention_flops / estimate_work(alone).attention_flops
    assert share == pytest.approx(9 / 16 / 4)


def one_billion(**mesh):
    config = load(str(ROOT / 'configs/1b.py'), [f'mesh.{axis}={size}' for axis, size in mesh.items()])
    return resolve(config, platform='gpu', num_devices=8, vocab_size=50_000, windows=1)


def test_devices_share_the_work():
    work = {
        name: estimate_work(one_billion(**mesh))
        for name, mesh in {
            'fsdp': {},
            'data': {'data': 8, 'fsdp': 1},
            'tensor': {'tensor': 2, 'fsdp': 4},
            'zero': {'zero_stage': 1},
        }.items()
    }
    # The total number of matmul operations does not depend on the mesh.
    assert {round(of.all_flops) for of in work.values()} == {round(work['fsdp'].all_flops)}
    # A device with all parameters updates all of them.
    assert work['data'].memory_bytes > work['fsdp'].memory_bytes
    assert work['fsdp'].host_bytes == 0


def test_host_memory():
    parameters = model_parameters(one_billion().model) / 8
    assert estimate_work(one_billion(host_offload='optimizer')).host_bytes == pytest.approx(parameters * 16)
    # Parameters are copied twice for each of 8 micro-batches, and for the update.
    assert estimate_work(one_billion(host_offload='all')).host_bytes == pytest.approx(
        parameters * (16 + 4 * (2 * 8 + 2))
    )


def test_bytes_follow_the_stored_dtypes():
    def moved(**overrides):
        return estimate_work(small_config(**{**SHAPE, **overrides})).memory_bytes

    base = moved()
    parameters = model_parameters(small_config(**SHAPE).model)
    assert base - moved(optimizer__moment_dtype='bfloat16') == pytest.approx(parameters * 8)
    assert moved(optimizer__ema_decay=0.9) - base == pytest.approx(parameters * 8)
    assert moved(model__remat_policy='full') > base
    assert moved(train__global_batch_size=32) > 1.5 * base


def test_parameters_equal_the_model_except_scales_and_biases():
    config = small_config(model__family='llama', model__num_kv_heads=2)
    leaves = jax.tree.leaves(abstract_state(config, small_layout(config)).params)
    scales = (2 * config.model.num_layers + 1) * config.model.dim
    assert model_parameters(config.model) == sum(leaf.size for leaf in leaves) - scales
    assert model_parameters(config.model) - config.model.dim * VOCAB == matmul_parameters(config.model)
