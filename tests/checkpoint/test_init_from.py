"""Initialization from the checkpoint of another run: larger vocabularies, adapters, positions, and rejected configs."""

import json

import jax
import numpy as np
import pytest
from flax import nnx

from maxlm.checkpoint.streaming import write_step
from maxlm.data.tokenizer.tokenizer import Tokenizer
from maxlm.errors import InputError
from maxlm.training.state import abstract_model, abstract_state, init_state
from maxlm.workdir.files import CONFIG, TOKENIZER, write_run_files
from tests.checkpoint.conftest import KNOWN, OLD
from tests.checkpoint.test_manager import config_on, random_state, same, save
from tests.checkpoint.test_streaming import flatten, streamed
from tests.messages import input_error
from tests.small import small_layout

# Embedding rows in the checkpoint, of which the first KNOWN are tokens, and in the run. The last row of the checkpoint
# is padding. Devices do not divide its number of rows.
ROWS, NEW_ROWS = 61, 72
NEW = OLD.with_special_tokens(['<|im_start|>', '<|im_end|>'])
OTHER = Tokenizer.from_json(OLD.to_json().replace('"A"', '"é"'), name='other')
UNTIED = {'model__family': 'llama'}
TABLES = {'embedding': 0, 'head.kernel': 1, 'value_embeddings': 1}
YARN = {'model__rope_scaling': 'yarn', 'model__rope_scaling_factor': 4.0, 'data__seq_len': 64}


@pytest.fixture(scope='module')
def make(tmp_path_factory):
    """Returns a function that makes a workdir with random parameters at step 7, and caches it by its arguments."""
    made = {}

    def make(tokenizer=OLD, **overrides):
        key = json.dumps([tokenizer and tokenizer.sha256, overrides], sort_keys=True)
        if key not in made:
            workdir = tmp_path_factory.mktemp('origin')
            config = config_on(2, **overrides)
            state = random_state(abstract_state(config, small_layout(config)), step=7, skipped=0)
            save(workdir, [state])
            if tokenizer:
                tokenizer.save(workdir / 'given')
                write_run_files(workdir, config, workdir / 'given')
            made[key] = workdir, flatten(jax.device_get(state.params))
        return made[key]

    return make


def fresh(**overrides):
    config = config_on(2, **overrides)
    return jax.device_get(init_state(config, small_layout(config)))


def assert_grown(params, before, *, rows=NEW_ROWS, known=KNOWN):
    """Asserts that rows below `known` equal `before`, later rows are their mean, and other parameters are unchanged."""
    params = flatten(params)
    assert params.keys() == before.keys()
    for name, values in params.items():
        if name not in TABLES:
            assert np.array_equal(values, before[name]), name
            continue
        table, old = (np.moveaxis(x, TABLES[name], 0) for x in (values, before[name]))
        assert len(table) == rows
        assert np.array_equal(table[:known], old[:known])
        mean = old[:known].mean(axis=0, dtype=np.float64)
        np.testing.assert_allclose(table[known:], np.broadcast_to(mean, table[known:].shape), atol=1e-6)
        # Negative control: the padding row would change the mean.
        assert np.abs(old[: known + 1].mean(axis=0) - mean).max() > 1e-3


@pytest.mark.parametrize(
    ('num_devices', 'overrides'),
    [
        (8, {}),
        (8, {**UNTIED, 'mesh__tensor': 2, 'mesh__fsdp': 2, 'mesh__context': 2}),
        (8, {'mesh__tensor': 8, 'mesh__fsdp': 1, 'model__num_heads': 8}),
        (1, UNTIED),
        (1, {**UNTIED, 'model__value_embedding_pattern': 'V'}),
        (2, {**UNTIED, 'mesh__zero_stage': 1, 'optimizer__ema_decay': 0.9}),
        # With parameters in host memory.
        (2, {**UNTIED, 'mesh__host_offload': 'all'}),
    ],
)
def test_new_token_rows_are_the_mean_of_old_rows(make, start, num_devices, overrides):
    model = {key: value for key, value in overrides.items() if key.startswith('model')}
    origin, before = make(**model)
    random = overrides == {}
    state, out = start(origin, NEW, num_devices=num_devices, model__vocab_size=NEW_ROWS, random=random, **overrides)
    assert_grown(state.params, before)
    assert (
        f'vocabulary grows from {KNOWN} to {KNOWN + 2} tokens: new rows are initialized to the mean of the old rows'
        in out
    )
    if state.ema is not None:
        assert same(state.ema, state.params)
    # Moments are zero, as at the start of a run.
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(state.opt_state))


