"""Scenarios of checkpoints in a bucket; `tests.forking` starts a process with the name of the scenario.

Each scenario needs its own process, because TensorStore reads the address of Google's storage once. The last line of
the output is the result as JSON.
"""

import dataclasses
import functools
import json
import logging
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

# Imported once by the parent process of all scenarios.
import gcsfs  # noqa: F401
import jax
import jax.numpy as jnp
import numpy as np

from maxlm.checkpoint import manager
from maxlm.checkpoint.checksums import corrupt_arrays
from maxlm.checkpoint.frozen_models import check_teacher, read_teacher, with_frozen_models
from maxlm.checkpoint.listing import damaged_steps
from maxlm.checkpoint.manager import Checkpoints, find_step, saved_steps
from maxlm.checkpoint.params import check_params, restore_params
from maxlm.checkpoint.streaming import ParamsReader
from maxlm.config.serialization import to_json
from maxlm.data.tokenizer.tokenizer import bytes_tokenizer
from maxlm.errors import InputError
from maxlm.log import Console
from maxlm.trainer.checkpointing import reference_metadata
from maxlm.training.state import abstract_state
from maxlm.workdir.step_dirs import to_path
from tests.checkpoint.test_manager import FACTS, abstract_on, config_on, random_state, same
from tests.gcs_emulator import Emulator
from tests.small import small_config, small_layout

LOSSES = {1: 3.0, 2: 1.0, 3: 2.0}

# `main` sets its address and the other attributes.
emulator = Emulator.__new__(Emulator)
URL = ''


@functools.cache
def abstract():
    return abstract_on(2)


def state(step):
    return random_state(abstract(), step=step, skipped=0, seed=step)


def save(checkpoints, *steps):
    for step in steps:
        checkpoints.save(step, state(step), FACTS, validation_loss=LOSSES.get(step))


def objects(step):
    return sorted(name for name in emulator.objects if f'{URL.removeprefix("gs://")}/checkpoints/{step}/' in name)


def deleted(step):
    """Returns the names of deleted objects of a step, in the order of deletion."""
    folder = f'{URL.partition("bucket/")[2]}/checkpoints/{step}/'
    names = [request['name'] for request in emulator.log if request['kind'] == 'delete']
    return [name.partition(folder)[2] for name in names if folder in name]


def complete_run():
    """Saves, retains, lists and restores checkpoints."""
    with Checkpoints(URL, max_to_keep=1, keep_best=1) as checkpoints:
        assert checkpoints.wait() is None
        save(checkpoints, 1, 2, 3)
        assert checkpoints.steps() == [2, 3] == saved_steps(URL)
        # Orbax also deletes temporary objects while it saves.
        layout = {name.partition('checkpoints/3/')[2] for name in objects(3)}
        final = {name: index for index, name in enumerate(deleted(1)) if name in layout}
        first_deleted = min(final, key=final.get)
        assert not objects(1)
        save(checkpoints, 4)
        checkpoints.remove_after(3)
        assert (checkpoints.steps(), objects(4)) == ([2], [])
        save(checkpoints, 4)
        assert same(checkpoints.restore(4, abstract()).state, state(4))
    # A new manager must find the checkpoints in the bucket.
    with Checkpoints(to_path(URL), max_to_keep=1, keep_best=1) as checkpoints:
        restored = checkpoints.restore_newest(abstract())
        assert same(restored.state, state(4))
        assert not same(restored.state, state(2))
        assert (restored.fingerprint, restored.history) == (FACTS, {})
        assert not checkpoints.is_params_only(4)
        save(checkpoints, 5)
    found = {name: str(find_step(f'{URL}{name}')) for name in ('', '@2', '@best', '/checkpoints/2')}
    step = find_step(f'{URL}@2')
    check_params(step, abstract().params)
    params = restore_params(step, abstract().params)
    assert same(params, state(2).params)
    assert corrupt_arrays(step)[0] == []
    read = ParamsReader(step).read('embedding')
    assert np.array_equal(read, params['embedding'])
    try:
        find_step(f'{URL}@1')
    except InputError as error:
        return {'found': found, 'missing': str(error), 'first_deleted': first_deleted}


