"""Fake Python: creates environments, installs nothing, supervises, and trains as plan.json specifies.

An attempt of training is `{'step': N, 'seconds': S, 'code': C, 'on_term': C}`: it writes checkpoint N, runs for S
seconds and exits with code C. On SIGTERM it exits with `on_term`, or continues if that is 'ignore'. With `after`, it
runs until this number of training processes, including itself, are ready for signals.
"""

import os
import signal
import sys
import time

from record import Plan, count_ready, record

arguments = sys.argv[1:]
if arguments[:2] == ['-m', 'maxlm.supervise'] or (arguments[:1] == ['-c'] and 'maxlm' in arguments[1]):
    os.execv(sys.executable, [sys.executable, *arguments])
record()
if arguments[:1] == ['-c']:
    with Plan() as plan:
        # The script checks the version.
        sys.exit(0 if plan['python_is_new'] else 1)
if arguments[:2] in (['-m', 'venv'], ['-m', 'uv']):
    os.makedirs(f'{arguments[-1]}/bin')
    os.symlink(os.path.realpath(sys.argv[0]), f'{arguments[-1]}/bin/python')
if arguments[:2] != ['-m', 'maxlm.train']:
    sys.exit(0)
if '--dry-run=elsewhere' in arguments:
    with Plan() as plan:
        sys.exit(plan['check_code'])

with Plan() as plan:
    # One list of attempts for each process, or one list for all processes.
    attempts = plan['attempts'].get(os.environ.get('MAXLM_PROCESS_ID', ''), plan['attempts'].get('', []))
    attempt = attempts.pop(0) if attempts else {}


def stop(number, frame):
    record(signal=signal.Signals(number).name)
    if attempt.get('on_term') != 'ignore':
        time.sleep(attempt.get('saving', 0))
        sys.exit(attempt.get('on_term', 75))


signal.signal(signal.SIGTERM, stop)
signal.signal(signal.SIGINT, stop)
print('training', *arguments[2:], flush=True)
if 'step' in attempt:
    workdir = next(word.removeprefix('--workdir=') for word in arguments if word.startswith('--workdir='))
    os.makedirs(f'{workdir}/checkpoints/{attempt["step"]}', exist_ok=True)
record(ready=True)
end = time.monotonic() + attempt.get('seconds', 0)
while time.monotonic() < end or count_ready() < attempt.get('after', 0):
    time.sleep(0.02)
if 'signal' in attempt:
    os.kill(os.getpid(), attempt['signal'])
    time.sleep(5)
sys.exit(attempt.get('code', 0))
