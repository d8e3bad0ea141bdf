"""Serves a model over HTTP: `python -m maxlm.serve --checkpoint=runs/first`, then open http://127.0.0.1:8000.

The checkpoint is a workdir (the step with the lowest validation loss, or the newest), `WORKDIR@STEP`, the directory of
one step, or a Hugging Face Transformers directory. The OpenAI-compatible API is at /v1, and a chat page for browsers is
at /. SIGTERM and Ctrl-C finish running requests before exit; a second signal exits
immediately.
"""

from __future__ import annotations

import os
import sys
from urllib.parse import urlsplit

from maxlm.errors import ArgumentParser, InputError, exit_code, os_message
from maxlm.log import Console, logger
from maxlm.model.layers.weight_only_quantization import KINDS
from maxlm.storage.paths import ANY, Kind, PathOption
from maxlm.storage.regular_files import read_text

API_KEY = 'MAXLM_API_KEY'


def main(argv: list[str]) -> int:
    """Loads the model, compiles its functions, and serves until it is stopped."""
    options = _parser().parse_args(argv)
    # Imported late, so that --help and invalid options do not wait for JAX.
    import jax

    from maxlm.inference.engine.engine import Engine
    from maxlm.inference.load import load_model
    from maxlm.inference.resolve_model import default_model_name, resolved_checkpoint
    from maxlm.planning.estimate.parameters import count_parameters
    from maxlm.runtime.compilation_cache import enable_compilation_cache
    from maxlm.serving.limits import ServerLimits
    from maxlm.serving.request_parsing import ModelDetails, ServedModel
    from maxlm.serving.server import Server, bind, is_loopback, serve_until_stopped, server_url

    api_key = _api_key(options.api_key_file)
    for origin in options.allow_origin:
        _check_origin(origin)
    limits = ServerLimits(
        max_request_bytes=options.max_request_bytes,
        max_tokens=options.max_tokens,
        max_queue_size=options.max_queue_size,
        request_timeout=options.request_timeout,
        drain_seconds=options.drain_seconds,
    )
    if not 1 <= options.tensor_parallel_size <= jax.device_count():
        raise InputError(
            f'--tensor-parallel-size={options.tensor_parallel_size}: must be from 1 to '
            f'{jax.device_count()}, the number of devices'
        )
    # Bind before the model is loaded, so that a port in use is reported immediately.
    with Console(), bind(options.host, options.port) as listener:
        if not is_loopback(listener) and not api_key:
            logger.warning(
                f'--host={options.host}: anyone who can reach this machine can use the model; '
                f'set --api-key-file or {API_KEY}, or listen on 127.0.0.1'
            )
        with resolved_checkpoint(options.checkpoint) as checkpoint:
            model = load_model(
                checkpoint,
                num_devices=options.tensor_parallel_size,
                quantize=options.quantize,
                share_layers=options.tensor_parallel_size > 1,
            )
        enable_compilation_cache(model.config.train.compilation_cache_dir)
        engine = Engine(
            model,
            num_slots=options.slots,
            max_context=options.max_model_len,
            cache=options.kv_cache_dtype,
            max_queue_size=options.max_queue_size,
        )
        details = ModelDetails(
            num_parameters=count_parameters(model.config.model),
            dim=model.config.model.dim,
            dtype=model.config.model.dtype,
            weight_quantization=model.config.model.weight_quantization,
            kv_cache_dtype=options.kv_cache_dtype,
        )
        model = model.without_params()
        engine.warm_up(lambda name: logger.info(f'compiling: {name}'))
        name = options.served_model_name or default_model_name(options.checkpoint)
        served = ServedModel(name, model.step, model.tokenizer, model.chat, engine, details)
        running = Server(
            served,
            limits,
            listener,
            api_key=api_key,
            origins=options.allow_origin,
            docs=options.docs,
            on_ready=lambda: print(f'serving {name} (step {model.step}) at {server_url(listener)}', flush=True),
        )
        return serve_until_stopped(running)


def _parser() -> ArgumentParser:
    parser = ArgumentParser(
        prog='maxlm serve',
        allow_abbrev=False,
        description=__doc__,
        epilog='example: python -m maxlm.serve --checkpoint=runs/first --port=8000',
    )
    parser.add_argument(
        '--checkpoint',
        type=PathOption(Kind.DIRECTORY, ANY),
        required=True,
        help='workdir, WORKDIR@STEP, directory of one step, or Transformers directory',
    )
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
    parser.add_argument(
        '--kv-cache-dtype',
        choices=('model', 'int8'),
        default='model',
        help='dtype of the key-value cache (default %(default)s)',
    )
    parser.add_argument(
        '--tensor-parallel-size',
        type=int,
        default=1,
        help='number of devices for tensor parallelism (default %(default)s)',
    )
    parser.add_argument(
        '--quantize', choices=('', *KINDS), default='', help='format to quantize the kernels to while loading'
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
    parser.add_argument('--docs', action='store_true', help='serve an API reference at /docs and /openapi.json')
    parser.add_argument(
        '--allow-origin',
        action='append',
        default=[],
        metavar='ORIGIN',
        help='additional allowed origin of web pages, e.g. https://chat.example.org; repeatable',
    )
    return parser


def _api_key(path: str) -> str:
    """Returns the key from the file or the environment; '' if there is none."""
    if not path:
        key, source = os.environ.get(API_KEY, ''), API_KEY
    else:
        source = f'--api-key-file={path}'
        try:
            key = read_text(path).strip()
        except (OSError, UnicodeDecodeError) as error:
            reason = os_message(error) if isinstance(error, OSError) else 'not UTF-8'
            raise InputError(f'{source}: {reason}; give a readable text file') from error
        if not key:
            raise InputError(f'{source}: the file is empty; write the API key to it')
    if not (key.isascii() and key.isprintable() and ' ' not in key):
        raise InputError(f'{source}: the API key must consist of printable ASCII characters without spaces')
    return key


def _check_origin(origin: str) -> None:
    parts = urlsplit(origin)
    if parts.scheme not in ('http', 'https') or not parts.hostname or f'{parts.scheme}://{parts.netloc}' != origin:
        raise InputError(f'--allow-origin={origin}: must be like https://chat.example.org, without a path')


def run() -> None:
    """Entry point of `python -m maxlm.serve` and `maxlm serve`."""
    sys.exit(exit_code(main, sys.argv[1:]))


if __name__ == '__main__':
    run()
