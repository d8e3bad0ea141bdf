"""Tests the selection of tests that depend on a change."""

import pytest

from tests.conftest import ROOT
from tools.affected_tests import affected, dependencies

FILES = {
    'maxlm/order.py': '',
    'maxlm/batches.py': 'from maxlm import order',
    'maxlm/train.py': '"""Uses maxlm.serve, it says here."""\nimport maxlm.batches',
    'maxlm/serve.py': '',
    'maxlm/cli/runs/grpo.py': '',
    'launch/demo.sh': '',
    'docs/data.md': '',
    'Dockerfile': '',
    'tests/conftest.py': 'import maxlm.serve',
    'tests/data/conftest.py': 'from maxlm.serve import Server',
    'tests/data/test_order.py': 'from maxlm.order import Order',
    'tests/test_train.py': "run('-m', 'maxlm.train')",
    'tests/test_grpo.py': "run('-m', 'maxlm.grpo')",
    'tests/test_demo.py': "root / 'launch/demo.sh'",
    'tests/test_image.py': "root / 'Dockerfile'",
    'tests/test_docs.py': "(root / 'docs').glob('*.md')",
}


@pytest.fixture
def graph(tmp_path):
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return dependencies(tmp_path)


@pytest.mark.parametrize(
    ('changed', 'wanted'),
    [
        ('maxlm/order.py', ['data/test_order.py', 'test_train.py']),
        ('maxlm/batches.py', ['test_train.py']),
        ('maxlm/serve.py', ['data/test_order.py']),
        ('tests/test_train.py', ['test_train.py']),
        ('maxlm/cli/runs/grpo.py', ['test_grpo.py']),
        ('launch/demo.sh', ['test_demo.py']),
        ('Dockerfile', ['test_image.py']),
        ('docs/data.md', ['test_docs.py']),
        (
            'tests/conftest.py',
            ['data/test_order.py', 'test_demo.py', 'test_docs.py', 'test_grpo.py', 'test_image.py', 'test_train.py'],
        ),
        ('README.md', []),
    ],
)
def test_tests_follow_imports_names_and_folders(graph, changed, wanted):
    assert affected(graph, [changed]) == [f'tests/{name}' for name in wanted]


@pytest.mark.nightly
def test_the_graph_of_the_project():
    graph = dependencies(ROOT)
    assert 'tests/data/loader/test_shuffle.py' in affected(graph, ['maxlm/data/loader/shuffle.py'])
    assert 'tests/data/loader/test_shuffle.py' not in affected(graph, ['maxlm/serving/middleware.py'])
