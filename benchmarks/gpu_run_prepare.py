"""Prepares the files that `benchmarks/gpu_run.sh run` needs on a GPU machine without network.

    python -m benchmarks.gpu_run_prepare DIRECTORY [--input PATH …] [--python-version=3.12]

Writes a data set and wheels. DIRECTORY/data.tar.gz contains the documentation of Debian's packages on this machine.
DIRECTORY/wheels contains what `maxlm train` needs in addition to jax, flax, optax, orbax-checkpoint and tokenizers. The
wheels have the versions that are installed here. Prints the sizes, and fails if all files together are larger than
--limit-mib. Needs a network for the wheels.
"""

from __future__ import annotations

import subprocess
import sys
import tarfile
import tempfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from maxlm.cli.parser import ArgumentParser
from maxlm.errors import EXIT_DONE, InputError, exit_code
from maxlm.formatting import format_bytes

ARCHIVE, WHEELS = 'data.tar.gz', 'wheels'
# Directory of the data set in the archive.
DATA = 'data'
# Manual pages, documentation, and scripts with documentation in them. All of it is free software.
INPUTS = ('/usr/share/man', '/usr/share/doc', '/usr/share/perl', '/usr/share/vim')
# Logs of changes repeat themselves, the suffixes are of markup and data, and the last names are of documentation that
# is not free.
EXCLUDED = ('changelog*', '*.html', '*.xml', '*.svg', '*.css', '*.js', '*.json', '*.bin', 'gcloud*', 'google-cloud*')
# grain requires array_record, cloudpickle and portpicker.
PACKAGES = ('grain', 'array_record', 'cloudpickle', 'portpicker', 'ml_collections', 'tenacity')
# pip accepts exactly the named tags.
PLATFORMS = ('manylinux_2_28_x86_64', 'manylinux_2_24_x86_64', 'manylinux_2_17_x86_64', 'manylinux2014_x86_64')


def main(argv: list[str]) -> int:
    """Writes the files and prints their sizes."""
    parser = ArgumentParser(prog='benchmarks.gpu_run_prepare', allow_abbrev=False, description=__doc__)
    parser.add_argument('directory', type=Path, help='directory to write')
    parser.add_argument('--input', nargs='+', default=INPUTS, help=f'texts (default {" ".join(INPUTS)})')
    parser.add_argument('--tokenizer', default='bpe:50000', help='as of maxlm prepare (default bpe:50000)')
    parser.add_argument('--validation-fraction', default='0.01', help='as of maxlm prepare (default 0.01)')
    parser.add_argument('--python-version', default='3.12', help='Python of the GPU machine (default 3.12)')
    parser.add_argument('--packages', nargs='*', default=PACKAGES, help=f'wheels (default {" ".join(PACKAGES)})')
    parser.add_argument('--limit-mib', type=float, default=45.0, help='size limit of all files (default 45)')
    options = parser.parse_args(argv)
    options.directory.mkdir(parents=True, exist_ok=True)
    code = write_data(options.directory / ARCHIVE, options.input, options.tokenizer, options.validation_fraction)
    if code:
        return code
    download_wheels(options.directory / WHEELS, options.packages, options.python_version)
    files = sorted(path for path in options.directory.rglob('*') if path.is_file())
    for file in files:
        print(f'{format_bytes(file.stat().st_size):>9}  {file}')
    size = sum(file.stat().st_size for file in files)
    print(f'{format_bytes(size):>9}  in all')
    if size > options.limit_mib * 2**20:
        raise InputError(
            f'{options.directory}: {format_bytes(size)} is above --limit-mib={options.limit_mib:g}; give less --input'
        )
    return EXIT_DONE


def write_data(archive: Path, inputs: list[str], tokenizer: str, validation_fraction: str) -> int:
    """Writes a data set of `maxlm prepare` as an archive and returns the exit code.

    Shards are padded and texts repeat themselves, so the archive has a third of the size of the shards.
    """
    with tempfile.TemporaryDirectory() as directory:
        data = Path(directory) / DATA
        words = ['--input', *inputs, '--exclude', *EXCLUDED, '--output', str(data), '--tokenizer', tokenizer]
        words += ['--validation-fraction', validation_fraction, '--deduplicate=near', '--max-record-mib=1']
        command = [sys.executable, '-m', 'maxlm.prepare', *words, '--skip-bad-records']
        if code := subprocess.run(command).returncode:
            return code
        with tarfile.open(archive, 'w:gz') as file:
            file.add(data, DATA)
    return EXIT_DONE


def download_wheels(directory: Path, packages: list[str], python_version: str) -> None:
    """Downloads wheels for x86-64 Linux in the installed versions.

    Raises:
        InputError: a package is not installed here, or pip fails.
    """
    if not packages:
        return
    try:
        pins = [f'{name}=={version(name)}' for name in packages]
    except PackageNotFoundError as error:
        raise InputError(f'--packages: {error.name} is not installed here') from error
    words = ['--no-deps', '--only-binary=:all:', f'--python-version={python_version}', '--implementation=cp']
    words += [f'--platform={platform}' for platform in PLATFORMS]
    command = [sys.executable, '-m', 'pip', 'download', '--quiet', *words, '--dest', str(directory), *pins]
    if subprocess.run(command).returncode:
        raise InputError(f'pip finds no wheels of {" ".join(pins)} for Python {python_version}; see its message above')


if __name__ == '__main__':
    sys.exit(exit_code(main, sys.argv[1:]))
