"""Generates text from prompts: `python -m maxlm.generate --checkpoint=runs/first --prompt='Once upon'`.

The checkpoint is a workdir (its newest step), `WORKDIR@STEP`, `WORKDIR@best`, or the directory of one step. Prompts are
arguments (--prompt), files (--prompt-file), lines typed in a terminal (--interactive), or a JSONL file (--input), whose
completions are written to --output. With --chat, prompts are user messages. Runs on one device.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from maxlm.errors import EXIT_DONE, ArgumentParser, InputError, exit_code, os_message, text_argument
from maxlm.hints import print_next
from maxlm.inference.engine.batch_io import Line, read_lines, write_completions
from maxlm.inference.engine.engine import CACHES, Engine
from maxlm.inference.engine.interactive import run_interactive, stream
from maxlm.inference.engine.requests import Completion, Request
from maxlm.inference.load import LoadedModel, load_model
from maxlm.inference.prompts import chat_prompt, infill_prompt, text_prompt
from maxlm.inference.sampling import Sampling
from maxlm.log import Console, progress_bar
from maxlm.model.layers.weight_only_quantization import KINDS
from maxlm.runtime.compilation_cache import enable_compilation_cache
from maxlm.storage.paths import ANY, Kind, PathOption
from maxlm.storage.regular_files import read_text


def main(argv: list[str]) -> int:
    """Prints each prompt with its completions or answers, or writes them to a file."""
    options = _parser().parse_args(argv)
    _check(options)
    _generate(options)
    print_next('maxlm', 'serve', f'--checkpoint={options.checkpoint}')
    return EXIT_DONE


def _generate(options: argparse.Namespace) -> None:
    texts = [*(options.prompt or []), *(_read(path) for path in options.prompt_file or [])]
    sampling = Sampling(
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        min_p=options.min_p,
        repetition_penalty=options.repetition_penalty,
    )

    with Console():
        model = load_model(options.checkpoint, num_devices=1, quantize=options.quantize)
    enable_compilation_cache(model.config.train.compilation_cache_dir)

    def request(ids: list[int]) -> Request:
        return Request(
            tuple(ids),
            options.max_tokens,
            sampling,
            seed=options.seed,
            num_samples=options.num_samples,
            stops=tuple(options.stop or ()),
        )

    if options.interactive:
        engine, model = _with_engine(model, options, 1)
        run_interactive(model, engine, request, chat=options.chat, read_line=input, output=sys.stdout)
        return
    if options.input:
        lines = read_lines(options.input, model)
        if not lines:
            raise InputError(f'{options.input}: the file contains no prompts; add lines with "prompt" or "messages"')
        engine, model = _with_engine(model, options, len(lines) * options.num_samples)
        _complete_lines(engine, lines, options.output, request)
        return
    requests = [request(_prompt(model, text, options)) for text in texts]
    shown = [text + ('\n\n' if options.chat else '') for text in texts]
    engine, model = _with_engine(model, options, len(requests) * options.num_samples)
    if len(requests) == options.num_samples == 1:
        engine.check(requests[0])
        print(shown[0], end='', flush=True)
        stream(engine, requests[0], sys.stdout)
        return
    rows = _complete(engine, requests)
    number, total = 0, len(requests) * options.num_samples
    for text, samples in zip(shown, rows, strict=True):
        for sample in samples:
            number += 1
            print(f'--- {number} of {total}')
            print(text + sample.text + (options.suffix or ''))


def _parser() -> ArgumentParser:
    parser = ArgumentParser(
        prog='maxlm generate',
        allow_abbrev=False,
        description=__doc__,
        epilog='example: python -m maxlm.generate --checkpoint=runs/first --prompt="Once upon"',
    )
    file = PathOption(Kind.FILE, as_path=True)
    parser.add_argument(
        '--checkpoint',
        required=True,
        type=PathOption(Kind.DIRECTORY, ANY),
        help='workdir, WORKDIR@STEP or directory of one step',
    )
    parser.add_argument('--prompt', action='append', type=text_argument, help='text to continue; repeatable')
    parser.add_argument(
        '--prompt-file', action='append', type=file, help='file containing a text to continue; repeatable'
    )
    parser.add_argument('--interactive', action='store_true', help='read prompts from the terminal')
    parser.add_argument('--input', type=file, help='JSONL file with "prompt" or "messages" on each line')
    parser.add_argument('--output', type=file, help='JSONL file for the lines of --input with "completions"')
    parser.add_argument('--chat', action='store_true', help='treat prompts as user messages; apply the chat template')
    parser.add_argument('--suffix', type=text_argument, help='suffix for fill-in-the-middle (FIM-trained models only)')
    parser.add_argument('--max-tokens', type=int, default=128, help='maximum tokens per continuation (default 128)')
    parser.add_argument('--num-samples', type=int, default=1, help='continuations per prompt (default 1)')
    parser.add_argument('--temperature', type=float, default=0.8, help='sampling temperature; 0 = greedy (default 0.8)')
    parser.add_argument('--top-k', type=int, default=0, help='sample from the k most likely tokens; 0 = all (default)')
    parser.add_argument(
        '--top-p',
        type=float,
        default=1.0,
        help='sample from the most likely tokens up to this total probability (default 1)',
    )
    parser.add_argument(
        '--min-p', type=float, default=0.0, help='minimum probability relative to the most likely token (default 0)'
    )
    parser.add_argument(
        '--repetition-penalty', type=float, default=1.0, help='penalty for repeated tokens; 1 = none (default)'
    )
    parser.add_argument(
        '--stop', action='append', type=text_argument, help='stop string, not included in the output; repeatable'
    )
    parser.add_argument('--seed', type=int, default=0, help='random seed (default 0)')
    parser.add_argument('--slots', type=int, default=8, help='maximum concurrent continuations (default 8)')
    parser.add_argument(
        '--kv-cache-dtype', choices=CACHES, default='model', help='dtype of the key-value cache (default model)'
    )
    parser.add_argument(
        '--quantize', choices=('', *KINDS), default='', help='format to quantize the kernels to while loading'
    )
    return parser


def _check(options: argparse.Namespace) -> None:
    """Checks combinations and ranges that argparse does not check."""
    given = [
        name
        for name, there in {
            '--prompt': options.prompt is not None or options.prompt_file is not None,
            '--interactive': options.interactive,
            '--input': options.input is not None,
        }.items()
        if there
    ]
    if len(given) != 1:
        raise InputError(
            'prompts must be given in exactly one way: --prompt and --prompt-file, --interactive, or --input; '
            f'given: {", ".join(given) or "none"}'
        )
    if (options.input is None) != (options.output is None):
        raise InputError('--input and --output must be used together')
    if options.input and (options.chat or options.suffix is not None):
        raise InputError('--input cannot be combined with --chat or --suffix; use "messages" or "suffix" in its lines')
    if options.suffix is not None and (options.chat or options.interactive):
        raise InputError('--suffix cannot be combined with --chat or --interactive; remove one of them')
    if options.num_samples < 1:
        raise InputError(f'--num-samples={options.num_samples}: must be at least 1')
    if options.interactive and options.num_samples > 1:
        raise InputError(f'--num-samples={options.num_samples}: must be 1 with --interactive')
    if options.slots < 1:
        raise InputError(f'--slots={options.slots}: must be at least 1')
    if not 0 <= options.seed < 2**32:
        raise InputError(f'--seed={options.seed}: must be at least 0 and below 2³² = {2**32}')


def _read(path: Path) -> str:
    try:
        return read_text(path)
    except OSError as error:
        raise InputError(f'--prompt-file={path}: {os_message(error)}; give a readable file') from error
    except UnicodeDecodeError as error:
        raise InputError(f'--prompt-file={path}: byte {error.start} is not UTF-8; save the file as UTF-8') from error


def _prompt(model: LoadedModel, text: str, options: argparse.Namespace) -> list[int]:
    if options.suffix is not None:
        try:
            return infill_prompt(model.tokenizer, text, options.suffix)
        except InputError as error:
            raise InputError(f'--suffix: {error}') from error
    if not options.chat:
        return text_prompt(model.tokenizer, text)
    try:
        return chat_prompt(model, [{'role': 'user', 'content': text}])
    except InputError as error:
        raise InputError(f'--chat: {error}') from error


def _with_engine(model: LoadedModel, options: argparse.Namespace, samples: int) -> tuple[Engine, LoadedModel]:
    """Returns an engine for `samples` samples, and the model without the parameters that the engine owns."""
    engine = Engine(model, num_slots=min(options.slots, samples), cache=options.kv_cache_dtype)
    return engine, model.without_params()


def _complete_lines(
    engine: Engine, lines: Sequence[Line], output: Path, request: Callable[[list[int]], Request]
) -> None:
    requests = []
    for line in lines:
        try:
            requests.append(request(line.ids))
            engine.check(requests[-1])
        except InputError as error:
            raise InputError(f'{line.name}: {error}') from error

    write_completions(output, lines, lambda: _complete(engine, requests))


def _complete(engine: Engine, requests: Sequence[Request]) -> list[list[Completion]]:
    with progress_bar('generate', total=len(requests), unit='prompt', show=True) as bar:
        return engine.complete(requests, on_done=lambda _: bar.update())


def run() -> None:
    """Entry point of `python -m maxlm.generate` and `maxlm generate`."""
    sys.exit(exit_code(main, sys.argv[1:]))


if __name__ == '__main__':
    run()