def test_padding_rows_are_used_for_new_tokens(make, start):
    origin, before = make(model__vocab_size=NEW_ROWS)
    state, out = start(origin, NEW, model__vocab_size=NEW_ROWS)
    assert_grown(state.params, before)
    assert 'vocabulary grows from 60 to 62 tokens' in out
    # Negative control: rows are unchanged if the tokenizer gives the same ids.
    content = json.loads(OLD.to_json())
    content['post_processor'] = {'type': 'ByteLevel', 'add_prefix_space': True, 'trim_offsets': True, 'use_regex': True}
    for tokenizer in (OLD, Tokenizer.from_json(json.dumps(content), name='')):
        state, out = start(origin, tokenizer, model__vocab_size=NEW_ROWS)
        assert same(flatten(state.params), before)
        assert out.count('\n') == 1


def test_larger_tables_for_the_same_tokens(make, start):
    origin, before = make()
    state, out = start(origin, OLD, model__vocab_size=NEW_ROWS)
    assert_grown(state.params, before)
    assert f'grow from {ROWS} to {NEW_ROWS} rows: new rows are initialized to the mean' in out


def test_vocabulary_of_an_import_grows(make, start, tmp_path):
    _, before = make()
    write_step(tmp_path / 'imported', 0, streamed(before))
    OLD.save(tmp_path / 'imported' / TOKENIZER)
    assert_grown(start(tmp_path / 'imported', NEW, model__vocab_size=NEW_ROWS)[0].params, before)


def test_another_tokenizer_of_the_same_size_is_a_warning(make, start):
    origin, before = make()
    state, out = start(origin, OTHER)
    assert same(flatten(state.params), before)
    assert 'is neither the tokenizer' in out
    assert f'--tokenizer {origin}/{TOKENIZER}' in out


def refusal(start, origin, *parts, tokenizer=OLD, **overrides):
    with input_error(f'train.init_from={origin}: ', *parts):
        start(origin, tokenizer, **overrides)


def test_rejected_vocabularies(make, start):
    origin, _ = make()
    larger = {'model__vocab_size': NEW_ROWS}
    refusal(start, origin, 'vocab_size=72', "no token 'A'", f'--tokenizer {origin}', tokenizer=OTHER, **larger)
    padded, _ = make(model__vocab_size=NEW_ROWS)
    refusal(start, padded, 'has 72 embedding rows', 'model.vocab_size=61', f'--tokenizer {padded}/{TOKENIZER}')
    bare, _ = make(tokenizer=None)
    refusal(start, bare, 'has 61 embedding rows', 'model.vocab_size=72', f'copy it to {bare}/{TOKENIZER}', **larger)
    (bare / TOKENIZER).write_text('{')
    try:
        refusal(start, bare, f'{bare}/{TOKENIZER} is not a tokenizer.json', **larger)
    finally:
        (bare / TOKENIZER).unlink()


LORA = {'model__lora_rank': 2}


def is_adapter(name):
    return name.endswith(('lora_a', 'lora_b'))


def test_adapters_are_initialized(make, start):
    origin, before = make(**UNTIED)
    mesh = {'mesh__tensor': 2, 'mesh__fsdp': 2, 'mesh__stage': 2, 'train__per_device_batch_size': 2}
    options = {'num_devices': 8, 'random': True, 'model__vocab_size': NEW_ROWS}
    state, _ = start(origin, NEW, **UNTIED, **LORA, **mesh, **options)
    params, random = flatten(state.params), flatten(fresh(**UNTIED, **LORA, model__vocab_size=NEW_ROWS).params)
    adapters = {name for name in params if is_adapter(name)}
    assert len(adapters) == 2 * 7
    for name in adapters:
        np.testing.assert_allclose(params[name], random[name], atol=1e-6)
        assert np.any(params[name]) == name.endswith('lora_a')
    kernel = 'blocks.attention.query.kernel'
    # Negative control: random initialization gives other kernels.
    assert not np.array_equal(before[kernel], random[kernel])
    assert np.array_equal(before[kernel], params[kernel])
    assert params['embedding'].shape[0] == NEW_ROWS


