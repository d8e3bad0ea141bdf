"""Chooses the attention kernel of a run with `model.attention=fastest`: the fastest one with right results.

Each kernel of the devices runs the known answers of all layers, forward and backward, with the sizes that they have on
one device. Kernels that are wrong, fail, or have a known fault are not chosen. The choice is stored in the workdir. A
run that resumes on the same kind of device, with the same libraries and sizes, keeps its kernel.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from maxlm.config.kernels import attention_kernels
from maxlm.config.schema import Config
from maxlm.errors import InputError
from maxlm.hardware.chips import capability_of
from maxlm.hardware.identity import cudnn_version, identify, installed_version
from maxlm.hardware.known_faults import EMPTY_DOCUMENTS, describe, installed_libraries
from maxlm.log import logger
from maxlm.model.attention.cudnn import lists_documents
from maxlm.model.layers.masks import layer_windows
from maxlm.runtime.barrier import ProcessGroup
from maxlm.storage.atomic import replace_file
from maxlm.storage.json_text import parse_json
from maxlm.storage.regular_files import read_text
from maxlm.training.known_answers.answer import KnownAnswer, find_mistake, on_each
from maxlm.training.known_answers.check import PACKAGES
from maxlm.training.known_answers.kernels import attention_answers
from maxlm.workdir.files import ATTENTION_FILE

FASTEST = 'fastest'
# Timed runs of a kernel, after one that compiles it.
RUNS = 10
# Fraction of the time that another kernel must save to replace that of auto. Repeated timings vary by less.
WORTHWHILE = 0.03
MAX_REASON = 200

# (known answer, device) → seconds of one run.
Measure = Callable[[KnownAnswer, jax.Device], float]


class Timing(NamedTuple):
    """A kernel, the seconds of its attention in all layers, and the reason why it is not chosen; '' if it may be."""

    kernel: str
    seconds: float
    reason: str = ''


def with_fastest_attention(config: Config, sized: Config, workdir: Path) -> Config:
    """Returns the config with the attention kernel that the run uses in place of `fastest`.

    All processes call it. The first one measures or reads the stored choice, and the others receive it.

    Args:
        config: config before it is resolved.
        sized: the resolved config, with the kernel of auto.
        workdir: local directory of the run.

    Raises:
        InputError: no kernel computes right results.
    """
    device = jax.local_devices()[0]
    kernels = attention_kernels(sized, device.platform, capability_of(device))
    chosen: str = kernels[0]
    if sized.train.deterministic:
        # A choice by time could differ between two runs.
        logger.info(f'attention: {chosen}, because train.deterministic=true does not choose by time')
    elif sized.mesh.context > 1 or len(kernels) == 1:
        logger.info(f'attention: {chosen}, the only kernel for this run on {device.device_kind}')
    else:
        chosen = choose_attention(sized, kernels, workdir / ATTENTION_FILE)
    return _with_kernel(config, chosen)


def choose_attention(config: Config, kernels: Sequence[str], path: Path, measure: Measure | None = None) -> str:
    """Returns the stored or the fastest of some kernels for a resolved config, the same in all processes.

    Args:
        config: resolved config.
        kernels: kernels to choose from; the first one is kept if no other is clearly faster.
        path: file of the choice.
        measure: function that times a known answer in place of `measured_seconds`.

    Raises:
        InputError: no kernel computes right results.
    """
    group, problem = ProcessGroup(), ''
    chosen = ''
    if group.process_index == 0:
        settings = {'kernels': list(kernels), **_settings(config)}
        chosen = _stored(path, settings, kernels)
        if not chosen:
            timings = [_time(config, kernel, measure or measured_seconds) for kernel in kernels]
            chosen, problem = _fastest(timings)
            _store(path, {'settings': settings, 'kernel': chosen, 'timings': [each._asdict() for each in timings]})
    # An error must reach all processes, because they wait for the choice.
    chosen, problem = parse_json(group.broadcast_from_host0(json.dumps([chosen, problem])))
    if problem:
        raise InputError(f'model.attention=fastest: {problem}; set model.attention=xla and report it')
    return str(chosen)


def measured_seconds(answer: KnownAnswer, device: jax.Device) -> float:
    """Returns the median of the times of a kernel on a device, forward and backward."""
    mesh = Mesh(np.array([device]), ('device',))
    inputs = jax.device_put(answer.inputs, NamedSharding(mesh, PartitionSpec()))
    run = on_each(answer.run, mesh)
    jax.block_until_ready(run(*inputs))
    seconds = []
    for _ in range(RUNS):
        began = time.perf_counter()
        jax.block_until_ready(run(*inputs))
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


def _with_kernel(config: Config, kernel: str) -> Config:
    model: Any = config.model
    return dataclasses.replace(config, model=dataclasses.replace(model, attention=kernel))


def _time(config: Config, kernel: str, measure: Measure) -> Timing:
    """Tests a kernel and times the attention of all layers. Does not raise, because other processes wait."""
    config, device, seconds = _with_kernel(config, kernel), jax.local_devices()[0], 0.0
    counts = Counter(layer_windows(config.model))
    try:
        if lists_documents(config, capability_of(device)) and EMPTY_DOCUMENTS.affects(
            installed_libraries(cudnn_version())
        ):
            return Timing(kernel, seconds, describe(EMPTY_DOCUMENTS))
        for window, answer in attention_answers(config).items():
            if (mistake := find_mistake(answer, [device])) is not None:
                return Timing(kernel, seconds, f'{mistake.name} is off by {mistake.error:.2%} for {answer.shape}')
            seconds += counts[window] * measure(answer, device)
    except Exception as error:
        return Timing(kernel, seconds, f'{type(error).__name__}: {" ".join(str(error).split())[:MAX_REASON]}')
    return Timing(kernel, seconds)


def _fastest(timings: Sequence[Timing]) -> tuple[str, str]:
    """Returns the name of the chosen kernel, and a problem if there is none. Logs all timings in one line."""
    right = [each for each in timings if not each.reason]
    wrong = '; '.join(f'{each.kernel} is not chosen: {each.reason}' for each in timings if each.reason)
    if not right:
        return '', f'no kernel computes right results: {wrong}'
    best, first = min(right, key=lambda each: each.seconds), right[0]
    chosen = best if best.seconds < (1 - WORTHWHILE) * first.seconds else first
    times = ', '.join(f'{each.kernel} {each.seconds * 1e3:.3g} ms' for each in right)
    rest = f'; {wrong}' if wrong else ''
    logger.info(f'attention: {chosen.kernel}; in all layers, forward and backward: {times}{rest}')
    return chosen.kernel, ''


def _settings(config: Config) -> dict[str, Any]:
    """Returns everything on which the choice depends, as JSON values."""
    model, train = config.model, config.train
    identity = identify()
    return {
        'device': jax.local_devices()[0].device_kind,
        'versions': {
            **{name: identity[name] for name in ('driver', 'cudnn', 'cuda', 'plugin') if name in identity},
            **{package: installed_version(package) for package in PACKAGES},
        },
        'rows': train.per_device_batch_size,
        'length': config.data.seq_len,
        'documents': config.data.document_mask,
        'heads': [model.num_heads, model.num_kv_heads, model.head_dim, config.mesh.tensor],
        'windows': sorted(Counter(layer_windows(model)).items()),
        'dtype': model.dtype,
        'softcap': model.attention_softcap,
    }


def _stored(path: Path, settings: dict[str, Any], kernels: Sequence[str]) -> str:
    """Returns the stored choice for these settings; '' if there is none."""
    try:
        entry = parse_json(read_text(path))
        is_valid = entry['settings'] == parse_json(json.dumps(settings)) and entry['kernel'] in kernels
    except (OSError, ValueError, TypeError, KeyError):
        return ''
    if is_valid:
        logger.info(f'attention: {entry["kernel"]}, chosen before ({path.name})')
    return str(entry['kernel']) if is_valid else ''


def _store(path: Path, entry: dict[str, Any]) -> None:
    try:
        replace_file(path, json.dumps(entry, indent=1) + '\n')
    except OSError as error:
        logger.warning(f'cannot write {path}: {error}; a resumed run measures again')
