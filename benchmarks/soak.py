"""Runs the tests of every fault and writes docs/faults.md from their results.

    python -m benchmarks.soak [--full] [--faults=NAME,…] [--results=FILE] [--docs=FILE]

With --full the tests run the full number of trials instead of a sample, which takes hours on two CPU cores. Results of
other faults in FILE are kept. Exit code 1: a test failed. `--faults=` runs no tests and only writes the page.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any, NamedTuple

from maxlm.cli.parser import ArgumentParser
from maxlm.errors import EXIT_DONE, EXIT_FAILED, InputError, exit_code

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / 'benchmarks' / 'results' / 'soak_cpu2.json'
DOCS = ROOT / 'docs' / 'faults.md'
NOT_MEASURED = 'not measured'
# In the environment of tests (tests/faults.py): the full count.
FULL = 'MAXLM_SOAK_FULL'


class Fault(NamedTuple):
    """A row of the table. `tests` are pytest's names of those that try it: a file, or FILE::TEST."""

    name: str
    fault: str
    promise: str
    tests: tuple[str, ...]


TRAIN, RESUME, PROCESSES, KILLED = (
    'tests/cli/runs/test_train.py::',
    'tests/cli/runs/test_resume.py::',
    'tests/cli/runs/test_train_processes.py::',
    'tests/cli/runs/test_train_processes_killed.py::',
)
ENDINGS, BUCKETS = 'tests/cli/runs/test_train_guards.py::', 'tests/cli/runs/test_train_buckets.py::'
STOP, MIRROR = 'tests/runtime/test_preemption.py::', 'tests/workdir/test_uploader.py::'
BUCKET, FAILURES = 'tests/checkpoint/test_bucket_checkpoints.py::', 'tests/checkpoint/test_failures.py::'
FAULTS = (
    Fault(
        'kill',
        'kill -9 at a random time of a run, including saves',
        'the restarted run ends with the same losses and parameters as an uninterrupted run, bit for bit',
        ('tests/cli/runs/test_train_killed.py',),
    ),
    Fault(
        'kill-save',
        'kill -9 during a save to a disk or a bucket',
        'no committed step is lost; every listed step can be restored',
        ('tests/checkpoint/test_killed.py', f'{BUCKET}test_partially_deleted_step_is_not_listed'),
    ),
    Fault(
        'resume',
        'stop after any step, and the files after a kill',
        'the run resumes bit for bit, also on another machine',
        (
            f'{RESUME}test_resume_from_each_step_is_exact',
            f'{RESUME}test_a_run_that_ended_early_resumes_exactly',
            f'{BUCKETS}test_a_run_in_a_bucket_resumes_on_another_machine',
            f'{BUCKETS}test_a_run_with_a_mirror_resumes_on_another_machine',
        ),
    ),
    Fault(
        'kill-one',
        'kill -9 of one of two processes',
        'the other process ends with 75 within 15 s; the run resumes bit for bit',
        (f'{KILLED}test_one_is_killed', f'{PROCESSES}test_the_other_process_exits_after_a_kill'),
    ),
    Fault(
        'sigterm',
        'SIGTERM to one of two processes, and again to any of them during the save',
        'all processes save the same step and end with 75 within 5 s; the run resumes bit for bit',
        (
            f'{KILLED}test_one_gets_sigterm',
            f'{RESUME}test_a_run_that_ended_early_resumes_exactly',
            f'{STOP}test_second_sigterm_does_not_interrupt_the_save',
            f'{STOP}test_signals_during_exit',
        ),
    ),
    Fault(
        'stopped',
        'SIGSTOP of one of two processes',
        'the other process ends with 75 within 15 s, and so does the stopped process after SIGCONT',
        (f'{KILLED}test_one_is_suspended',),
    ),
    Fault(
        'stuck',
        'a process hangs, in its data loader or elsewhere',
        'it ends with 75 within 2 s after train.hang_timeout_seconds, with all stacks in the log; the other '
        'processes end too',
        ('tests/runtime/test_watchdog.py', f'{PROCESSES}test_a_stuck_process_logs_its_stacks_and_all_exit'),
    ),
    Fault(
        'notice',
        'preemption or maintenance notice of a metadata server (Google Cloud, AWS, Azure), which may itself fail',
        'the run saves its state and ends with 75; errors of the server have no effect',
        (
            *(f'tests/runtime/notices/test_{name}.py' for name in ('google', 'aws', 'azure', 'watcher')),
            f'{STOP}test_notice_reaches_other_processes_as_sigterm',
        ),
    ),
    Fault(
        'other-mesh',
        'another mesh and other numbers of processes and devices at the next start',
        'the state and the data order are the same bit for bit, the next loss within 1e-6 (processes × devices: '
        'difference)',
        (
            f'{PROCESSES}test_a_checkpoint_of_two_processes_is_restored_with_other_counts',
            f'{PROCESSES}test_a_checkpoint_of_one_process_is_restored_in_two',
            'tests/checkpoint/test_layouts.py',
        ),
    ),
    Fault(
        'elastic',
        'kill -9 of a host of an elastic run (processes and supervisor), and its return',
        'the remaining hosts resume, and all hosts after the return; the losses are those of an uninterrupted run '
        'within 1e-5',
        ('tests/supervision/test_elastic.py',),
    ),
    Fault(
        'damage',
        'bit flip, truncation or deleted file in a checkpoint',
        'detected and named; the newest older intact step is used',
        (
            'tests/checkpoint/test_damage.py',
            'tests/checkpoint/test_processes.py',
            f'{BUCKET}test_damaged_step_is_set_aside_and_outage_is_not_damage',
        ),
    ),
    Fault(
        'bucket-faults',
        '503, 429, dropped connections or delays during a save to a bucket',
        'all steps are committed, and no training step waits',
        (
            f'{BUCKET}test_transient_faults_delay_no_step',
            'tests/workdir/test_run_storage.py',
            'tests/workdir/test_bucket_steps.py',
        ),
    ),
    Fault(
        'outage',
        'storage does not respond, or refuses (403)',
        'training continues, with an alert within 60 s; a checkpoint due during the outage is skipped, the next save '
        'works',
        (
            f'{BUCKET}test_unresponsive_bucket_is_reported_during_a_save',
            f'{BUCKET}test_refused_upload_is_reported_and_training_continues',
            f'{MIRROR}test_training_continues_during_an_outage',
            f'{MIRROR}test_stalled_upload_is_reported',
            f'{BUCKETS}test_an_unreachable_bucket_starts_no_new_run',
        ),
    ),
    Fault(
        'kill-upload',
        'kill -9 of an upload',
        'the upload is resumed; no partial step is visible',
        (f'{MIRROR}test_a_killed_upload_is_resumed',),
    ),
    Fault(
        'full-disk',
        'the disk of one process, or of several in turn, is full',
        'one clear line, older steps unchanged; the next save works when there is space',
        (f'{FAILURES}test_a_full_disk', f'{FAILURES}test_no_process_waits_for_a_failed_process'),
    ),
    Fault(
        'bad-batch',
        'a non-finite gradient or a loss spike',
        'the state is bit for bit the same as without the batch',
        ('tests/training/test_spike_guard.py::test_a_bad_batch_leaves_no_trace',),
    ),
    Fault(
        'rollback',
        'several bad batches in a row',
        'the run rolls back and ends like a run without these batches; it stops after several rollbacks',
        (
            f'{ENDINGS}test_a_rollback_equals_a_run_without_the_skipped_batches',
            f'{ENDINGS}test_a_diverging_run_stops_and_keeps_its_checkpoint',
        ),
    ),
    Fault(
        'data',
        'a damaged, truncated or missing data shard',
        'the shard is named and not trained on; the previous state is saved',
        (
            'tests/data/loader/test_damaged_shards.py',
            f'{ENDINGS}test_the_state_before_damaged_data_is_saved',
            f'{PROCESSES}test_bad_input_of_one_process_stops_all',
        ),
    ),
    Fault(
        'end',
        'the last step, early stopping, or a spent budget',
        'the state is committed before the run ends; started again, the run reports that it is complete',
        (
            f'{TRAIN}test_a_finished_run_has_nothing_to_do_and_can_be_extended',
            f'{ENDINGS}test_early_stopping_saves_and_stays_stopped',
            f'{ENDINGS}test_a_budget_stops_a_run_with_its_state_saved',
            f'{ENDINGS}test_the_schedule_ends_with_the_budget',
        ),
    ),
    Fault(
        'two-runs',
        'a second run on the same workdir',
        'it is refused with one line that names the first; exactly one run takes over the lock of a dead process',
        ('tests/workdir/test_lock.py',),
    ),
    Fault(
        'crash-loop',
        'a run that fails repeatedly',
        'it is restarted as long as it makes progress',
        ('tests/cli/runs/test_supervise_decisions.py', 'tests/cli/runs/test_supervise.py'),
    ),
    Fault(
        'alerts',
        'an alert webhook or command that fails or hangs',
        'training is neither stopped nor delayed',
        ('tests/telemetry/test_alerts.py',),
    ),
    Fault(
        'foreign-files',
        'damaged, special and oversized files in data, configs, Hugging Face directories and checkpoints',
        'one line that names the file; no hang, and at most 1 GiB of memory',
        (
            'tests/test_special_files.py',
            'tests/data/formats/test_bombs.py',
            'tests/data/formats/test_hostile_files.py::test_damaged_files',
            'tests/huggingface/test_numbers.py',
        ),
    ),
    Fault(
        'secrets',
        'tokens, keys and credentials in the environment',
        'they are in no log, config.json, checkpoint, metric or error',
        ('tests/test_secrets.py', 'tests/workdir/test_run_storage.py::test_secrets_are_not_logged'),
    ),
)


