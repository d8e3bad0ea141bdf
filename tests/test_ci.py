"""CI: requirements.lock pins the dependencies of pyproject.toml with hashes, and the workflows install from it."""

import itertools
import os
import re
import subprocess
import tomllib

import pytest
import yaml
from check_jsonschema.cli import main as check_jsonschema
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

import maxlm
from tests.conftest import ROOT

PROJECT = tomllib.loads((ROOT / 'pyproject.toml').read_text())
LOCK = (ROOT / 'requirements.lock').read_text()
CLASSIFIER = 'Programming Language :: Python :: '
PYTHONS = [name.removeprefix(CLASSIFIER) for name in PROJECT['project']['classifiers'] if name.startswith(CLASSIFIER)]
WORKFLOWS = {path.stem: yaml.safe_load(path.read_text()) for path in (ROOT / '.github/workflows').iterdir()}
RELEASE, TESTS, JAX, DOCS = (WORKFLOWS[name] for name in ('release', 'tests', 'jax', 'docs'))
# Permissions of the jobs that publish, by their environment. All other jobs can only read.
PERMISSIONS = {
    'pypi': {'contents': 'read', 'id-token': 'write'},
    'github-pages': {'pages': 'write', 'id-token': 'write'},
}
PINNED = r'[\w-]+/[\w-]+@[0-9a-f]{40}'


def is_for(requirement, python):
    """Returns True if the requirement applies to CI machines with this version of Python."""
    environment = {'python_version': python, 'python_full_version': f'{python}.1', 'extra': ''}
    environment |= {
        'os_name': 'posix',
        'sys_platform': 'linux',
        'platform_system': 'Linux',
        'platform_machine': 'x86_64',
    }
    environment |= {'implementation_name': 'cpython', 'platform_python_implementation': 'CPython'}
    return requirement.marker is None or requirement.marker.evaluate(environment)


def read_lock(text):
    """Returns (requirement, hashes) of each entry."""
    lines = re.sub(r'\\\n', ' ', re.sub(r'(?m)^\s*#.*\n', '', text)).splitlines()
    parts = [re.split(r'\s+--hash=', line.strip()) for line in lines]
    return [(Requirement(requirement), hashes) for requirement, *hashes in parts]


def malformed(entries):
    return [
        str(requirement)
        for requirement, hashes in entries
        if not hashes
        or not all(re.fullmatch('sha256:[0-9a-f]{64}', value) for value in hashes)
        or not re.fullmatch(r'==[^*,]+', str(requirement.specifier))
    ]


def unmet(entries, wanted, python):
    """Returns the requirements that are not pinned once, within their bounds, for a version of Python."""
    pins = {}
    for requirement, _ in entries:
        if is_for(requirement, python):
            pins.setdefault(canonicalize_name(requirement.name), []).append(str(requirement.specifier).lstrip('='))
    assert {name: versions for name, versions in pins.items() if len(versions) != 1} == {}
    return [
        str(requirement)
        for requirement in wanted
        if is_for(requirement, python)
        and not any(Version(pin) in requirement.specifier for pin in pins.get(canonicalize_name(requirement.name), []))
    ]


def dependencies():
    """Returns all requirements of pyproject.toml, including every extra and the build backend."""
    project = PROJECT['project']
    extras = itertools.chain(*project['optional-dependencies'].values())
    lines = [*PROJECT['build-system']['requires'], *project['dependencies'], *extras]
    return [requirement for line in lines if (requirement := Requirement(line)).name != project['name']]


@pytest.mark.parametrize('python', PYTHONS)
def test_the_lock_has_every_dependency_within_its_bounds(python):
    entries = read_lock(LOCK)
    assert len(entries) > 100
    assert unmet(entries, dependencies(), python) == []
    # Negative control: an unknown package, and newer versions.
    planted = [Requirement('no-such-package'), Requirement('jax>=99'), Requirement('numpy>=99; python_version < "3"')]
    assert unmet(entries, planted, python) == ['no-such-package', 'jax>=99']


def test_every_entry_has_hashes_and_no_address():
    assert malformed(read_lock(LOCK)) == []
    assert re.findall(r'(?i)https?:|index-url|find-links| @ ', LOCK) == []
    planted = f'a==1 \\\n    --hash=sha256:{"0" * 64}\n    # via b\nb==2\nc>=3 \\\n    --hash=sha256:{"1" * 64}\n'
    assert malformed(read_lock(planted)) == ['b==2', 'c>=3']


def environment_of(job):
    """Returns the name of the environment of a job; None if it has none."""
    environment = job.get('environment')
    return environment['name'] if isinstance(environment, dict) else environment


