"""Fixture of runs that start from the checkpoint of another run."""

import dataclasses

import jax
import pytest

from maxlm.checkpoint.manager import Checkpoints
from maxlm.data.tokenizer.tokenizer import chars_tokenizer
from maxlm.log import Console
from maxlm.trainer import checkpointing as starting
from maxlm.trainer.checkpointing import check_init_from, initialize_state
from maxlm.training.state import abstract_state, init_state
from maxlm.workdir.files import TOKENIZER
from tests.checkpoint.test_manager import config_on, zero_state
from tests.small import small_layout

# Number of tokens of the checkpoint's tokenizer.
KNOWN = 60
OLD = chars_tokenizer([''.join(map(chr, range(ord('A'), ord('A') + KNOWN - 2)))])


@pytest.fixture
def start(tmp_path, capsys, monkeypatch):
    """Returns a function that initializes a run from a workdir and returns the initial state and the log.

    Only with `random` are parameters first initialized at random, which takes most of the time.
    """

    def start(origin, tokenizer=OLD, *, num_devices=2, random=False, **overrides):
        monkeypatch.setattr(starting, 'init_state', init_state if random else zero_state)
        config = config_on(num_devices, **overrides)
        config = dataclasses.replace(config, train=dataclasses.replace(config.train, init_from=str(origin)))
        layout = small_layout(config)
        abstract = abstract_state(config, layout)
        tokenizer.save(tmp_path / TOKENIZER)
        run = tmp_path / 'run'
        check_init_from(config, abstract.params, run, tokenizer=tmp_path / TOKENIZER)
        assert not run.exists()
        capsys.readouterr()
        with Console(), Checkpoints(run, max_to_keep=3) as manager:
            state = initialize_state(
                config, tokenizer=tmp_path / TOKENIZER, layout=layout, abstract=abstract, manager=manager
            )
        placed = jax.tree.map(
            lambda leaf, wanted: leaf.sharding.is_equivalent_to(wanted.sharding, leaf.ndim), state, abstract
        )
        assert all(jax.tree.leaves(placed))
        return jax.device_get(state), capsys.readouterr().out

    return start
