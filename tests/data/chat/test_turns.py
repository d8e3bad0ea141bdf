"""Tests the turns of the assistant in templates that change messages, and `{% generation %}` blocks around others."""

import pytest

from maxlm.data.chat.jinja import ChatError, JinjaTemplate

SPECIAL = ('<|user|>', '<|assistant|>', '<|end|>', '</s>', '<|sep|>', '<|call|>', '<|tool|>')
PROMPT = '{% if add_generation_prompt %}<|assistant|>{% endif %}'
MESSAGES = [
    {'role': 'user', 'content': 'question 1'},
    {'role': 'assistant', 'content': 'answer é'},
    {'role': 'user', 'content': 'question 2'},
    {'role': 'assistant', 'content': 'answer 2'},
]
END = '<|end|>{% endfor %}' + PROMPT
EACH = '{% for m in messages %}<|{{ m.role }}|>'


def marked(source, messages=MESSAGES):
    rendered = JinjaTemplate(source).render_with_spans(messages, special=SPECIAL)
    text, place = '', 0
    for start, stop in rendered.assistant_spans:
        text += f'{rendered.text[place:start]}⟦{rendered.text[start:stop]}⟧'
        place = stop
    return text + rendered.text[place:]


USER_1, USER_2 = '<|user|>question 1<|end|><|assistant|>', '<|user|>question 2<|end|><|assistant|>'
CHANGED = {
    'cut': (EACH + '{{ m.content[:10] }}' + END, '⟦answer é<|end|>⟧', '⟦answer 2<|end|>⟧'),
    'escaped': (EACH + '{{ (m.content | tojson(ensure_ascii=true))[1:-1] }}' + END, '⟦answer \\u00e9<|end|>⟧', None),
    'tested': (EACH + "{% if m.content[0] in 'aq' %}{{ m.content }}{% endif %}" + END, None, None),
    'ended': (EACH + "{{ m.content ~ ('.' if m.content.endswith('é')) }}" + END, '⟦answer é.<|end|>⟧', None),
    'built': (
        "{% set ns = namespace(t='') %}{% for m in messages %}"
        "{% set ns.t = ns.t ~ '<|' ~ m.role ~ '|>' ~ m.content ~ '<|end|>' %}{% endfor %}{{ ns.t }}" + PROMPT,
        None,
        None,
    ),
    'counted': ('{{ messages | length }}' + EACH + '{{ m.content }}' + END, None, None),
}


@pytest.mark.parametrize('name', CHANGED)
def test_templates_that_change_or_test_contents(name):
    source, first, second = CHANGED[name]
    start = '4' if name == 'counted' else ''
    expected = f'{start}{USER_1}{first or "⟦answer é<|end|>⟧"}{USER_2}{second or "⟦answer 2<|end|>⟧"}'
    assert marked(source) == expected


def test_a_text_that_the_template_adds_to_the_last_message():
    hint = "{% if loop.last or loop.index0 == messages | length - 2 %}{{ ' /think' if m.role == 'user' }}{% endif %}"
    expected = f'{USER_1}⟦answer é<|end|>⟧{USER_2.replace("<|end|>", " /think<|end|>")}⟦answer 2<|end|>⟧'
    assert marked(EACH + '{{ m.content }}' + hint + END) == expected


def test_a_text_that_the_template_adds_between_messages():
    source = "{% for m in messages %}{{ '\n' if not loop.first }}<|{{ m.role }}|>{{ m.content }}" + END
    messages = [*MESSAGES[:2], MESSAGES[3]]
    expected = '<|user|>question 1<|end|>\n<|assistant|>⟦answer é<|end|>⟧\n<|assistant|>⟦answer 2<|end|>⟧'
    assert marked(source, messages) == expected


def test_an_end_of_the_last_turn_only():
    other = "{{ '</s>' if loop.last and not add_generation_prompt else '<|end|>' }}{% endfor %}" + PROMPT
    assert marked(EACH + '{{ m.content }}' + other) == f'{USER_1}⟦answer é<|end|>⟧{USER_2}⟦answer 2</s>⟧'
    # This token begins messages.
    source = '{% for m in messages %}<|sep|>{{ m.role }}: {{ m.content }}{% endfor %}'
    source += "{{ '<|sep|>assistant: ' if add_generation_prompt else '</s>' }}"
    assert marked(source, MESSAGES[:2]) == '<|sep|>user: question 1<|sep|>assistant: ⟦answer é</s>⟧'
    with pytest.raises(ChatError, match='without a special token'):
        marked(source)


