"""Tests the comparison with PyTorch on a GPU, with a tiny model on the CPU, and its order of turns."""

import json
import sys

import pytest
import torch
from torch.nn.attention import SDPBackend

from benchmarks import gpu_peer, peers_gpu
from benchmarks.gpu_peer import EXIT_NO_MEMORY, FIRST, SIDES, Task, fastest_layout
from benchmarks.nanochat_step import nanochat_classes
from benchmarks.peer_worker import BATCHES
from benchmarks.peers_gpu import SIZES, find_mistakes, fits_beside_others, measure, sweep
from benchmarks.torch_gpt import GPT, make_step
from maxlm.errors import EXIT_BAD_INPUT, EXIT_DONE, EXIT_FAILED, InputError, exit_code
from maxlm.planning.forecast import estimate
from maxlm.planning.machine import Machine, usable_memory
from maxlm.planning.targets import parse_target

# A package with the interface of nanochat that `benchmarks.nanochat_step` uses.
NANOCHAT = """
import dataclasses, torch

@dataclasses.dataclass
class GPTConfig:
    sequence_len: int
    vocab_size: int
    n_layer: int
    n_head: int
    n_kv_head: int
    n_embd: int
    window_pattern: str

class GPT(torch.nn.Module):
    def __init__(self, config):
        super().__init__()
        self.table = torch.nn.Embedding(config.vocab_size, config.n_embd)

    def init_weights(self):
        torch.nn.init.normal_(self.table.weight)

    def setup_optimizer(self):
        print('nanochat prints its settings')
        return torch.optim.SGD(self.parameters(), lr=1.0)

    def num_matmul_params(self):
        return self.table.weight.numel()

    def forward(self, tokens, targets):
        logits = self.table(tokens) @ self.table.weight.T
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
"""


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_all_sides_but_nanochat_train_the_same_model(tmp_path, monkeypatch, capsys):
    # With more threads than cores, threads wait for each other.
    monkeypatch.setenv('OMP_NUM_THREADS', '1')
    monkeypatch.setattr(peers_gpu, 'TURN_SECONDS', 0.01)
    (tmp_path / 'nanochat').mkdir()
    (tmp_path / 'nanochat/gpt.py').write_text(NANOCHAT)
    output = tmp_path / 'peers.json'
    arguments = ['--device=cpu', '--size=tiny', '--compile=none', '--rounds=3', '--batches=4,2']
    assert exit_code(peers_gpu.main, [*arguments, f'--nanochat={tmp_path}', f'--output={output}']) == EXIT_DONE
    printed = capsys.readouterr().out
    assert 'tokens/s of maxlm / fastest other side' in printed
    assert 'maxlm: batch=' in printed
    result = json.loads(output.read_text())
    names = ['maxlm', 'torch', 'transformers', 'nanochat']
    assert [list(batch['sides']) for batch in result['batches']] == [names, names]
    for name, side in result['sides'].items():
        assert len(side['turns']) == 3
        assert len(side['losses']) == FIRST
        measured = [batch['sides'][name]['tokens_per_second'] for batch in result['batches']]
        assert side['tokens_per_second'] == max(measured)
        # The random weights of nanochat's model lose against those of the others, and learn.
        assert side['losses'][-1] < side['losses'][BATCHES - 1]
    rates = {name: side['tokens_per_second'] for name, side in result['sides'].items()}
    assert result['ratio'] == pytest.approx(rates['maxlm'] / max(rates['torch'], rates['transformers']))
    settings = {name: side['versions']['settings'] for name, side in result['sides'].items()}
    assert settings['maxlm']['remat_policy'] in ('none', 'dots_no_batch', 'full')
    assert settings['torch'] == {
        'compile': 'none',
        'attention': 'FLASH_ATTENTION',
        'autocast': 'bfloat16',
        'parameters': 'float32',
        'optimizer': 'fused AdamW',
    }
    assert settings['nanochat']['parameters'] == 128 * 32
    assert {'jax', 'torch', 'date'} <= set().union(*(side['versions'] for side in result['sides'].values()))
    assert result['mistakes'] == []
    # Controls: in each of the batches, the difference of a few updates is detected.
    losses = result['batches'][0]['sides']['maxlm']['losses']
    for index in range(BATCHES):
        other = [*losses[:index], losses[index + BATCHES], *losses[index + 1 :]]
        assert len(find_mistakes({'maxlm': losses, 'other': other})) == 1


def test_mistakes():
    losses = {'maxlm': [5.0, 4.0], 'same': [5.001, 4.001], 'other': [5.0, 4.01], 'broken': [5.0, float('nan')]}
    mistakes = find_mistakes(losses)
    assert [mistake.split()[0] for mistake in mistakes] == ['other', 'broken']


