"""Tests the script of GPU measurements with a fake Python that records its calls."""

import os
import re
import subprocess
import sys

import pytest

from maxlm.config.config_files import split_overrides
from maxlm.config.loading import load
from maxlm.config.resolve import resolve
from tests.conftest import ROOT

# Writes the requested output file, and exits with the given code if the measurement is in FAILING.
STAND_IN = """#!/usr/bin/env bash
case "$1" in -c) exit 0 ;; esac
[ "${JAX_ENABLE_COMPILATION_CACHE:-}" = false ] && set -- "$@" --no-cache
echo "$*" >>"$CALLS"
for word in "$@"; do
  case "$word" in --output=*) file="${word#--output=}" ;; esac
done
name="$(basename "$file" .json)"
echo '{}' >"$file"
for failing in $FAILING; do
  [ "${failing%:*}" = "$name" ] && exit "${failing#*:}"
done
exit 0
"""


@pytest.fixture
def run(tmp_path):
    stand_in, out = tmp_path / 'python3', tmp_path / 'out'
    stand_in.write_text(STAND_IN)
    stand_in.chmod(0o755)

    def run(limit, failing=''):
        """Returns the process, the calls of Python by name, and the names of the written files."""
        calls = tmp_path / f'calls_{limit}'
        environment = {
            'PATH': f'{tmp_path}{os.pathsep}{os.environ["PATH"]}',
            'OUT': str(out),
            'CALLS': str(calls),
            'LIMIT': str(limit),
            'FAILING': failing,
        }
        done = subprocess.run(['bash', f'{ROOT}/benchmarks/gpu.sh'], env=environment, capture_output=True, text=True)
        lines = calls.read_text().splitlines() if calls.exists() else []
        by_name = {re.search(r'--output=\S*/(\w+)\.json', line)[1]: line.split() for line in lines}
        assert len(by_name) == len(lines)
        return done, by_name, {file.stem for file in out.glob('*.json')}

    return run


# More seconds than the script needs.
ALWAYS = 10**6
# Measurements of the first three calls of 570 seconds.
FIRST_CALL = ('decide', 'attention', 'deterministic', 'replay', '1b')
SECOND_CALL = ('norm', '1b_norm_kernels', '1b_deterministic', 'experts', '1b_fp8', '8x1b_4layers', 'decode_1b')
THIRD_CALL = ('decode_1b_int8', 'peers')
FIRST_CALLS = (*FIRST_CALL, *SECOND_CALL, *THIRD_CALL)


def test_all_measurements_run(run):
    done, calls, files = run(ALWAYS)
    assert done.returncode == 0, done.stderr
    assert 'skipped' not in done.stdout
    names = list(calls)
    assert set(names) == files
    # The most informative measurements come first.
    assert names[: len(FIRST_CALLS)] == [*FIRST_CALLS]
    # A second call skips the measurements that have a file.
    again, calls_again, _ = run(ALWAYS + 1)
    assert again.returncode == 0
    assert calls_again == {}
    folder = os.path.dirname(calls['1b'][2].removeprefix('--output=')).removesuffix('/unfinished')
    assert f'--beside={folder}/1b.json' in calls['1b_fp8']
    modules = {words[1].removeprefix('benchmarks.') for words in calls.values()}
    checks = {'gpu_decide', 'gpu_attention', 'gpu_checks', 'gpu_replay', 'gpu_norm', 'gpu_experts'}
    assert modules == {*checks, 'peers_gpu', 'step', 'decode'}
    # These compile without the cache: one compares programs, and the compile time of the other is a result.
    assert [name for name, words in calls.items() if '--no-cache' in words] == ['deterministic', '1b']


def test_three_calls_are_enough():
    """The declared seconds of the measurements of each of the first three calls fit into the default limit."""
    script = (ROOT / 'benchmarks/gpu.sh').read_text()
    limit = int(re.search(r'LIMIT:-(\d+)', script)[1])
    # Lines such as `run NAME SECONDS MODULE`, also after an assignment or within an `if`.
    declared = re.findall(r'^[^#\n]*?\b(?:run|measure) (\w+) (\d+) ', script, re.MULTILINE)
    seconds = {name: int(number) for name, number in declared}
    assert list(seconds)[: len(FIRST_CALLS)] == [*FIRST_CALLS]
    for names in (FIRST_CALL, SECOND_CALL, THIRD_CALL):
        assert sum(seconds[name] for name in names) <= limit
    # Control: one more measurement does not fit.
    assert sum(seconds[name] for name in (*FIRST_CALL, 'peers')) > limit


