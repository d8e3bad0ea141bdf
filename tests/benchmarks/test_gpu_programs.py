"""Tests the analysis of GPU programs: parts add up to the step, and every matmul is counted once."""

from pathlib import Path

import jax
import pytest

from benchmarks import gpu_programs
from benchmarks.gpu_programs import RUNGS, VOCAB, library_products, parts_of
from maxlm.config.loading import load
from maxlm.config.resolve import resolve
from maxlm.errors import EXIT_BAD_INPUT, exit_code
from maxlm.planning.compiled.hlo import parse_hlo
from maxlm.planning.compiled.program import read_program
from maxlm.planning.estimate.work import estimate_work
from maxlm.planning.targets import parse_target
from tests.conftest import ROOT

PROGRAMS = Path(ROOT) / 'tests/planning/compiled/programs'


def resolved(rung):
    target = parse_target(rung.target)
    config = load(str(ROOT / rung.config), rung.overrides)
    vocab_size = config.model.vocab_size or VOCAB
    return resolve(
        config,
        platform='gpu',
        num_devices=target.num_devices,
        vocab_size=vocab_size,
        windows=10**6,
        capability=target.chip.capability,
    )


@pytest.mark.parametrize('rung', RUNGS, ids=lambda rung: f'{rung.name} {rung.target}')
def test_parts_add_up_to_the_step(rung):
    target, config = parse_target(rung.target), resolved(rung)
    work = estimate_work(config, target.chip.capability)
    parts = parts_of(config, work, target)
    assert sum(part.flops for part in parts.values()) == pytest.approx(work.all_flops)
    sent = sum(transfer.sent for transfer in work.transfers)
    assert sum(part.bytes for part in parts.values()) == pytest.approx(work.memory_bytes + sent)
    # Only Muon's update has matmuls.
    muon = config.optimizer.name == 'muon'
    assert (parts['optimizer'].flops > 1e-6 * work.flops) == muon
    assert (parts['collectives'].bytes > 0) == (target.num_devices > 1)
    for name in ('attention', 'projections', 'feed_forward', 'head_and_loss', 'elementwise', 'optimizer'):
        assert 0 < parts[name].least < parts[name].expected
    # Matmuls in fp8 have twice the peak.
    fp8 = config.model.matmul_precision == 'fp8'
    assert parts['projections'].least == pytest.approx(parts['projections'].flops / (1 + fp8) / 989.4e12)


def test_every_matmul_is_counted_once():
    text = (PROGRAMS / 'h100_cublas.txt').read_text()
    module = parse_hlo(text)
    counted = library_products(module)
    assert all(name.startswith('__cublas$') for name in counted)
    sizes = {'replica': 1, 'stage': 1, 'data': 1, 'fsdp': module.num_partitions, 'context': 1, 'tensor': 1}
    flops = read_program(text, sizes).flops
    assert flops > 0
    assert sum(products.flops for products in counted.values()) == pytest.approx(flops)


def test_matmuls_in_loops_and_fusions(monkeypatch):
    text = (PROGRAMS / 'h100_layers.txt').read_text()
    module = parse_hlo(text)
    sizes = {'replica': 1, 'stage': 1, 'data': 1, 'fsdp': module.num_partitions, 'context': 1, 'tensor': 1}
    counted = library_products(module)
    assert sum(products.flops for products in counted.values()) == pytest.approx(read_program(text, sizes).flops)
    # Control: the matmuls are in loops.
    monkeypatch.setattr(gpu_programs, 'trip_count', lambda *_: 1)
    fewer = library_products(module)
    assert sum(products.runs for products in fewer.values()) < sum(products.runs for products in counted.values())


def test_bad_input(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(jax.config, 'update', lambda *_: None)
    output = tmp_path / 'programs.json'
    assert exit_code(gpu_programs.main, ['--only=2b', f'--output={output}']) == EXIT_BAD_INPUT
    assert '7b, 8 layers' in capsys.readouterr().err
    # The process of the tests has no compiler for GPUs.
    assert exit_code(gpu_programs.main, ['--only=1b', f'--output={output}']) == EXIT_BAD_INPUT
    assert '--install-compiler' in capsys.readouterr().err
    assert not output.exists()
