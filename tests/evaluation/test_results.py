"""Tests metrics and files made from lm-eval's results, without lm-eval."""

import json
import math

import numpy as np
import pytest

from maxlm.errors import InputError
from maxlm.evaluation.statistics import mean_of
from maxlm.evaluation.tasks.lm_eval_tasks import measures, write_results

RATES = [(-6.0, 2), (-9.0, 3), (-2.0, 1), (-1.0, 1)]
RESULTS = {
    'results': {
        'choice': {'alias': 'choice', 'acc,none': 0.75, 'acc_stderr,none': 0.25, 'acc,strict': 0.5, 'size,none': 'N/A'},
        'rolling': {
            'bits_per_byte,none': 18 / 7 / math.log(2),
            'bits_per_byte_stderr,none': 'N/A',
            'word_perplexity,none': math.exp(18 / 7),
        },
    },
    'samples': {
        'choice': [{'filter': 'none', 'acc': value} for value in (1.0, 1.0, 0.0, 1.0)],
        'rolling': [{'filter': 'none', 'bits_per_byte': rate, 'word_perplexity': rate} for rate in RATES],
    },
}


def test_metrics_use_documents_if_available():
    found = {measure.name: measure for measure in measures(RESULTS)}
    assert list(found) == ['choice/acc', 'choice/acc,strict', 'rolling/bits_per_byte', 'rolling/word_perplexity']
    accuracy = mean_of('', np.array([1.0, 1.0, 0.0, 1.0]))
    assert (found['choice/acc'].value, found['choice/acc'].error) == (accuracy.value, accuracy.error)
    assert found['choice/acc'].values.tolist() == [1, 1, 0, 1]
    # This filter has no samples, and lm-eval reports no standard error.
    assert (found['choice/acc,strict'].value, found['choice/acc,strict'].error) == (0.5, None)
    log_probs, counts = np.array(RATES).T
    bits = mean_of('', -log_probs / counts / math.log(2), counts)
    assert found['rolling/bits_per_byte'].value == pytest.approx(bits.value)
    assert found['rolling/bits_per_byte'].error == pytest.approx(bits.error)
    nats = mean_of('', -log_probs / counts, counts)
    assert found['rolling/word_perplexity'].value == math.exp(18 / 7)
    assert found['rolling/word_perplexity'].error == pytest.approx(math.exp(18 / 7) * nats.error)


def test_a_mean_that_differs_from_the_documents_keeps_its_error():
    results = {**RESULTS, 'results': {'choice': {'acc,none': 0.6, 'acc_stderr,none': 0.1}}}
    (measure,) = measures(results)
    assert (measure.value, measure.error, measure.values) == (0.6, 0.1, None)


def test_files_equal_those_of_lm_eval(tmp_path):
    write_results({**RESULTS, 'date': np.float64(3), 'of': set}, tmp_path / 'out', step=7)
    written = json.loads((tmp_path / 'out' / 'results_7.json').read_text())
    assert written == {'results': RESULTS['results'], 'date': 3.0, 'of': "<class 'set'>"}
    lines = (tmp_path / 'out' / 'samples_choice_7.jsonl').read_text().splitlines()
    assert [json.loads(line) for line in lines] == RESULTS['samples']['choice']
    with pytest.raises(InputError, match='--output='):
        write_results(RESULTS, tmp_path / 'out' / 'results_7.json', step=7)