def main(argv: list[str]) -> int:
    """Tries faults, and writes results and table."""
    parser = ArgumentParser(prog='benchmarks.soak', allow_abbrev=False, description=__doc__)
    parser.add_argument('--full', action='store_true', help='the full count of each fault instead of a sample')
    parser.add_argument('--faults', help='names, with commas (default: all)')
    parser.add_argument('--results', type=Path, default=RESULTS, help='JSON file, read and written')
    parser.add_argument('--docs', type=Path, default=DOCS, help='table to write')
    options = parser.parse_args(argv)
    names = [fault.name for fault in FAULTS]
    wanted = names if options.faults is None else [name for name in options.faults.split(',') if name]
    for name in wanted:
        if name not in names:
            raise InputError(f'--faults: there is no {name!r}; one of {", ".join(names)}')

    results = json.loads(options.results.read_text()) if options.results.exists() else {}
    for fault in FAULTS:
        if fault.name in wanted:
            results[fault.name] = try_fault(fault, full=options.full)
            print(f'{fault.name}: {figure(results[fault.name])}', flush=True)
            options.results.write_text(json.dumps(results, indent=1) + '\n')
    options.docs.write_text(render(results))
    return EXIT_DONE if all(not results[name]['failed'] for name in wanted) else EXIT_FAILED


