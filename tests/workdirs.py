"""Workdirs in every state of a run, written without training, for tests of monitor and report.

Each builder writes the files of a run of 400 steps to an empty directory and returns the directory. All values are
functions of the step and thus reproducible. `now` is the time of the newest line. `python -m tests.workdirs DIR` writes
all of them.
"""

import dataclasses
import json
import math
import sys
import time
from pathlib import Path

from maxlm.config.serialization import to_json
from maxlm.workdir.lock import LOCK, this_process
from tests.run_lines import (
    BEAT,
    CATEGORIES,
    COMPILE,
    DATA_WAIT,
    EVALUATE_EVERY,
    EVALUATION,
    LOG_EVERY,
    NOW,
    NUM_STEPS,
    PRICE_PER_HOUR,
    RESTORE,
    SAVE,
    SAVE_EVERY,
    START,
    STEP,
    config,
    machine,
    reading,
    step_metrics,
    train_loss,
    validation_loss,
)


class RunWriter:
    """Writes the files of a run. Its clock starts at 0 and is shifted to end at `now`."""

    def __init__(self, workdir, *, processes=1, devices=1, kind='NVIDIA H100 80GB HBM3', price=PRICE_PER_HOUR):
        workdir.mkdir(parents=True, exist_ok=True)
        self.workdir, self.processes, self.devices, self.kind, self.price = workdir, processes, devices, kind, price
        self.clock, self.attempt, self.began, self.step = 0.0, 0, 0.0, 0
        self.seconds, self.saved_step, self.start_step = {}, None, 0
        self.spent = 0.0
        self.lines = {'metrics.jsonl': [], 'events.jsonl': [], 'samples.jsonl': []}
        for process in range(processes):
            self.lines[self._file('goodput', process)] = []
            self.lines[self._file('devices', process)] = []
        self.files = {'config.json': to_json(config()), 'tokenizer.json': '{}\n', 'run.log': 'started\n'}

    def start(self, *, from_step=0, idle=0.0):
        """Starts an attempt that resumes from `from_step` after `idle` seconds."""
        self.clock += idle
        self.attempt += 1
        self.began, self.step, self.start_step = self.clock, from_step, from_step
        self.seconds = dict.fromkeys(CATEGORIES, 0.0)
        self.saved_step = from_step or None
        self._pass('start', START)
        total = self.processes * self.devices
        message = f'3,411,200 parameters on {total} × {self.kind}'
        command = ['maxlm', 'train', '--config=configs/tiny.py', f'--workdir={self.workdir.name}']
        self.event('started', message, command=command, **machine(self.kind, total, self.processes, self.price))
        if from_step:
            self._pass('restore', RESTORE)
            self.event('resumed', f'resuming from step {from_step}', from_step=from_step)
        self._beat('beat')

    def compile(self):
        self._pass('compile', COMPILE)
        self.event('compiled', f'the step compiled in {COMPILE:g} s', seconds=COMPILE)

    def train(self, until, *, loss=train_loss, skipped=0):
        """Trains up to step `until`, with evaluations and saves according to the config."""
        while self.step < until:
            self.step += 1
            self._pass('data_wait', DATA_WAIT)
            self._pass('step', STEP - DATA_WAIT)
            if self.step % LOG_EVERY == 0:
                self._metrics(loss(self.step), skipped)
            if self.step % EVALUATE_EVERY == 0:
                self.evaluate()
            if self.step % SAVE_EVERY == 0:
                self.save()

    def evaluate(self):
        self._pass('evaluation', EVALUATION)
        loss = validation_loss(self.step)
        perplexity = math.exp(loss)
        sources = {'eval/loss/web': loss + 0.1, 'eval/loss/code': loss - 0.2}
        self._line('metrics.jsonl', {'step': self.step, 'eval/loss': loss, 'eval/perplexity': perplexity, **sources})
        self.event('evaluated', f'validation loss {loss:.4f}', loss=loss)
        text = ' the Licensor and its affiliates, in <script>alert(1)</script> or otherwise'
        self._line('samples.jsonl', {'step': self.step, 'prompt': 'Subject to the terms', 'text': text[: self.step]})

    def save(self):
        self._pass('checkpoint', SAVE)
        self.saved_step = self.step
        self.event('saved', f'step {self.step} is saved', seconds=SAVE, loss=validation_loss(self.step))
        self._beat('saved')

    def roll_back(self, to):
        message = f'steps up to {self.step} spiked or were not finite: rolling back to step {to}'
        self.event('rollback', message, alert=True)
        # The ledger contains a line with the last step before the rollback and a line with the resumed step.
        self._beat('beat')
        self.lines['metrics.jsonl'] = [line for line in self.lines['metrics.jsonl'] if line['step'] <= to]
        self._pass('restore', RESTORE)
        self.step = to
        self._beat('rollback')

    def end(self, kind, message, code):
        self._beat('end')
        self.event(kind, message, code=code)

    def event(self, kind, message, **extra):
        line = {'life': self.attempt, 'step': self.step or None, 'kind': kind, 'message': message, **extra}
        self._line('events.jsonl', line)

    def close(self, now=NOW):
        """Writes the files with the clock ending at `now` and returns the workdir."""
        shift = now - self.clock
        for name, text in self.files.items():
            (self.workdir / name).write_text(text, encoding='utf-8')
        for name, lines in self.lines.items():
            if lines:
                moved = [{key: self._moved(key, value, shift) for key, value in line.items()} for line in lines]
                text = ''.join(json.dumps(line) + '\n' for line in moved)
                (self.workdir / name).write_text(text, encoding='utf-8')
        return self.workdir

    def _moved(self, key, value, shift):
        return round(value + shift, 3) if key in ('time', 'began') else value

    def _file(self, stem, process):
        return f'{stem}-{process}.jsonl' if process else f'{stem}.jsonl'

    def _line(self, name, line):
        self.lines[name].append({'time': self.clock, **line})

    def _pass(self, category, seconds):
        """Advances the clock and writes the periodic lines."""
        before = self.clock
        self.clock += seconds
        self.seconds[category] += seconds
        if self.price:
            self.spent += seconds / 3600 * self.price * self.devices * self.processes
        if int(self.clock / BEAT) > int(before / BEAT):
            self._beat('beat')
            self._readings()

    def _beat(self, why):
        for process in range(self.processes):
            name = self._file('goodput', process)
            mine = dict(self.seconds)
            if process:
                # The second host waits slightly longer for its data.
                moved = mine['step'] * 0.05
                mine['step'] -= moved
                mine['data_wait'] += moved
            dollars = None
            # Process 0 counts the devices of all processes.
            if self.price and not process:
                dollars = round((self.clock - self.began) / 3600 * self.price * self.devices * self.processes, 6)
            self._line(
                name,
                {
                    'life': self.attempt,
                    'process': process,
                    'host': f'host{process}',
                    'began': self.began,
                    'step': self.step,
                    'saved_step': self.saved_step,
                    'start_step': self.start_step,
                    'seconds': {category: round(value, 3) for category, value in mine.items()},
                    'dollars': dollars,
                    'why': why,
                },
            )

    def _metrics(self, loss, skipped):
        left = (NUM_STEPS - self.step) * STEP * 1.1
        money = {}
        if self.price:
            at_end = self.spent + left / 3600 * self.price * self.processes * self.devices
            money = {'cost/dollars': self.spent, 'cost/projected_dollars': at_end}
        cost = {'cost/hours': self.clock / 3600, 'perf/eta_seconds': left, **money}
        self._line('metrics.jsonl', {**step_metrics(self.step, loss, skipped), **cost})

    def _readings(self):
        for process in range(self.processes):
            own = {'life': self.attempt, 'process': process, 'host': f'host{process}'}
            self._line(self._file('devices', process), {**own, **reading(self.kind, self.devices)})


