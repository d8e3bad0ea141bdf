"""Tests how the leaderboard measures an entry and decides about records."""

import json

import numpy as np
import pytest

from benchmarks import leaderboard, nanochat_rows, nanochat_sides
from benchmarks.nanochat_sides import Size
from maxlm.errors import EXIT_BAD_INPUT, EXIT_DONE, EXIT_FAILED, InputError, exit_code
from tests.conftest import ROOT

MACHINE = {'device': 'cpu', 'devices': 1, 'processor': 'x86_64'}


def result(tokens, seconds=(60.0, 61.0, 62.0, 61.0, 60.0), **changes):
    seeds = {
        str(seed): {'reached': True, 'tokens': each, 'seconds': time}
        for seed, (each, time) in enumerate(zip(tokens, seconds, strict=False))
    }
    return {'track': 'cpu', 'target': 1.85, 'validation': 'a', 'machine': MACHINE, 'seeds': seeds, **changes}


RECORD = result([1000.0, 1010.0, 990.0, 1005.0, 995.0])


def test_fewer_tokens_in_five_seeds_are_a_record():
    found = leaderboard.compare(result([900.0, 905.0, 895.0, 910.0, 890.0]), RECORD)
    assert found['tokens']['is_record']
    assert found['tokens']['p'] < 1e-4
    assert not found['seconds']['is_record']


def test_the_p_value_is_that_of_welch():
    # Welch 1947, with the degrees of freedom of Satterthwaite 1946.
    ours = np.array([9.0, 9.5, 10.0, 10.5, 10.0])
    theirs = np.array([10.0, 11.0, 12.0, 9.0, 13.0])
    found = leaderboard.compare(result(ours), result(theirs))['tokens']['p']
    parts = [each.var(ddof=1) / 5 for each in (ours, theirs)]
    t = (ours.mean() - theirs.mean()) / np.sqrt(sum(parts))
    freedom = sum(parts) ** 2 / sum(part**2 / 4 for part in parts)
    # The distribution function of Student's t by quadrature.
    x = np.linspace(-400, t, 2_000_001)
    density = (1 + x**2 / freedom) ** (-(freedom + 1) / 2)
    whole = np.linspace(-400, 400, 4_000_001)
    total = np.trapezoid((1 + whole**2 / freedom) ** (-(freedom + 1) / 2), whole)
    assert found == pytest.approx(np.trapezoid(density, x) / total, rel=1e-3)


@pytest.mark.parametrize(
    'entry',
    [
        result([900.0, 905.0, 895.0, 910.0]),
        {**result([900.0] * 5), 'seeds': {**RECORD['seeds'], '0': {'reached': False, 'tokens': None, 'seconds': 9.0}}},
    ],
)
def test_four_seeds_or_a_missed_target_are_no_record(entry):
    assert leaderboard.compare(entry, RECORD) == {}


def test_times_of_other_machines_are_not_compared():
    entry = result([900.0, 905.0, 895.0, 910.0, 890.0], machine={**MACHINE, 'device': 'NVIDIA H100'})
    assert list(leaderboard.compare(entry, RECORD)) == ['tokens']


@pytest.fixture
def small(tmp_path, monkeypatch):
    for module in (nanochat_rows, nanochat_sides, leaderboard):
        monkeypatch.setattr(module, 'SEQ_LEN', 32)
    for module in (nanochat_rows, nanochat_sides):
        monkeypatch.setattr(module, 'VOCABULARY', 300)
    monkeypatch.setattr(nanochat_rows, 'VALIDATION_ROWS', 8)
    monkeypatch.setattr(nanochat_rows, 'HELD_OUT_EVERY', 3)
    size = Size(layers=1, steps=6, evaluate_every=2)
    track = leaderboard.Track(size, evaluate_from=2, target=0.0, limit_minutes=1)
    monkeypatch.setattr(leaderboard, 'TRACKS', {'cpu': track})

    def run(target, *words):
        (tmp_path / 'result.json').unlink(missing_ok=True)
        leaderboard.TRACKS['cpu'] = track._replace(target=target)
        paths = [f'--text={ROOT / "docs/tutorials"}', f'--work={tmp_path}', f'--output={tmp_path / "result.json"}']
        code = exit_code(leaderboard.main, ['cpu', *paths, '--seeds=0', *words])
        file = tmp_path / 'result.json'
        return code, json.loads(file.read_text()) if file.exists() else None

    return run


def test_the_tokens_to_the_target_are_interpolated(small):
    code, missed = small(0.0)
    (seed,) = missed['seeds'].values()
    assert (code, seed['reached']) == (EXIT_FAILED, False)
    curve = {int(step): value for step, value in seed['bits_per_byte'].items()}
    assert list(curve) == [2, 4, 6]
    assert curve[2] > curve[4] > curve[6]
    code, reached = small((curve[4] + 3 * curve[6]) / 4)
    (seed,) = reached['seeds'].values()
    assert (code, seed['reached']) == (EXIT_DONE, True)
    assert seed['tokens'] == pytest.approx((4 + 0.75 * 2) * 4 * 32)
    assert seed['seconds'] > 0


def test_a_record_of_other_rows_is_an_error():
    with pytest.raises(InputError, match='validation is a instead of b'):
        leaderboard.compare(result([900.0] * 5, validation='b'), RECORD)


def test_a_record_of_another_target_is_an_error(small, tmp_path, monkeypatch, capsys):
    (tmp_path / 'record.json').write_text(json.dumps(RECORD))
    monkeypatch.setattr(leaderboard, 'run', None)
    assert small(9.0, f'--record={tmp_path / "record.json"}') == (EXIT_BAD_INPUT, None)
    assert '--record: target is 1.85 instead of 9.0' in capsys.readouterr().err


@pytest.mark.parametrize(
    ('words', 'files', 'message'),
    [
        (['--record={}/record.json'], {}, 'record.json: No such file'),
        (['--record={}/record.json'], {'record.json': '{'}, 'record.json: is not JSON'),
        (['--record={}/record.json'], {'record.json': '{"seeds": {}}'}, 'record.json: is no result of this command'),
        (['--output={}/missing/result.json'], {}, 'missing/result.json: No such file'),
        (['--output={}/record.json'], {'record.json': json.dumps(RECORD)}, 'another entry, which differs in target'),
        (['--change=train.seed=1'], {}, 'the track fixes train.seed'),
        (['--change=data.seq_len=16'], {}, 'the track fixes data.seq_len'),
    ],
    ids=str,
)
def test_mistakes_are_errors_before_the_training(small, tmp_path, monkeypatch, capsys, words, files, message):
    monkeypatch.setattr(leaderboard, 'run', None)
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    code, _ = small(9.0, *(word.format(tmp_path) for word in words))
    error = capsys.readouterr().err
    assert code == EXIT_BAD_INPUT
    assert message in error
    assert error.count('\n') == 1
    assert all((tmp_path / name).read_text() == content for name, content in files.items())
