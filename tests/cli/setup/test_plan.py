"""`maxlm plan` by estimate: output, suggestions and errors.

tests/cli/setup/test_plan_compiled.py tests compilers.
"""

import json
import re

import pytest

from maxlm.api import plan as api_plan
from maxlm.cli.setup import plan
from maxlm.config.loading import load
from maxlm.errors import EXIT_BAD_INPUT, EXIT_DONE, EXIT_FAILED
from maxlm.planning.targets import CompilerMissingError, parse_target
from tests.conftest import ROOT
from tests.messages import assert_error_line
from tests.shards import write_dataset


@pytest.fixture
def run(run_command):
    """Returns a function that plans a config of the repository."""
    return lambda config, target, *options: run_command(
        plan.main, f'--config={ROOT}/configs/{config}', f'--target={target}', *options
    )


@pytest.fixture
def figures(run):
    """Returns a function for the output of --json."""

    def figures(*arguments):
        code, out, _ = run(*arguments, '--json')
        report = json.loads(out)
        assert code == (EXIT_DONE if report['fits'] else EXIT_FAILED)
        return report

    return figures


def test_text_output(run):
    code, out, err = run('1b.py', 'h100:8', '--estimate')
    assert code == EXIT_DONE
    assert err == ''
    for words in (
        '8 × h100',
        '759,905,280 parameters, mesh fsdp=8; 512 × 2048 tokens per step in 8 micro-batches of 8 per device',
        'memory      fits: ',
        'activations ',
        'all-gather along fsdp',
        's per step (estimated)',
        'MFU ',
        '100,000 steps, 105B tokens',
        'per device-hour',
        'checkpoint  8.49 GiB',
    ):
        assert words in out
    assert out.startswith('All figures are estimates: --estimate\n')
    assert '--config.' not in out


def test_json_output(figures):
    report = figures('1b.py', 'h100:8', '--estimate')
    assert report['fits']
    assert report['is_estimate']
    memory = report['memory']
    kinds = ('parameters', 'moments', 'average', 'gradients', 'activations', 'temporary', 'batch')
    assert sum(memory[kind] for kind in kinds) == memory['total'] <= memory['available'] < memory['chip']
    # Twelve bytes per parameter, sharded over eight devices.
    assert memory['parameters'] + memory['moments'] == pytest.approx(12 * 759_905_280 / 8, rel=0.01)
    assert report['tokens_per_second'] == pytest.approx(512 * 2048 / report['step_seconds'])
    assert report['hours'] == pytest.approx(100_000 * report['step_seconds'] / 3600, rel=0.05)
    assert report['dollars'] == pytest.approx(report['hours'] * 8 * report['cost']['price']['dollars'])
    assert 0.2 < report['mfu'] < report['mfu_full'] < 0.8
    assert report['advice'] is None
    # Negative controls: another chip, a shorter run, another price.
    assert figures('1b.py', 'a100:8', '--estimate')['step_seconds'] > report['step_seconds']
    half = figures('1b.py', 'h100:8', '--estimate', '--config.train.num_steps=50000', '--price-per-hour=1')
    assert half['hours'] == pytest.approx(report['hours'] / 2, rel=0.01)
    assert half['dollars'] == pytest.approx(half['hours'] * 8)


def test_memory_excess_and_advice_that_fits(run, figures):
    arguments = ('depth.py:64-2025', 'h100:8', '--estimate', '--config.model.remat_policy=none', '--vocab-size=32')
    code, out, _ = run(*arguments)
    assert code == EXIT_FAILED
    report = figures(*arguments)
    over = (report['memory']['total'] - report['memory']['available']) / 2**30
    (shown,) = re.findall(r'DOES NOT FIT: ([\d.]+) GiB over the limit', out)
    assert float(shown) == pytest.approx(over, rel=0.01)
    advice = out.splitlines()[-1].split()
    assert advice == report['advice']
    assert any('model.remat_policy' in override or 'micro_batch' in override for override in advice)
    code, out, _ = run(*arguments, *advice)
    assert code == EXIT_DONE
    assert 'fits: ' in out


def test_no_configuration_fits(run):
    code, out, _ = run('code.py:70b', 'l4:1', '--estimate')
    assert code == EXIT_FAILED
    assert 'fits l4:1; use more devices' in out


