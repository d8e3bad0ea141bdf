"""Checksums of several processes, and damage that they agree on."""

from maxlm.errors import EXIT_DONE
from maxlm.runtime.checkpoint import saved_steps
from maxlm.runtime.integrity import damages
from maxlm.runtime.step_folder import DAMAGED, FOLDER
from tests.processes import Processes
from tests.test_checkpoints import flip
from tests.test_train import arguments

SETTINGS = {'checkpoint__every_steps': 1, 'checkpoint__keep_last': 100, 'eval__every': 0, 'train__stuck_seconds': 60}


def test_two_processes_go_back_together(dataset, tmp_path):
    workdir, cache = tmp_path / 'run', tmp_path / 'programs'

    def train(count, devices, num_steps):
        words = arguments(dataset, workdir, **SETTINGS, train__num_steps=num_steps)
        logs = tmp_path / f'logs_{num_steps}'
        with Processes(count, devices, words, logs=logs, cache=cache) as processes:
            codes = processes.wait()
            assert codes == [EXIT_DONE] * count, processes.output(0) + processes.output(count - 1)
            return processes.output(0)

    def verified():
        return {step: damages(workdir / FOLDER / str(step))[0] for step in saved_steps(workdir)}

    train(2, 2, 2)
    # What two processes summed up is what one reads.
    assert verified() == {1: [], 2: []}
    flip(workdir / FOLDER / '2')
    assert len(verified()[2]) == 1
    out = train(2, 2, 3)
    assert 'step 2 is damaged and not used' in out
    assert 'going on from step 1\n' in out
    assert (workdir / FOLDER / DAMAGED / '2').is_dir()
    assert verified() == {1: [], 2: [], 3: []}
    # One process on another mesh restores what two have saved; control: nothing is said of damage.
    out = train(1, 1, 4)
    assert 'going on from step 3\n' in out
    assert 'damaged' not in out
