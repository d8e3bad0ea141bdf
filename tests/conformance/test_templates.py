"""Tests that the turns of the assistant are found in chat templates of public models, message by message.

Transformers renders and tokenizes every conversation. The spans are stated beside the template, or those of TRL.
"""

import itertools
import re
from pathlib import Path

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import render_jinja_template

from maxlm.data.chat.encoder import ChatEncoder
from maxlm.data.chat.jinja import ChatError, JinjaTemplate
from maxlm.data.chat.template import ChatTemplate, set_variables
from maxlm.data.chat.token_flags import is_target, token_ids
from maxlm.data.documents.conversation import Conversation
from maxlm.data.documents.document import Document
from maxlm.data.tokenizer.tokenizer import train_bpe
from maxlm.errors import InputError
from tests.conformance.public_templates import BOS, CONVERSATION, EOS, PUBLIC, SPECIAL

VARIABLES = {'bos_token': BOS, 'eos_token': EOS}
TOKENIZER = train_bpe(['hi yo ok ok! user assistant <think> </think> User: Assistant: Be kind.'] * 3, 300)
TOKENIZER = TOKENIZER.with_special_tokens(SPECIAL)
# Templates whose generation prompt ends with a space, which a tokenizer may join with the next word.
ENDING_WITH_A_SPACE = ('vicuna', 'falcon', 'deepseek-v2', 'jamba', 'openchat')
DECIDABLE = [name for name, public in PUBLIC.items() if public.text is not None]


def messages(*turns):
    return [{'role': role, 'content': content, **dict(*rest)} for role, content, *rest in turns]


def source(name):
    return set_variables(PUBLIC[name].source, VARIABLES)


@pytest.fixture(scope='module')
def reference(tmp_path_factory):
    path = tmp_path_factory.mktemp('tokenizer') / 'tokenizer.json'
    TOKENIZER.save(path)
    return PreTrainedTokenizerFast(tokenizer_file=str(path))


@pytest.fixture(scope='module')
def encoders(module_monkeypatch):
    # One process for 37 templates would not keep their compiled forms.
    module_monkeypatch.setattr('maxlm.data.chat.template.RemoteTemplate', lambda text, limits: JinjaTemplate(text))
    return {name: ChatEncoder(TOKENIZER, ChatTemplate(source(name), name=name)) for name in DECIDABLE}


@pytest.fixture(scope='module')
def module_monkeypatch():
    with pytest.MonkeyPatch.context() as patch:
        yield patch


def encode(encoder, conversation):
    learned = tuple(message['role'] == 'assistant' for message in conversation)
    document = Document('a', 's', conversation=Conversation(tuple(conversation), learned))
    (found,) = encoder.encode_documents([document])
    if isinstance(found, ChatError):
        raise found
    return found


def marked(found, num=None):
    """Returns the text of the first `num` tokens with ⟦ and ⟧ around each turn of target tokens."""
    tokens = found.tokens[:num]
    learned = is_target(tokens)
    cuts = sorted({0, *(np.flatnonzero(np.diff(learned)) + 1), *found.turn_ends, len(tokens)})
    parts = [(learned[a], TOKENIZER.decode(token_ids(tokens[a:b]))) for a, b in itertools.pairwise(cuts)]
    return ''.join(f'⟦{text}⟧' if is_turn else text for is_turn, text in parts)


@pytest.mark.parametrize('name', DECIDABLE)
def test_every_turn_is_a_target_up_to_its_end(name, encoders, reference):
    public, encoder, conversation = PUBLIC[name], encoders[name], messages(*CONVERSATION)
    found = encode(encoder, conversation)
    ids = token_ids(found.tokens).tolist()
    text = reference.apply_chat_template(conversation, chat_template=source(name), tokenize=False)
    assert text == re.sub('[⟦⟧]', '', public.text)
    # A prompt is tokenized without the text after it.
    pieces = reference(public.text.replace('⟧', '').split('⟦'), add_special_tokens=False)['input_ids']
    expected = [i for piece in pieces for i in piece]
    if name not in ENDING_WITH_A_SPACE:
        found_there = reference.apply_chat_template(conversation, chat_template=source(name), return_dict=True)
        expected = found_there['input_ids']
    assert ids[: len(expected)] == expected
    assert set(ids[len(expected) :]) <= {TOKENIZER.end_of_document}
    assert marked(found, len(expected)) == public.text
    assert TOKENIZER.special_tokens[encoder.end_of_turn].content == public.end
    assert len(found.turn_ends) == 2
    # Negative control: the next token does not belong to the turn.
    assert is_target(found.tokens)[found.turn_ends[0] - 1]
    assert not is_target(found.tokens)[found.turn_ends[0]]


