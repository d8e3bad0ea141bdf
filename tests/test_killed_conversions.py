"""Kills of commands that write a model or a report: the output is absent or complete, and a second start succeeds."""

import json
import shutil

import pytest

from maxlm.cli.models.hf import main as hf
from tests.adapters import adapter_arrays
from tests.faults import how_many
from tests.forking import forking
from tests.huggingface.workdirs import MODELS, make_workdir
from tests.killing_conversions import COMMANDS
from tests.small import small_config

pytestmark = pytest.mark.multiprocess
# The other commands use the same functions to write their output.
USUAL = ('merge', 'report', 'export')
LORA = {**MODELS['llama'], 'model__lora_rank': 3, 'model__lora_alpha': 6.0}


@pytest.fixture(scope='module')
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp('made')
    vocab_size = make_workdir(folder / 'base', MODELS['llama']).model.vocab_size
    model = small_config(**{**LORA, 'model__vocab_size': vocab_size}).model
    make_workdir(folder / 'lora', LORA, changed=adapter_arrays(model))
    (folder / 'base' / 'metrics.jsonl').write_text('{"step": 1, "time": 1.0, "train/loss": 2.0}\n')
    assert hf(['export', f'--checkpoint={folder}/base', f'--output={folder}/exported']) == 0
    return folder


@pytest.fixture(scope='module')
def parent():
    with forking('tests.killing_conversions:main') as parent:
        yield parent


@pytest.mark.parametrize(
    'name', [name if name in USUAL else pytest.param(name, marks=pytest.mark.nightly) for name in COMMANDS]
)
def test_killed(made, parent, tmp_path, name):
    folder = tmp_path / 'runs'
    shutil.copytree(made, folder)
    process = parent.start([folder, 0, how_many(2, 100), name], tmp_path / 'log')
    assert process.wait() == 0, process.stdout + process.stderr
    found = json.loads(process.stdout.splitlines()[-1])
    # Files of GGUF and reports have random hidden names, because several processes may write them.
    assert found['left'] == [] or name in ('export-gguf', 'report')