@pytest.mark.parametrize('name', WORKFLOWS)
def test_workflows_pin_actions_and_have_read_permission(name):
    workflow = WORKFLOWS[name]
    assert workflow['name'] == name
    jobs = workflow['jobs'].values()
    assert workflow['permissions'] == {'contents': 'read'}
    assert [job.get('permissions') for job in jobs] == [PERMISSIONS.get(environment_of(job)) for job in jobs]
    steps = [step for job in jobs for step in job.get('steps', ())]
    assert [step['uses'] for step in steps if 'uses' in step and not re.fullmatch(PINNED, step['uses'])] == []
    assert not re.fullmatch(PINNED, 'actions/checkout@v5')
    # Only the nightly build of JAX has no fixed version.
    installed = [line for step in steps for line in step.get('run', '').splitlines() if 'pip install' in line]
    assert [line for line in installed if '==' not in line and '--pre' not in line] == []


def is_valid(*paths):
    """Returns True if check-jsonschema accepts the files as workflows of GitHub."""
    words = ['--quiet', '--builtin-schema', 'vendor.github-workflows', *map(str, paths)]
    return check_jsonschema(words, standalone_mode=False) == 0


def test_workflows_are_valid(tmp_path):
    assert is_valid(*(ROOT / '.github/workflows').iterdir())
    (tmp_path / 'a.yml').write_text('on: push\njobs: {a: {runs-on: ubuntu-24.04, stepz: []}}\n')
    assert not is_valid(tmp_path / 'a.yml')


def test_every_tier_runs_on_every_python():
    assert TESTS['env'] == {'MAXLM_LOCK': 'requirements.lock'}
    jobs = TESTS['jobs']
    for name in ('audit', 'test', 'package', 'nightly'):
        assert jobs[name]['strategy']['matrix']['python'] == PYTHONS, name
    assert '--nightly' in jobs['nightly']['strategy']['matrix']['tier']
    assert {'run': 'launch/test.sh ${{ matrix.tier }}'} in jobs['nightly']['steps']


def test_the_oldest_and_the_newest_jax_are_tested_on_every_python(tmp_path):
    job = JAX['jobs']['released']
    assert job['strategy']['matrix'] == {'python': PYTHONS, 'jax': ['oldest', 'newest']}
    (constrain,) = [step for step in job['steps'] if step.get('if') == "matrix.jax == 'oldest'"]
    # The constraint is read from pyproject.toml.
    bound = next(line for line in PROJECT['project']['dependencies'] if line.startswith('jax>='))
    (tmp_path / 'pyproject.toml').write_bytes((ROOT / 'pyproject.toml').read_bytes())
    environment = {**os.environ, 'GITHUB_ENV': str(tmp_path / 'environment')}
    subprocess.run(['bash', '-e', '-c', constrain['run']], cwd=tmp_path, env=environment, check=True)
    assert (tmp_path / 'jax.txt').read_text() == bound.replace('>=', '==') + '\n'
    assert (tmp_path / 'environment').read_text() == f'PIP_CONSTRAINT={tmp_path}/jax.txt\n'
    assert commands(job)[-1] == 'launch/test.sh'
    # Negative control: without a lower bound, the step fails.
    (tmp_path / 'pyproject.toml').write_text('dependencies = []\n')
    assert subprocess.run(['bash', '-e', '-c', constrain['run']], cwd=tmp_path, env=environment).returncode == 1


def test_the_nightly_jax_is_tested_weekly():
    assert JAX[True]['schedule'] == [{'cron': '43 4 * * 1'}]
    nightly = JAX['jobs']['nightly']
    assert 'continue-on-error' not in nightly
    assert commands(nightly)[-1] == 'launch/test.sh --fast'


def test_the_documentation_is_deployed_from_main():
    assert DOCS[True]['push'] == {'branches': ['main']}
    build, deploy = DOCS['jobs']['build'], DOCS['jobs']['deploy']
    assert commands(build) == ['launch/test.sh --lint']
    assert 'mkdocs build --strict' in (ROOT / 'launch/test.sh').read_text()
    assert build['steps'][-1]['with'] == {'path': 'site'}
    assert (deploy['needs'], commands(deploy)) == ('build', [])


def test_the_urls_of_the_package_have_one_repository():
    urls = PROJECT['project']['urls']
    assert [
        name for name, url in urls.items() if name != 'Documentation' and not url.startswith(urls['Repository'])
    ] == []
    owner, name = urls['Repository'].removeprefix('https://github.com/').split('/')
    assert urls['Documentation'] == f'https://{owner}.github.io/{name}/'
    owners = re.findall(r'@(\w+)/\w+', (ROOT / '.github/CODEOWNERS').read_text())
    assert owners
    assert set(owners) == {owner}


