"""`maxlm quantize`: its table, and one-line errors without remaining files."""

import re

import pytest

from maxlm.cli.execution import quantize as command
from maxlm.cli.models import hf, quantize
from maxlm.errors import EXIT_BAD_INPUT, EXIT_DONE, exit_code
from maxlm.inference.quantize_checkpoint import Quantized
from tests.huggingface.workdirs import MODELS, make_workdir
from tests.messages import assert_error_line


@pytest.fixture(scope='module')
def workdir(tmp_path_factory, dataset):
    folder = tmp_path_factory.mktemp('quantize')
    make_workdir(folder / 'run', {**MODELS['llama'], 'model__dim': 64, 'data__path': str(dataset)}, step=7)
    return folder / 'run'


def run(*argv):
    return exit_code(quantize.main, [str(word) for word in argv])


def test_sizes_and_losses(workdir, tmp_path, capsys):
    output = tmp_path / 'new'
    assert run(f'--checkpoint={workdir}', '--format=int8', f'--output={output}', '--num-batches=1') == EXIT_DONE
    title, head, before, after = capsys.readouterr().out.splitlines()[-4:]
    assert title == f'{output}: step 7 quantized to int8'
    assert head.split('  ')[0] == 'weights'
    row = r'{} +([\d.]+) KiB +[\d.]+ [KM]iB +([\d.]+){}'
    first = re.fullmatch(row.format('float32', ''), before)
    second = re.fullmatch(row.format('int8', r' +([+-][\d.]+) %'), after)
    assert float(second[1]) < float(first[1])
    difference = 100 * (float(second[2]) / float(first[2]) - 1)
    assert float(second[3]) == pytest.approx(difference, abs=0.01)
    assert abs(difference) < 1


def test_no_eval_and_gguf_export(workdir, tmp_path, capsys):
    output = tmp_path / 'new'
    options = (f'--checkpoint={workdir}@7', '--format=int4', '--group=16', '--no-eval')
    assert run(*options, f'--output={output}', '--data=nowhere') == EXIT_DONE
    after = capsys.readouterr().out.splitlines()[-1]
    assert re.fullmatch(r'int4 +[\d.]+ KiB +[\d.]+ KiB +-', after)
    file = tmp_path / 'model.gguf'
    argv = ['export-gguf', f'--checkpoint={output}', f'--output={file}', '--dtype=q8_0']
    assert exit_code(hf.main, argv) == EXIT_DONE
    summary = capsys.readouterr().out.splitlines()[-1]
    assert summary.startswith(f'{file}: llama of ')
    assert summary.endswith(' matrices in f16, because their row size is not a multiple of 32')


def test_the_table(tmp_path):
    done = Quantized(
        tmp_path, 7, memory_before=4_000_000, memory_after=1_250_000, disk_before=3_000_000, disk_after=900_000
    )
    assert command._table(done, 'int8', [2.0, 2.01]).splitlines() == [
        f'{tmp_path}: step 7 quantized to int8',
        'weights  in memory    on disk    loss  difference',
        'float32   3.81 MiB   2.86 MiB  2.0000',
        'int8      1.19 MiB  878.9 KiB  2.0100     +0.50 %',
    ]
    assert command._table(done, 'int4', []).splitlines()[-1] == 'int4      1.19 MiB  878.9 KiB     -'


@pytest.mark.parametrize(
    ('option', 'parts'),
    [
        ('--format=int2', ['--format', 'int2', 'int8']),
        ('--group=-1', ['--group=-1', 'at least 0']),
        ('--num-batches=-1', ['--num-batches=-1', 'at least 0']),
        ('--output={workdir}', ['--output=', 'new or empty']),
        ('--checkpoint={workdir}@8', ["step '8' does not exist", 'steps: 7']),
        ('--data=nowhere', ['nowhere']),
    ],
)
def test_bad_input(workdir, tmp_path, capfd, option, parts):
    given = [f'--checkpoint={workdir}', '--format=int8', f'--output={tmp_path}/new']
    assert run(*given, option.format(workdir=workdir)) == EXIT_BAD_INPUT
    assert_error_line(capfd.readouterr().err, *parts)
    assert list(tmp_path.iterdir()) == []
