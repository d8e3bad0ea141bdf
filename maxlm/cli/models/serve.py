"""Serves a model over HTTP: `maxlm serve --checkpoint=runs/first`, then open http://127.0.0.1:8000.

The checkpoint is a workdir (its newest step), `WORKDIR@STEP`, `WORKDIR@best`, the directory of one step, a directory of
Transformers or nanochat, or a GGUF file. The OpenAI-compatible API is at /v1, and a chat page for browsers is at /.
SIGTERM, Ctrl-C and the loss of the terminal finish running requests before exit; a second signal exits immediately.
"""

from __future__ import annotations

from urllib.parse import urlsplit

from maxlm.cli.execution.api_key import API_KEY, read_api_key
from maxlm.cli.parser import SHARED, ArgumentParser, command_parser
from maxlm.cli.process import run
from maxlm.errors import InputError
from maxlm.storage.paths import ANY, Kind, PathOption


def main(argv: list[str]) -> int:
    """Loads the model, compiles its functions, and serves until it is stopped."""
    options = make_parser().parse_args(argv)
    api_key = read_api_key(options.api_key_file)
    for origin in options.allow_origin:
        _check_origin(origin)

    from maxlm.cli.execution.serve import execute

    return execute(options, api_key)


def make_parser() -> ArgumentParser:
    parser = command_parser('serve', __doc__, '--checkpoint=runs/first --port=8000')
    help = f'{SHARED["--checkpoint"]["help"]}, model of Transformers or nanochat, or GGUF file'
    parser.add_shared('--checkpoint', type=PathOption(urls=ANY), help=help)
    parser.add_argument('--host', default='127.0.0.1', help='address to listen on (default %(default)s)')
    parser.add_argument(
        '--port', type=int, default=8000, help='port to listen on; 0 = any free port (default %(default)s)'
    )
    parser.add_argument(
        '--api-key-file',
        type=PathOption(Kind.FILE, may_be_empty=True),
        default='',
        help=f'file containing the API key (default: environment variable {API_KEY})',
    )
    parser.add_argument('--served-model-name', default='', help='model name in the API (default: directory name)')
    parser.add_argument('--slots', type=int, default=8, help='maximum concurrent samples (default %(default)s)')
    parser.add_argument(
        '--max-model-len',
        type=int,
        default=0,
        help="maximum tokens of prompt and response; 0 = the model's context length (default)",
    )
    parser.add_shared('--kv-cache-dtype', '--draft-model', '--num-draft-tokens', '--quantize')
    parser.add_argument(
        '--tensor-parallel-size',
        type=int,
        default=1,
        help='number of devices for tensor parallelism (default %(default)s)',
    )
    parser.add_argument(
        '--max-tokens',
        type=int,
        default=0,
        help='maximum tokens of a response; 0 = limited by the context only (default)',
    )
    parser.add_argument(
        '--max-queue-size',
        type=int,
        default=256,
        help='maximum samples waiting for a slot; 0 = unlimited (default %(default)s)',
    )
    parser.add_argument(
        '--request-timeout', type=float, default=600, help='timeout of a request in seconds (default %(default)s)'
    )
    parser.add_argument(
        '--max-request-bytes', type=int, default=4 * 2**20, help='maximum size of a request body (default %(default)s)'
    )
    parser.add_argument(
        '--drain-seconds',
        type=float,
        default=30,
        help='seconds for running requests to finish at shutdown (default %(default)s)',
    )
    parser.add_argument(
        '--parse-special',
        action='store_true',
        help='encode names of special tokens in text prompts as their ids, unless a request sets parse_special',
    )
    parser.add_argument(
        '--no-shared-prefixes',
        action='store_true',
        help='never reuse the cached prefix of another request, unless both have the same cache_salt',
    )
    parser.add_argument(
        '--no-check-kernels',
        action='store_true',
        help='start without the comparison of the kernels with formulas in float32',
    )
    parser.add_argument('--docs', action='store_true', help='serve an API reference at /docs and /openapi.json')
    parser.add_argument(
        '--allow-origin',
        action='append',
        default=[],
        metavar='ORIGIN',
        help='additional allowed origin of web pages, e.g. https://chat.example.org; repeatable',
    )
    return parser


def _check_origin(origin: str) -> None:
    parts = urlsplit(origin)
    if parts.scheme not in ('http', 'https') or not parts.hostname or f'{parts.scheme}://{parts.netloc}' != origin:
        raise InputError(f'--allow-origin={origin}: must be like https://chat.example.org, without a path')


if __name__ == '__main__':
    run('serve')