def teacher():
    """Distills a checkpoint in the bucket."""
    small, tokenizer = config_on(2), bytes_tokenizer()
    with Checkpoints(URL, max_to_keep=2) as checkpoints:
        save(checkpoints, 1, 2)
    workdir = to_path(URL)
    (workdir / 'config.json').write_text(to_json(small))
    (workdir / 'tokenizer.json').write_text(tokenizer.to_json())
    tokenizer.save(local := Path(tempfile.mkdtemp()) / 'tokenizer.json')

    def read(name):
        distill = dataclasses.replace(small.distill, teacher=f'{URL}{name}')
        model = with_frozen_models(dataclasses.replace(small, distill=distill)).teacher
        config = dataclasses.replace(small_config(2, teacher=model, model__num_layers=1), distill=distill)
        shapes = abstract_state(config, small_layout(config))
        check_teacher(config, shapes, tokenizer=local)
        return config, shapes, reference_metadata(config)

    with Console():
        found = {name: read(name) for name in ('', '@1', '/checkpoints/1')}
        params = {name: read_teacher(config, shapes) for name, (config, shapes, _) in found.items()}
    assert same(params[''], state(2).params)
    assert same(params['@1'], state(1).params)
    assert same(params['/checkpoints/1'], params['@1'])
    assert found['@1'][2] == found['/checkpoints/1'][2] != found[''][2]
    (workdir / 'config.json').unlink()
    try:
        read('')
    except InputError as error:
        return {'missing': str(error), 'layers': [found[''][0].teacher.num_layers, found[''][0].model.num_layers]}


def faults():
    """Injects temporary and permanent failures of requests."""
    messages = []
    upload = r'^POST /upload'
    with Checkpoints(URL, max_to_keep=1, on_failure=messages.append) as checkpoints:
        save(checkpoints, 1)
        checkpoints.wait()
        for status in (503, 429):
            emulator.fault(match=upload, times=2, status=status)
        save(checkpoints, 2)
        assert (checkpoints.wait(), messages) == (2, [])
        emulator.fault(match=upload, status=403)
        save(checkpoints, 3)
        newest = checkpoints.wait()
        assert (newest, len(messages)) == (2, 1), (newest, messages)
        emulator.clear()
        # The save can be repeated, and the previous checkpoint remains although max_to_keep is 1.
        save(checkpoints, 3)
        assert (checkpoints.wait(), len(messages)) == (3, 1)
        assert same(checkpoints.restore_newest(abstract()).state, state(3))
    return {'messages': messages, 'steps': saved_steps(URL)}


def steady(rounds, delay):
    """Continues training steps while checkpoints are saved, with temporary faults and responses delayed by `delay`."""
    upload = r'^POST /upload'
    kinds = {
        '503': [{'match': upload, 'times': 3, 'status': 503}],
        '429': [{'match': upload, 'times': 3, 'status': 429}],
        'drop': [{'match': upload, 'times': 2, 'drop': 'before'}, {'match': upload, 'times': 1, 'drop': 'after'}],
        'delay': [{'match': upload, 'times': 2, 'delay': delay}],
        'none': [],
    }
    compute = jax.jit(lambda x: x @ x / jnp.linalg.norm(x))
    x = compute(jnp.ones((200, 200)))
    messages, number = [], 0
    steps = {kind: [] for kind in kinds}
    saves = {kind: [] for kind in kinds}
    with Checkpoints(URL, max_to_keep=1, on_failure=messages.append) as checkpoints:
        # The first save compiles.
        save(checkpoints, number)
        assert checkpoints.wait() == number
        for kind, faults in [*kinds.items()] * int(rounds):
            for fault in faults:
                emulator.fault(**fault)
            began = time.monotonic()
            number += 1
            save(checkpoints, number)
            while checkpoints.latest_step() != number and not messages:
                before = time.monotonic()
                x = compute(x).block_until_ready()
                steps[kind].append(time.monotonic() - before)
                # Leaves CPU time to the save.
                time.sleep(0.002)
            saves[kind].append(time.monotonic() - began)
            emulator.clear()
            assert (checkpoints.wait(), messages) == (number, []), kind
            assert same(checkpoints.restore(number, abstract()).state, state(number))
    return {
        'steps': {k: len(v) for k, v in steps.items()},
        'saves': saves,
        'median': {k: statistics.median(v) for k, v in steps.items()},
    }


