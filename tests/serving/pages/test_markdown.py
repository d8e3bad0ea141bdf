"""Tests the rendering of Markdown on the chat page, with ordinary and hostile outputs of a model."""

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.serving.pages.chat_tab import with_page
from tests.serving.pages.hostile_outputs import DEEP, HTML, MARKDOWN, SLOW, URL

CONTENT = '.assistant .content '
TEXT = r"""# One
## Two
Text with ~~old~~ words, *emphasis* and [a link](https://example.org/a?b=c).
def f(x):
    return 4 - x

1. first
   - nested
2. second

```c++ title
int x;
```

| a | b |
|:--|--:|
| 1 | `2` |

> quoted

Math \(a*b*c\), \[d_1*e_1*f\], $x_{i}*y_{i}*z$ and $$*u*$$, but $5 and *$6*.
<b>raw</b> ![picture](https://example.org/p.png) [reference] [script](javascript:f) &amp;

[reference]: https://example.org/r
"""
PARTS = (
    *('a', 'b c', '\n', '\n\n', '\n\n\n', '- ', '* ', '1. ', '2. ', '10) ', '> ', '    ', '  ', '\t', '```', '```\n'),
    *('~~~py\n', '# ', '## a\n', '---\n', '===\n', '|', '| a | b |\n', '|---|---|\n', '|-|-|\n', 'a | b\n', '*', '**'),
    *('_', '`', '``', '[a](http://b)', '[a]: http://b\n', '[a]', '<b>', '<!--', '\\', '\\(', '\\)', '$', '$$', '\\['),
    *('&amp;', '\r\n', '\r', '\0', '\u00a0', '\u2028', '~~', '- [ ] ', ' ', '-', '1', '1.', '>', 'x  \n', '\U0001f469'),
)
# Returns the elements of messages that Markdown does not have, and unsafe links.
FINDINGS = """(() => {
  const attributes = {
    A: ['href', 'target', 'rel'], OL: ['start'], TH: ['align'], TD: ['align'], P: ['class'],
    DIV: ['class', 'tabindex'], PRE: ['tabindex'], BUTTON: ['class', 'type'],
  };
  const names = 'P H3 H4 H5 H6 UL OL LI BLOCKQUOTE PRE CODE EM STRONG S A HR TABLE THEAD TBODY TR TH TD DIV SPAN '
    + 'BUTTON';
  const isBad = (node) => !names.split(' ').includes(node.tagName)
    || [...node.attributes].some(({ name }) => ![...attributes[node.tagName] ?? [], 'dir'].includes(name))
    || node.tagName === 'A' && (node.target !== '_blank' || node.rel !== 'noopener noreferrer'
      || node.hasAttribute('href') && (!/^(https?|mailto):$/.test(node.protocol) || node.host === location.host));
  return [...document.querySelectorAll('#log .content *')].filter(isBad).map((node) => node.outerHTML);
})()"""
# Counts the parsed characters. Later steps of rendering cost a constant time per character and token.
COUNT = """(() => {
  const parse = parser.parse;
  window.parsed = { total: 0, most: 0 };
  parser.parse = (text, env) => {
    parsed.total += text.length;
    parsed.most = Math.max(parsed.most, text.length);
    return parse.call(parser, text, env);
  };
})()"""


def show(tab, *turns, title=''):
    """Shows a conversation of turns, each given as a dictionary or as the text of a response."""
    turns = [turn if isinstance(turn, dict) else {'role': 'assistant', 'content': turn} for turn in turns]
    conversation = {'id': 'x', 'kind': 'chat', 'title': title, 'updated': 1, 'turns': turns, 'text': '', 'model': ''}
    tab.run(f'saveConversation({json.dumps(conversation)}), openConversation(conversations.get("x")), 0')
    tab.until('!waiting.size')


def stream(tab, text, ends):
    """Renders a text up to each of the ends and then completely, and returns the HTML of its elements."""
    return tab.run(
        f'((text, ends) => {{ const view = new MarkdownView(); for (const end of ends) {{ '
        f'view.set([...text].slice(0, end).join("")); while (view.isBehind) view.step(); }} '
        f'waiting.clear(); return view.node.innerHTML; }})({json.dumps(text)}, {[*ends, len(text)]})'
    )