def test_frozen_rows_of_new_tokens_are_a_warning(make, start):
    origin, _ = make(**UNTIED)
    options = {**UNTIED, **LORA, 'model__vocab_size': NEW_ROWS}
    _, out = start(origin, NEW, **options)
    assert 'the rows of 2 new tokens are not trained' in out
    assert "--config.optimizer.trainable_params=\"('embedding', 'head')\"" in out
    # The parameters that the message names suffice; the embedding alone does not.
    _, out = start(origin, NEW, **options, optimizer__trainable_params=('embedding', 'head'))
    assert 'not trained' not in out
    _, out = start(origin, NEW, **options, optimizer__trainable_params=('embedding',))
    assert 'not trained' in out
    # Control: without new tokens or adapters, nothing is missing.
    assert 'not trained' not in start(origin, OLD, **UNTIED, **LORA)[1]
    assert 'not trained' not in start(origin, NEW, **UNTIED, model__vocab_size=NEW_ROWS)[1]


def test_adapters_are_restored(make, start):
    origin, before = make(**UNTIED, **LORA)
    state, _ = start(origin, **UNTIED, **LORA)
    assert same(flatten(state.params), before)
    # If the checkpoint has fewer adapters, the remaining adapters are initialized.
    fewer, before = make(**UNTIED, **LORA, model__lora_target_modules=('*.query',))
    params = flatten(start(fewer, **UNTIED, **LORA)[0].params)
    assert all(np.array_equal(params[name], before[name]) for name in before)
    assert params.keys() > before.keys()


def test_rejected_adapters(make, start):
    origin, _ = make(**UNTIED, **LORA)
    merge = f'`maxlm checkpoints merge --checkpoint={origin}/checkpoints/7 --output=WORKDIR`'
    refusal(start, origin, merge, 'model.lora_rank=2', **UNTIED)
    refusal(start, origin, merge, 'of rank 2', 'model.lora_rank=4', **UNTIED, model__lora_rank=4)
    refusal(start, origin, merge, 'model.lora_alpha=16', 'has 8', **UNTIED, **LORA, model__lora_alpha=8.0)
    refusal(start, origin, merge, 'lora_target_modules', **UNTIED, **LORA, model__lora_target_modules=('*.query',))


def test_missing_base_parameters_are_rejected(make, start):
    origin, _ = make(**UNTIED, model__qk_norm=False)
    refusal(start, origin, 'missing in the', 'checkpoint of another model', **UNTIED, **LORA, model__qk_norm=True)


def test_learned_positions_do_not_grow(make, start):
    origin, _ = make()
    refusal(start, origin, 'learned positions for 16 tokens', 'the config has 64', 'max_positions=16', data__seq_len=64)
    longer, _ = make(data__seq_len=64)
    refusal(start, longer, 'learned positions for 64 tokens', 'the config has 16', 'max_positions=64')
    # The suggested setting is valid.
    start(longer, model__max_positions=64)


@pytest.mark.parametrize(
    ('overrides', 'line'),
    [
        (YARN, 'sequence length: 16 in the checkpoint, 64 in this run (yarn ×4)'),
        ({**YARN, 'model__original_max_positions': 32}, '16 in the checkpoint, 64 in this run (yarn ×4 of 32)'),
        ({**YARN, 'model__rope_scaling': 'linear'}, '16 in the checkpoint, 64 in this run (linear ×4)'),
        ({'model__rope_theta': 1e6}, '16 in the checkpoint, 16 in this run (rope_theta 10000 → 1e+06)'),
        ({**YARN, 'model__rope_theta': 1e6}, '64 in this run (rope_theta 10000 → 1e+06, yarn ×4)'),
        ({'data__seq_len': 64}, '16 in the checkpoint, 64 in this run (rotary positions, unchanged)'),
        ({}, ''),
    ],
)
def test_sequence_length_is_logged(make, start, overrides, line):
    origin, before = make(**UNTIED)
    state, out = start(origin, **UNTIED, **overrides)
    # The setting does not change parameters.
    assert same(flatten(state.params), before)
    assert line in out
    assert out.count('sequence length: ') == bool(line)


