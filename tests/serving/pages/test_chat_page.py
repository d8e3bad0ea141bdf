"""Tests the chat page in a browser: typing, streaming, stopping, retrying, small and large screens, light and dark."""

import json

import httpx
import pytest

from maxlm.serving.pages.chat_page import chat_page
from tests.serving.devtools import CONTROL, SHIFT
from tests.serving.fake_engine import FakeEngine, served_by
from tests.serving.pages.chat_tab import LENGTH, REPLY, finished, send, set_up, with_page
from tests.serving.serving_thread import ServerThread


def test_a_conversation(tab, engine):
    set_up(tab, temperature=0, max_tokens=LENGTH - 1)
    tab.click('#prompt')
    tab.type('How do I')
    tab.press('Enter', modifiers=SHIFT)
    tab.type('count?')
    tab.press('Enter')
    finished(tab, 1)
    assert tab.texts('.user .content') == ['How do I\ncount?']
    assert tab.run('prompt.value') == ''
    text = '.assistant .content '
    assert tab.texts(f'{text}h3') == ['Counting']
    assert tab.texts(f'{text}strong') == ['once']
    assert tab.texts(f'{text}em') == ['file']
    assert tab.texts(f'{text}p code') == ['Counter']
    assert tab.texts(f'{text}ol p') == ['Open the file.', 'Count <img src=x onerror=alert(1)>.']
    assert tab.texts(f'{text}pre')[0].startswith('def count(path)')
    assert len(tab.texts(f'{text}ul p')) == len(tab.texts(f'{text}blockquote')) == 1
    # A response is shown as text, not as HTML.
    assert tab.texts('img') == []
    (status,) = tab.texts('.assistant .stats')
    assert status.startswith(f'{LENGTH - 1} tokens · ')
    assert 'tokens/s' in status
    assert status.endswith('token limit reached')
    send(tab, 'Again')
    finished(tab, 2)
    # The complete conversation was sent: 3 special tokens for each turn, and the prefix of the response.
    roles = len('user\n' * 2 + 'assistant\n' * 2 + '\n' * 3)
    sent = len('How do I\ncount?' + 'Again') + LENGTH - 1 + roles + 7
    assert engine.state.prompt_tokens > sent > LENGTH
    # The conversation is restored after a reload.
    tab.open(tab.run('location.href'))
    assert len(tab.texts('.turn')) == 4
    tab.click('#new')
    assert tab.texts('.turn') == []


def test_an_answer_streams_and_stops(tab, engine):
    set_up(tab, temperature=0)
    engine.open.clear()
    send(tab, 'Hello')
    tab.until('running')
    assert tab.texts('#send') == ['Stop']
    engine.seconds = 0.002
    engine.open.set()
    # Received text is shown while more arrives.
    tab.until('running && document.querySelector(".assistant .content").textContent.includes("Counting")')
    assert engine.state.running == 1
    tab.press('Escape')
    finished(tab, 1)
    engine.seconds = 0
    assert tab.texts('#send') == ['Send']
    assert tab.texts('.assistant .stats')[0].endswith('stopped')
    shown = tab.run('turns[1].content')
    assert REPLY.startswith(shown[:LENGTH])
    # The button does the same.
    engine.open.clear()
    send(tab, 'Once more')
    tab.until('running')
    tab.click('#send')
    finished(tab, 2)
    engine.open.set()


def test_retry_and_edit(tab):
    set_up(tab, max_tokens=5, temperature=1, seed=3)
    send(tab, 'First')
    finished(tab, 1)
    send(tab, 'Second')
    finished(tab, 2)
    (first, second) = tab.texts('.assistant .content')
    set_up(tab, seed=9)
    tab.run('document.querySelector(".assistant:last-child .tools button:nth-child(2)").focus(), 0')
    tab.press('Enter')
    tab.until(f'!running && turns.length === 4 && turns[3].stats && turns[3].content !== {json.dumps(second)}')
    assert tab.texts('.assistant .content')[0] == first
    # An edit removes the messages after the edited one.
    tab.run('document.querySelector(".user .tools button").click(), 0')
    tab.run('document.activeElement.select(), 0')
    tab.type('Another')
    tab.press('Escape')
    assert tab.texts('.user .content') == ['First', 'Second']
    tab.run('document.querySelector(".user .tools button").click(), 0')
    tab.run('document.activeElement.select(), 0')
    tab.type('Another')
    tab.press('Enter')
    tab.until('!running && turns.length === 2 && turns[1].stats')
    assert tab.texts('.user .content') == ['Another']


def test_errors_can_be_retried(tab, server):
    set_up(tab, max_tokens=3000)
    send(tab, 'Hello')
    tab.until('document.querySelector(".error")')
    assert 'The context length is 3000 tokens' in tab.texts('.error span')[0]
    # The browser reports each error response in its console; the page keeps working.
    assert all('400 (Bad Request)' in fault for fault in tab.faults)
    assert len(tab.faults) == 1
    tab.faults.clear()
    set_up(tab, max_tokens=5)
    tab.click('.error button')
    finished(tab, 1)
    assert tab.texts('.error') == []