@pytest.mark.parametrize('name', [name for name in PUBLIC if name not in DECIDABLE])
def test_undecidable_ends_are_an_error_of_one_line(name):
    with pytest.raises((InputError, ChatError)) as info:
        encode(ChatEncoder(TOKENIZER, ChatTemplate(source(name), name=name)), messages(*CONVERSATION))
    assert 'ends an assistant turn without a special token' in str(info.value)
    assert '\n' not in str(info.value)


REASONING = '<think>\nhm\n</think>\n\n'
OTHERS = {
    'system': [('system', 'Be kind.'), ('user', 'u1'), ('assistant', 'a1'), ('user', 'u2'), ('assistant', 'a2')],
    'spaces': [('user', ' u1\n'), ('assistant', ' a1 \n'), ('user', '\tu2 '), ('assistant', '\na2\n')],
    'equal': [('user', 'x'), ('assistant', 'x'), ('user', 'x'), ('assistant', 'x')],
    'pieces': [('user', '<'), ('assistant', '<tag'), ('user', 'assistant\n'), ('assistant', '\nuser\nUSER: [INST')],
    'empty': [('user', 'u1'), ('assistant', ''), ('user', 'u2'), ('assistant', 'a2')],
    'empty questions': [('user', ''), ('assistant', 'a1'), ('user', ''), ('assistant', 'a2')],
    'reasoning': [('user', 'u1'), ('assistant', f'{REASONING}a1'), ('user', 'u2'), ('assistant', f'{REASONING}a2')],
    'tables': [('user', 'u1'), ('assistant', f'{REASONING}<table>'), ('user', 'u2'), ('assistant', '<think')],
    'consecutive': [('user', 'u1'), ('assistant', 'a1'), ('assistant', 'a2'), ('user', 'u2'), ('assistant', 'a3')],
    'field': [
        ('user', 'u1'),
        ('assistant', 'a1', {'reasoning_content': 'r1'}),
        ('user', 'u2'),
        ('assistant', 'a2', {'reasoning_content': 'r2'}),
    ],
    'one': [('user', 'u1'), ('assistant', 'a1')],
}


@pytest.mark.parametrize('kind', OTHERS)
def test_other_conversations(kind, encoders, reference):
    conversation = messages(*OTHERS[kind])
    answers = [message['content'].strip() for message in conversation if message['role'] == 'assistant']
    num = 0
    for name, encoder in encoders.items():
        try:
            text = reference.apply_chat_template(conversation, chat_template=source(name), tokenize=False)
        except Exception:  # the template rejects it
            continue
        found = encode(encoder, conversation)
        shown = marked(found)
        assert re.sub('[⟦⟧]', '', shown).removesuffix('<|endoftext|>') == text.removesuffix('<|endoftext|>'), name
        runs, rest = re.findall('⟦(.*?)⟧', shown, re.DOTALL), re.sub('⟦.*?⟧', '⟦⟧', shown, flags=re.DOTALL)
        assert len(runs) == len(answers) == len(found.turn_ends), name
        for run, answer in zip(runs, answers, strict=True):
            assert run.rstrip().endswith((PUBLIC[name].end, '<|end|>')), name
            assert (answer.rpartition('</think>')[2].strip() or '') in run, name
            # A template adds at most its own header of a reasoning or a channel.
            assert not re.search(r'u[12]|user\n(?!USER)', run), name
        questions = [message['content'].strip() for message in conversation if message['role'] == 'user']
        assert all(question in rest for question in questions), name
        if kind not in ('equal', 'pieces'):
            assert not re.search('a[123]', rest), name
        num += 1
    assert num > 25


@pytest.mark.parametrize('name', DECIDABLE)
def test_continued_messages_match_transformers(name, encoders, reference):
    for kind in ('one', 'spaces', 'system', 'reasoning', 'tables'):
        conversation = messages(*OTHERS[kind])
        options = {'chat_template': source(name), 'return_dict': True}
        try:
            expected = reference.apply_chat_template(conversation, continue_final_message=True, **options)['input_ids']
        except Exception:  # the template removes a part
            with pytest.raises(ChatError):
                encoders[name].encode_prompt(conversation, continue_final_message=True)
            continue
        assert encoders[name].encode_prompt(conversation, continue_final_message=True).tolist() == expected
        assert encoders[name].encode_prompt(conversation).tolist() != expected