def test_unknown_sequence_length(make, start, tmp_path):
    origin, before = make(**UNTIED)
    write_step(tmp_path / 'bare', 0, streamed(before))
    assert 'sequence length: ' not in start(tmp_path / 'bare', **UNTIED, **YARN)[1]
    (tmp_path / 'bare' / CONFIG).write_text('{')
    out = start(tmp_path / 'bare', **UNTIED, **YARN)[1]
    assert 'config.json' in out
    assert 'sequence length: ' not in out
    # The sequence length of an import is that of its model.
    config = json.loads((origin / CONFIG).read_text())
    config['train']['num_steps'], config['model']['max_positions'] = 0, 32
    (tmp_path / 'bare' / CONFIG).write_text(json.dumps(config))
    assert '32 in the checkpoint, 64 in this run' in start(tmp_path / 'bare', **UNTIED, **YARN)[1]


DENSE = {'model__family': 'llama', 'model__num_layers': 3, 'model__ffn_dim': 24}
UPCYCLED = {
    **DENSE,
    'model__num_dense_layers': 1,
    'model__num_experts': 4,
    'model__num_experts_per_token': 2,
    'train__load_balancing_loss': 0.0,
}


def hidden(params, **overrides):
    config = config_on(1, **overrides)
    graph, _ = nnx.split(abstract_model(config, small_layout(config)))
    tokens = np.random.default_rng(0).integers(0, 50, (2, 8), dtype=np.int32)
    return np.asarray(nnx.merge(graph, params)(tokens)[0])


@pytest.mark.parametrize('mesh', [{}, {'mesh__expert': 4}])
def test_experts_start_as_copies_of_a_dense_model(make, start, mesh):
    workdir, before = make(**DENSE)
    devices = {'num_devices': 8} if mesh else {}
    state, out = start(workdir, random=True, train__upcycling_noise=0.0, **UPCYCLED, **mesh, **devices)
    assert 'each of the 4 experts starts as a copy of the feed-forward of its layer' in out
    experts = state.params['blocks']['feedforward']['experts']['up']['kernel']
    up = before['blocks.feedforward.up.kernel']
    np.testing.assert_array_equal(experts, np.broadcast_to(up[1:, None], experts.shape))
    np.testing.assert_array_equal(state.params['dense_blocks']['feedforward']['up']['kernel'], up[:1])
    dense = {}
    for path, array in before.items():
        *modules, name = path.split('.')
        node = dense
        for module in modules:
            node = node.setdefault(module, {})
        node[name] = array
    expected = hidden(dense, **DENSE)
    np.testing.assert_allclose(hidden(state.params, **UPCYCLED), expected, atol=1e-4)
    # Negative control: a single dense layer computes something else.
    dense['blocks'] = jax.tree.map(lambda leaf: leaf[::-1], dense['blocks'])
    assert np.abs(hidden(dense, **DENSE) - expected).max() > 0.1


def test_copies_of_experts_have_noise(make, start):
    workdir, before = make(**DENSE)
    state, _ = start(workdir, random=True, train__upcycling_noise=0.1, **UPCYCLED)
    up = before['blocks.feedforward.up.kernel']
    noise = state.params['blocks']['feedforward']['experts']['up']['kernel'] - up[1:, None]
    np.testing.assert_allclose(noise.std(axis=(2, 3)), 0.1 * up.std(), rtol=0.2)
    assert np.abs(noise[:, 0] - noise[:, 1]).max() > 0.01


@pytest.mark.parametrize(
    ('change', 'words'),
    [
        ({'model__num_shared_experts': 1}, 'the checkpoint is dense, so it has no shared experts'),
        ({'model__expert_ffn_dim': 12}, 'has width 24, but model.expert_ffn_dim=12; set it to 24'),
    ],
)
def test_experts_that_cannot_be_copies(make, start, change, words):
    workdir, _ = make(**DENSE)
    with pytest.raises(InputError, match=words):
        start(workdir, **{**UPCYCLED, **change})
