"""Tests that the GPU scripts import packages from a directory of wheels, and that bad wheels stop them."""

import os
import subprocess
import sys
import zipfile

import pytest

from tests.conftest import ROOT

# Prints the path of the imported module.
PROGRAM = """
source benchmarks/gpu_wheels.sh
python="$PYTHON"
use_wheels
"$python" -c 'import carried; print(carried.__file__)'
"""

pytestmark = pytest.mark.multiprocess


def write_wheel(directory, tag):
    directory.mkdir()
    with zipfile.ZipFile(directory / f'carried-1.0-{tag}.whl', 'w') as file:
        file.writestr('carried.py', '')
        file.writestr('carried-1.0.dist-info/METADATA', 'Metadata-Version: 2.1\nName: carried\nVersion: 1.0\n')
        file.writestr('carried-1.0.dist-info/WHEEL', f'Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: {tag}\n')
        file.writestr('carried-1.0.dist-info/RECORD', '')


@pytest.mark.parametrize(
    ('wheels', 'code', 'text'),
    [('good', 0, 'carried.py'), ('other_python', 2, 'not a supported wheel'), (None, 1, "No module named 'carried'")],
)
def test_wheels(tmp_path, wheels, code, text):
    write_wheel(tmp_path / 'good', 'py3-none-any')
    write_wheel(tmp_path / 'other_python', 'cp27-cp27m-win32')
    environment = {**os.environ, 'PYTHON': sys.executable, 'TMPDIR': str(tmp_path)}
    if wheels:
        environment['WHEELS'] = str(tmp_path / wheels)
    command = ['bash', '-c', PROGRAM]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == code, done.stderr
    assert text in done.stdout + done.stderr
