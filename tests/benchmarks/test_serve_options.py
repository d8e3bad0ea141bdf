"""Tests the benchmark of the server's options."""

import itertools
import json

import pytest

from benchmarks import serve_options
from maxlm.errors import EXIT_BAD_INPUT, exit_code
from tests.conftest import ROOT


def test_ratios_compare_medians(monkeypatch):
    # Rates by setting: a warm-up and three turns.
    rates = {
        'plain': iter([1, 100, 90, 110]),
        'drafts': iter([1, 150, 200, 140]),
        'grammar': iter([1, 40, 50, 60]),
        'sampled': iter([1, 80, 70, 60]),
    }
    names = itertools.cycle(rates)
    monkeypatch.setattr(serve_options, 'rate', lambda server, clients, fields: next(rates[next(names)]))
    counts = iter([(10, 5), (30, 45)])

    def counters(server):
        assert server == 'drafting'
        passes, accepted = next(counts)
        return {'maxlm_passes_total': passes, 'maxlm_tokens_total{kind="accepted"}': accepted}

    monkeypatch.setattr(serve_options, 'counters', counters)
    found = serve_options.measure('plain', 'drafting', 8, 3)
    assert (found['draft_ratio'], found['grammar_ratio'], found['accepted_per_pass']) == (1.5, 1.4, 2)
    assert found['turns']['drafts'] == [150, 200, 140]


def test_documented_results():
    results = json.loads((ROOT / 'benchmarks/results/serve_options_cpu2.json').read_text())['results']
    page = (ROOT / 'docs/serving.md').read_text()
    for found in results:
        # Repeated text is decoded at least 1.3 times as fast with drafts.
        assert found['draft_ratio'] >= 1.3
        assert (
            f'| {found["clients"]} | {found["plain"]:.0f} | {found["drafts"]:.0f} ({found["draft_ratio"]:.2f} ×) | '
            f'{found["accepted_per_pass"]:.1f} | {found["grammar_ratio"]:.2f} × |'
        ) in page


@pytest.mark.parametrize(
    ('option', 'words'),
    [
        ('--rounds=0', '--rounds=0: must be at least 1'),
        ('--clients=1,x', '--clients=1,x: must be positive numbers'),
        ('--num-draft-tokens=0', '--num-draft-tokens=0: must be from 1 to 32'),
    ],
)
def test_bad_input_is_one_line(option, words, capfd):
    assert exit_code(serve_options.main, ['--checkpoint=none', option]) == EXIT_BAD_INPUT
    assert words in capfd.readouterr().err
