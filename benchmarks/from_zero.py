"""Runs the commands of a tutorial, from texts to a chat, and records their times and the model's answers.

    python -m benchmarks.from_zero --save
    python -m benchmarks.from_zero --page=fine-tune --model=DIR --save

DIR is a model in the format of Transformers. The commands are those of the page, in a new directory and with an empty
compilation cache. Each runs in a process of its own. The seconds of the CPU do not depend on other programs that run at
the same time; half of them is the least time on two cores.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.step import machine
from maxlm.cli.parser import ArgumentParser
from maxlm.errors import EXIT_DONE, exit_code

ROOT = Path(__file__).parents[1]
PAGES = ('chat', 'fine-tune')


def tutorial(page: str) -> str:
    """Returns the text of a tutorial."""
    return (ROOT / f'docs/tutorials/{page}.md').read_text(encoding='utf-8')


def code_blocks(text: str, language: str) -> list[str]:
    """Returns the code blocks of a language in a Markdown text; '' selects those without a language."""
    found = re.findall(r'^```(\w*)\n(.*?)^```$', text, re.MULTILINE | re.DOTALL)
    return [block for name, block in found if name == language]


def commands(text: str) -> list[list[str]]:
    """Returns the words of the commands of a page, up to the chat."""
    lines = [line for block in code_blocks(text, '') for line in block.replace('\\\n', ' ').splitlines()]
    found = [shlex.split(line) for line in lines]
    return found[: next(index for index, words in enumerate(found) if words[:2] == ['maxlm', 'chat']) + 1]


def run_command(words: list[str], directory: Path, *, typed: str = '') -> dict[str, Any]:
    """Runs a command of a page and returns its times in seconds.

    Raises:
        RuntimeError: the command fails.
    """
    program = [sys.executable, '-m', 'maxlm'] if words[0] == 'maxlm' else [sys.executable]
    environment = {**os.environ, 'PYTHONPATH': str(ROOT), 'JAX_COMPILATION_CACHE_DIR': str(directory / 'programs')}
    started = time.monotonic()
    process = subprocess.Popen([*program, *words[1:]], cwd=directory, env=environment, stdin=subprocess.PIPE, text=True)
    assert process.stdin is not None
    process.stdin.write(typed)
    process.stdin.close()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f'{shlex.join(words)}: exit code {process.returncode}')
    return {
        'command': shlex.join(words),
        'seconds': round(time.monotonic() - started, 1),
        'cpu_seconds': round(usage.ru_utime + usage.ru_stime, 1),
    }


def follow(page: str, directory: Path) -> dict[str, Any]:
    """Runs the commands of a page and returns their times, the answers, and the fraction of all exact answers."""
    (directory / 'places.py').write_text(code_blocks(tutorial('chat'), 'python')[0])
    done, ask = [], []
    for words in commands(tutorial(page)):
        typed = ''
        if words[:2] == ['maxlm', 'evaluate']:
            ask, words = words, [*words, '--output=results']
        if words[:2] == ['maxlm', 'chat']:
            typed = f'{_answers(directory / "results")[0]["question"]}\n/quit\n'
        done.append(run_command(words, directory, typed=typed))
    answers = _answers(directory / 'results')
    run_command([*(word for word in ask if not word.startswith('--limit')), '--output=all'], directory)
    every = _answers(directory / 'all')
    return {
        'commands': done,
        'seconds': round(sum(each['seconds'] for each in done), 1),
        'cpu_seconds': round(sum(each['cpu_seconds'] for each in done), 1),
        'exact': sum(answer['exact'] for answer in answers),
        'answers': answers,
        'all_exact': sum(answer['exact'] for answer in every),
        'all_questions': len(every),
    }


def _answers(results: Path) -> list[dict[str, Any]]:
    (path,) = results.glob('*/samples_questions_*.jsonl')
    return [json.loads(line) for line in path.read_text(encoding='utf-8').splitlines()]


def main(argv: list[str]) -> int:
    """Follows a tutorial, prints times and answers, and writes JSON."""
    parser = ArgumentParser(prog='benchmarks.from_zero', allow_abbrev=False, description=__doc__)
    parser.add_argument('--page', choices=PAGES, default='chat', help='name of the tutorial (default chat)')
    parser.add_argument('--model', type=Path, help='for fine-tune: directory of the base model')
    parser.add_argument('--save', action='store_true', help='write the result to benchmarks/results')
    options = parser.parse_args(argv)
    if (options.page == 'fine-tune') != (options.model is not None):
        parser.error('--page=fine-tune and --model must be used together')
    facts: dict[str, Any] = {'machine': machine(), 'load_at_start': round(os.getloadavg()[0], 1)}
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        if options.model:
            shutil.copytree(options.model, directory / 'model')
            facts['model'] = options.model.name
        facts |= follow(options.page, directory)
    for each in facts['commands']:
        print(f'{each["seconds"]:8.1f} s {each["cpu_seconds"]:8.1f} s of the CPU  {each["command"]}')
    print(
        f'{facts["seconds"]:8.1f} s {facts["cpu_seconds"]:8.1f} s of the CPU  all commands; {facts["exact"]} of '
        f'{len(facts["answers"])} answers exact, {facts["all_exact"]} of all {facts["all_questions"]}'
    )
    if options.save:
        path = ROOT / f'benchmarks/results/from_zero_{options.page.replace("-", "_")}_cpu2.json'
        path.write_text(json.dumps(facts, indent=1, ensure_ascii=False) + '\n', encoding='utf-8')
    return EXIT_DONE


if __name__ == '__main__':
    sys.exit(exit_code(main, sys.argv[1:]))
