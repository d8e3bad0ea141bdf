"""A model for lm-eval: likelihoods of continuations and of complete texts, and generation until a stop string.

Results equal those of lm-eval's Hugging Face backend with the exported weights: the same tokens, truncation from the
left, and prefix token before a text without context.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import tokenizers

from maxlm.data.tokenizer.limited_encoding import encode_long
from maxlm.errors import InputError
from maxlm.inference.engine.requests import MAX_STOPS, Completion, Request
from maxlm.inference.load import LoadedModel
from maxlm.inference.sampling import Sampling
from maxlm.inference.scoring import LogprobScorer, ScoringRequest, windows
from maxlm.installation import pip_install

# Default number of generated tokens, as in lm-eval's own backends.
MAX_TOKENS = 256
LENGTH_NAMES = ('max_gen_toks', 'max_new_tokens', 'max_tokens', 'max_completion_tokens')
SAMPLING_NAMES = ('temperature', 'top_k', 'top_p', 'min_p', 'repetition_penalty')


class Generator(Protocol):
    """Interface of the engine that completes requests."""

    def complete(self, requests: Sequence[Request]) -> list[list[Completion]]:
        """Returns the samples of each request."""


class LmEvalModel:
    """Implements the model interface of lm-eval. `harness_model` converts it to lm-eval's base class."""

    def __init__(self, model: LoadedModel, scorer: LogprobScorer, engine: Generator | None, *, show: bool = False):
        """Initializes the model. Without `engine`, it cannot generate text."""
        self._model, self._scorer, self._engine, self._show = model, scorer, engine, show
        # Templates write special tokens as text.
        self._tokenizer = tokenizers.Tokenizer.from_str(model.tokenizer.marked_json())
        self._tokenizer.encode_special_tokens = model.chat is None
        # Empty after the use of a chat template, which writes its own.
        self._beginning = list(model.tokenizer.beginning_of_document)

    @property
    def tokenizer_name(self) -> str:
        """Identifier of the tokenizer in lm-eval's cache of prompts."""
        return self._model.tokenizer.sha256

    @property
    def eot_token_id(self) -> int:
        """Id of the end-of-document token."""
        return self._model.tokenizer.end_of_document

    @property
    def prefix_token_id(self) -> int:
        """Id of the token before a text without context."""
        return self._model.tokenizer.context_free_prefix[-1]

    @property
    def max_length(self) -> int:
        """Maximum number of input tokens."""
        return self._scorer.max_length

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **ignored: Any) -> list[int]:
        """Returns the token ids of a text.

        If `add_special_tokens` is None, adds the beginning of text unless the text already starts with it.
        """
        del ignored
        ids = encode_long(self._tokenizer, [string])[0].tolist()
        if add_special_tokens is None:
            written = ''.join(self._tokenizer.id_to_token(index) or '' for index in self._beginning)
            add_special_tokens = not (written and string.startswith(written))
        return [*self._beginning, *ids] if add_special_tokens else ids

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **ignored: Any
    ) -> list[tuple[float, bool]]:
        del ignored
        scores = self._scorer.score(
            [ScoringRequest(context, continuation) for _, context, continuation in requests], show=self._show
        )
        return [(score.log_prob, score.is_greedy) for score in scores]

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Returns the log-probability of each text, of any length."""
        del disable_tqdm
        prefix = self._model.tokenizer.context_free_prefix
        texts = [
            windows(self.tok_encode(request.args[0], add_special_tokens=False), prefix, self.max_length)
            for request in requests
        ]
        found = iter(self._scorer.score(list(itertools.chain.from_iterable(texts)), show=self._show))
        return [sum(score.log_prob for score in itertools.islice(found, len(spans))) for spans in texts]

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Returns each prompt's continuation, up to the stop strings of its task."""
        del disable_tqdm
        if self._engine is None:
            raise InputError('tasks that generate text are not supported here; use log-likelihood tasks')
        engine_requests: list[Request] = []
        stops = []
        for request in requests:
            prompt, settings = request.args
            engine_requests.append(self._request(prompt, settings, seed=len(engine_requests)))
            stops.append(_stop_strings(settings))
        completions = self._engine.complete(engine_requests)
        return [_truncate_at_stops(samples[0].text, until) for samples, until in zip(completions, stops, strict=True)]

    def _request(self, prompt: str, settings: Mapping[str, Any], *, seed: int) -> Request:
        supported = (*LENGTH_NAMES, *SAMPLING_NAMES, 'until', 'do_sample')
        if unknown := [name for name in settings if name not in supported]:
            raise InputError(
                f'generation_kwargs of a task: {", ".join(unknown)} not supported; use {", ".join(supported)}'
            )
        max_tokens = next((int(settings[name]) for name in LENGTH_NAMES if settings.get(name) is not None), MAX_TOKENS)
        max_prompt = self.max_length - max_tokens
        if max_prompt < 1:
            raise InputError(
                f'a task requests {max_tokens} tokens, but the context length of the model is {self.max_length}; '
                'set a lower max_gen_toks in its generation_kwargs'
            )
        # As in lm-eval, a positive temperature without `do_sample` means sampling.
        do_sample = settings.get('do_sample', float(settings.get('temperature') or 0) > 0)
        options = {name: settings[name] for name in SAMPLING_NAMES if settings.get(name) is not None}
        # The model needs at least one token of context.
        ids = (self.tok_encode(prompt) or [self.prefix_token_id])[-max_prompt:]
        return Request(
            tuple(ids),
            max_tokens,
            Sampling(**{'temperature': 1.0, **options}) if do_sample else Sampling(temperature=0),
            seed=seed,
            stops=tuple(_stop_strings(settings)[:MAX_STOPS]),
        )

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Renders messages with the model's chat template.

        Without `add_generation_prompt`, the text ends after the content of the last message, which the model continues.
        """
        assert self._model.chat is not None, 'applying a chat template requires a model that has one'
        self._beginning = []
        rendered = self._model.chat.template.render(
            chat_history,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )
        return rendered.spelled(0, len(rendered.text))

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """Returns the source of the chat template, for lm-eval's results."""
        return self._model.chat.template.source if chat_template and self._model.chat else None

    def get_model_info(self) -> dict[str, Any]:
        """Returns the description of the model in lm-eval's results."""
        return {'model': 'maxlm', 'model_step': self._model.step, 'model_dtype': self._model.config.model.dtype}


def missing_lm_eval() -> InputError:
    """Returns the error if lm-eval is not installed."""
    return InputError(f'lm-eval benchmarks require an extra: {pip_install("eval")}')


def harness_model(model: LmEvalModel) -> Any:
    """Converts a model to an instance of lm-eval's base class.

    Raises:
        InputError: lm-eval is not installed.
    """
    try:
        from lm_eval.api.model import TemplateLM
    except ImportError as error:
        raise missing_lm_eval() from error
    model_class: Any = type('MaxlmModel', (LmEvalModel, TemplateLM), {})
    instance = model_class.__new__(model_class)
    TemplateLM.__init__(instance)
    instance.__dict__.update(model.__dict__)
    return instance


def _stop_strings(settings: Mapping[str, Any]) -> list[str]:
    until = settings.get('until') or []
    return [text for text in ([until] if isinstance(until, str) else until) if text]


def _truncate_at_stops(text: str, stops: Sequence[str]) -> str:
    """Truncates a text at the first stop string. Required, because the engine accepts at most MAX_STOPS of them."""
    return text[: min((index for stop in stops if (index := text.find(stop)) >= 0), default=len(text))]