def test_the_scroll_position_stays_while_text_arrives(tab, engine):
    set_up(tab, temperature=0, max_tokens=2000)
    engine.seconds = 0.001
    send(tab, 'Hello')
    tab.until('main.scrollHeight > main.clientHeight + 400')
    assert tab.run('main.scrollHeight - main.scrollTop - main.clientHeight') < 100
    tab.run('main.scrollTop = 0, 0')
    tab.until('!$("down").hidden')
    height = tab.run('main.scrollHeight')
    tab.until(f'main.scrollHeight > {height + 100}')
    assert tab.run('main.scrollTop') == 0
    tab.click('#down')
    tab.until('$("down").hidden')
    tab.press('Escape')
    finished(tab, 1)
    engine.seconds = 0


@pytest.mark.parametrize('dark', [False, True])
@pytest.mark.parametrize('width', [360, 1280])
def test_the_page_fits_the_screen(tab, width, dark):
    set_up(tab, temperature=0, max_tokens=LENGTH)
    send(tab, 'A_word_that_is_so_long_that_no_line_of_a_phone_has_room_for_it_and_must_be_broken' * 3)
    finished(tab, 1)
    tab.look(width=width, dark=dark, mobile=width < 500)
    assert tab.run('innerWidth') == width
    assert tab.run('document.documentElement.scrollWidth') == width
    assert tab.run('main.scrollWidth === main.clientWidth')
    shown = (
        '[...document.querySelectorAll("button, textarea, h1, .content, #hint, .code")].filter((x) => x.offsetWidth)'
    )
    edges = tab.run(f'{shown}.map((one) => one.getBoundingClientRect()).flatMap((box) => [box.left, box.right])')
    assert min(edges) >= 0
    assert max(edges) <= width
    background = tab.run('getComputedStyle(document.documentElement).backgroundColor')
    assert (sum(map(int, background[4:-1].split(','))) < 200) == dark
    tab.click('#open-settings')
    box = tab.run('(({ left, right }) => [left, right])($("settings").getBoundingClientRect())')
    assert box[0] >= 0
    assert box[1] <= width


def test_the_model_continues_a_text(browser, tmp_path):
    engine = FakeEngine(max_context=2000)
    with ServerThread(served_by(engine, chat=False)) as server:
        with_page(browser, server.url)
        assert browser.run('prompt.offsetWidth') == 0
        set_up(browser, temperature=0, max_tokens=9)
        browser.click('#document')
        browser.type('Once: ')
        browser.press('Enter', modifiers=CONTROL)
        browser.until('!running && text.value.length > 10')
        assert browser.run('text.value') == 'Once: The quick'
        assert '9 tokens' in browser.texts('#speed')[0]
        browser.click('#send')
        browser.until('!running && text.value.length > 20')
        browser.click('#undo')
        assert browser.run('text.value') == 'Once: The quick'
        set_up(browser, max_tokens=3)
        browser.click('#retry')
        browser.until('!running && text.value === "Once: The"')
        # More tokens than the context allows.
        set_up(browser, max_tokens=2000)
        browser.click('#send')
        browser.until('document.querySelector(".error")')
        assert 'The context length is 2000 tokens' in browser.texts('.error span')[0]
        browser.look(width=360, mobile=True)
        assert browser.run('document.documentElement.scrollWidth') == 360
        # Unsent text is restored.
        browser.open(server.url)
        assert browser.run('text.value') == 'Once: The'
        browser.faults.clear()


def test_the_page_asks_for_a_key(browser):
    with ServerThread(served_by(FakeEngine()), api_key='secret') as server:
        browser.look(width=1280)
        browser.open(server.url)
        browser.until('$("settings").open')
        assert 'API key' in browser.texts('.error span')[0]
        browser.click('[name=key]')
        browser.type('secret')
        browser.press('Enter')
        browser.until('model')
        set_up(browser, max_tokens=3, temperature=0)
        send(browser, 'Hello')
        finished(browser, 1)
        assert browser.texts('.assistant .content') == ['The']
        browser.faults.clear()


def test_the_server_becomes_unavailable(browser):
    engine = FakeEngine()
    with ServerThread(served_by(engine)) as server:
        with_page(browser, server.url)
        send(browser, 'Hello')
        finished(browser, 1)
    send(browser, 'Are you there?')
    browser.until('document.querySelector(".error")')
    assert browser.texts('.error span') == ['The server cannot be reached.']
    browser.faults.clear()


def test_the_page_loads_nothing_external():
    page = chat_page()
    before_script = page.text.partition('<script>')[0]
    assert 'http' not in before_script.replace('http://www.w3.org/2000/svg', '')
    assert "default-src 'none'" in page.policy
    assert "require-trusted-types-for 'script'; trusted-types dompurify" in page.policy
    assert 'unsafe' not in page.policy
    assert page.text.count('<script>') == page.text.count('</script>') == 1


def test_the_browser_keeps_the_page(server):
    page = httpx.get(server.url)
    assert page.headers['cache-control'] == 'no-cache'
    # Hosts of links are not looked up before the user opens them.
    assert page.headers['x-dns-prefetch-control'] == 'off'
    tag = page.headers['etag']
    # A proxy that compresses the page changes the tag to a weak one.
    for value in (tag, f'"other", W/{tag}'):
        again = httpx.get(server.url, headers={'if-none-match': value})
        assert (again.status_code, again.content) == (304, b'')
        assert again.headers['content-security-policy'] == page.headers['content-security-policy']
    assert httpx.get(server.url, headers={'if-none-match': '"other"'}).status_code == 200
