import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from maxlm.data.chat.jinja import ChatError
from maxlm.data.chat.template import CHATML, LLAMA3, TEMPLATES, ChatTemplate, load_template, set_variables
from tests.messages import input_error

# A typical template of a model, without `generation`.
PLAIN_CHATML = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + "
    "'\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
PLAIN_LLAMA3 = (
    "{% set loop_messages = messages %}{% for message in loop_messages %}{% set content = '<|start_header_id|>' + "
    "message['role'] + '<|end_header_id|>\n\n'+ message['content'] | trim + '<|eot_id|>' %}{% if loop.index0 == 0 %}"
    '{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}'
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}"
    "{% elif message['role'] == 'assistant' %}{{ ' ' + message['content'] + eos_token}}{% endif %}{% endfor %}"
)
# Removes the reasoning of all turns except the last, like the template of Qwen 3.
FORGETFUL = (
    '{%- set ns = namespace(last=messages | length - 1) %}{%- for message in messages %}'
    "{%- set content = message.content.split('</think>')[-1] if loop.index0 < ns.last else message.content %}"
    "{{- '<|im_start|>' + message.role + '\n' + content + '<|im_end|>\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)
ALL = {
    'chatml': CHATML,
    'llama3': LLAMA3,
    'plain chatml': PLAIN_CHATML,
    'plain llama3': PLAIN_LLAMA3,
    'mistral': MISTRAL,
    'forgetful': FORGETFUL,
}
VARIABLES = {'bos_token': '<s>', 'eos_token': '</s>'}
SPECIAL = ('<|im_start|>', '<|im_end|>', '<|start_header_id|>', '<|end_header_id|>', '<|eot_id|>', '<s>', '</s>')


def user(text):
    return {'role': 'user', 'content': text}


def assistant(text, **rest):
    return {'role': 'assistant', 'content': text, **rest}


TURNS = [
    user('What is 1 + 1?\n'),
    assistant('Let me see.\n\n2'),
    user('<b>And</b> "2 + 2"? Größe 🙂'),
    assistant(' 4 '),
]


def make_template(source):
    return ChatTemplate(set_variables(source, VARIABLES), name='test')


def render_with_transformers(source, messages, **options):
    options = {'return_assistant_tokens_mask': False, **VARIABLES, **options}
    (text,), spans = render_jinja_template(conversations=[messages], chat_template=source, **options)
    return (text, spans) if options['return_assistant_tokens_mask'] else text


@pytest.mark.parametrize('prompt', [False, True])
@pytest.mark.parametrize('source', ALL.values(), ids=ALL)
def test_texts_match_transformers(source, prompt):
    for messages in (TURNS, TURNS[:3], TURNS[:1]):
        rendered = make_template(source).render(messages, special=SPECIAL, add_generation_prompt=prompt)
        assert rendered.text == render_with_transformers(source, messages, add_generation_prompt=prompt)
        assert (
            make_template(source).render(messages[:1] + messages[:1] if source != MISTRAL else [user('x')]).text
            != rendered.text
        )


# Both follow published templates: Qwen2.5's shows no role that it does not know, and gpt-oss's knows the role.
SYSTEM_ONLY = (
    "{%- for m in messages %}{%- if m.role in ['system', 'user', 'assistant'] %}"
    "{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{%- endif %}{%- endfor %}"
)
WITH_DEVELOPER = SYSTEM_ONLY.replace("'system'", "'system', 'developer'")


@pytest.mark.parametrize('source', [SYSTEM_ONLY, CHATML, LLAMA3])
def test_a_developer_is_the_system_of_templates_without_this_role(source):
    template = make_template(source)
    messages = {role: [{'role': role, 'content': 'Be brief.'}, *TURNS] for role in ('developer', 'system')}
    rendered = {role: template.render(each, special=SPECIAL).text for role, each in messages.items()}
    assert 'Be brief.' in rendered['system']
    assert rendered['developer'] == rendered['system']
    spans = {role: template.render_with_spans(each, special=SPECIAL) for role, each in messages.items()}
    assert spans['developer'] == spans['system']
    assert messages['developer'][0]['role'] == 'developer'


def test_templates_may_have_the_role_of_a_developer():
    messages = [{'role': 'developer', 'content': 'Be brief.'}, *TURNS]
    found = make_template(WITH_DEVELOPER).render(messages, special=SPECIAL).text
    assert found == render_with_transformers(WITH_DEVELOPER, messages)
    assert 'developer' in found


def test_tools_match_transformers():
    call = {'type': 'function', 'function': {'name': 'add', 'arguments': {'a': 1, 'text': '<ü>'}}}
    messages = [
        user('3 + 4?'),
        assistant('', tool_calls=[call, call]),
        {'role': 'tool', 'content': '7'},
        assistant('I call again.', tool_calls=[call]),
    ]
    tools = [{'type': 'function', 'function': {'name': 'add'}}]
    template = make_template(CHATML)
    rendered = template.render_with_spans(messages, special=SPECIAL, tools=tools)
    assert rendered.text == render_with_transformers(CHATML, messages, tools=tools)
    first, second = (rendered.text[slice(*span)] for span in rendered.assistant_spans)
    assert first.count('<tool_call>\n{"name": "add", "arguments": {"a": 1, "text": "<ü>"}}\n</tool_call>') == 2
    assert second.startswith('I call again.\n<tool_call>')
    assert '"add"' not in template.render(messages[:1]).text


@pytest.mark.parametrize('source', [CHATML, LLAMA3])
def test_generation_spans_match_transformers(source):
    rendered = make_template(source).render_with_spans(TURNS, special=SPECIAL)
    text, spans = render_with_transformers(source, TURNS, return_assistant_tokens_mask=True)
    assert rendered.text == text
    assert [tuple(span) for span in rendered.assistant_spans] == [tuple(span) for span in spans[0]]


@pytest.mark.parametrize(
    ('name', 'expected'),
    [
        ('chatml', ['Let me see.\n\n2<|im_end|>', ' 4 <|im_end|>']),
        ('plain chatml', ['Let me see.\n\n2<|im_end|>', ' 4 <|im_end|>']),
        ('llama3', ['Let me see.\n\n2<|eot_id|>', '4<|eot_id|>']),
        ('plain llama3', ['Let me see.\n\n2<|eot_id|>', '4<|eot_id|>']),
        ('mistral', [' Let me see.\n\n2</s>', '  4 </s>']),
    ],
)
def test_spans_of_assistant_turns(name, expected):
    rendered = make_template(ALL[name]).render_with_spans(TURNS, special=SPECIAL)
    assert [rendered.text[slice(*span)] for span in rendered.assistant_spans] == expected
    assert make_template(ALL[name]).has_generation == ('plain' not in name and name != 'mistral')


def test_turns_that_change_when_others_follow():
    messages = [user('a'), assistant('<think>hm</think>b'), user('c'), assistant('<think>so</think>d')]
    rendered = make_template(FORGETFUL).render_with_spans(messages, special=SPECIAL)
    assert [rendered.text[slice(*span)] for span in rendered.assistant_spans] == [
        'b<|im_end|>',
        '<think>so</think>d<|im_end|>',
    ]
    # The start of the text may change.
    source = "{{ messages | length }}{% for m in messages %}{{ m.role + m.content + '</s>' }}{% endfor %}"
    rendered = make_template(source).render_with_spans(messages, special=SPECIAL)
    assert rendered.text[slice(*rendered.assistant_spans[0])] == 'assistant<think>hm</think>b</s>'


def test_the_token_that_ends_a_turn_may_be_outside_of_generation():
    source = '{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{{ eos_token }}\n{% endfor %}'
    rendered = make_template(source).render_with_spans([assistant('a'), assistant('b')], special=SPECIAL)
    assert [rendered.text[slice(*span)] for span in rendered.assistant_spans] == ['a</s>', 'b</s>']
    for bad in (source.replace('{{ eos_token }}', ''), "{% for m in messages %}{{ m.content + '\n' }}{% endfor %}"):
        with pytest.raises(ChatError, match='without a special token'):
            make_template(bad).render_with_spans([assistant('a')], special=SPECIAL)


@pytest.mark.parametrize('name', ALL)
def test_special_token_strings_in_data_are_escaped(name):
    plain = [user('xim_startx'), assistant('say <|im_end| and end'), user('c'), assistant('d')]
    nasty = [user('<|im_start|>'), assistant('say <|im_end|></s> \U0010ffff'), user('c'), assistant('d\U0010fffd')]
    template = make_template(ALL[name])
    before, after = (template.render_with_spans(messages, special=SPECIAL) for messages in (plain, nasty))
    count = sum(map(before.text.count, SPECIAL))
    assert count > 0
    assert sum(map(after.text.count, SPECIAL)) == count
    assert after.spelled(0, len(after.text)) == render_with_transformers(ALL[name], nasty)
    assert 'say <|im_end|></s> \U0010ffff' in after.spelled(*after.assistant_spans[0])
    # Negative control: without escaping, the text would be parsed as the template's special tokens.
    assert sum(map(template.render(nasty).text.count, SPECIAL)) > count


def test_variables_and_special_tokens_of_a_template():
    template = ChatTemplate(PLAIN_LLAMA3 + '{% if pad_token is defined %}<start_of_turn>{% endif %}', name='x')
    assert template.variables == ('bos_token', 'pad_token')
    assert template.tokens == ('<|start_header_id|>', '<|end_header_id|>', '<|eot_id|>', '<start_of_turn>')
    known = ChatTemplate(set_variables(template.source, {'bos_token': '<"s">', 'pad_token': ''}), name='x')
    assert known.variables == ()
    assert known.render([user('a')]).text.startswith('<"s"><|start')
    assert known.sha256 != template.sha256


def test_templates_are_loaded_by_name_and_file(tmp_path):
    assert load_template('chatml').source == TEMPLATES['chatml']
    (tmp_path / 'x.jinja').write_text(PLAIN_CHATML)
    assert load_template(str(tmp_path / 'x.jinja')).source == PLAIN_CHATML
    (tmp_path / 'bad.jinja').write_text('a\n{% for %}')
    (tmp_path / 'binary.jinja').write_bytes(b'\xff')
    for name, message in (('bad', 'bad.jinja: line 2'), ('binary', 'byte 0 is not UTF-8'), ('none', 'chatml, llama3')):
        with input_error(message):
            load_template(str(tmp_path / f'{name}.jinja'))


@pytest.mark.parametrize(
    ('source', 'reason'),
    [
        ("{{ raise_exception('no system') }}", 'no system'),
        ("{{ messages[5]['role'] }}", 'no element 5'),
        ('{{ messages[0].content + 1 }}', 'str'),
        ("{{ ''.__class__.__mro__ }}", 'unsafe'),
        ('{{ messages.append(1) }}', 'unsafe'),
        ('{% set ns = namespace() %}{% set ns._x = 1 %}', "no name '_x'"),
        ("{{ namespace(**{'__call__': 1}) }}", "no name '__call__'"),
        ('{% for i in range(10 ** 9) %}{% endfor %}', 'Range too big'),
        ("{{ strftime_now('%Y') }}", "'strftime_now' is undefined, because prepared data must not depend"),
    ],
)
def test_template_errors_have_one_line(source, reason):
    with pytest.raises(ChatError) as info:
        make_template(source).render(TURNS)
    assert reason in str(info.value)
    assert '\n' not in str(info.value)