def test_search_finds_a_faster_configuration(figures):
    plain = figures('code.py:7b', 'h100:8', '--estimate')
    fitted = figures('code.py:7b', 'h100:8', '--estimate', '--search')
    assert fitted['fits']
    assert fitted['step_seconds'] < plain['step_seconds']
    pasted = figures('code.py:7b', 'h100:8', '--estimate', *fitted['advice'])
    assert pasted['step_seconds'] == fitted['step_seconds']
    assert pasted['memory'] == fitted['memory']


def test_auto_micro_batch(run):
    code, out, _ = run('1b.py', 'h100:8', '--estimate', '--config.train.per_device_batch_size=auto')
    assert code == EXIT_DONE
    assert ' micro-batches of 16 per device' in out


def test_a_target_without_a_compiler_is_estimated(run, figures, monkeypatch):
    def missing(target):
        raise CompilerMissingError("no compiler for v4 (libtpu) is installed; run pip install 'maxlm[tpu]'")

    monkeypatch.setattr(api_plan, 'check_compiler', missing)
    code, out, _ = run('1b.py', 'v4:2x2x4', '--config.model.remat_policy=full')
    assert code == EXIT_DONE
    assert "estimates: no compiler for v4 (libtpu) is installed; run pip install 'maxlm[tpu]'" in out
    report = figures('1b.py', 'v4:2x2x4', '--config.model.remat_policy=full')
    assert report['is_estimate']
    assert 'maxlm[tpu]' in report['why_estimated']


def test_experts_without_their_kernels_are_estimated(run, figures, monkeypatch):
    monkeypatch.setattr(api_plan, 'check_compiler', lambda target: None)
    monkeypatch.setattr(api_plan, 'find_spec', lambda name: None)
    code, out, _ = run('moe.py:8x1b', 'h100:8')
    assert code == EXIT_DONE
    assert '6,873,221,120 parameters (2,041,382,912 active per token), mesh fsdp=8' in out
    assert 'estimates: the kernels of experts for GPUs need the package tokamax; run pip install' in out
    report = figures('moe.py:8x1b', 'h100:8')
    assert (report['parameters'], report['active_parameters']) == (6_873_221_120, 2_041_382_912)
    # Control: MFU counts the active parameters, so it is far below 1.
    assert 0.2 < report['mfu'] < 0.6
    monkeypatch.setattr(api_plan, 'find_spec', lambda name: name)
    config = load(f'{ROOT}/configs/moe.py:8x1b')
    assert not api_plan.why_estimated(config, parse_target('h100:8'), estimate=False)
    assert 'only on the GPU itself' in api_plan.why_estimated(config, parse_target('b200:8'), estimate=False)


def test_cpu(figures):
    report = figures('tiny.py', 'cpu:2', '--vocab-size=512', '--config.model.num_layers=2', '--config.data.seq_len=64')
    assert report['fits']
    assert not report['is_estimate']
    assert report['why_estimated'] is None
    assert report['step_seconds'] > 0
    assert report['dollars'] == 0


def test_steps_of_a_budget(run):
    code, out, _ = run('depth.py:24', 'h100:8', '--estimate', '--hours=4')
    assert code == EXIT_DONE
    (steps,) = re.findall(r'budget of 4 h: .* tokens, --config\.train\.num_steps=(\d+)', out)
    _, out, _ = run('depth.py:24', 'h100:8', '--estimate', f'--config.train.num_steps={steps}')
    assert re.search(r': (3 h 5\d|4 h 0\d) min, ', out)
    _, dollars, _ = run('depth.py:24', 'h100:8', '--estimate', '--dollars=64', '--price-per-hour=2')
    assert 'budget of $64: ' in dollars
    assert f'num_steps={steps}' in dollars


def test_a_config_whose_length_is_a_budget(figures):
    hours = figures('1b.py', 'h100:8', '--estimate', '--config.train.hours=24')
    assert hours['hours'] == pytest.approx(24, rel=0.01)
    assert hours['cost']['steps'] == pytest.approx(24 * 3600 / hours['step_seconds'], rel=0.05)
    dollars = figures('1b.py', 'h100:8', '--estimate', '--config.train.dollars=500', '--config.train.price_per_hour=2')
    assert dollars['dollars'] == pytest.approx(500, rel=0.01)
    assert dollars['hours'] == pytest.approx(500 / 16, rel=0.01)