@pytest.mark.parametrize(
    ('source', 'reason'),
    [
        ('{% for m in messages | reverse %}<|{{ m.role }}|>{{ m.content }}' + END, 'mixes an assistant turn'),
        (EACH + '{{ m.content }} {{ messages[0].content if loop.index0 == 1 }}' + END, 'mixes an assistant turn'),
        ('{% for m in messages[-2:] %}<|{{ m.role }}|>{{ m.content }}' + END, 'cannot be located'),
        (EACH + "{{ m.content }}{{ '<|end|>' if not loop.last }}{% endfor %}" + PROMPT, 'without a special token'),
        (EACH + '{{ m.content }}{% endfor %}</s>' + PROMPT, 'without a special token'),
        (EACH + '{% generation %}{{ m.content }}<|end|>{% endgeneration %}{% endfor %}', 'message of the role user'),
        (EACH + '{% generation %}{% generation %}x{% endgeneration %}{% endgeneration %}' + END, 'nests'),
    ],
)
def test_turns_that_cannot_be_located_are_an_error(source, reason):
    with pytest.raises(ChatError, match=reason) as info:
        marked(source)
    assert '\n' not in str(info.value)


def block(text, after=''):
    others = '{% else %}{{ m.content }}<|end|>{% endif %}{% endfor %}'
    return EACH + "{% if m.role == 'assistant' %}" + text + others + after


@pytest.mark.parametrize(
    ('source', 'expected'),
    [
        # Spaces after the end of the turn stay in the block, as in the mask of Transformers.
        (block("{% generation %}{{ m.content + '<|end|>\n' }}{% endgeneration %}"), '⟦answer {}<|end|>\n⟧'),
        (block('{% generation %}{{ m.content }}{% endgeneration %}<|end|>'), '⟦answer {}<|end|>⟧'),
        (block('{% generation %}{{ m.content }}{% endgeneration %}{% generation %}<|end|>{% endgeneration %}'), None),
    ],
)
def test_ends_of_blocks(source, expected):
    expected = expected or '⟦answer {}<|end|>⟧'
    assert marked(source) == f'{USER_1}{expected.format("é")}{USER_2}{expected.format("2")}'
    assert JinjaTemplate(source).end_of_turn(SPECIAL) == '<|end|>'


def test_a_block_is_not_extended_by_the_token_that_begins_the_next_message():
    source = block('{% generation %}{{ m.content }}{% endgeneration %}', after='</s>')
    with pytest.raises(ChatError, match='put this token between'):
        marked(source)


def test_an_empty_turn_with_tokens_before_its_content():
    """A token of the header does not end a turn, even if the template tests its content."""
    header = "<|call|>{{ '!' if m.content }}{{ m.content }}"
    empty = [{**message, 'content': ''} if message['role'] == 'assistant' else message for message in MESSAGES]
    assert marked(EACH + header + END, empty).count('⟦<|call|><|end|>⟧') == 2
    last = "{{ '</s>' if loop.last and not add_generation_prompt else '<|end|>' }}{% endfor %}" + PROMPT
    for messages in (empty, empty[:2]):
        with pytest.raises(ChatError, match='without a special token'):
            marked(EACH + header + last, messages)


def test_calls_and_results():
    calls = (
        '{% for c in m.tool_calls or [] %}<|call|>{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}'
    )
    name = "{% if m.role == 'tool' %}{{ messages[loop.index0 - 1].tool_calls[0].function.name }}{% endif %}"
    source = EACH + '{{ m.content }}' + calls + '<|end|>' + name + '{% endfor %}' + PROMPT
    call = {'function': {'name': 'add', 'arguments': {'a': 1}}}
    messages = [
        MESSAGES[0],
        {'role': 'assistant', 'content': '', 'tool_calls': [call, call]},
        {'role': 'tool', 'content': '3'},
        *MESSAGES[1:],
    ]
    calls = '<|call|>add{"a": 1}' * 2
    expected = f'{USER_1}⟦{calls}<|end|>⟧<|tool|>3<|end|>add<|assistant|>⟦answer é<|end|>⟧{USER_2}⟦answer 2<|end|>⟧'
    assert marked(source, messages) == expected


def test_marks_in_the_data_are_escaped():
    nasty = '\ufdd0\ufdd2\ufde1\ufdd6x\ufdd0'
    messages = [MESSAGES[0], {'role': 'assistant', 'content': nasty}]
    source = EACH + '{{ m.content }}' + END
    rendered = JinjaTemplate(source).render_with_spans(messages, special=SPECIAL)
    assert rendered.spelled(*rendered.assistant_spans[0]) == f'{nasty}<|end|>'
    assert rendered.text != rendered.spelled(0, len(rendered.text))
