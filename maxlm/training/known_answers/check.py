"""Runs the known-answer tests of a run or a server at its start, unless they have passed recently on these devices."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import Mesh

import maxlm
from maxlm.errors import InputError
from maxlm.hardware.identity import cudnn_version, identify, installed_version
from maxlm.hardware.known_faults import describe as describe_fault
from maxlm.hardware.known_faults import installed_libraries, known_faults
from maxlm.log import logger
from maxlm.runtime.barrier import agree
from maxlm.runtime.compilation_cache import CompilationCache
from maxlm.storage.json_text import parse_json
from maxlm.training.known_answers.answer import KnownAnswer, Mistake, find_mistake
from maxlm.training.known_answers.collectives import wrong_collective

# Seconds after which the tests run again: a device can develop a defect.
VALID_SECONDS = 24 * 3600
# CPUs use no kernels other than those of XLA.
UNTESTED_PLATFORM = 'cpu'
# Environment variables that change the compiled kernels.
FLAGS = ('XLA_FLAGS', 'LIBTPU_INIT_ARGS', 'NCCL_ALGO', 'NCCL_PROTO')
# Packages that contain kernels.
PACKAGES = ('jax', 'jaxlib', 'tokamax')

# Creates the tests. They allocate their inputs on the device, so they are created only if they run.
MakeAnswers = Callable[[], Sequence[KnownAnswer]]


def check_kernels(
    make: MakeAnswers,
    about: Any,
    mesh: Mesh,
    *,
    cache: CompilationCache | None,
    way_out: str = 'train.check_kernels=false',
) -> None:
    """Compares kernels with their formulas on the devices of a mesh, and collectives with exact sums.

    All processes of a run call it, and all raise an error if one of them finds a wrong result. Nothing is tested
    on CPUs.

    Args:
        make: returns the kernels of the run.
        about: everything on which the kernels depend, with a `repr` that contains its values.
        mesh: mesh of the run.
        cache: stores that the tests have passed; None: they run at each start.
        way_out: setting that starts without the tests, for the message.

    Raises:
        InputError: a result is wrong, or a package of a kernel is not installed.
    """
    devices = [device for device in mesh.devices.flat if device.process_index == jax.process_index()]
    if devices[0].platform == UNTESTED_PLATFORM:
        return
    key = _key(identify(), (about, mesh.shape))
    if not agree('' if _has_passed(cache, key) else 'not tested'):
        return
    logger.info('comparing the kernels with their formulas on these devices (seconds)')
    began = time.monotonic()
    untested: list[str] = []
    _raise_if_any(wrong_kernel(make(), devices, untested.append), way_out)
    _raise_if_any(wrong_collective(mesh), way_out)
    for reason in untested:
        logger.warning(reason)
    counted = f'; {len(untested)} not tested' if untested else ''
    logger.info(f'the tested kernels compute right results{counted}; {time.monotonic() - began:.1f} s')
    if cache is not None and key and not untested:
        cache.put(key, json.dumps({'time': time.time()}).encode())


def warn_of_known_faults(*, has_document_lists: bool) -> None:
    """Logs a warning for each known fault of the installed libraries; see `known_faults`."""
    if jax.default_backend() == 'gpu':
        for fault in known_faults(installed_libraries(cudnn_version()), has_document_lists=has_document_lists):
            logger.warning(f'the installed libraries have a known fault: {describe_fault(fault)}')


def wrong_kernel(
    answers: Sequence[KnownAnswer], devices: Sequence[jax.Device], on_untested: Callable[[str], None] = logger.warning
) -> str:
    """Returns a description of the first wrong result on the devices of this process; '' if all are right.

    A package that is not installed counts as wrong. `on_untested` gets a line for each test that could not run, for
    example because the memory beside a loaded model is too small: no result is wrong, and if the kernel itself cannot
    run, its run says so.
    """
    for answer in answers:
        try:
            mistake = find_mistake(answer, devices)
        except InputError as error:
            return str(error)
        except Exception as error:
            reason = ' '.join(str(error).split())[:300]
            on_untested(f'{answer.kernel} for {answer.shape} is not tested: {type(error).__name__}: {reason}')
            continue
        if mistake is not None:
            return describe(mistake, identify())
    return ''


def describe(mistake: Mistake, identity: dict[str, Any]) -> str:
    """Returns a wrong result as one line."""
    answer, devices = mistake.answer, mistake.devices
    uuids = {entry['index']: entry['uuid'] for entry in identity['devices'] if 'uuid' in entry}
    local = {device.id: index for index, device in enumerate(jax.local_devices())}
    named = ', '.join(
        f'{device.id} ({uuids[local[device.id]]})' if local.get(device.id) in uuids else str(device.id)
        for device in devices
    )
    where = f'{devices[0].device_kind}, device {named}'
    remedy = answer.remedy
    if len(devices) < mistake.num_devices:
        # Devices of one kind run the same program, so the kernel is right.
        remedy = f'the other devices are right, so replace device {named}'
    return (
        f'{answer.kernel} computes wrong results on {where}: {mistake.name} is off by {mistake.error:.2%} for '
        f'{answer.shape}; {remedy}'
    )


def _raise_if_any(problem: str, way_out: str) -> None:
    if problem := agree(problem):
        raise InputError(f'{problem}; to start without the tests, set {way_out}')


def _has_passed(cache: CompilationCache | None, key: str) -> bool:
    stored = cache.get(key) if cache is not None and key else None
    return stored is not None and 0 <= time.time() - parse_json(stored)['time'] < VALID_SECONDS


def _key(identity: dict[str, Any], about: Any) -> str:
    """Returns the key of tests that have passed; '' if a device has no UUID, since it may be another one next time."""
    uuids = [device.get('uuid') for device in identity['devices']]
    if not all(uuids):
        return ''
    versions = {name: identity.get(name) for name in ('driver', 'cuda', 'cudnn', 'plugin')}
    packages = {name: installed_version(name) for name in PACKAGES}
    flags = {name: os.environ.get(name) for name in FLAGS}
    settings: Any = jax.config
    precision = settings.jax_default_matmul_precision
    parts = (maxlm.__version__, uuids, versions, packages, flags, precision, about)
    return f'known-answers-{hashlib.sha256(repr(parts).encode()).hexdigest()}'
