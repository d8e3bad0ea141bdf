"""Checkpoints of nanochat are imported with equal logits, and exported with equal files."""

import json
import math

import numpy as np
import pytest
import torch

from maxlm.checkpoint.streaming import ParamsReader
from maxlm.cli.models import hf
from maxlm.config.schema import Config
from maxlm.errors import EXIT_BAD_INPUT, EXIT_DONE, exit_code
from maxlm.inference.load import load_model
from maxlm.workdir.files import read_config
from tests.huggingface.nanochat.files import Reference, save, save_tokenizer
from tests.test_bad_input import assert_one_line

FIRST = Reference('first')


@pytest.fixture
def refused(capfd, tmp_path):
    """Returns a function that runs a failing import. It must print one line with all parts and write no files."""

    def refused(*argv, parts=()):
        before = {path: path.is_file() and path.read_bytes() for path in tmp_path.rglob('*')}
        capfd.readouterr()
        assert exit_code(hf.main, ['import', f'--output={tmp_path / "new"}', *argv]) == EXIT_BAD_INPUT
        assert_one_line(capfd.readouterr().err, *parts)
        assert {path: path.is_file() and path.read_bytes() for path in tmp_path.rglob('*')} == before

    return refused


def imported(source, output, *argv):
    assert exit_code(hf.main, ['import', f'--input={source}', f'--output={output}', *argv]) == EXIT_DONE
    return output


def logits(workdir, ids):
    """Returns the logits of a workdir in float32."""
    model = load_model(str(workdir), dtype='float32')
    return np.asarray(model.logits(ids))