def test_pytorch_compiles_one_graph_with_a_bfloat16_residual_stream():
    config = Task(SIZES['tiny'], 'cpu', 'default').config
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
    """Fake side that records its calls. PyTorch's needs too much memory with a batch of 8."""

    def __init__(self, held, log):
        self.memory = {'peak': held, 'held': held, 'limit': 100}
        self.first = {'losses': [1.0], 'versions': {'peak_tflops': 1.0}}
        self.seconds, self.steps, self.log = [], 1, log

    def __call__(self, name, task):
        side = FakeSide(self.memory['held'], self.log)
        side.name, side.batch = name, task.sizes['batch']
        return side

    def start(self):
        if self.name == 'torch' and self.batch == 8:
            raise peers_gpu.SideError(self.name, EXIT_NO_MEMORY)
        self.log.append((self.name, 'start'))

    def turn(self):
        self.log.append((self.name, 'turn'))
        # Smaller batches are less efficient.
        self.seconds.append((0.5 if self.name == 'maxlm' else 0.6) + self.batch / 8)

    def end(self):
        self.log.append((self.name, 'end'))


@pytest.fixture
def tiny():
    return Task(SIZES['tiny'], 'gpu', 'none')


def run_measurement(held, monkeypatch, task):
    log = []
    monkeypatch.setattr(peers_gpu, 'Side', FakeSide(held, log))
    return measure(['maxlm', 'torch'], task, rounds=2), log


def test_each_side_has_its_best_batch(tiny, monkeypatch, capsys):
    monkeypatch.setattr(peers_gpu, 'Side', FakeSide(30, []))
    result = sweep(['maxlm', 'torch'], tiny, [2, 4, 8], rounds=2)
    assert {name: side['batch'] for name, side in result['sides'].items()} == {'maxlm': 8, 'torch': 4}
    assert result['ratio'] == pytest.approx((8 / 1.5) / (4 / 1.1))
    assert 'torch: a batch of 8 does not fit' in capsys.readouterr().out
    with pytest.raises(InputError, match='torch: no batch of 8 fits'):
        sweep(['maxlm', 'torch'], tiny, [8], rounds=2)


def test_the_layout_of_maxlm_is_the_fastest_that_fits(monkeypatch):
    """An H100 has the memory for saving all activations of the 1.3B model; half of its memory is too small."""
    target = parse_target('h100:1')
    task = Task(SIZES['1.3B'], 'gpu', 'none')
    monkeypatch.setattr(gpu_peer, 'compile_for', lambda config, machine, _: estimate(config, machine))

    def layout(available):
        monkeypatch.setattr(gpu_peer, 'present_machine', lambda _: Machine(target, available))
        config = fastest_layout(task).forecast.config
        return config.model.remat_policy, config.model.scan_layers, config.train.per_device_batch_size

    memory = usable_memory(target.chip)
    assert layout(memory) == ('none', False, 8)
    assert layout(memory // 2) != ('none', False, 8)
    with pytest.raises(MemoryError, match='no layout fits'):
        layout(10**9)


def test_small_sides_take_turns(tiny, monkeypatch):
    result, log = run_measurement(30, monkeypatch, tiny)
    assert result['together']
    assert log[:2] == [('maxlm', 'start'), ('torch', 'start')]
    assert [name for name, call in log if call == 'turn'] == ['torch', 'maxlm', 'maxlm', 'torch']


def test_large_sides_follow_each_other(tiny, monkeypatch):
    result, log = run_measurement(50, monkeypatch, tiny)
    assert not result['together']
    assert log.index(('maxlm', 'end')) < log.index(('torch', 'start'))
    assert [name for name, call in log if call == 'turn'] == ['maxlm', 'maxlm', 'torch', 'torch']


def test_fits_beside_others():
    assert fits_beside_others({'peak': None, 'held': None, 'limit': None}, 2)
    assert fits_beside_others({'peak': 1, 'held': 40, 'limit': 100}, 2)
    assert not fits_beside_others({'peak': 1, 'held': 41, 'limit': 100}, 2)
    assert not fits_beside_others({'peak': 1, 'held': 40, 'limit': 100}, 3)


def test_no_torch(monkeypatch, capsys):
    monkeypatch.setattr(peers_gpu.importlib.util, 'find_spec', lambda name: None)
    assert exit_code(peers_gpu.main, []) == EXIT_BAD_INPUT
    assert 'pip install torch' in capsys.readouterr().err
    assert exit_code(peers_gpu.main, ['--sides=maxlm,jax']) == EXIT_BAD_INPUT
    assert ', '.join(SIDES) in capsys.readouterr().err


def test_nanochat_needs_its_source(monkeypatch, capsys):
    assert exit_code(peers_gpu.main, ['--sides=maxlm,nanochat']) == EXIT_BAD_INPUT
    assert '--nanochat=DIR' in capsys.readouterr().err
    monkeypatch.setattr(sys, 'path', list(sys.path))
    monkeypatch.setenv('NANOCHAT_DTYPE', 'bfloat16')
    with pytest.raises(InputError, match=r'contains nanochat/gpt\.py'):
        nanochat_classes('/nowhere')


def test_a_side_that_ends_early(monkeypatch, capsys):
    """PyTorch reports that there is no GPU, and the comparison ends."""
    for code, expected in ((EXIT_BAD_INPUT, EXIT_BAD_INPUT), (-9, EXIT_FAILED)):

        def fail(*_, code=code):
            raise peers_gpu.SideError('torch', code)

        monkeypatch.setattr(peers_gpu, 'sweep', fail)
        assert exit_code(peers_gpu.main, []) == expected
        assert f'torch ended with exit code {code}' in capsys.readouterr().err
