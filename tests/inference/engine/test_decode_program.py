"""Decoding compiled for an absent GPU: one graph for all passes of a call, few kernels, and no copies of parameters."""

import json

import pytest

from benchmarks.decode_program import host_turns
from tests.conftest import ROOT
from tests.gpu_compiler import needs_gpu_compiler, run_python

LAYERS = 2
SMALL = (f'--config.model.num_layers={LAYERS}', '--config.model.vocab_size=1024', '--context=128')
# The steps of a program of which the host starts each pass, as XLA prints them.
THUNKS = """001: kCopy [source]
002: kWhile [prev=001]
condition:
    003: kCustomKernel [source | sink] compare
  body:
    000: kCommandBuffer [source | sink]
        004: kCustomKernel [source] add
        005: kConditional [prev=004]
    006: kConditional [prev=000]
        007: kCustomKernel [source | sink] sort
"""


@needs_gpu_compiler
@pytest.mark.parametrize('slots', [1, 4])
def test_a_call_is_one_graph_and_reads_each_array_once(slots, tmp_path):
    output = tmp_path / 'out.json'
    arguments = (f'--config={ROOT}/configs/1b.py', *SMALL, f'--batches={slots}', f'--output={output}')
    done = run_python('-m', 'benchmarks.decode_program', *arguments)
    assert done.returncode == 0, done.stderr
    (found,) = json.loads(output.read_text())['results']
    assert (found['host_waits_per_pass'], found['is_one_graph']) == (0, 1)
    assert found['kernels_per_pass'] <= 18 * LAYERS + 60
    # No parameter is copied before the first pass, and sampling has the rest.
    assert found['bytes_per_call'] < 0.01 * found['weight_and_cache_bytes']
    sampling = slots * 1024 * 4 * 40
    assert found['bytes_per_pass'] < 1.05 * found['weight_and_cache_bytes'] + sampling


def test_host_turns_are_counted():
    assert host_turns(THUNKS) == {'host_waits_per_pass': 2, 'launches_per_pass': 4, 'is_one_graph': 0}
    # Control: in a graph, nothing waits for the host.
    in_graph = '000: kCommandBuffer [source | sink]\n' + ''.join(f'    {line}\n' for line in THUNKS.splitlines())
    assert host_turns(in_graph) == {'host_waits_per_pass': 0, 'launches_per_pass': 0, 'is_one_graph': 1}