def try_fault(fault: Fault, *, full: bool) -> dict[str, Any]:
    """Runs the tests of a fault; returns how many passed and failed, what they measured, where and when."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / 'report.xml'
        # Nightly tests too; the full counts take their time.
        every = ['-m', '', '--timeout=0']
        # The default family cannot have what tests record, and warns of that, which is an error here.
        every += ['-o', 'junit_family=xunit1']
        command = [sys.executable, '-m', 'pytest', '-q', *every, f'--junitxml={report}', *fault.tests]
        environment = {**os.environ, **({FULL: '1'} if full else {})}
        load, began = os.getloadavg()[0], time.monotonic()
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
        seconds = time.monotonic() - began
        if not report.exists():
            raise InputError(
                f'{fault.name}: pytest has not run: {" ".join((done.stdout + done.stderr).split())[-200:]}'
            )
        found = read_report(report.read_text(), fault.name)
    if not found['passed'] + len(found['failed']):
        raise InputError(f'{fault.name}: none of its tests is there')
    return {
        **found,
        'full': full,
        'seconds': round(seconds),
        'date': time.strftime('%Y-%m-%d'),
        'cpus': os.cpu_count(),
        # What else this machine did: times grow with it.
        'load': [round(load, 1), round(os.getloadavg()[0], 1)],
    }


def read_report(text: str, name: str) -> dict[str, Any]:
    """Reads pytest's JUnit report of the tests of a fault."""
    cases = list(ElementTree.fromstring(text).iter('testcase'))
    # A test that is left out has shown nothing.
    bad = [case for case in cases if any(case.find(kind) is not None for kind in ('failure', 'error', 'skipped'))]
    properties = [item for case in cases if case not in bad for item in case.iter('property')]
    return {
        'passed': len(cases) - len(bad),
        'failed': [f'{case.get("classname")}.{case.get("name")}' for case in bad],
        'figures': [item.get('value') for item in properties if item.get('name') == f'fault:{name}'],
    }


def figure(result: dict[str, Any] | None) -> str:
    """A result in a cell."""
    if result is None:
        return NOT_MEASURED
    total = result['passed'] + len(result['failed'])
    count = f'{result["passed"]} of {total} tests passed'
    if result['failed']:
        return f'**failed**: {count}'
    return '; '.join([*result['figures'], f'{count}{"" if result["full"] else " (sample)"}, {result["date"]}'])


def render(results: dict[str, Any]) -> str:
    """docs/faults.md."""
    rows = []
    for fault in FAULTS:
        tests = '<br>'.join(f'`{test.removeprefix("tests/")}`' for test in fault.tests)
        rows.append(f'| {fault.fault} | {fault.promise} | {tests} | {figure(results.get(fault.name))} |')
    table = '\n'.join(rows)
    return f"""# Tested faults

The faults that maxlm is tested with, the guarantee for each, and the measurement. Repeat a
test with:

```
python -m benchmarks.soak --faults=kill
```

`python -m benchmarks.soak` writes this page from its table and the results of the tests, so do not edit the page.
*sample* means the tests as CI runs them; `--full` runs the full number of trials. Times are the longest, on CPU cores
with other load (`benchmarks/results/soak_cpu2.json`). GPUs compute the same bits with
[train.deterministic](reliability.md#deterministic-runs). [launch.md](launch.md#restarts) has exit codes and restarts,
[reliability.md](reliability.md) has the options.

| fault | guarantee | tests (below `tests/`) | measured |
|---|---|---|---|
{table}
"""


def run() -> None:
    """Entry of `python -m benchmarks.soak`."""
    sys.exit(exit_code(main, sys.argv[1:]))


if __name__ == '__main__':
    run()
