"""A small Slurm: sbatch stores jobs with arrays and dependencies, which the test runs, kills and requeues."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil

from tests.launch.programs import Programs

SBATCH = """#!{python} -SEs
import json, os, sys
folder = {folder!r}
number = len(os.listdir(folder)) + 101
with open(os.path.join(folder, str(number)), 'w') as file:
    json.dump(dict(arguments=sys.argv[1:], directory=os.getcwd()), file)
print(number)
"""
# Runs the command after the options.
SRUN = """#!/bin/sh
while [ "${1#--}" != "$1" ]; do shift; done
exec "$@"
"""
SCONTROL = """#!/bin/sh
echo "$2" >>{requeued}
"""


class Element:
    """A job, or one task of an array."""

    def __init__(self, job: int, words: list[str], directory: str, index: int | None = None, last: int = 0):
        self.job, self.words, self.directory = job, words, directory
        self.name = str(job) if index is None else f'{job}_{index}'
        self.environment = {'SLURM_JOB_ID': str(job if index is None else job * 1000 + index)}
        if index is not None:
            names = ('JOB_ID', 'TASK_ID', 'TASK_MIN', 'TASK_MAX')
            values = map(str, (job, index, 0, last))
            self.environment |= {f'SLURM_ARRAY_{name}': value for name, value in zip(names, values, strict=True)}
        self.restarts = 0
        self.code: int | None = None
        self.process: subprocess.Popen[str] | None = None
        self.output = ''


class SlurmQueue:
    """Queue of the jobs that a script submits. It runs all tasks of a job at once, and jobs one after the other."""

    def __init__(self, programs: Programs, folder: Path):
        self._jobs, self._requeued, bin_folder = folder / 'jobs', folder / 'requeued', folder / 'bin'
        for path in (self._jobs, bin_folder):
            path.mkdir(parents=True)
        self._requeued.touch()
        sources = {'sbatch': SBATCH.format(python=sys.executable, folder=str(self._jobs)), 'srun': SRUN}
        sources['scontrol'] = SCONTROL.format(requeued=self._requeued)
        for name, text in sources.items():
            (bin_folder / name).write_text(text)
            (bin_folder / name).chmod(0o755)
        self.environment = {**programs.environment, 'PATH': f'{bin_folder}:{programs.environment["PATH"]}'}
        self.elements: list[Element] = []

    def run(self, on_poll: Callable[[list[Element]], object] = lambda running: None) -> dict[int, list[int | None]]:
        """Runs the submitted jobs until none can start. Returns the exit codes of the tasks of each job.

        Args:
            on_poll: called repeatedly with the running tasks, which it may kill.
        """
        for number in sorted(int(path.name) for path in self._jobs.iterdir()):
            job = json.loads((self._jobs / str(number)).read_text())
            options = [word for word in job['arguments'] if word.startswith('--')]
            text = ' '.join(options[: options.index('--input')] if '--input' in options else options)
            array = re.search(r'--array=0-(\d+)', text)
            after = re.search(r'--dependency=afterok:(\d+)', text)
            script = next(place for place, word in enumerate(job['arguments']) if word.endswith('.sbatch'))
            words = job['arguments'][script:]
            indices = range(int(array[1]) + 1) if array else [None]
            tasks = [Element(number, words, job['directory'], index, indices[-1] or 0) for index in indices]
            self.elements += tasks
            # Slurm removes the job with --kill-on-invalid-dep.
            if after and any(element.code for element in self.elements if element.job == int(after[1])):
                for element in tasks:
                    element.code = -1
            while running := [element for element in tasks if element.code is None]:
                for element in running:
                    self._poll(element)
                on_poll([element for element in running if element.process is not None])
        return {job: [each.code for each in self.elements if each.job == job] for job in {e.job for e in self.elements}}

    def fail_node(self, element: Element) -> None:
        """Kills all processes of a task. Slurm runs it again."""
        assert element.process is not None
        os.killpg(element.process.pid, signal.SIGKILL)
        self._end(element)
        element.restarts += 1

    def end_step(self, element: Element) -> None:
        """Sends SIGTERM to the command of srun, as Slurm does before the time limit."""
        assert element.process is not None
        for process in psutil.Process(element.process.pid).children():
            process.terminate()

    def _poll(self, element: Element) -> None:
        if element.process is None:
            environment = {**self.environment, **element.environment, 'SLURM_RESTART_COUNT': str(element.restarts)}
            element.process = subprocess.Popen(
                ['bash', *element.words],
                cwd=element.directory,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                process_group=0,
            )
        elif (code := element.process.poll()) is not None:
            self._end(element)
            requeued = self._requeued.read_text().split()
            if element.name in requeued:
                self._requeued.write_text('\n'.join(name for name in requeued if name != element.name))
                element.restarts += 1
            else:
                element.code = code

    @staticmethod
    def _end(element: Element) -> None:
        assert element.process is not None
        element.output += element.process.communicate()[0]
        element.process = None
