"""Chats with a model in the terminal."""

from __future__ import annotations

import argparse
import contextlib
import sys

from maxlm.inference.drafting.load_draft import load_draft
from maxlm.inference.engine.engine import Engine
from maxlm.inference.engine.interactive import ChatSession, Terminal
from maxlm.inference.engine.requests import Request
from maxlm.inference.load import load_model
from maxlm.inference.resolve_model import resolved_checkpoint
from maxlm.inference.sampling import Sampling
from maxlm.log import Console


def execute(options: argparse.Namespace) -> None:
    """Loads the model and answers lines until the end of the input."""
    terminal = standard_terminal()
    # In a pipe, the output consists of the answers.
    with Console(stderr=not terminal.is_interactive), resolved_checkpoint(options.checkpoint) as checkpoint:
        model = load_model(checkpoint, num_devices=1, quantize=options.quantize)
        engine = Engine(
            model,
            num_slots=1,
            cache=options.kv_cache_dtype,
            num_draft_tokens=options.num_draft_tokens,
            draft=load_draft(options.draft_model, model),
        )
    sampling = sampling_of(options)

    def request(ids: list[int]) -> Request:
        # The engine reports a prompt that fills the context.
        max_tokens = options.max_tokens or max(1, engine.max_context - len(ids))
        return Request(tuple(ids), max_tokens, sampling, seed=options.seed, stops=tuple(options.stop or ()))

    session = ChatSession(
        model.without_params(),
        engine,
        request,
        terminal,
        system=options.system,
        max_tokens=options.max_tokens or None,
    )
    # The engine owns the parameters.
    del model
    session.run()


def sampling_of(options: argparse.Namespace) -> Sampling:
    """Returns the sampling settings of a command's options."""
    return Sampling(
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        min_p=options.min_p,
        repetition_penalty=options.repetition_penalty,
    )


def standard_terminal() -> Terminal:
    """Returns the standard streams. With a terminal, typed lines can be edited; no history is written to a file."""
    is_interactive = sys.stdin.isatty()
    if is_interactive:
        with contextlib.suppress(ImportError):
            # `input` edits lines with this module, which some builds of Python lack.
            import readline  # noqa: F401
    return Terminal(input, sys.stdout, sys.stderr, is_interactive)
