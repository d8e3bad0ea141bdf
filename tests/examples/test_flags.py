"""Files of the flags example."""

import json

from examples.tasks.flags import NUM_STRIPES, SIZES, is_green, main
from maxlm.errors import EXIT_DONE, exit_code


def test_the_preferred_flag_has_four_stripes_and_more_green(tmp_path):
    assert exit_code(main, ['--output', str(tmp_path)]) == EXIT_DONE
    lines = {name: (tmp_path / f'{name}.jsonl').read_text().splitlines() for name in SIZES}
    entries = {name: list(map(json.loads, each)) for name, each in lines.items()}
    assert {name: len(found) for name, found in entries.items()} == SIZES
    malformed = [pair for pair in entries['pairs'] if len(pair['rejected']) != NUM_STRIPES]
    assert 0.4 < len(malformed) / SIZES['pairs'] < 0.6
    for pair in entries['pairs']:
        assert len(pair['chosen']) == NUM_STRIPES
        assert pair in malformed or pair['chosen'].count('g') > pair['rejected'].count('g')
    names = [chat['messages'][0]['content'] for chat in entries['chats']]
    names += [line['prompt'] for name in ('pairs', 'prompts', 'held_out') for line in entries[name]]
    assert len(set(names)) == sum(SIZES.values())
    green = sum(is_green(chat['messages'][1]['content'], {}) for chat in entries['chats']) / SIZES['chats']
    # Two or more of four stripes: 1 - 0.75⁴ - 4 · 0.25 · 0.75³ = 0.26.
    assert 0.2 < green < 0.32
