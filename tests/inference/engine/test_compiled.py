"""Tests the shapes that the engine compiles, and the division of prompts into them."""

import pytest

from maxlm.inference.engine.compiled import CompiledFunctions
from tests.small import VOCAB, small_config, small_layout


@pytest.fixture(scope='module')
def functions():
    config = small_config(model__max_positions=8192)
    options = {'num_ids': VOCAB, 'num_slots': 4, 'max_context': 8192, 'int8': False, 'chunk': 512}
    return CompiledFunctions(config, small_layout(config), **options)


def test_a_cpu_server_compiles_seven_programs(functions):
    names = [name.partition(' (')[0] for name, *_ in functions.warm_up_calls()]
    prefill = [f'prefill {size} tokens' for size in (32, 128, 512)]
    assert names == ['drop tokens', 'copy slot', 'decode 1 slots', 'decode 4 slots', *prefill]


@pytest.mark.parametrize(
    ('prompt', 'chunks'),
    [
        (1, [1]),
        (32, [32]),
        (40, [32, 8]),
        (64, [32, 32]),
        (65, [65]),
        (128, [128]),
        (130, [128, 2]),
        (200, [128, 72]),
        (256, [128, 128]),
        (257, [257]),
        (1200, [512, 512, 128, 32, 16]),
    ],
)
def test_padding_is_less_than_half_of_a_chunk(functions, prompt, chunks):
    found, computed, left = [], 0, prompt
    while left:
        length = functions.chunk_length(left)
        found.append(length)
        computed += next(size for size in functions.chunk_sizes if size >= length)
        left -= length
    assert found == chunks
    # Control: sizes that double, which were 5 programs, compute no fewer tokens.
    full, rest = divmod(prompt, 512)
    doubled = 512 * full + (next(size for size in (32, 64, 128, 256, 512) if size >= rest) if rest else 0)
    assert computed <= doubled
