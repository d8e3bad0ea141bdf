"""Checks that the documentation calls nothing unmeasured that a result file in benchmarks/results has measured."""

import re

import pytest

from tests.conftest import ROOT
from tests.documentation import PAGES

RESULTS = ROOT / 'benchmarks/results'
GPU, TPU = '_h[12]00*.json', '_v[0-9]*.json'
# Sentences that say so, each with the names of result files that would make it untrue.
CLAIMS = {
    'No TPU has been timed yet': f'*{TPU}',
    'maxlm has not been run on a TPU yet': f'*{TPU}',
    'No step has been timed on several GPUs or on a TPU': f'*x8{GPU}',
    'No run on eight GPUs has been timed yet': f'*x8{GPU}',
    'no recipe has been run at full size on a GPU yet': f'recipe*{GPU}',
    'which may help the generation of single tokens; this has not been measured yet': f'decode_1b_int8{GPU}',
    'It is off by default, because it has been compiled for an H100 but not measured on one': f'*norm*{GPU}',
    'It has not run on a GPU yet.': f'gpu_run*{GPU}',
    'runs each side with its fastest settings, which has not been measured yet': 'peers_h100.json',
    'The trace led to two changes, whose effect is not measured yet': '1b_h100.json',
    'the program has a fixed order of additions; not measured': f'*deterministic*{TPU}',
    'The cost is not measured yet': f'*deterministic*{GPU}',
    'Replays have not run on GPUs or TPUs yet': f'replay*{GPU}',
    'The comparison has not run on GPUs or TPUs yet': f'replicas*{GPU}',
    'They have not run on a GPU.': f'kernels*{GPU}',
    'It has not been measured on a GPU yet': f'*norm*{GPU}',
    'No record yet: the track has not run on a GPU': 'leaderboard_gpu*.json',
    'Its learning curves and its speed on a GPU are not measured': f'soap*{GPU}',
    'It has been compiled for a B200 but not measured on one': '*_b200.json',
    '(maxlm/model/fp8/mxfp8.py), which has not been measured': '*_b200.json',
    'Which kernel is the fastest on a GPU has not been measured': f'1b_tokamax{GPU}',
    'Delayed scaling has not been measured on a GPU': f'1b_fp8_delayed{GPU}',
    'The rounding kernels have not been measured on a GPU': f'1b_fp8_*kernels{GPU}',
    '(maxlm/model/fp8/rounding_kernel.py), which has not been measured': f'1b_fp8_*kernels{GPU}',
    'The present program has not been measured on a GPU': 'decode_1b_h100.json',
    "None of the providers' commands has been run for this page": 'runpod*.json',
    'state in host memory has not been timed on a GPU': f'*host*{GPU}',
    'The time on a real cluster is not measured': 'prepare_*cluster*.json',
    'Their effect on the speed has not been measured yet': f'xla_flags*{GPU}',
}
UNMEASURED = re.compile(r'(?i)\b(?:not|never|no|none)\b[^.|:]{0,60}\b(?:measured|timed|been run|run on)\b|unmeasured')


def sentences():
    """Yields the sentences of the documentation, and the cells of its tables, that call something unmeasured."""
    for page in (ROOT / 'README.md', *PAGES):
        text = re.sub(r'^```.*?^```$', '', page.read_text(), flags=re.MULTILINE | re.DOTALL)
        for sentence in re.split(r'(?<=\.)\s+(?=[A-Z*`])|\n\n|\|', text):
            if UNMEASURED.search(sentence):
                yield page.relative_to(ROOT), ' '.join(sentence.replace('**', '').split())


SENTENCES = list(sentences())


def claim_of(sentence):
    return next((claim for claim in CLAIMS if claim in sentence), None)


def test_each_claim_names_the_results_that_would_end_it():
    assert [(page, sentence) for page, sentence in SENTENCES if claim_of(sentence) is None] == []
    # Claims whose sentence is gone.
    assert {claim for claim in CLAIMS if not any(claim in sentence for _, sentence in SENTENCES)} == set()


@pytest.mark.parametrize('claim', CLAIMS)
def test_unmeasured_claims_have_no_result(claim):
    assert [path.name for path in RESULTS.glob(CLAIMS[claim])] == []


def test_controls():
    # The patterns match existing result files and the usual wording.
    assert list(RESULTS.glob(f'1b{GPU}'))
    assert UNMEASURED.search('No step has been timed on a GPU.')