def outage(patience):
    """Refuses uploads of a checkpoint; `patience` is the time until the first probe, 0 keeps the default."""
    messages = []
    manager.PROBE_SECONDS = patience or manager.PROBE_SECONDS
    manager.BUSY_TIMEOUT_SECONDS = 0.1
    with Checkpoints(URL, max_to_keep=1, on_failure=messages.append) as checkpoints:
        save(checkpoints, 1)
        checkpoints.wait()
        # TensorStore uploads the data and retries; gcsfs sends the probe.
        emulator.fault(match=r'^POST /upload.*/2/', status=503)
        emulator.fault(match=r'^POST /upload', status=503 if not patience else 403)
        began = time.monotonic()
        save(checkpoints, 2)
        while not messages:
            time.sleep(0.01)
        seconds = time.monotonic() - began
        newest = checkpoints.latest_step()
        # The next save is skipped instead of waiting.
        if patience:
            checkpoints.save(3, state(3), FACTS, wait_for_previous=False)
        emulator.clear()
        checkpoints.wait()
        # Succeeds if the previous save has failed by then.
        save(checkpoints, 2)
        assert checkpoints.wait() == 2
        assert same(checkpoints.restore_newest(abstract()).state, state(2))
    # Negative control: without faults, a save finishes before the first probe.
    reported = [*messages]
    with Checkpoints(URL, max_to_keep=1, on_failure=messages.append) as checkpoints:
        save(checkpoints, 3)
        assert (checkpoints.wait(), messages) == (3, reported)
    return {'messages': messages, 'seconds': seconds, 'newest': newest}


def half_deleted():
    """Interrupts a deletion after the first object."""
    with Console(), Checkpoints(URL, max_to_keep=1) as checkpoints:
        save(checkpoints, 1)
        checkpoints.wait()
        emulator.fault(match=r'^(DELETE|POST /batch)', status=403)
        save(checkpoints, 2)
        checkpoints.wait()
        # The commit marker remains, so both checkpoints can be restored.
        visible = saved_steps(URL)
        emulator.clear()
        emulator.fault(match=r'^DELETE .*/checkpoints/[12]/(?!commit_success)|^POST /batch', status=403)
        save(checkpoints, 3)
        checkpoints.wait()
        left = {step: len(objects(step)) for step in (1, 2, 3)}
        half = saved_steps(URL)
        for step in half:
            checkpoints.restore(step, abstract())
    emulator.clear()
    with Checkpoints(URL, max_to_keep=1) as checkpoints:
        checkpoints.wait()
        return {'visible': visible, 'half': half, 'left': left, 'after': [len(objects(step)) for step in (1, 2, 3)]}


def damage():
    """Damages a checkpoint, which is set aside. An outage must not count as damage."""
    with Checkpoints(URL, max_to_keep=3) as checkpoints:
        save(checkpoints, 1, 2)
    path = to_path(f'{URL}/checkpoints/2/progress/metadata')
    path.write_text(path.read_text().replace('"skipped": 0', '"skipped": 7'))
    with Console(), Checkpoints(URL, max_to_keep=3) as checkpoints:
        emulator.fault(match=r'^GET .*/checkpoints.*alt=media', status=403)
        try:
            checkpoints.restore_newest(abstract())
        except InputError as error:
            refused = f'{type(error).__name__}: {error}'
        assert saved_steps(URL) == [1, 2]
        emulator.clear()
        restored = checkpoints.restore_newest(abstract())
        assert same(restored.state, state(1))
        assert checkpoints.wait() == 1
    with Checkpoints(URL, max_to_keep=3) as checkpoints:
        kept, aside = len(objects(2)), damaged_steps(URL)
        save(checkpoints, 2)
        assert same(checkpoints.restore_newest(abstract()).state, state(2))
    return {'refused': refused, 'kept': kept, 'aside': aside, 'after': damaged_steps(URL)}


def main():
    """Runs the scenario named by the first argument with the following numbers."""
    global URL  # noqa: PLW0603
    name, *numbers = sys.argv[1:]
    URL = f'gs://bucket/runs/{name}'
    emulator.url = os.environ['STORAGE_EMULATOR_HOST']
    logging.getLogger('absl').setLevel(logging.ERROR)
    jax.config.update('jax_platforms', 'cpu')
    print(json.dumps(globals()[name](*map(float, numbers))))
