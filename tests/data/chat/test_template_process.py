"""Tests that endless loops, unbounded memory and deep nesting in untrusted templates are one-line errors."""

import os
import types

import pytest

from maxlm.data.chat import template_process
from maxlm.data.chat.jinja import ChatError, JinjaTemplate
from maxlm.data.chat.template import CHATML, ChatTemplate, set_variables
from maxlm.data.chat.template_process import RemoteTemplate
from maxlm.errors import InputError
from maxlm.sandbox.limited_process import ProcessLimits

LIMITS = ProcessLimits(cpu_seconds=0.1, memory_bytes=200 << 20, output_bytes=1 << 20)
MESSAGES = [{'role': 'user', 'content': 'a'}, {'role': 'assistant', 'content': 'b'}]
LOOPS = '{% for a in range(99999) %}' * 3 + '{% endfor %}' * 3
DOUBLED = '{% set n = namespace(a=VALUE) %}{% for i in range(99999) %}{% set n.a = n.a OP n.a %}{% endfor %}'
TIME, MEMORY, DEPTH, OUTPUT = 'CPU time', 'MiB of memory', 'nested too deeply', 'outputs 29999'
BOMBS = {
    'loops': (LOOPS, TIME),
    'calls': ('{% macro f(n) %}{{ f(n - 1) ~ f(n - 1) if n }}{% endmacro %}{{ f(60) }}', TIME),
    'a recursive macro': ('{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}', DEPTH),
    'a product': ("{{ 'a' * 9000000000 }}", MEMORY),
    'a product of data': ('{{ messages[0].content * 9000000000 }}', MEMORY),
    'a product of lists': ('{{ (messages * 900000000) | length }}', MEMORY),
    'a power': ('{{ 9 ** (9 ** 9) }}', TIME),
    'a width': ("{{ '%9000000000d' % 1 }}", MEMORY),
    'a width by format': ("{{ '{:9000000000}'.format(1) }}", MEMORY),
    'a width by a filter': ("{{ '%*d' | format(900000000, 1) }}", MEMORY),
    'center': ("{{ 'a' | center(9000000000) }}", MEMORY),
    'ljust': ("{{ 'a'.ljust(9000000000) }}", MEMORY),
    'indent': ("{{ 'a' | indent(9000000000, first=true) }}", MEMORY),
    'replace': ("{{ ('a' * 99999) | replace('a', 'b' * 99999) }}", MEMORY),
    'batch': ('{{ [1] | batch(900000000, 0) | list | length }}', MEMORY),
    'a text that doubles': (DOUBLED.replace('VALUE', "'a'").replace('OP', '~'), ''),
    'a list that doubles': (DOUBLED.replace('VALUE', '[1]').replace('OP', '+'), ''),
    'a number that doubles': (DOUBLED.replace('VALUE', '3').replace('OP', '*'), ''),
    'output': ("{% for i in range(99999) %}{{ 'a' * 30 }}{% endfor %}", OUTPUT),
    'lipsum': ('{{ lipsum(n=99999999) }}', TIME),
    'brackets': ('{{' + '(' * 5000 + '1' + ')' * 5000 + '}}', ''),
    'blocks': ('{% if 1 %}' * 3000 + '{% endif %}' * 3000, ''),
    'a long error': ("{{ raise_exception('a' * 1000000) }}", 'aaa'),
}


@pytest.mark.parametrize('name', BOMBS)
def test_a_bomb_is_a_one_line_error(name):
    source, reason = BOMBS[name]
    with pytest.raises((ChatError, InputError)) as info:
        ChatTemplate(source, name='bomb', limits=LIMITS).render(MESSAGES)
    message = str(info.value)
    assert reason in message
    assert '\n' not in message
    assert len(message) < 700
    # The next conversation runs in a new process.
    assert ChatTemplate('{{ messages[0].content }}', name='x', limits=LIMITS).render(MESSAGES).text == 'a'


