"""Prepares text files, trains a small model on them and continues a prompt.

    python -m examples.train_on_text texts/ --workdir=runs/mine

On 2 CPU cores, the default of 400,000 tokens takes about 3 minutes. The result imitates the text but makes no sense.
"""

from __future__ import annotations

import argparse

import maxlm


def main(argv: list[str] | None = None) -> maxlm.Run:
    """Trains on the text and prints a continuation."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('texts', nargs='+', help='files or directories')
    parser.add_argument('--workdir', default='runs/mine', help='directory of the run (%(default)s)')
    parser.add_argument('--tokens', type=float, default=4e5, help='number of training tokens (%(default)g)')
    parser.add_argument('--tokenizer', default='bpe:4096', help='tokenizer to train, or bytes (%(default)s)')
    parser.add_argument('--prompt', default='The ', help='text to continue (%(default)r)')
    options = parser.parse_args(argv)

    # A new call with the same arguments finds the finished parts and only generates.
    dataset = maxlm.Dataset.prepare(options.texts, f'{options.workdir}-data', tokenizer=options.tokenizer)
    print(dataset)
    config = maxlm.Config.get('tiny', {'data.path': dataset.path, 'train.num_tokens': options.tokens})
    run = maxlm.Trainer(config, workdir=options.workdir).train()
    print(options.prompt + run.model().generate(options.prompt, max_tokens=64, temperature=0.8))
    return run


if __name__ == '__main__':
    main()
