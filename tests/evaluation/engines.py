"""Engines that need no compiled decoding: one computes everything again for every token, one recites."""

import jax
import numpy as np
from flax import nnx

from maxlm.inference.engine.requests import Completion, GeneratedToken
from maxlm.training.state import abstract_model


class PlainEngine:
    """Always the likeliest token, by the whole text through the model once more."""

    def __init__(self, model):
        self._tokenizer, self._stop_ids, self._context = model.tokenizer, model.stop_token_ids, model.config.model.max_positions
        graph, _ = nnx.split(abstract_model(model.config, model.layout))

        @jax.jit
        def likeliest(params, tokens_1T, length):
            decoder = nnx.merge(graph, params)
            logits_1TV = decoder.logits(decoder(tokens_1T)[0])
            return logits_1TV[0, length - 1, : model.tokenizer.vocab_size].argmax()

        self._likeliest = lambda tokens_1T, length: int(likeliest(model.params, tokens_1T, length))

    def complete(self, requests):
        return [[self._one(request)] for request in requests]

    def _one(self, request):
        assert request.sampling.temperature == 0
        ids = []
        text = ''
        while len(ids) < request.max_tokens:
            tokens_1T = np.zeros((1, self._context), np.int32)
            read = [*request.prompt, *ids]
            tokens_1T[0, : len(read)] = read
            token = self._likeliest(tokens_1T, len(read))
            if token in self._stop_ids:
                return self._completion(text, ids, 'stop')
            ids.append(token)
            text = self._tokenizer.decode(ids)
            places = [place for stop in request.stops if (place := text.find(stop)) >= 0]
            if places:
                return self._completion(text[: min(places)], ids, 'stop')
        return self._completion(text, ids, 'length')

    def _completion(self, text, ids, finish):
        return Completion(text, tuple(GeneratedToken(token, float('nan'), ()) for token in ids), finish)


class RecitingEngine:
    """Answers a prompt with texts that it was given for it, as many as are asked for; keeps the requests."""

    def __init__(self, tokenizer, answers):
        self._tokenizer, self._lm_eval_model = tokenizer, answers
        self.requests = []

    def complete(self, requests):
        self.requests += requests
        return [self._samples(request) for request in requests]

    def _samples(self, request):
        texts = self._lm_eval_model[self._tokenizer.decode(request.prompt)]
        return [Completion(texts[number % len(texts)], (), 'stop') for number in range(request.num_samples)]
