"""Losses and model blocks of the user, with the code of the tutorials."""

import re

import jax
import numpy as np
import optax
import pytest

from maxlm.config.loading import default
from maxlm.config.validation import validate
from maxlm.errors import InputError
from maxlm.huggingface.architectures import ARCHITECTURES
from maxlm.training.state import abstract_model
from maxlm.training.step import make_eval_step, make_train_step
from tests.conftest import ROOT
from tests.small import small_batch, small_config, small_layout, small_state
from tests.user_modules import write_module


def tutorial_code(page):
    """Returns the Python blocks of a tutorial."""
    return re.findall(r'^```python\n(.*?)^```', (ROOT / 'docs/tutorials' / page).read_text(), re.MULTILINE | re.DOTALL)
