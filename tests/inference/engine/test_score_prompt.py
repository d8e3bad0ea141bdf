"""Scores of prompts: equal to those of `LogprobScorer`, alone and beside other requests."""

import numpy as np
import pytest

from maxlm.errors import InputError
from maxlm.inference.engine import score_positions
from maxlm.inference.engine.requests import Request
from maxlm.inference.scoring import LogprobScorer, ScoringRequest
from tests.inference.engines import (
    CONTEXT,
    GREEDY,
    NUM_IDS,
    PROMPTS,
    engine,
    generate,
    load,
    new_engine,
    prompt_log_probs,
    score_prompts,
)

FAMILY = 'llama, grouped'


def reference(family, prompt):
    """Returns the log-probability of each token of a prompt from its second one, by `LogprobScorer`."""
    scorer = LogprobScorer(load(family))
    requests = [ScoringRequest(prompt[:end], prompt[end : end + 1]) for end in range(1, len(prompt))]
    return [score.log_prob for score in scorer.score(requests)]


@pytest.mark.parametrize('family', [FAMILY, 'gemma2', 'experts', 'stream'])
def test_scores_equal_those_of_the_scorer(family):
    # Prompts of one token, of one chunk, and of several chunks.
    for prompt, (delta,) in zip(PROMPTS, score_prompts(engine(family), PROMPTS), strict=True):
        assert (delta.text, delta.tokens, delta.finish_reason) == ('', (), 'length')
        np.testing.assert_allclose(delta.prompt_scores.log_prob_T, reference(family, prompt), rtol=1e-4, atol=2e-4)
        assert delta.prompt_scores.top_ids_TC.shape == (len(prompt) - 1, 0)
    # Control: the scores are not those of another prompt.
    other = reference(family, [*PROMPTS[1][:-1], 7])
    (delta,) = score_prompts(engine(family), PROMPTS[1:2])[0]
    assert abs(delta.prompt_scores.log_prob_T[-1] - other[-1]) > 1e-3


def test_most_likely_tokens():
    (delta,) = score_prompts(engine(FAMILY), PROMPTS[2:], top_log_probs=3)[0]
    # All ids of the model share the probability, but only ids of the tokenizer have a text.
    log_probs = prompt_log_probs(FAMILY, PROMPTS[2])
    best = np.argsort(-log_probs[:, :NUM_IDS], axis=1)[:, :3]
    assert (delta.prompt_scores.top_ids_TC == best).all()
    expected = np.take_along_axis(log_probs, best, axis=1)
    np.testing.assert_allclose(delta.prompt_scores.top_log_probs_TC, expected, rtol=1e-4, atol=2e-4)
    assert (np.diff(delta.prompt_scores.top_log_probs_TC, axis=1) < 0).all()


def test_a_continuation_follows_the_scores(monkeypatch):
    monkeypatch.setattr(score_positions, 'BLOCK', 24)
    some = new_engine(load(FAMILY), share=False)
    alone = generate(some, PROMPTS)
    # The prompts are in the cache now, but their logits are not.
    beside = [Request(tuple(PROMPTS[0]), 30, GREEDY)]
    for prompt, ids, deltas in zip(PROMPTS, alone, score_prompts(some, PROMPTS, 12, beside), strict=True):
        assert [token.id for delta in deltas for token in delta.tokens] == ids
        np.testing.assert_allclose(deltas[0].prompt_scores.log_prob_T, reference(FAMILY, prompt), rtol=1e-4, atol=2e-4)
        assert all(delta.prompt_scores is None for delta in deltas[1:])


def test_an_end_token_is_reported(monkeypatch):
    some = engine(FAMILY)
    ((first, *_),) = generate(some, PROMPTS[1:2])
    monkeypatch.setattr(some, '_stop_token_ids', frozenset({first}))
    (delta,) = score_prompts(some, PROMPTS[1:2], max_tokens=1, top_log_probs=1)[0]
    assert (delta.text, delta.tokens, delta.finish_reason, delta.end_token.id) == ('', (), 'stop', first)
    assert delta.end_token.top == ((first, delta.end_token.log_prob),)
    monkeypatch.undo()
    # Control: otherwise it is a token of the text.
    (delta,) = score_prompts(some, PROMPTS[1:2], max_tokens=1, top_log_probs=1)[0]
    assert ([token.id for token in delta.tokens], delta.finish_reason, delta.end_token) == ([first], 'length', None)


def test_a_prompt_may_fill_the_context():
    prompt = [5] * CONTEXT
    (delta,) = score_prompts(engine(FAMILY), [prompt])[0]
    assert len(delta.prompt_scores.log_prob_T) == CONTEXT - 1
    with pytest.raises(InputError, match='max_tokens=1: the prompt has 100 tokens'):
        engine(FAMILY).check(Request(tuple(prompt), 1, score_prompt=True))
    with pytest.raises(InputError, match='max_tokens=-1: must be at least 0'):
        Request((1,), -1, score_prompt=True)


def test_a_cancelled_prompt_has_no_scores():
    some, deltas = engine(FAMILY), []
    some.submit(Request(tuple(PROMPTS[2]), 0, score_prompt=True), deltas.append).cancel()
    while some.step():
        pass
    assert [(delta.finish_reason, delta.prompt_scores) for delta in deltas] == [('cancelled', None)]


def test_running_samples_continue_while_a_prompt_is_scored():
    some, order = engine(FAMILY), []
    some.submit(Request(tuple(PROMPTS[0]), 40, GREEDY), lambda delta: order.append('token'))
    while len(order) < 2:
        some.step()
    order.clear()
    some.submit(Request(tuple(PROMPTS[2]), 0, score_prompt=True), lambda delta: order.append('scores'))
    while some.step():
        pass
    # A step reads one chunk of the prompt, which has three, and generates a token.
    assert order.index('scores') >= 2
    assert order.count('scores') == 1
