"""Continue a prompt: `python -m maxlm.generate --checkpoint=CKPT --prompt=TEXT --max_tokens=N --temperature=0`.

CKPT is a workdir (its newest step), `WORKDIR@STEP`, or one step's directory. With --chat the prompt is what a user
says, and the model answers. Runs on one device.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial

import numpy as np

from maxlm.data.chat_template import ChatError
from maxlm.errors import EXIT_DONE, ArgumentParser, InputError, exit_code
from maxlm.inference.engine import Engine
from maxlm.inference.load import LoadedModel, load_model
from maxlm.inference.sampling import Sampling
from maxlm.runtime.compile_cache import keep_programs
from maxlm.runtime.console import Console
from maxlm.runtime.workdir import CHAT_TEMPLATE


def main(argv: list[str]) -> int:
    """Prints the prompt with each continuation, or each answer behind it."""
    parser = ArgumentParser(prog='maxlm.generate', allow_abbrev=False, description=__doc__)
    parser.add_argument('--checkpoint', required=True, help='workdir, WORKDIR@STEP, or a directory of one step')
    parser.add_argument('--prompt', required=True, action='append', help='text to continue; can be given several times')
    parser.add_argument('--chat', action='store_true', help='the prompt is a question, spelled by the chat template')
    parser.add_argument('--max_tokens', type=int, default=128, help='tokens per continuation (default 128)')
    parser.add_argument('--num_samples', type=int, default=1, help='continuations of each prompt (default 1)')
    parser.add_argument('--temperature', type=float, default=0.8, help='0 = always the likeliest token (default 0.8)')
    parser.add_argument('--top_k', type=int, default=0, help='draw among the k likeliest tokens only; 0 = all')
    parser.add_argument('--top_p', type=float, default=1.0, help='draw among the likeliest that reach this probability')
    parser.add_argument('--seed', type=int, default=0, help='the same seed gives the same text (default 0)')
    options = parser.parse_args(argv)
    if options.num_samples < 1:
        raise InputError(f'--num_samples={options.num_samples}: must be at least 1')
    if not 0 <= options.seed < 2**32:
        raise InputError(f'--seed={options.seed}: must be at least 0 and below 2³² = {2**32}')
    sampling = Sampling(temperature=options.temperature, top_k=options.top_k, top_p=options.top_p)

    with Console():
        model = load_model(options.checkpoint, num_devices=1)
    keep_programs(model.config.train.compile_cache)
    texts = [prompt for prompt in options.prompt for _ in range(options.num_samples)]
    encode = partial(_questions, model) if options.chat else model.tokenizer.encode_batch
    prompts = [ids.tolist() for ids in encode(texts)]
    rows = Engine(model).generate(prompts, max_tokens=options.max_tokens, sampling=sampling, seed=options.seed)
    for number, (text, row) in enumerate(zip(texts, rows, strict=True), start=1):
        if len(rows) > 1:
            print(f'--- {number} of {len(rows)}')
        print(text + ('\n\n' if options.chat else '') + model.tokenizer.decode(row))
    return EXIT_DONE


def _questions(model: LoadedModel, texts: Sequence[str]) -> list[np.ndarray]:
    """Texts as turns of a user, with what invites an answer."""
    if model.chat is None:
        raise InputError(
            f'--chat: {model.tokenizer_path.parent} has no {CHAT_TEMPLATE} that can be used; it comes with a run on '
            f'conversations (maxlm.prepare --format=chat) or an import of a model that has one'
        )
    try:
        return [model.chat.encode_prompt([{'role': 'user', 'content': text}]) for text in texts]
    except ChatError as error:
        raise InputError(f'--chat: {error}') from error


def run() -> None:
    """Entry of `python -m maxlm.generate` and `maxlm generate`."""
    sys.exit(exit_code(main, sys.argv[1:]))


if __name__ == '__main__':
    run()
