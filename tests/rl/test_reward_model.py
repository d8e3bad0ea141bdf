"""Scores of rollouts: the same as those of training on the same conversations."""

import jax
import numpy as np
import pytest

from maxlm.checkpoint.frozen_models import read_reward_model
from maxlm.data.chat.encoder import ChatEncoder
from maxlm.data.chat.scored_tokens import SCORED, with_scored_tokens
from maxlm.data.chat.template import TEMPLATES, ChatTemplate
from maxlm.data.documents.document import Document
from maxlm.data.documents.preference import parse_preference
from maxlm.data.loader.windows import window_batch
from maxlm.data.tokenizer.tokenizer import bytes_tokenizer
from maxlm.rl.generation.responses import Responses
from maxlm.rl.reward_model import open_reward_model
from maxlm.training.forward import make_scores
from tests.small import small_config, small_layout
from tests.starting import MODEL, make_start

TOKENS = {
    'chatml': ['<|im_start|>', '<|im_end|>'],
    'llama3': ['<|begin_of_text|>', '<|start_header_id|>', '<|end_header_id|>', '<|eot_id|>'],
}
PAIR = {'prompt': 'abc', 'chosen': 'green', 'rejected': 'blue'}
WINDOW = 96


def responses_of(texts, encoder, *, ended):
    """Returns the answers as responses, with their end token if `ended`."""
    ids = [[*encoder.tokenizer.encode_batch([text])[0], *([encoder.end_of_turn] if ended else [])] for text in texts]
    tokens = np.zeros((len(ids), 12), np.int32)
    for row, each in enumerate(ids):
        tokens[row, : len(each)] = each
    lengths = np.array([len(each) for each in ids])
    return Responses(tokens, np.zeros(tokens.shape, np.float32), lengths, np.full(len(ids), ended), 12)


@pytest.mark.parametrize('name', TEMPLATES)
def test_scores_equal_those_of_training(tmp_path, name):
    tokenizer = bytes_tokenizer().with_special_tokens(TOKENS[name])
    tokenizer.save(tmp_path / 'tokenizer.json')
    encoder = ChatEncoder(tokenizer, ChatTemplate(TEMPLATES[name], name=name))
    make_start(tmp_path / 'reward', tmp_path / 'tokenizer.json', train__objective='reward')
    (tmp_path / 'reward/chat_template.jinja').write_text(TEMPLATES[name])
    config = small_config(
        **{**MODEL, 'model__vocab_size': tokenizer.vocab_size},
        data__seq_len=WINDOW,
        train__objective='grpo',
        # The rows of a program are more than the responses.
        train__global_batch_size=4,
        grpo__reward='reward_model',
        grpo__reward_model=str(tmp_path / 'reward'),
    )
    layout = small_layout(config)
    scorer = open_reward_model(config.grpo, encoder)
    scorer.open(config, layout)
    prompt = encoder.encode_prompt([{'role': 'user', 'content': PAIR['prompt']}])
    answers = [PAIR['chosen'], PAIR['rejected']]
    scores = scorer([prompt, prompt], responses_of(answers, encoder, ended=True))

    (document,) = encoder.encode_documents([Document('pair', 'pair', preference=parse_preference(PAIR))])
    batch = window_batch(
        [document.tokens], WINDOW, end_of_document=tokenizer.end_of_document, isolate_documents=True, marked=True
    )
    batch = with_scored_tokens(batch, tokenizer.end_of_document)
    assert batch[SCORED].sum() == 2
    params = read_reward_model(config, layout)
    expected = jax.jit(make_scores(config.of_scorer, layout))(params, None, batch, None)
    assert scores == pytest.approx(np.asarray(expected)[batch[SCORED] > 0], abs=1e-5)
    assert abs(scores[0] - scores[1]) > 1e-3
    # A response without an end token is scored as if it ended there.
    assert np.array_equal(scorer([prompt, prompt], responses_of(answers, encoder, ended=False)), scores)
