"""Tests launch/sky/train.yaml: SkyPilot accepts it, and its commands install maxlm and train on all nodes."""

import copy
import json
import subprocess
import sys

import jsonschema
import pytest
import yaml

from maxlm.errors import EXIT_DEVICE, EXIT_PREEMPTED
from tests.conftest import ROOT
from tests.launch.test_shell import shellcheck

pytestmark = pytest.mark.multiprocess

TASK = ROOT / 'launch/sky/train.yaml'
SKYPILOT = ROOT / 'tests/launch/skypilot.json'
VARIABLES = {
    'CONFIG': 'configs/tiny.py',
    'WORKDIR': 's3://bucket/run',
    'ARGUMENTS': "--config.train.num_steps=3 --config.data.path='a b'",
    'SKYPILOT_NUM_GPUS_PER_NODE': '8',
}


def task():
    return yaml.safe_load(TASK.read_text())


def validate(document):
    schemas = json.loads(SKYPILOT.read_text())
    for schema, part in (('task', document), ('resources', document['resources'])):
        jsonschema.Draft202012Validator(schemas[schema]).validate(part)


def test_schema():
    validate(task())
    for part, key in (('resources', 'use_spots'), ('envs', '1'), ('', 'setups')):
        misspelled = copy.deepcopy(task())
        (misspelled[part] if part else misspelled)[key] = 'x'
        with pytest.raises(jsonschema.ValidationError):
            validate(misspelled)
    misspelled = task()
    misspelled['resources']['job_recovery']['recover_on_exit_code'] = [EXIT_PREEMPTED]
    with pytest.raises(jsonschema.ValidationError):
        validate(misspelled)


def test_jobs_are_recovered_on_other_machines_only_if_that_helps():
    recovery = task()['resources']['job_recovery']
    # All other codes, such as bad input, end the job.
    assert (recovery['recover_on_exit_codes'], recovery['max_restarts_on_errors']) == ([EXIT_DEVICE, EXIT_PREEMPTED], 0)
    # SkyPilot refuses the task until these are set.
    assert [name for name, value in task()['envs'].items() if value is None] == ['CONFIG', 'WORKDIR']


def test_shellcheck(tmp_path):
    for name in ('setup', 'run'):
        (tmp_path / name).write_text(f'#!/usr/bin/env bash\n{task()[name]}')
        assert shellcheck(tmp_path / name) == ''


@pytest.fixture
def machine(programs, tmp_path):
    """Returns a function that runs a script of the task in the directory to which SkyPilot copies the repository."""
    (tmp_path / 'launch').symlink_to(ROOT / 'launch')
    (tmp_path / '.venv/bin').mkdir(parents=True)

    def run(script, **variables):
        values = {name: value for name, value in task()['envs'].items() if value is not None}
        done = programs.run('bash', '-c', task()[script], cwd=tmp_path, HOME=str(tmp_path), **{**values, **variables})
        assert done.returncode == 0, done.stderr
        return done

    return run


def test_one_node(programs, machine):
    machine('run', **VARIABLES, SKYPILOT_NUM_NODES='1', SKYPILOT_NODE_RANK='0', SKYPILOT_NODE_IPS='10.0.0.4')
    call, _ = programs.calls('python')
    words = ['--config=configs/tiny.py', '--workdir=s3://bucket/run', '--config.train.num_steps=3']
    assert call['arguments'] == ['-m', 'maxlm.train', *words, '--config.data.path=a b']
    assert not [name for name in call['environment'] if name.startswith('MAXLM_')]
    assert call['environment']['CUDA_VISIBLE_DEVICES'] == '0,1,2,3,4,5,6,7'


@pytest.mark.parametrize('rank', ['0', '1'])
def test_two_nodes(programs, machine, rank):
    nodes = {'SKYPILOT_NUM_NODES': '2', 'SKYPILOT_NODE_RANK': rank, 'SKYPILOT_NODE_IPS': '10.0.0.4\n10.0.0.5'}
    machine('run', **VARIABLES, **nodes)
    joined = {name: value for name, value in programs.calls('python')[0]['environment'].items() if 'MAXLM_' in name}
    assert joined == {'MAXLM_COORDINATOR': '10.0.0.4:8476', 'MAXLM_NUM_PROCESSES': '2', 'MAXLM_PROCESS_ID': rank}


def test_setup_installs_once(programs, machine, tmp_path):
    machine('setup', EXTRAS='cuda12,s3')
    # uv ends at once if the packages are installed.
    install = 'uv pip install --quiet --python .venv/bin/python --editable .[cuda12,s3]'
    assert programs.lines('uv') == ['uv venv --quiet --python 3.12 .venv', install]
    programs.forget()
    (tmp_path / '.venv/bin/python').symlink_to(sys.executable)
    machine('setup', EXTRAS='cuda12,s3')
    assert programs.lines('uv') == [install]


@pytest.mark.parametrize(
    ('words', 'message'),
    [
        (['jobs', 'launch', 'launch/sky/train.yaml', '--use-spots'], 'No such option: --use-spots'),
        (['jobs', 'launch', 'launch/sky/other.yaml'], 'does not exist'),
        (['jobs', 'launch', 'launch/sky/train.yaml', '--infra'], 'requires an argument'),
        (['jobs', 'start'], 'No such command'),
    ],
)
def test_fake_sky_refuses_what_skypilot_does_not_have(programs, words, message):
    done = programs.run('sky', *words)
    assert done.returncode == 2
    assert message in done.stderr
    assert programs.run('sky', 'jobs', 'launch', TASK, '--use-spot', '--infra=gcp').returncode == 0


# Slow: installs SkyPilot.
@pytest.mark.nightly
@pytest.mark.timeout(1200)
def test_schemas_are_those_of_skypilot(tmp_path):
    python = tmp_path / 'venv/bin/python'
    version = json.loads(SKYPILOT.read_text())['version']
    subprocess.run([sys.executable, '-m', 'venv', tmp_path / 'venv'], check=True)
    subprocess.run([python, '-m', 'pip', 'install', '--quiet', f'skypilot=={version}'], check=True)
    environment = {'HOME': str(tmp_path), 'PATH': '/usr/bin:/bin'}
    written = subprocess.run([python, ROOT / 'tests/launch/write_skypilot.py'], env=environment, capture_output=True)
    assert json.loads(written.stdout) == json.loads(SKYPILOT.read_text()), written.stderr
    # SkyPilot's own parser also checks relations between the fields.
    load = (
        'import sys, sky, yaml; config = yaml.safe_load(open(sys.argv[1])); config.pop("workdir"); '
        'sky.Task.from_yaml_config(config, env_overrides=[("CONFIG", "c"), ("WORKDIR", "gs://b/r")])'
    )
    subprocess.run([python, '-c', load, TASK], env=environment, check=True)
