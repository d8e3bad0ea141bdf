"""Check `resume`: kills a trial run after its first checkpoint and restarts it."""

from __future__ import annotations

import tempfile
from pathlib import Path

from maxlm.diagnostics.checks.disk import nearest_directory
from maxlm.diagnostics.checks.trial_run import STEPS, Trial, trial_command, try_run
from maxlm.diagnostics.context import CheckContext
from maxlm.diagnostics.result import CheckResult, failure, ok, skipped

REMEDY = 'run it directly: maxlm train with this config, and start it again after a kill'


def check_resume(context: CheckContext) -> CheckResult:
    """Trains until a checkpoint is complete, kills the run and restarts it. The workdir is on the disk of the run."""
    if not context.try_resume:
        return skipped('not requested; give --try-resume')
    if context.config is None:
        return skipped('no --config to run')
    if context.num_processes > 1:
        return skipped('the run has several processes; run it on one machine, without their variables')
    prefix, parent = 'maxlm-doctor-', nearest_directory(context)
    with tempfile.TemporaryDirectory(prefix=prefix, dir=parent, ignore_cleanup_errors=True) as directory:
        workdir = Path(directory) / 'run'
        # A short run would be complete before it is killed.
        settings = {'checkpoint.save_interval_steps': STEPS, 'train.num_steps': 10**6}
        command = trial_command(context, workdir, settings)
        killed = try_run(command, context.environment, workdir, is_done=has_checkpoint)
        if killed.trouble:
            return failure(f'training does not save step {STEPS}: {killed.trouble}', REMEDY)
        return evaluate_resume(try_run(command, context.environment, workdir, is_done=has_resumed))


def has_checkpoint(workdir: Path) -> bool:
    """Returns True if the run has a complete checkpoint."""
    # Incomplete checkpoints have a suffix.
    return any(path.name.isdecimal() for path in workdir.glob('checkpoints/*'))


def has_resumed(workdir: Path) -> bool:
    """Returns True if the run has logged a step after a restart."""
    from maxlm.telemetry.events import read_events
    from maxlm.telemetry.metrics import read_metrics

    times = [event['time'] for event in read_events(workdir).lines if event.get('kind') == 'resumed']
    return bool(times) and any(line['time'] > times[-1] and 'train/loss' in line for line in read_metrics(workdir))


def evaluate_resume(trial: Trial) -> CheckResult:
    """Evaluates the restarted run."""
    resumed = [event.get('from_step') for event in trial.events if event.get('kind') == 'resumed']
    if trial.trouble or not resumed:
        trouble = trial.trouble or 'it did not load the checkpoint'
        return failure(f'the restarted training does not continue: {trouble}', REMEDY)
    return ok(f'killed after a checkpoint, and resumed from step {resumed[-1]} in {trial.seconds:.0f} s')
