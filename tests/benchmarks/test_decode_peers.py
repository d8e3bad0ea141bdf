"""Tests the comparison of decoding with its peers, with fakes for all sides."""

import sys

import pytest

from benchmarks import decode_peers
from benchmarks.peer_process import Peer

SECONDS = {
    'maxlm': 1.0,
    'llama.cpp': 0.5,
    'transformers': 4.0,
    'maxlm int8': 0.5,
    'maxlm w8a8': 0.2,
    'llama.cpp q8_0': 0.25,
}


class Side:
    """A side that takes a number of seconds for each call, and a hundred times as long at first."""

    def __init__(self, seconds, tokens=7):
        self.seconds, self.tokens, self.prompts = seconds, tokens, []

    def work(self, prompts, num):
        is_first = not any(len(before) == len(prompts) for before in self.prompts[1:])
        self.prompts.append(prompts)
        return {'tokens': [[self.tokens] * num for _ in prompts], 'seconds': self.seconds * (100 if is_first else 1)}


def test_medians_are_compared_without_the_first_round():
    sides = {name: Side(seconds) for name, seconds in SECONDS.items()}
    one, eight = decode_peers.measure(sides, 100, rounds=2)
    assert (one['streams'], eight['streams']) == (1, 8)
    assert one['tokens_per_second']['maxlm'] == 128
    assert eight['tokens_per_second']['maxlm'] == 8 * 128
    ratios = {
        'maxlm / llama.cpp': 0.5,
        'maxlm / transformers': 4.0,
        'maxlm int8 / llama.cpp q8_0': 0.5,
        'maxlm w8a8 / llama.cpp q8_0': 1.25,
    }
    assert one['ratios'] == eight['ratios'] == ratios
    # All sides get the same prompts, and each round has others.
    assert sides['maxlm'].prompts[1:] == sides['llama.cpp q8_0'].prompts
    assert len({str(prompts) for prompts in sides['maxlm'].prompts}) == 7


def test_another_model_is_not_compared():
    sides = {name: Side(1.0, tokens=8 if name == 'llama.cpp' else 7) for name in SECONDS}
    with pytest.raises(SystemExit, match='not the same model'):
        decode_peers.measure(sides, 100, rounds=1)


def test_a_peer_answers_lines():
    program = (
        'import json\nprint(json.dumps({"threads": 2}))\nprint(json.dumps({"twice": 2 * json.loads(input())["x"]}))'
    )
    peer = Peer('doubling', [sys.executable, '-uc', program])
    assert peer.ready == {'threads': 2}
    assert peer.work(x=4) == {'twice': 8}
    with pytest.raises(SystemExit, match='doubling exited with code 0'):
        peer._answer()
    peer.end()
