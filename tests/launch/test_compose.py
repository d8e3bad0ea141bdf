"""Tests the Compose files: their schema, and that their services start commands of the images' targets."""

import copy
import json
from importlib.resources import files

import jsonschema
import pytest
import yaml

from tests.conftest import ROOT
from tests.launch.images import ARGUMENTS, STAGES, compose, exec_form, maxlm_words, values
from tests.launch.parsing import parse

# The schema of the Compose Specification, which comes with check-jsonschema.
SCHEMA = json.loads((files('check_jsonschema') / 'builtin_schemas/vendor/compose-spec.json').read_text())
NAMES = ('compose.yaml', 'compose.gpu.yaml')
CPU, GPU = compose(NAMES[0]), compose(*NAMES)


def errors(document):
    return [error.message for error in jsonschema.Draft202012Validator(SCHEMA).iter_errors(document)]


@pytest.mark.parametrize('name', NAMES)
def test_schema(name):
    document = yaml.safe_load((ROOT / name).read_text())
    assert errors(document) == []
    # Negative controls: an unknown key and a wrong type.
    planted = copy.deepcopy(document)
    planted['services']['train']['comand'] = ['x']
    assert errors(planted)
    planted = copy.deepcopy(document)
    planted['services']['train']['build'] = 3
    assert errors(planted)


@pytest.mark.parametrize('document', [CPU, GPU])
def test_images(document):
    for name, service in document['services'].items():
        build = service['build']
        assert build['context'] == '.', name
        assert build['target'] in STAGES, name
        assert build['args'].keys() <= ARGUMENTS.keys(), name
        assert build['args'].get('HARDWARE', 'cpu') in STAGES, name
        assert build['args']['UID'] == 1000, name
    # Services with the same image build the same target.
    images = {(service['image'], json.dumps(service['build'])) for service in document['services'].values()}
    assert len(images) == len({image for image, _ in images}) == 2


def test_gpu_images():
    reserved = [{'driver': 'nvidia', 'count': 'all', 'capabilities': ['gpu']}]
    assert GPU['services'].keys() == CPU['services'].keys()
    for name, service in GPU['services'].items():
        hardware = service['build']['args'].get('HARDWARE', service['build']['target'])
        assert hardware == 'cuda12', name
        if name != 'tensorboard':
            assert service['deploy']['resources']['reservations']['devices'] == reserved
    # Control: without the second file no service needs GPUs.
    assert all('deploy' not in service for service in CPU['services'].values())


def test_commands():
    services = compose(NAMES[0], MAXLM_CONFIG='configs/1b.py', MAXLM_WORKDIR='runs/1b')['services']
    words = services['train']['entrypoint'] + services['train']['command']
    verb, separator, *training = maxlm_words(words)
    assert (verb, separator) == ('supervise', '--')
    options = parse(maxlm_words(training))
    assert (options.config, options.workdir) == ('configs/1b.py', 'runs/1b')
    server = services['serve']
    assert 'entrypoint' not in server
    options = parse(exec_form(server['build']['target'], 'ENTRYPOINT')[1:] + server['command'])
    assert options.checkpoint == 'runs/1b'
    # Defaults.
    defaults = CPU['services']
    options = parse(maxlm_words(defaults['train']['entrypoint'][4:] + defaults['train']['command']))
    assert (options.config, options.workdir) == ('configs/tiny.py', 'runs/tiny')


@pytest.mark.parametrize('name', CPU['services'])
def test_services(name):
    service = CPU['services'][name]
    # The last process of a container receives SIGTERM, and ports are open only to this machine.
    assert service['init'] is True
    assert all(port.startswith('127.0.0.1:') for port in service.get('ports', []))
    directory = values(service['build']['target'], 'WORKDIR')[0]
    mounts = dict(volume.split(':') for volume in service['volumes'])
    assert mounts == {'./data': f'{directory}/data', './runs': f'{directory}/runs', 'cache': '/home/maxlm/.cache'}
    assert 'cache' in CPU['volumes']
    # Secrets come from the shell, so they have no values.
    assert set(service['environment'].values()) == {None}


def test_health_checks():
    services = CPU['services']
    assert services['tensorboard']['healthcheck']['test'][:3] == ['CMD', 'python', '-c']
    assert '127.0.0.1:6006' in services['tensorboard']['healthcheck']['test'][3]
    assert '--port=6006' in services['tensorboard']['entrypoint']
    # The image of the server contains its check.
    assert 'healthcheck' not in services['serve']
    assert values('serve', 'HEALTHCHECK')
    assert services['serve']['ports'] == ['127.0.0.1:8000:8000']
