"""Tests that damaged and unsupported GGUF files are refused in one line, without a partial import."""

import struct

import numpy as np
import pytest

from maxlm.errors import InputError
from maxlm.huggingface.gguf.header import GgufFiles
from maxlm.huggingface.gguf.import_gguf import find_gguf, import_gguf
from tests.huggingface.gguf.files import gguf, write

F32 = gguf.GGMLQuantizationType.F32
DIM, VOCAB = 8, 300
METADATA = {
    'general.architecture': 'llama',
    'llama.block_count': 1,
    'llama.context_length': 64,
    'llama.embedding_length': DIM,
    'llama.feed_forward_length': 16,
    'llama.attention.head_count': 2,
    'llama.attention.layer_norm_rms_epsilon': 1e-5,
}
SHAPES = {
    'token_embd.weight': (VOCAB, DIM),
    'output_norm.weight': (DIM,),
    **{f'blk.0.{name}_norm.weight': (DIM,) for name in ('attn', 'ffn')},
    **{f'blk.0.attn_{name}.weight': (DIM, DIM) for name in ('q', 'k', 'v', 'output')},
    **{f'blk.0.ffn_{name}.weight': (16, DIM) for name in ('gate', 'up')},
    'blk.0.ffn_down.weight': (DIM, 16),
}


def tensors(**shapes):
    return {name: (np.ones(shape, np.float32), F32) for name, shape in {**SHAPES, **shapes}.items() if shape}


def refuse(path, *fragments):
    output = path.parent / 'imported'
    with pytest.raises(InputError) as info:
        import_gguf(path, str(output), tokenizer='', show=False)
    message = str(info.value)
    for fragment in fragments:
        assert fragment in message
    assert '\n' not in message
    assert not list(path.parent.glob('*imported*'))


def test_the_model_of_these_tests_is_valid(tmp_path):
    done = import_gguf(
        write(tmp_path / 'a.gguf', METADATA, tensors()), str(tmp_path / 'imported'), tokenizer='', show=False
    )
    assert done.parameters == sum(int(np.prod(shape)) for shape in SHAPES.values())


@pytest.mark.parametrize(
    ('changes', 'fragments'),
    [
        ({'general.architecture': 'bert'}, ["general.architecture='bert'", 'use one of', 'llama']),
        ({'llama.block_count': None}, ['llama.block_count', 'missing']),
        ({'llama.block_count': 'one'}, ["llama.block_count='one'", 'integer']),
        ({'llama.attention.head_count': 0}, ['llama.attention.head_count=0']),
        ({'llama.attention.head_count_kv': [1, 2]}, ['head_count_kv=[1, 2]', 'layers of one shape']),
        ({'llama.attention.layer_norm_rms_epsilon': float('nan')}, ['layer_norm_rms_epsilon=nan', 'finite']),
        ({'llama.attention.clamp_kqv': 8.0}, ['llama.attention.clamp_kqv=8.0', '--remove-metadata']),
        ({'llama.rope.dimension_count': 2}, ['rope.dimension_count=2', 'must be 4']),
        ({'llama.rope.scaling.type': 'other'}, ["rope.scaling.type='other'", 'yarn']),
        ({'llama.rope.scaling.attn_factor': 1.5}, ['rope.scaling.attn_factor=1.5', 'yarn']),
        ({'llama.attention.value_length': 2}, ['attention.value_length=2', '4']),
        ({'llama.context_length': 0}, ['llama.context_length=0']),
        ({'llama.embedding_length': 12}, ['token_embd.weight', '(300, 8)', '(300, 12)']),
        ({'tokenizer.ggml.model': 'bert', 'tokenizer.ggml.tokens': ['a']}, ["tokenizer.ggml.model='bert'"]),
        (
            {'tokenizer.ggml.model': 'gpt2', 'tokenizer.ggml.tokens': ['a'], 'tokenizer.ggml.pre': 'odd'},
            ["tokenizer.ggml.pre='odd'", 'llama-bpe', '--tokenizer=FILE'],
        ),
        (
            {'tokenizer.ggml.model': 'gpt2', 'tokenizer.ggml.tokens': ['a'], 'tokenizer.ggml.token_type': [1, 1]},
            ['1 tokens', '2 types'],
        ),
        (
            {'tokenizer.ggml.model': 'llama', 'tokenizer.ggml.tokens': ['a'], 'tokenizer.ggml.scores': [1.0]},
            ['<0x00>'],
        ),
        (
            {
                'tokenizer.ggml.model': 'gpt2',
                'tokenizer.ggml.pre': 'gpt-2',
                'tokenizer.ggml.tokens': ['a'],
                'tokenizer.ggml.eos_token_id': 7,
            },
            ['eos_token_id=7'],
        ),
    ],
    ids=str,
)
def test_metadata(tmp_path, changes, fragments):
    values = {key: value for key, value in {**METADATA, **changes}.items() if value is not None}
    refuse(write(tmp_path / 'a.gguf', values, tensors()), *fragments)