@pytest.mark.parametrize('is_marked', [False, True])
def test_many_short_turns_are_located_in_linear_time(is_marked):
    # Time that grew with the square of the number of turns would exceed the limit several times.
    text = '{{ m.content }}<|end|>'
    if is_marked:
        block = f'{{% generation %}}{text}{{% endgeneration %}}'
        text = f"{{% if m.role == 'assistant' %}}{block}{{% else %}}{text}{{% endif %}}"
    source = f'{{% for m in messages %}}<|{{{{ m.role }}}}|>{text}{{% endfor %}}'
    source += '{% if add_generation_prompt %}<|assistant|>{% endif %}'
    messages = MESSAGES * 7_000
    template = RemoteTemplate(source, ProcessLimits(cpu_seconds=5))
    rendered = template.render_with_spans(messages, special=('<|user|>', '<|assistant|>', '<|end|>'))
    assert len(rendered.assistant_spans) == 7_000
    assert {rendered.spelled(*span) for span in rendered.assistant_spans} == {'b<|end|>'}


def test_a_slow_conversation_does_not_affect_others():
    source = f"{{% if messages[0].content == 'go' %}}{LOOPS}{{% endif %}}{{{{ messages[0].content }}}}"
    template = ChatTemplate(source, name='x', limits=LIMITS)
    for _ in range(2):
        with pytest.raises(ChatError, match=r'more than 0\.1 s of CPU time'):
            template.render([{'role': 'user', 'content': 'go'}])
        assert template.render(MESSAGES).text == 'a'


def test_a_long_conversation_does_not_delay_short_ones(monkeypatch):
    asked = []
    process = types.SimpleNamespace(call=lambda data: asked.append(len(data)) or b'["", [], {}]')
    monkeypatch.setattr(
        template_process, 'limited_process', lambda name, limits: asked.append(limits.cpu_seconds) or process
    )
    template = object.__new__(RemoteTemplate)
    template._source, template._limits = '', None
    for length in (1, 200_000):
        template.render([{'role': 'user', 'content': 'a' * length}])
    assert asked[::2] == [5.0, 20.0]


def test_the_limits_scale_with_the_conversation():
    template = ChatTemplate('{{ messages[0].content * 2 }}', name='x', limits=ProcessLimits(10, 200 << 20, 64, 10, 2))
    large = [{'role': 'user', 'content': 'a' * 10**6}]
    assert len(template.render(large).text) == 2 * 10**6


def test_remote_and_local_results_are_equal():
    unusual = [{'role': 'user', 'content': '<|im_end|>\ud800 ü', 'x': [1.5, None, {'y': 10**30}]}, MESSAGES[1]]
    for messages in (MESSAGES, unusual):
        options = {'special': ('<|im_start|>', '<|im_end|>'), 'tools': [{'a': 1}]}
        local, remote = JinjaTemplate(CHATML), RemoteTemplate(CHATML)
        assert remote.properties == local.properties
        assert remote.render_with_spans(messages, **options) == local.render_with_spans(messages, **options)
        assert remote.render(messages, **options) == local.render(messages, **options)
        settings = {'continue_final_message': True, 'template_kwargs': {'a': [1]}}
        assert remote.render(messages, **settings) == local.render(messages, **settings)
        assert remote.end_of_turn(options['special']) == local.end_of_turn(options['special']) == '<|im_end|>'
    source = '{{ messages[0].process }}'
    assert RemoteTemplate(source).render([{'process': os.getpid}]).text.startswith('<built-in')


def test_only_templates_of_this_package_are_rendered_in_process(monkeypatch):
    remote_templates = []
    monkeypatch.setattr(
        'maxlm.data.chat.template.RemoteTemplate', lambda *args: remote_templates.append(args) or JinjaTemplate('')
    )
    ChatTemplate(CHATML, name='x')
    ChatTemplate(set_variables(CHATML, {'bos_token': '<s>"\\{{ 1 }}', 'pad_token': ''}), name='x')
    assert remote_templates == []
    for source in (CHATML + ' ', '{%- set a = "b" ~ "c" %}\n' + CHATML, '{%- set a = "b" %}' + CHATML, LOOPS + CHATML):
        ChatTemplate(source, name='x')
    assert len(remote_templates) == 4