def test_every_path_with_an_owner_exists():
    lines = (ROOT / '.github/CODEOWNERS').read_text().splitlines()
    paths = [line.split()[0] for line in lines if line and not line.startswith('#')]
    assert [path for path in paths if path != '*' and not (ROOT / path.strip('/')).exists()] == []
    assert '*' in paths


@pytest.mark.parametrize(('repository', 'code'), [('maxlm/maxlm', 0), ('fork/maxlm', 1)])
def test_a_fork_does_not_publish(repository, code):
    check = commands(RELEASE['jobs']['publish'])[1]
    environment = {**os.environ, 'GITHUB_SERVER_URL': 'https://github.com', 'GITHUB_REPOSITORY': repository}
    assert subprocess.run(['bash', '-c', check], cwd=ROOT, env=environment).returncode == code


def commands(job):
    return [step['run'] for step in job['steps'] if 'run' in step]


def test_the_wheel_and_the_source_distribution_are_installed_and_used():
    run = commands(TESTS['jobs']['package'])
    assert run[1:] == [
        'python -m build --no-isolation',
        'python -m twine check --strict dist/*',
        'launch/smoke_package.sh dist/*.whl',
        'launch/smoke_package.sh dist/*.tar.gz',
    ]


def test_a_tag_is_published_after_the_tests_without_a_stored_token():
    # YAML reads the key `on` as True.
    assert RELEASE[True] == {'push': {'tags': ['v*']}}
    assert 'workflow_call' in TESTS[True]
    assert RELEASE['jobs']['tests'] == {'uses': './.github/workflows/tests.yml'}
    publish = RELEASE['jobs']['publish']
    assert (publish['needs'], publish['environment']) == ('tests', 'pypi')
    check, _, install, *build = commands(publish)
    assert build == ['python -m build --no-isolation', 'uv publish --trusted-publishing always dist/*']
    assert not any('secrets.' in command or 'TOKEN' in command for command in (check, install, *build))
    # Both workflows build with the versions of the lock.
    pins = {str(requirement) for requirement, _ in read_lock(LOCK)}
    for command in (install, commands(TESTS['jobs']['package'])[0]):
        assert {word for word in command.split() if word.startswith(('build', 'setuptools'))} <= pins


@pytest.mark.parametrize(('tag', 'code'), [(f'v{maxlm.__version__}', 0), ('v0.0.1', 1), (maxlm.__version__, 1)])
def test_the_tag_must_be_the_version(tag, code):
    check, *_ = commands(RELEASE['jobs']['publish'])
    environment = {**os.environ, 'GITHUB_REF_NAME': tag}
    assert subprocess.run(['bash', '-c', check], cwd=ROOT, env=environment, check=False).returncode == code


def test_hooks_run_the_checks_of_ci():
    (local,) = yaml.safe_load((ROOT / '.pre-commit-config.yaml').read_text())['repos']
    script = (ROOT / 'launch/test.sh').read_text()
    checks = re.findall(
        r'(?m)^  (?:beside )?(.*)$', ''.join(re.findall(r'(?ms)^(?:format|lint)\(\) \{\n(.*?)^\}', script))
    )
    hooks = {hook['entry'].replace(' --force-exclude', '') for hook in local['hooks']}
    assert hooks == {check.removesuffix(' .') for check in checks}


def test_all_files_have_the_same_version():
    citation = yaml.safe_load((ROOT / 'CITATION.cff').read_text())
    changelog = re.findall(r'^## \[([\d.]+)\]', (ROOT / 'CHANGELOG.md').read_text(), re.MULTILINE)
    assert {PROJECT['project']['version'], citation['version'], changelog[0]} == {maxlm.__version__}


def test_the_newest_version_of_the_changelog_is_short():
    newest = re.split(r'(?m)^## ', (ROOT / 'CHANGELOG.md').read_text())[1]
    assert re.findall(r'(?m)^### (.+)', newest)[:2] == ['Highlights', 'Breaking changes']
    assert 0 < len(re.findall(r'(?m)^- ', newest)) <= 80


@pytest.mark.parametrize('path', sorted((ROOT / '.github').rglob('*.yml')), ids=lambda path: path.name)
def test_forms_have_unique_labels(path):
    form = yaml.safe_load(path.read_text())
    labels = [entry['attributes']['label'] for entry in form.get('body', ())]
    assert len(set(labels)) == len(labels)
    assert form
