"""Checksums of several processes, and their agreement on damage."""

import pytest

from maxlm.checkpoint.checksums import corrupt_arrays
from maxlm.checkpoint.manager import saved_steps
from maxlm.errors import EXIT_DONE
from maxlm.workdir.step_dirs import CHECKPOINTS_DIR, DAMAGED
from tests.cli.models.test_checkpoints import flip
from tests.cli.runs.test_train import arguments
from tests.forking import forking

pytestmark = pytest.mark.multiprocess

SETTINGS = {
    'checkpoint__save_interval_steps': 1,
    'checkpoint__max_to_keep': 100,
    'eval__interval': 0,
    'train__hang_timeout_seconds': 60,
}


# test_failures.py tests two processes that save without training.
@pytest.mark.nightly
def test_two_processes_fall_back_to_the_same_step(dataset, tmp_path):
    workdir = tmp_path / 'run'

    def train(parent, num_steps):
        words = arguments(dataset, workdir, **SETTINGS, train__num_steps=num_steps)
        processes = parent.start_run(2, words, tmp_path / f'logs_{num_steps}')
        codes = [process.wait() for process in processes]
        assert codes == [EXIT_DONE] * 2, [process.stdout + process.stderr for process in processes]
        return processes[0].stdout

    def verified():
        return {step: corrupt_arrays(workdir / CHECKPOINTS_DIR / str(step))[0] for step in saved_steps(workdir)}

    with forking('maxlm.train') as parent:
        # Negative control: no damage is reported.
        assert 'damaged' not in train(parent, 2)
        # Checksums by two processes match the arrays that one process reads.
        assert verified() == {1: [], 2: []}
        flip(workdir / CHECKPOINTS_DIR / '2')
        assert len(verified()[2]) == 1
        out = train(parent, 3)
        assert 'checkpoint of step 2 is damaged and skipped' in out
        assert 'resuming from step 1\n' in out
        assert (workdir / CHECKPOINTS_DIR / DAMAGED / '2').is_dir()
        assert verified() == {1: [], 2: [], 3: []}
