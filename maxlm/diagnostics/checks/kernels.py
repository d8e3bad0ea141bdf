"""Check `kernels`: the kernels of the run compute right results, and the installed libraries have no known faults."""

from __future__ import annotations

from collections.abc import Sequence

from maxlm.config.schema import Config
from maxlm.diagnostics.context import CheckContext
from maxlm.diagnostics.result import CheckResult, combine, failure, ok, skipped, warning
from maxlm.hardware.known_faults import KnownFault

# Vocabulary of a run whose data set determines it: that of GPT-2, as a multiple of 64.
VOCAB_SIZE = 50_304


def check_kernels(context: CheckContext) -> CheckResult:
    """Compares the kernels of the run with their formulas, and collectives with exact sums."""
    import jax

    from maxlm.hardware.chips import capability_of
    from maxlm.hardware.identity import cudnn_version
    from maxlm.hardware.known_faults import installed_libraries, known_faults
    from maxlm.model.attention.cudnn import lists_documents
    from maxlm.parallel.layout import make_layout
    from maxlm.training.known_answers.check import wrong_kernel
    from maxlm.training.known_answers.collectives import wrong_collective
    from maxlm.training.known_answers.kernels import training_answers

    platform = jax.default_backend()
    if platform == 'cpu':
        return skipped('JAX runs on the CPU, with kernels of XLA only')
    config = _resolved(context.config) if context.config else None
    faults = []
    if platform == 'gpu':
        capability = capability_of(jax.local_devices()[0])
        libraries = installed_libraries(cudnn_version())
        faults = known_faults(libraries, has_document_lists=config is not None and lists_documents(config, capability))
    if config is None:
        return evaluate_kernels(faults, 0, [])
    answers, mesh = training_answers(config), make_layout(config.mesh).mesh
    # All processes run the collectives, even if a kernel is wrong.
    untested: list[str] = []
    problems = [wrong_kernel(answers, jax.local_devices(), untested.append), wrong_collective(mesh)]
    return evaluate_kernels(faults, len(answers), problems, untested)


def evaluate_kernels(
    faults: list[KnownFault], num_kernels: int, problems: list[str], untested: Sequence[str] = ()
) -> CheckResult:
    """Evaluates the faults of the libraries, and the problems of the tested kernels; an empty text is no problem."""
    findings = [warning(f'known fault: {fault.effect} ({fault.source})', fault.remedy) for fault in faults]
    findings += [warning(reason, 'free device memory, or test with a smaller batch') for reason in untested]
    findings += [
        failure(problem, 'change the setting, the version or the device that the message names')
        for problem in problems
        if problem
    ]
    if findings:
        return combine(findings)
    return ok(f'{num_kernels} kernels compute right results') if num_kernels else skipped('no --config to test')


def _resolved(config: Config) -> Config:
    from maxlm.checkpoint.frozen_models import with_frozen_models
    from maxlm.planning.machine import local_resolver, sized_config

    resolver = local_resolver(vocab_size=config.model.vocab_size or VOCAB_SIZE, windows=1)
    return sized_config(with_frozen_models(config, is_planned=True), resolver)