@pytest.mark.parametrize(
    ('shapes', 'fragments'),
    [
        ({'token_embd.weight': None}, ['token_embd.weight is missing']),
        ({'blk.0.attn_k.weight': None}, ['blk.0.attn_k.weight', 'missing']),
        ({'blk.1.attn_k.weight': (DIM, DIM)}, ['blk.1.attn_k.weight', 'not in the model']),
        ({'blk.0.attn_k.weight': (4, DIM)}, ['blk.0.attn_k.weight', '(4, 8)', '(8, 8)']),
        ({'rope_freqs.weight': (3,)}, ['rope_freqs.weight', 'heads of 4']),
    ],
    ids=str,
)
def test_tensors(tmp_path, shapes, fragments):
    refuse(write(tmp_path / 'a.gguf', METADATA, tensors(**shapes)), *fragments)


def test_factors_that_are_not_of_llama3(tmp_path):
    values = tensors() | {'rope_freqs.weight': (np.array([3, 5], np.float32), F32)}
    refuse(write(tmp_path / 'a.gguf', METADATA, values), 'rope_freqs.weight', 'llama3')


def test_values_that_are_not_finite(tmp_path):
    values = tensors()
    values['blk.0.ffn_down.weight'][0][3, 3] = np.inf
    refuse(write(tmp_path / 'a.gguf', METADATA, values), 'blk.0.ffn_down.weight', 'not finite')


def test_each_truncation(tmp_path):
    content = write(tmp_path / 'whole.gguf', METADATA, tensors()).read_bytes()
    header = content.index(b'blk.0.ffn_down.weight')
    path = tmp_path / 'a.gguf'
    for size in [*range(0, header, 37), header + 40, len(content) - 1]:
        path.write_bytes(content[:size])
        refuse(path, str(path), 'download it again')


@pytest.mark.parametrize(
    ('header', 'fragments'),
    [
        (b'PK\x03\x04' + bytes(100), ['does not begin with GGUF']),
        (b'GGUF' + struct.pack('<I', 1) + bytes(100), ['version is 1']),
        (b'GGUF' + struct.pack('>I', 3) + bytes(100), ['big-endian']),
        (b'GGUF' + struct.pack('<IQQ', 3, 2**60, 0), ['ends in its header']),
        (b'GGUF' + struct.pack('<IQQ', 3, 0, 2**60), ['ends in its header']),
        # A list of 2**60 texts, and one of 2**60 numbers.
        (b'GGUF' + struct.pack('<IQQQ1sIIQ', 3, 0, 1, 1, b'a', 9, 8, 2**60), ['ends in its header']),
        (b'GGUF' + struct.pack('<IQQQ1sIIQ', 3, 0, 1, 1, b'a', 9, 4, 2**60), ['ends in its header']),
        (b'GGUF' + struct.pack('<IQQQ1sI', 3, 0, 1, 1, b'a', 77), ['unknown type 77']),
        (b'GGUF' + struct.pack('<IQQQ1sIQIQ', 3, 1, 0, 1, b'a', 1, 5, 999, 0), ['tensor a', 'unknown type 999']),
        (b'GGUF' + struct.pack('<IQQQ1sI', 3, 1, 0, 1, b'a', 9), ['9 axes']),
        (b'GGUF' + struct.pack('<IQQQ1sIQIQ', 3, 1, 0, 1, b'a', 1, 2**50, 0, 0), ['has 57 bytes', 'ends at']),
    ],
    ids=repr,
)
def test_headers(tmp_path, header, fragments):
    path = tmp_path / 'a.gguf'
    path.write_bytes(header)
    refuse(path, *fragments)


def test_tensors_that_overlap(tmp_path):
    content = write(tmp_path / 'whole.gguf', METADATA, tensors()).read_bytes()
    name = b'blk.0.attn_k.weight'
    # After the name are the number of axes, two sizes and the type.
    place = content.index(name) + len(name) + 4 + 2 * 8 + 4
    path = tmp_path / 'a.gguf'
    path.write_bytes(content[:place] + struct.pack('<Q', 0) + content[place + 8 :])
    refuse(path, 'blk.0.attn_k.weight', 'overlap', 'download it again')


def split(folder, **metadata):
    """Writes a model in two files."""
    halves = list(tensors().items())
    common = {'split.count': 2, 'split.tensors.count': len(halves)} | metadata
    first, second = (folder / f'model-0000{number}-of-00002.gguf' for number in (1, 2))
    write(first, {**METADATA, 'split.no': 0, **common}, dict(halves[:5]))
    write(second, {'general.architecture': 'llama', 'split.no': 1, **common}, dict(halves[5:]))
    return first, second


def test_a_split_file(tmp_path):
    first, second = split(tmp_path)
    assert find_gguf(str(tmp_path)) == first
    files = [GgufFiles(path) for path in (first, second)]
    assert {name: tensor.path for name, tensor in files[0].tensors.items()}.keys() == SHAPES.keys()
    assert files[0].tensors == files[1].tensors
    assert {tensor.path for tensor in files[0].tensors.values()} == {first, second}
    second.unlink()
    refuse(first, '1 of 2 parts are missing', second.name)


def test_a_split_file_with_another_name(tmp_path):
    first, _ = split(tmp_path)
    refuse(first.rename(tmp_path / 'model.gguf'), 'part 0 of 2')


def test_a_directory_of_several_models(tmp_path):
    for name in ('a', 'b'):
        write(tmp_path / f'{name}.gguf', METADATA, tensors())
    with pytest.raises(InputError, match=r'contains 2 models, e\.g\. a\.gguf'):
        find_gguf(str(tmp_path))
    assert find_gguf(str(tmp_path / 'b.gguf')) == tmp_path / 'b.gguf'
    assert find_gguf(str(tmp_path / 'missing')) is None
