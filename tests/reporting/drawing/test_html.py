"""Tests that any text of a run is escaped in its page."""

from maxlm.reporting.drawing.html import Markup, code, escape, join, section, table, tag
from maxlm.storage.json_fields import items, mapping, number, text

EVIL = '<script>alert("1")</script>&\'</pre>'
SAFE = '&lt;script&gt;alert(&quot;1&quot;)&lt;/script&gt;&amp;&#x27;&lt;/pre&gt;'


def test_text_is_escaped_once_and_markup_is_not():
    assert escape(EVIL) == SAFE
    assert escape(escape(EVIL)) == SAFE
    assert tag('p', EVIL, title=EVIL) == f'<p title="{SAFE}">{SAFE}</p>'
    assert tag('p', tag('b', 'x')) == '<p><b>x</b></p>'
    assert join('<', Markup('<br>'), by=' & ') == '&lt; &amp; <br>'
    assert SAFE in table(['a'], [[EVIL]])
    assert SAFE in code(EVIL)


def test_modified_markup_is_escaped():
    # A str method returns a plain str, so its result is escaped.
    assert escape(Markup('<b>').upper()) == '&lt;B&gt;'


def test_invalid_characters_are_replaced():
    assert escape('a\x00b\x1b[31mc\ud800d\n\te') == 'a\ufffdb\ufffd[31mc\ufffdd\n\te'
    escape('\ud800').encode()


def test_attributes():
    markup = tag('path', d='M0 0', class_='line', data_series=3, stroke_width=None, hidden=True, open=False)
    assert markup == '<path d="M0 0" class="line" data-series="3" hidden/>'
    assert tag('meta', charset='utf-8') == '<meta charset="utf-8">'
    assert tag('svg', viewBox='0 0 1 1') == '<svg viewBox="0 0 1 1"></svg>'


def test_section_without_content_is_omitted():
    assert section('x', 'X', '', Markup('')) == ''
    assert section('x', 'X', '', 'y') == '<section id="x"><h2>X</h2>y</section>'


def test_text_columns_are_left_aligned():
    markup = table(['name', 'n'], [['a', '1']])
    assert '<th class="t">name</th><th>n</th>' in markup
    assert '<td class="t">a</td><td>1</td>' in markup


def test_fields_have_the_expected_type_or_are_absent():
    line = {'a': 1, 'b': 2.5, 'c': True, 'd': 'x', 'e': float('nan'), 'f': 10**400, 'g': {'h': 1}, 'i': [1], 'j': None}
    assert [number(line, key) for key in 'abcdefgijz'] == [1.0, 2.5, *[None] * 8]
    assert [text(line, key) for key in 'adjz'] == ['1', 'x', '', '']
    assert [mapping(line, key) for key in 'gaz'] == [{'h': 1}, {}, {}]
    assert [items(line, key) for key in 'iaz'] == [[1], [], []]
    assert number('not an object', 'a') is None
    assert text(None, 'a') == ''