def test_configs_and_overrides_are_valid(run):
    """Every config and override of the script is valid on its kind of GPU."""
    for words in run(ALWAYS)[1].values():
        overrides, rest = split_overrides(words)
        if not overrides:
            continue
        (spec,) = (word.removeprefix('--config=') for word in rest if word.startswith('--config='))
        config = load(str(ROOT / spec), overrides)
        vocab_size = config.model.vocab_size or 50_257
        resolved = resolve(config, platform='gpu', num_devices=1, vocab_size=vocab_size, windows=1, capability=(9, 0))
        # Documents are a mask if all bits must be equal.
        usual = 'cudnn_mask' if config.train.deterministic else 'cudnn'
        assert resolved.model.attention == (usual if config.model.attention == 'auto' else config.model.attention)
        assert resolved.train.global_batch_size <= 16


def test_xla_options_are_known(run):
    options = [word.removeprefix('--xla=') for words in run(ALWAYS)[1].values() for word in words if '--xla=' in word]
    assert len(options) > 3
    program = "import jax; jax.devices('cpu')"
    for more, is_known in (('', True), (' --xla_gpu_no_such_option=1', False)):
        environment = {**os.environ, 'XLA_FLAGS': ' '.join(f'--{option}' for option in options) + more}
        done = subprocess.run([sys.executable, '-c', program], env=environment, capture_output=True, text=True)
        assert (done.returncode == 0) == is_known, done.stderr


def test_measurements_beyond_the_time_limit_are_skipped(run):
    done, calls, _ = run(0)
    assert done.returncode == 0, done.stderr
    assert calls == {}
    (line,) = (line for line in done.stdout.splitlines() if 'skipped' in line)
    assert f' {" ".join(FIRST_CALLS)} peers_others ' in line
    # Measurements that need more than the limit are skipped, and all others run.
    done, calls, files = run(110)
    assert done.returncode == 0, done.stderr
    assert 'attention' in files
    assert not {'decide', 'peers', 'peers_cudnn'} & set(calls)
    (line,) = (line for line in done.stdout.splitlines() if 'skipped' in line)
    assert {'decide', 'peers', 'peers_cudnn'} <= set(line.split())
    assert not set(calls) & set(line.split())


def test_failure_is_reported_and_other_measurements_run(run):
    done, calls, files = run(ALWAYS, failing='1b:1 xlarge:124')
    assert done.returncode == 1
    assert set(calls) - files == {'1b', 'xlarge'}
    assert 'error: 1b: exit code 1' in done.stderr
    assert 'error: xlarge: took too long' in done.stderr
    assert done.stderr.splitlines()[-1] == 'error: failed: 1b xlarge'


def test_invalid_limit(run):
    done, calls, _ = run('soon')
    assert done.returncode == 2
    assert 'LIMIT=soon' in done.stderr
    assert calls == {}


def test_refuses_a_machine_without_a_gpu(tmp_path):
    environment = {**os.environ, 'PYTHON': sys.executable, 'OUT': str(tmp_path)}
    done = subprocess.run(['bash', f'{ROOT}/benchmarks/gpu.sh'], env=environment, capture_output=True, text=True)
    assert done.returncode == 2
    assert 'no GPU' in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_names_a_missing_package(tmp_path):
    """Prints one line with the installation command. With -S, no installed package is found."""
    python = tmp_path / 'python'
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    python.chmod(0o755)
    environment = {'PATH': os.environ['PATH'], 'PYTHON': str(python), 'OUT': str(tmp_path / 'out')}
    done = subprocess.run(['bash', f'{ROOT}/benchmarks/gpu.sh'], env=environment, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.count('\n') == 1
    assert 'pip install jax flax optax orbax-checkpoint ml_collections' in done.stderr
