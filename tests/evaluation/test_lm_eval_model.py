"""Tests the methods that lm-eval calls on a model."""

from types import SimpleNamespace

import pytest
import tokenizers

from maxlm.data.chat.encoder import ChatEncoder
from maxlm.data.chat.template import CHATML, ChatTemplate
from maxlm.data.tokenizer.text_boundaries import TextBoundaries
from maxlm.data.tokenizer.tokenizer import Tokenizer, bytes_tokenizer
from maxlm.errors import InputError
from maxlm.evaluation.tasks.lm_eval_model import MAX_TOKENS, LmEvalModel, harness_model
from tests.evaluation.engines import RecitingEngine

CONTEXT = 300
CHAT_TOKENIZER = bytes_tokenizer().with_special_tokens(['<|im_start|>', '<|im_end|>'])


def make(tokenizer=None, chat=None, answers=None):
    tokenizer = tokenizer or bytes_tokenizer()
    model = SimpleNamespace(
        tokenizer=tokenizer, chat=chat, step=3, config=SimpleNamespace(model=SimpleNamespace(dtype='x'))
    )
    engine = RecitingEngine(tokenizer, answers or {})
    return LmEvalModel(model, SimpleNamespace(max_length=CONTEXT), engine), engine


def request_of(prompt, **settings):
    """Returns the request that the engine receives."""
    answers, engine = make(answers={prompt[-CONTEXT:]: ['x']})
    engine._answers = type('Any', (), {'__getitem__': lambda self, key: ['x']})()
    answers.generate_until([SimpleNamespace(args=(prompt, settings))])
    (request,) = engine.requests
    return request


def test_settings_of_a_task_reach_the_engine():
    request = request_of('abc', until=['\n'], max_gen_toks=7)
    assert (request.prompt, request.max_tokens, request.stops) == (tuple(b'abc'), 7, ('\n',))
    assert request.sampling.temperature == 0
    assert request_of('abc', until='.').stops == ('.',)
    assert request_of('abc').max_tokens == MAX_TOKENS
    assert request_of('abc', max_new_tokens=5).max_tokens == 5
    drawn = request_of('abc', do_sample=True, temperature=0.7, top_p=0.9, top_k=5)
    assert (drawn.sampling.temperature, drawn.sampling.top_p, drawn.sampling.top_k) == (0.7, 0.9, 5)
    # lm-eval interprets these settings in the same way.
    assert request_of('abc', do_sample=False, temperature=0.7).sampling.temperature == 0
    assert request_of('abc', temperature=0.7).sampling.temperature == 0.7
    with pytest.raises(InputError, match='generation_kwargs of a task: num_beams not supported'):
        request_of('abc', num_beams=4)
    with pytest.raises(
        InputError, match=f'requests {CONTEXT} tokens, but the context length of the model is {CONTEXT}'
    ):
        request_of('abc', max_gen_toks=CONTEXT)


def test_a_long_prompt_loses_its_beginning():
    prompt = ''.join(chr(97 + n % 26) for n in range(500))
    assert request_of(prompt, max_gen_toks=100).prompt == tuple(prompt[-200:].encode())
    assert request_of('', max_gen_toks=100).prompt == (256,)


def test_an_answer_ends_before_any_of_many_stops():
    stops = [f'<{number}>' for number in range(40)]
    answers, engine = make(answers={'q': ['one <30> two <5> three']})
    request = SimpleNamespace(args=('q', {'until': stops}))
    assert answers.generate_until([request]) == ['one ']
    assert len(engine.requests[0].stops) == 16


def test_without_an_engine_nothing_is_generated():
    answers, _ = make()
    alone = LmEvalModel(answers._model, answers._scorer, None)
    with pytest.raises(InputError, match='generate text'):
        alone.generate_until([])


def test_tokens_before_a_text():
    answers, _ = make()
    assert (answers.prefix_token_id, answers.eot_token_id) == (256, 256)
    assert answers.tok_encode('ab') == [97, 98]
    # The tokenizers of imported models may prepend a token to every text.
    library = tokenizers.Tokenizer.from_str(CHAT_TOKENIZER.to_json())
    library.post_processor = tokenizers.processors.TemplateProcessing(
        single='<|im_start|> $A', pair='<|im_start|> $A $B', special_tokens=[('<|im_start|>', 257)]
    )
    other, _ = make(Tokenizer(library, TextBoundaries(256, (256,), (257,))))
    assert other.prefix_token_id == 257
    assert other.tok_encode('ab') == [257, 97, 98]
    assert other.tok_encode('ab', add_special_tokens=False) == [97, 98]


def test_the_template_encodes_conversations():
    chat = ChatEncoder(CHAT_TOKENIZER, ChatTemplate(CHATML, name='chatml'))
    answers, _ = make(CHAT_TOKENIZER, chat)
    messages = [{'role': 'user', 'content': 'a'}]
    text = answers.apply_chat_template(messages)
    assert text == '<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n'
    assert answers.tok_encode(text) == chat.encode_prompt(messages).tolist()
    with_prefix = [*messages, {'role': 'assistant', 'content': 'It is'}]
    assert answers.apply_chat_template(with_prefix, add_generation_prompt=False) == f'{text}It is'
    assert answers.chat_template(True) == CHATML
    plain, _ = make(CHAT_TOKENIZER)
    # Without a chat template, the text of a special token is encoded as plain text.
    assert len(plain.tok_encode('<|im_end|>')) == 10


def test_the_class_is_an_lm_eval_model():
    model = pytest.importorskip('lm_eval.api.model', reason='the extra eval')
    answers, _ = make()
    made = harness_model(answers)
    assert isinstance(made, model.TemplateLM)
    assert made.max_length == CONTEXT
    assert made.tokenizer_name == bytes_tokenizer().sha256
    assert made._encode_pair('a ', 'b') == ([97], [32, 98])