def empty(workdir, now=NOW):
    """Returns a workdir without a run."""
    workdir.mkdir(parents=True, exist_ok=True)
    return workdir


def fresh(workdir, now=NOW):
    """Writes a new run during its first compilation."""
    writer = RunWriter(workdir)
    writer.start()
    lock(workdir)
    return writer.close(now)


def lock(workdir, *, here=False):
    """Writes a lock that belongs to an unreachable machine, or to this process if `here` is set."""
    owner = this_process()
    if not here:
        owner = dataclasses.replace(owner, host='elsewhere', kernel='another')
    (workdir / LOCK).write_text(json.dumps(dataclasses.asdict(owner)) + '\n')


def trained(workdir, num_steps, **settings):
    """Returns the writer of a run that has begun and trained for some steps."""
    writer = RunWriter(workdir, **settings)
    writer.start()
    writer.compile()
    writer.train(num_steps)
    return writer


def running(workdir, now=NOW, *, devices=1, processes=1):
    """Writes a run in progress."""
    writer = trained(workdir, 234, devices=devices, processes=processes)
    writer._beat('beat')
    writer._readings()
    lock(workdir)
    return writer.close(now)


def on_cpu(workdir, now=NOW):
    """Writes a run in progress on a machine without accelerator and without price."""
    writer = trained(workdir, 234, kind='cpu', price=None)
    writer._beat('beat')
    lock(workdir)
    return writer.close(now)