def complete(tab, text):
    """Returns the HTML of the elements of a text that is rendered at once."""
    whole = json.dumps(re.sub('\r\n?', '\n', text))
    return tab.run(f'element("div", "", ...renderTokens(parser.parse({whole}, {{}})).children).innerHTML')


@pytest.fixture
def page(browser, server):
    with_page(browser, server.url)
    return browser


def test_the_elements_of_markdown(tab):
    show(tab, TEXT)
    assert tab.texts(f'{CONTENT}h3') == ['One']
    assert tab.texts(f'{CONTENT}h4') == ['Two']
    assert tab.texts(f'{CONTENT}s') == ['old']
    # Line breaks and indentation of text outside code blocks are kept.
    assert tab.texts(f'{CONTENT}p')[0].endswith('\ndef f(x):\n    return 4 - x')
    assert tab.run(f'getComputedStyle(document.querySelector("{CONTENT}p")).whiteSpace') == 'pre-wrap'
    assert [text.strip() for text in tab.texts(f'{CONTENT}ol > li > ul')] == ['nested']
    assert tab.texts(f'{CONTENT}.bar span') == ['c++']
    assert tab.texts(f'{CONTENT}pre') == ['int x;']
    assert tab.texts(f'{CONTENT}th') == ['a', 'b']
    assert tab.texts(f'{CONTENT}td code') == ['2']
    align = f'[...document.querySelectorAll("{CONTENT}td")].map((one) => getComputedStyle(one).textAlign)'
    assert [value.removeprefix('-webkit-') for value in tab.run(align)] == ['left', 'right']
    # Markdown does not change mathematics and HTML. Images are links, because they would send data to other hosts.
    # The definition of a reference would change text before it.
    *_, last, definition = tab.texts(f'{CONTENT}p')
    assert definition == '[reference]: https://example.org/r'
    assert r'Math \(a*b*c\), \[d_1*e_1*f\], $x_{i}*y_{i}*z$ and $$*u*$$, but $5 and $6.' in last
    assert last.endswith('\n<b>raw</b> !picture [reference] [script](javascript:f) &')
    assert tab.texts(f'{CONTENT}em') == ['emphasis', '$6']
    links = tab.run(f'[...document.querySelectorAll("{CONTENT}a")].map((one) => [one.href, one.target, one.rel])')
    addresses = ['https://example.org/a?b=c', 'https://example.org/p.png']
    assert links == [[address, '_blank', 'noopener noreferrer'] for address in addresses]
    tab.look(width=360, mobile=True)
    assert tab.run('document.documentElement.scrollWidth') == 360


def test_each_block_has_the_direction_of_its_language(tab):
    show(
        tab, 'one\n\n\u0645\u0631\u062d\u0628\u0627 (two):\n\n- \u05e9\u05dc\u05d5\u05dd\n  ```\n  x\n  ```\n\n1. three'
    )
    found = tab.run(
        "['#log p', '#log p ~ p', '#log ul', '#log ul pre', '#log ol'].map((name) => "
        'getComputedStyle(document.querySelector(name)).direction)'
    )
    assert found == ['ltr', 'rtl', 'rtl', 'ltr', 'ltr']


def test_hostile_outputs_run_nothing_and_load_nothing(tab):
    tab.run('window.attacks = 0, window.attack = () => { attacks++; }, 0')
    for text in [*HTML, *(f'- {text}' for text in HTML), *MARKDOWN]:
        turns = [{'role': role, 'content': text, 'stats': text, 'error': text} for role in ('user', 'assistant')]
        show(tab, *turns, text, title=text)
        found = tab.run(f'[{FINDINGS}, attacks, document.querySelectorAll("#composer, a:not([href])").length]')
        assert found == [[], 0, 1], text
        assert tab.faults == tab.requests == [], text
    # Control: elements and requests are detected.
    tab.run(f'log.querySelector(".content").append(Object.assign(new Image(), {{ src: "{URL}" }})), 0')
    assert len(tab.run(FINDINGS)) == 1
    assert tab.requests == [URL]
    assert 'Content Security Policy' in tab.faults[0]
    tab.faults.clear()
    tab.requests.clear()


