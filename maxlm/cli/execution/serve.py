"""Serves a model over HTTP."""

from __future__ import annotations

import argparse
from functools import partial

import jax

from maxlm.cli.execution.api_key import API_KEY
from maxlm.errors import InputError
from maxlm.inference.drafting.load_draft import load_draft
from maxlm.inference.engine.engine import Engine
from maxlm.inference.load import load_model
from maxlm.inference.resolve_model import default_model_name, resolved_checkpoint
from maxlm.log import Console, logger
from maxlm.model.parameters import count_parameters
from maxlm.runtime.compilation_cache import enabled_cache
from maxlm.runtime.malloc import trim_malloc
from maxlm.serving.limits import ServerLimits
from maxlm.serving.request_parsing import ModelDetails, ServedModel
from maxlm.serving.server import Server, bind, is_loopback, serve_until_stopped, server_url
from maxlm.training.known_answers.check import check_kernels, warn_of_known_faults
from maxlm.training.known_answers.kernels import serving_answers


def execute(options: argparse.Namespace, api_key: str) -> int:
    """Loads the model, compiles its functions, and serves until it is stopped."""
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
    name = options.served_model_name or default_model_name(options.checkpoint)
    if not name.isprintable():
        raise InputError(f'--served-model-name={name!r}: must be printable text; choose another name')
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
        warn_of_known_faults(has_document_lists=False)
        settings = {
            'max_context': options.max_model_len or model.config.model.max_positions,
            'int8_cache': options.kv_cache_dtype == 'int8',
        }
        if not options.no_check_kernels:
            check_kernels(
                partial(serving_answers, model.config, **settings),
                (model.config, settings),
                model.layout.mesh,
                cache=enabled_cache(),
                way_out='--no-check-kernels',
            )
        engine = Engine(
            model,
            num_slots=options.slots,
            max_context=options.max_model_len,
            cache=options.kv_cache_dtype,
            max_queue_size=options.max_queue_size,
            num_draft_tokens=options.num_draft_tokens,
            draft=load_draft(options.draft_model, model, share_layers=options.tensor_parallel_size > 1),
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
        trim_malloc()
        served = ServedModel(
            name,
            model.step,
            model.tokenizer,
            model.chat,
            engine,
            details,
            parse_special=options.parse_special,
            share_prefixes=not options.no_shared_prefixes,
        )
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
