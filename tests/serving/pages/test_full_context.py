"""Tests long conversations on the chat page with a model of 256 tokens of context."""

import pytest

from tests.serving.fake_engine import FakeEngine, served_by
from tests.serving.pages.chat_tab import finished, send, set_up, with_page
from tests.serving.serving_thread import ServerThread

NOTE = 'The context is full. The model no longer sees the messages above.'
CONTEXT = 256


@pytest.fixture(scope='module')
def engine():
    return FakeEngine(max_context=CONTEXT)


@pytest.fixture
def page(browser, engine):
    with ServerThread(served_by(engine)) as server:
        with_page(browser, server.url)
        yield browser
        browser.faults.clear()


def prompt_of(engine):
    """Returns the text of the last prompt. Special tokens are not bytes."""
    return bytes(i for i in engine.last_request.prompt if i < 256).decode()


def test_a_long_conversation(page, engine):
    set_up(page, temperature=0, max_tokens=20, system='Be brief.')
    for number in range(1, 13):
        send(page, f'Question {number}?')
        finished(page, number)
        prompt = prompt_of(engine)
        assert prompt.startswith('system\nBe brief.')
        assert prompt.endswith(f'user\nQuestion {number}?\nassistant\n')
        assert len(engine.last_request.prompt) <= CONTEXT - 20
        # The page marks exactly the messages that the prompt lacks.
        missing = [text for text in page.texts('.user .content') if f'user\n{text}' not in prompt]
        assert page.texts('.user.unseen .content') == missing
        assert page.texts('.divider') == ([NOTE] if missing else [])
    assert len(missing) > 5
    # A turn is dropped only if it does not fit: each has the same length.
    turn = 2 * 2 + len('user\nQuestion 1?\n' + 'assistant\n\n') + 20
    assert CONTEXT - 20 - len(engine.last_request.prompt) < turn + 2
    # The note stands above the first message that the model sees, also after a reload.
    following = 'document.querySelector(".divider").nextElementSibling.querySelector(".content").textContent'
    first_seen = f'Question {len(missing) + 1}?'
    assert page.run(following) == first_seen
    page.open(page.run('location.href'))
    assert page.run(following) == first_seen


def test_without_a_limit_a_quarter_of_the_context_is_kept_for_the_answer(page, engine):
    set_up(page, temperature=0)
    for number in range(1, 4):
        send(page, f'Question {number}?')
        finished(page, number)
        assert engine.last_request.max_tokens >= CONTEXT // 4
    assert page.texts('.error') == []
    # Retry gives another answer to the same prompt.
    prompt = prompt_of(engine)
    page.run('document.querySelector(".assistant:last-child .tools button:nth-child(2)").click(), 0')
    finished(page, 3)
    assert prompt_of(engine) == prompt
    assert page.texts('.error') == []


def test_a_message_that_is_too_long_alone(page, engine):
    set_up(page, temperature=0, max_tokens=20)
    send(page, 'Hello')
    finished(page, 1)
    send(page, 'x' * 300)
    page.until('document.querySelector(".error")')
    assert 'The context length is 256 tokens; the prompt has' in page.texts('.error span')[0]
    # With another maximum or system prompt, the message might fit.
    assert page.texts('.error button') == ['Edit message', 'Retry']
    page.click('#open-settings')
    page.click('#reset')
    page.click('#settings .strong')
    page.click('.error button')
    page.until('!running && document.querySelectorAll(".error button").length === 1')
    assert page.texts('.error button') == ['Edit message']
    page.click('.error button')
    page.run('document.activeElement.select(), 0')
    page.type('Short')
    page.press('Enter')
    finished(page, 2)
    assert page.texts('.error') == []
    assert page.texts('.user .content') == ['Hello', 'Short']


def test_a_message_without_a_response_is_not_sent_again(page, engine):
    set_up(page, temperature=0, max_tokens=20)
    send(page, 'Hello')
    finished(page, 1)
    send(page, 'x' * 300)
    page.until('document.querySelector(".error")')
    send(page, 'Short')
    finished(page, 2)
    prompt = prompt_of(engine)
    assert 'xxx' not in prompt
    assert 'user\nHello' in prompt
    assert page.texts('.unseen .content') == ['x' * 300]
