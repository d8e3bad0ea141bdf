"""Tests the comparison with PyTorch on a GPU, with a tiny model on the CPU, and its order of turns."""

import json

import pytest
import torch
from torch.nn.attention import SDPBackend

from benchmarks import peers_gpu
from benchmarks.gpu_peer import FIRST, SIDES, Task
from benchmarks.peer_worker import BATCHES
from benchmarks.peers_gpu import SIZES, find_mistakes, fits_beside_another, measure
from benchmarks.torch_gpt import GPT, make_step
from maxlm.errors import EXIT_BAD_INPUT, EXIT_DONE, EXIT_FAILED, exit_code


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_both_sides_train_the_same_model(tmp_path, monkeypatch, capsys):
    # With more threads than cores, threads wait for each other.
    monkeypatch.setenv('OMP_NUM_THREADS', '1')
    monkeypatch.setattr(peers_gpu, 'TURN_SECONDS', 0.01)
    output = tmp_path / 'peers.json'
    arguments = ['--device=cpu', '--size=tiny', '--eager', '--rounds=3', f'--output={output}']
    assert exit_code(peers_gpu.main, arguments) == EXIT_DONE
    assert 'fastest other side / maxlm' in capsys.readouterr().out
    result = json.loads(output.read_text())
    sides = result['sides']
    assert list(sides) == ['maxlm', 'torch']
    assert all(len(side['turns']) == 3 and len(side['losses']) == FIRST for side in sides.values())
    assert result['ratio'] == pytest.approx(sides['torch']['step_seconds'] / sides['maxlm']['step_seconds'])
    assert {'jax', 'torch', 'date'} <= sides['maxlm']['versions'].keys() | sides['torch']['versions'].keys()
    assert result['mistakes'] == []
    # Controls: in each of the batches, the difference of a few updates is detected.
    losses = sides['maxlm']['losses']
    for index in range(BATCHES):
        other = [*losses[:index], losses[index + BATCHES], *losses[index + 1 :]]
        assert len(find_mistakes({'maxlm': losses, 'other': other})) == 1


def test_mistakes():
    losses = {'maxlm': [5.0, 4.0], 'same': [5.001, 4.001], 'other': [5.0, 4.01], 'broken': [5.0, float('nan')]}
    mistakes = find_mistakes(losses)
    assert [mistake.split()[0] for mistake in mistakes] == ['other', 'broken']


def test_pytorch_compiles_one_graph_with_a_bfloat16_residual_stream():
    config = Task(SIZES['tiny'], 'cpu', True).config
    model, graphs, streams = GPT(config), [], []
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.02)

    def note(graph, _):
        graphs.append(graph)
        return graph.forward

    step = make_step(
        torch.compile(model, dynamic=False, fullgraph=True, backend=note),
        model,
        config,
        autocast=torch.bfloat16,
        attention=SDPBackend.FLASH_ATTENTION,
    )
    tokens = torch.zeros((4, 32), dtype=torch.long)
    assert step(tokens, tokens).isfinite()
    assert len(graphs) == 1
    model.transformer.h[1].register_forward_hook(lambda _, inputs, output: streams.extend([inputs[0], output]))
    with torch.autocast('cpu', dtype=torch.bfloat16):
        model(tokens, tokens)
    model(tokens, tokens)
    assert [stream.dtype for stream in streams] == [torch.bfloat16] * 2 + [torch.float32] * 2


class FakeSide:
    """Fake side that records its calls."""

    def __init__(self, held, log):
        self.memory = {'peak': held, 'held': held, 'limit': 100}
        self.first = {'losses': [1.0], 'versions': {'peak_tflops': 1.0}}
        self.seconds, self.steps, self.log = [], 1, log

    def __call__(self, name, task):
        side = FakeSide(self.memory['held'], self.log)
        side.name = name
        return side

    def start(self):
        self.log.append((self.name, 'start'))

    def turn(self):
        self.log.append((self.name, 'turn'))
        self.seconds.append(0.5 if self.name == 'maxlm' else 0.6)

    def end(self):
        self.log.append((self.name, 'end'))


def run_measurement(held, monkeypatch):
    log = []
    monkeypatch.setattr(peers_gpu, 'Side', FakeSide(held, log))
    result = measure(['maxlm', 'torch'], Task(SIZES['tiny'], 'gpu', True), rounds=2)
    assert result['ratio'] == pytest.approx(1.2)
    return result, log


def test_small_sides_take_turns(monkeypatch):
    result, log = run_measurement(30, monkeypatch)
    assert result['together']
    assert log[:2] == [('maxlm', 'start'), ('torch', 'start')]
    assert [name for name, call in log if call == 'turn'] == ['torch', 'maxlm', 'maxlm', 'torch']


def test_large_sides_follow_each_other(monkeypatch):
    result, log = run_measurement(50, monkeypatch)
    assert not result['together']
    assert log.index(('maxlm', 'end')) < log.index(('torch', 'start'))
    assert [name for name, call in log if call == 'turn'] == ['maxlm', 'maxlm', 'torch', 'torch']


def test_fits_beside_another():
    assert fits_beside_another({'peak': None, 'held': None, 'limit': None})
    assert fits_beside_another({'peak': 1, 'held': 40, 'limit': 100})
    assert not fits_beside_another({'peak': 1, 'held': 41, 'limit': 100})


def test_no_torch(monkeypatch, capsys):
    monkeypatch.setattr(peers_gpu.importlib.util, 'find_spec', lambda name: None)
    assert exit_code(peers_gpu.main, []) == EXIT_BAD_INPUT
    assert 'pip install torch' in capsys.readouterr().err
    assert exit_code(peers_gpu.main, ['--sides=maxlm,jax']) == EXIT_BAD_INPUT
    assert all(name in capsys.readouterr().err for name in [', '.join(SIDES)])


def test_a_side_that_ends_early(monkeypatch, capsys):
    """PyTorch reports that there is no GPU, and the comparison ends."""
    for code, expected in ((EXIT_BAD_INPUT, EXIT_BAD_INPUT), (-9, EXIT_FAILED)):

        def fail(*_, code=code):
            raise peers_gpu.SideError('torch', code)

        monkeypatch.setattr(peers_gpu, 'measure', fail)
        assert exit_code(peers_gpu.main, []) == expected
        assert f'torch ended with exit code {code}' in capsys.readouterr().err