def test_html_of_the_parser_is_sanitized(tab):
    tab.run('window.attacks = 0, window.attack = () => { attacks++; }, 0')
    for text in [f'{parent}{html}' for html in HTML for parent in ('', '<p>', '<svg>', '<math><mtext>')]:
        # Chromium 156.0.8078.108 does not return from rendering more than 600 levels of <svg>.
        if f'<svg>{DEEP}' in text or f'<mtext>{DEEP}' in text:
            continue
        token = json.dumps({'type': 'html_block', 'content': text})
        tab.run(f'log.replaceChildren(element("div", "content", renderTokens([{token}]))), 0')
        assert tab.run(f'[{FINDINGS}, attacks]') == [[], 0], text
    tab.run('new Promise((resolve) => setTimeout(resolve, 50))')
    assert tab.run('attacks') == 0
    assert tab.requests == []
    # The browser reports styles, addresses and handlers that the policy forbids while DOMPurify reads them.
    reported = ('inline style', 'base URI', 'inline event handler')
    assert [fault for fault in tab.faults if not any(part in fault for part in reported)] == []
    # Control: the policy forbids HTML that DOMPurify has not checked.
    assert tab.run('(() => { try { log.innerHTML = "<p>"; } catch ({ name }) { return name; } })()') == 'TypeError'
    tab.faults.clear()


@pytest.mark.parametrize('name', SLOW)
def test_slow_outputs_are_bounded(page, name):
    text = SLOW[name](60_000)
    show(page, 'first')
    page.run(COUNT)
    show(page, text)
    assert page.run('parsed.total') <= 4 * len(text)
    stream(page, text, range(0, len(text), 9000))
    assert page.run('parsed.most') <= 80_000
    assert page.faults == page.requests == []


def test_a_stream_renders_complete_blocks_once(page):
    text = 'Some *words*.\n\n' * 5000
    page.run(COUNT)
    stream(page, text, range(0, len(text), 200))
    assert page.run('parsed.total') < 3 * len(text)
    # Control: a block that grows is parsed again.
    page.run('parsed.total = 0')
    stream(page, 'words ' * 5000, range(0, 30_000, 200))
    assert page.run('parsed.total') > 300_000


def test_a_long_block_continues_as_plain_text(page):
    for text, pattern in (('words ' * 30_000, 'words'), ('|a|b|\n|-|-|\n' + '|x|y|\n' * 5000, 'x')):
        show(page, 'first')
        page.run(COUNT)
        show(page, text)
        assert page.run('parsed.most') <= 80_000
        assert page.run('document.querySelectorAll(".content *").length') < 500
        assert (
            page.run('Math.max(...[...document.querySelectorAll(".plain")].map((one) => one.textContent.length))')
            < 9000
        )
        assert page.texts('.content')[0].count(pattern) == text.count(pattern)


def test_no_text_is_lost_at_the_limits(page):
    words = [f'w{i}' for i in range(30_000)]
    for join in (' ', '\n', '\n- ', '\n\n', '|'):
        for start in ('- ', '> ' * 150):
            show(page, 'first')
            show(page, start + join.join(words))
            assert re.findall(r'w\d+', page.texts('.content')[0]) == words
    show(page, f'{"> " * 15}**shallow**\n\n{"> " * 40}**deep**\n\n{"- " * 40}**list**\n\nend')
    assert page.texts('strong') == ['shallow', 'deep', 'list']
    assert page.texts('.content > p') == ['end']


@pytest.mark.parametrize(
    'text',
    [
        'a\n|b\n|-|-|\n',
        '1. a\n\n2. b\n\nc\n---\n',
        '- a\n\n  b\n\n      c\n- d\n',
        '> a\nb\n===\n***\n',
        '    a\n\n    b\n```\nc\n\n```\nd\r\n\r\ne',
    ],
)
def test_each_character_of_a_stream_gives_the_same_elements(page, text):
    assert stream(page, text, range(len(text))) == complete(page, text)


@given(st.lists(st.sampled_from(PARTS), max_size=25).map(''.join), st.data())
def test_a_stream_gives_the_same_elements_as_the_complete_text(page, text, data):
    ends = data.draw(st.lists(st.integers(0, len(text)), max_size=8).map(sorted))
    assert stream(page, text, ends) == complete(page, text)