def test_variables_of_the_caller(encoders, reference):
    conversation = messages(*CONVERSATION[:1])
    options = {'chat_template': source('qwen3'), 'return_dict': True, 'add_generation_prompt': True}
    found = []
    for kwargs in ({}, {'enable_thinking': True}, {'enable_thinking': False}):
        expected = reference.apply_chat_template(conversation, **options, **kwargs)['input_ids']
        found.append(encoders['qwen3'].encode_prompt(conversation, template_kwargs=kwargs).tolist())
        assert found[-1] == expected
    assert found[0] == found[1] != found[2]
    text = encoders['qwen3'].template.render(conversation, template_kwargs={'unused': 1}).text
    assert text == encoders['qwen3'].template.render(conversation).text
    for name in ('messages', 'eos_token', 'add_generation_prompt'):
        with pytest.raises(ChatError, match=f'{name} cannot be set'):
            encoders['qwen3'].encode_prompt(conversation, template_kwargs={name: 'x'})
    with pytest.raises(ChatError, match='exclude each other'):
        encoders['qwen3'].render_prompt(conversation, continue_final_message=True)
    with pytest.raises(ChatError, match='no text to continue'):
        encoders['qwen3'].encode_prompt([{'role': 'assistant', 'tool_calls': []}], continue_final_message=True)


# The date of these templates must be fixed.
DATE = '{%- macro strftime_now(format) %}2025-01-01{% endmacro %}'
TRL = Path(pytest.importorskip('trl').__file__).parent / 'chat_templates'
CALL = {'id': 'call00000', 'type': 'function', 'function': {'name': 'w', 'arguments': {'city': 'Oslo'}}}
TOOLS = [
    *messages(('user', 'u1'), ('assistant', '', {'tool_calls': [CALL]})),
    {'role': 'tool', 'name': 'w', 'tool_call_id': 'call00000', 'content': '5'},
    *messages(('assistant', 'a1'), ('user', 'u2'), ('assistant', 'a2')),
]
TOKEN = re.compile(r'<\|[^<>|\s]+\|>|<｜[^<>｜\s]+｜>|<(?:start|end)_of_(?:turn|utterance)>|<\|[a-z_]+>|<[a-z_]+\|>')
# Templates whose blocks also contain the header, or a token at the end of the conversation; or that need images.
DIFFERENT = {'phi3', 'phi3_5', 'deepseek_r1_distill', 'glm4moe', 'diffusion_gemma', 'idefics3', 'smolvlm', 'llava_next'}


def trl_names():
    return sorted(path.stem.removesuffix('_training') for path in TRL.glob('*_training.jinja'))


def transformers_spans(text, conversation):
    """Returns the text and the blocks of Transformers, where adjacent blocks are one."""
    (rendered,), (spans,) = render_jinja_template(
        conversations=[conversation], chat_template=text, return_assistant_tokens_mask=True, **VARIABLES
    )
    joined = []
    for start, stop in spans:
        if joined and joined[-1][1] == start:
            joined[-1][1] = stop
        elif start < stop:
            joined.append([start, stop])
    return rendered, joined


@pytest.mark.parametrize('name', trl_names())
def test_blocks_are_those_of_transformers(name):
    text = DATE + (TRL / f'{name}_training.jinja').read_text()
    template = JinjaTemplate(set_variables(text, VARIABLES))
    num = 0
    for conversation in (messages(*CONVERSATION), messages(*OTHERS['spaces']), messages(*OTHERS['field']), TOOLS):
        special = tuple(dict.fromkeys([BOS, EOS, *TOKEN.findall(text)]))
        try:
            rendered, spans = transformers_spans(text, conversation)
        except Exception:  # the template rejects it
            continue
        found = template.render_with_spans(conversation, special=special)
        joined = []
        for start, stop in found.assistant_spans:
            if joined and joined[-1][1] == start:
                joined[-1][1] = stop
            else:
                joined.append([start, stop])
        assert (found.text, joined) == (rendered, spans)
        num += 1
    assert num or name == 'llava_next'


@pytest.mark.parametrize('name', [name for name in trl_names() if name not in DIFFERENT])
def test_turns_are_those_of_trl(name):
    text, training = (DATE + (TRL / f'{name}{kind}.jinja').read_text() for kind in ('', '_training'))
    template = JinjaTemplate(set_variables(text, VARIABLES))
    special = tuple(dict.fromkeys([BOS, EOS, *TOKEN.findall(text)]))
    num = 0
    for conversation in (*(messages(*OTHERS[kind]) for kind in ('one', 'system', 'spaces', 'tables')), TOOLS):
        try:
            rendered, spans = transformers_spans(training, conversation)
            prompt = template.render(conversation[:1], add_generation_prompt=True).text
            found = template.render_with_spans(conversation, special=special)
        except Exception:  # the template rejects it
            continue
        if found.text != rendered:
            continue  # TRL changed the text
        assert len(found.assistant_spans) == len(spans)
        for span, (start, stop) in zip(found.assistant_spans, spans, strict=True):
            # TRL's blocks may contain the end of the prompt, and spaces after the end of the turn.
            assert start <= span.start < span.stop <= stop
            assert rendered[start : span.start] in prompt
            assert rendered[span.stop : stop].isspace() or span.stop == stop
            assert rendered[: span.stop].endswith(special)
        num += 1
    assert num