def two_hosts(workdir, now=NOW):
    """Writes a run in progress with two processes of four devices each."""
    return running(workdir, now, devices=4, processes=2)


def killed(workdir, now=NOW):
    """Writes a run that was killed between two checkpoints."""
    writer = trained(workdir, 170)
    writer._beat('beat')
    return writer.close(now)


def crashed(workdir, now=NOW):
    """Writes a run whose first attempt was killed and whose second failed with an error."""
    writer = trained(workdir, 170)
    writer._beat('beat')
    writer.lines['metrics.jsonl'] = [line for line in writer.lines['metrics.jsonl'] if line['step'] <= SAVE_EVERY]
    writer.start(from_step=SAVE_EVERY, idle=60.0)
    writer.compile()
    writer.train(260)
    writer.end('failed', 'XlaRuntimeError: RESOURCE_EXHAUSTED: out of memory', 1)
    return writer.close(now)


def preempted(workdir, now=NOW):
    """Writes a run that was preempted and saved its state."""
    writer = trained(workdir, 150)
    writer.save()
    writer.end('preempted', 'SIGTERM: step 150 of 400 is saved', 75)
    return writer.close(now)


def diverged(workdir, now=NOW):
    """Writes a run that diverged at step 201, rolled back once and diverged again."""
    writer = RunWriter(workdir)
    writer.start()
    writer.compile()

    def loss(step):
        return train_loss(step) if step <= 200 else None

    writer.train(220, loss=loss, skipped=20)
    writer.event('skipped', 'step 201 skipped: its loss or gradient is not finite (1 skipped so far)', alert=True)
    writer.roll_back(to=200)
    writer.train(220, loss=loss, skipped=40)
    writer.end('diverged', 'stopped at step 220: the loss is not finite; the newest checkpoint is from step 200', 1)
    return writer.close(now)


def finished(workdir, now=NOW):
    """Writes a finished run of two attempts with a pause of a minute."""
    writer = trained(workdir, 150)
    writer.save()
    writer.end('preempted', 'SIGTERM: step 150 of 400 is saved', 75)
    writer.start(from_step=150, idle=60.0)
    writer.compile()
    writer.train(NUM_STEPS)
    writer.end('finished', 'all steps are done', 0)
    return writer.close(now)


def torn(workdir, now=NOW):
    """Writes `running` with a truncated last line in each file."""
    running(workdir, now)
    for path in workdir.glob('*.jsonl'):
        with path.open('ab') as file:
            # Truncates within a multi-byte character too.
            file.write('{"time": 1, "text": "ü'.encode()[:-1])
    return workdir


BUILDERS = {
    builder.__name__: builder
    for builder in (*(empty, fresh, running, on_cpu, two_hosts, killed, crashed, preempted, diverged, finished, torn),)
}


def main(folder, now):
    """Writes a workdir of each kind below `folder`."""
    for name, builder in BUILDERS.items():
        print(builder(Path(folder) / name, now))


if __name__ == '__main__':
    main(sys.argv[1], time.time())