def test_sweep(run, tmp_path):
    budget = '--dollars=100000'
    code, out, err = run('1b.py', 'h100:8', '--sweep=8,16', budget, f'--output={tmp_path}/sweep.png')
    assert code == EXIT_DONE, err
    assert 'strong' in out
    assert 'weak' in out
    assert 'sizes on h100:8' in out
    assert (tmp_path / 'sweep.png').read_bytes().startswith(b'\x89PNG')

    code, out, err = run('1b.py', 'h100:8', '--sweep=8,64,512', budget, f'--output={tmp_path}/sweep.html', '--json')
    assert code == EXIT_DONE, err
    page = (tmp_path / 'sweep.html').read_text()
    assert '<svg' in page
    report = json.loads(out)
    rows = report['scaling']
    strong = {row['num_devices']: row for row in rows if row['kind'] == 'strong' and not row['refusal']}
    assert set(strong) == {8, 64, 512}
    assert strong[8]['tokens_per_second'] < strong[64]['tokens_per_second'] < 8 * strong[8]['tokens_per_second']
    assert len(report['sizes']) > 5
    assert report['budget']['best']['parameters'] > 1e8


@pytest.mark.parametrize(
    ('config', 'target', 'options', 'words'),
    [
        ('1b.py', 'h10:8', (), ['h10', 'did you mean h100:8']),
        ('1b.py', 'h100:16', (), ['h100:8x2']),
        ('1b.py', 'v4:3x3', (), ['v4:3x3', 'v4:2x2x2']),
        ('1b.py', 'v4:2x2', (), ['v4:2x2x1']),
        ('1c.py', 'h100:8', (), ['1c.py', '1b.py']),
        ('mix.py:huge', 'h100:8', (), ['huge', 'xlarge']),
        ('1b.py', 'h100:8', ('--config.model.dims=3',), ['model.dims', 'model.dim']),
        ('1b.py', 'h100:8', ('--config.mesh.tensor=5',), ['tensor=5', '1, 2, 4, 8']),
        ('1b.py', 'h100:8', ('--price-per-hour=-1',), ['--price-per-hour=-1']),
        ('1b.py', 'h100:8', ('--spot-share=2',), ['--spot-share=2']),
        ('1b.py', 'h100:8', ('--hours=0',), ['--hours=0']),
        ('1b.py', 'h100:8', ('--sweep=8,many',), ['--sweep=8,many']),
        ('1b.py', 'h100:8', ('--fits',), ['--fits']),
        ('1b.py', 'h100:8', ('--config.train.dollars=5',), ['train.dollars', 'train.price_per_hour']),
        ('1b.py', 'h100:8', ('--fit-scaling-law', 'run'), ['--fit-scaling-law', '--sweep']),
        ('1b.py', 'h100:8', ('--output=sweep.png',), ['--output', '--sweep']),
        ('1b.py', 'h100:8', ('--explain', '--estimate'), ['--explain', 'remove', '--estimate']),
        ('1b.py', 'cpu:1', ('--explain', '--vocab-size=50'), ['--explain', 'cpu:1 is not a GPU', 'h100:1']),
        ('code.py:7b', 'h100:8x4', ('--config.mesh.tensor=32', '--config.mesh.fsdp=1'), ['4 nodes', 'mesh.tensor']),
    ],
)
def test_bad_input(run, config, target, options, words):
    code, _, err = run(config, target, *options)
    assert code == EXIT_BAD_INPUT
    assert_error_line(err, *words)


@pytest.mark.parametrize('variant', ['7b-instruct', '7b-lora', '7b-qlora'])
def test_epochs_of_data_that_do_not_exist_yet_are_a_thousand_steps(run, variant):
    code, out, _ = run(f'code.py:{variant}', 'h100:8', '--estimate', '--config.data.path=nowhere')
    assert code == EXIT_DONE
    assert 'nowhere' in out
    assert 'assuming data for 1,000 steps' in out
    assert 'cost   ' in out
    # A step has 64 sequences of 4096 tokens.
    assert '1,000 steps, 262M tokens' in out


def test_rows_that_begin_at_documents_are_counted(run, tmp_path):
    data = write_dataset(tmp_path / 'data', [['a text of a document', 'another one'] * 20])
    keys = {'path': data.path, 'rows': 'documents', 'seq_len': 32, 'cache_dir': tmp_path / 'cache'}
    options = [f'--config.data.{key}={value}' for key, value in keys.items()]
    code, out, err = run('tiny.py', 'cpu:1', *options, '--estimate', '--vocab-size=512')
    assert code == EXIT_DONE
    assert 'rows with data.rows=documents, ' in out + err
    assert f'of {data.splits["train"].tokens:,} tokens in an epoch' in out + err
