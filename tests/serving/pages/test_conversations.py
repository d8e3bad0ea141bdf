"""Tests the conversation list, exports, settings and model information of the chat page."""

import json
import re

import pytest

from maxlm.serving.limits import ServerLimits
from maxlm.serving.schema.generation import MAX_SEED, RequestBase
from tests.serving.fake_engine import DETAILS, FakeEngine, served_by
from tests.serving.pages.chat_tab import finished, send, set_up, with_page
from tests.serving.serving_thread import ServerThread
from tests.waiting import until


@pytest.fixture
def two(tab):
    """Has two conversations, the second of which is shown."""
    set_up(tab, temperature=0, max_tokens=10)
    send(tab, 'First question')
    finished(tab, 1)
    tab.click('#new')
    send(tab, 'Second question\nwith a second line')
    finished(tab, 1)
    return tab


def titles(tab):
    return tab.texts('#conversations .entry')


def stored(tab):
    """Returns the stored conversations by title or first message."""
    keys = tab.run('Object.entries(localStorage).filter(([key]) => key.startsWith("maxlm.conversation."))')
    entries = [json.loads(value) for _, value in keys]
    return {entry['title'] or entry['turns'][0]['content']: entry for entry in entries}


def test_conversations_are_listed_and_opened(two):
    assert titles(two) == ['Second question', 'First question']
    assert two.texts('[aria-current=true]') == ['Second question']
    two.click('li:last-child .entry')
    assert two.texts('.user .content') == ['First question']
    assert two.texts('[aria-current=true]') == ['First question']
    # An answer moves its conversation to the top and keeps the other one.
    send(two, 'More')
    finished(two, 2)
    assert titles(two) == ['First question', 'Second question']
    two.click('li:last-child .entry')
    assert two.texts('.user .content') == ['Second question\nwith a second line']
    # The list survives a reload, and the tab shows the same conversation.
    two.open(two.run('location.href'))
    assert titles(two) == ['First question', 'Second question']
    assert two.texts('[aria-current=true]') == ['Second question']
    # An empty conversation is not listed.
    two.click('#new')
    assert len(titles(two)) == 2
    assert two.texts('[aria-current=true]') == []
    assert two.run('document.activeElement.id') == 'prompt'


def test_rename(two):
    two.run('document.querySelector("li:last-child .more").click(), 0')
    two.run('document.querySelector(".actions button").click(), 0')
    assert two.run('document.activeElement.value') == 'First question'
    two.type('<b>Mine</b>')
    two.press('Escape')
    assert titles(two)[1] == 'First question'
    two.run('document.querySelector(".actions button").click(), 0')
    two.type('<b>Mine</b>')
    two.press('Enter')
    # A title is text, and the order is kept.
    assert titles(two) == ['Second question', '<b>Mine</b>']
    assert two.run('document.activeElement.textContent') == '<b>Mine</b>'
    assert two.texts('#conversations b') == []
    two.open(two.run('location.href'))
    assert titles(two)[1] == '<b>Mine</b>'


def test_a_response_does_not_disturb_the_list(two, engine):
    engine.open.clear()
    send(two, 'Again')
    two.until('running?.controller')
    two.run('document.querySelector("li:last-child .more").focus(), 0')
    two.press('Enter')
    engine.open.set()
    finished(two, 2)
    # The focus stays on the button, also after the list was rendered again.
    assert two.run('document.activeElement.ariaLabel') == 'Actions for First question'
    engine.open.clear()
    send(two, 'Once more')
    two.until('running?.controller')
    two.run('document.querySelector(".actions button").click(), 0')
    two.type('Half a ti')
    engine.open.set()
    finished(two, 3)
    two.type('tle')
    two.press('Enter')
    assert titles(two)[1] == 'Half a title'


def test_delete(two):
    def delete(which):
        two.run(f'document.querySelector("{which} .more[aria-expanded=false]")?.click(), 0')
        two.run('document.querySelector(".danger").click(), 0')
        two.until('$("confirm").open')

    delete('li:last-child')
    assert two.texts('#confirm-text') == ['Delete “First question”? This cannot be undone.']
    # Cancel has the focus, so Enter keeps the conversation.
    two.press('Enter')
    two.until('!$("confirm").open')
    assert len(titles(two)) == 2
    delete('li:last-child')
    two.click('[value=delete]')
    two.until('document.querySelectorAll("#conversations li").length === 1')
    assert two.texts('.user .content') == ['Second question\nwith a second line']
    assert two.texts('#status') == ['Deleted.']
    assert two.run('document.activeElement.className') == 'entry'
    assert [*stored(two)] == ['Second question\nwith a second line']
    # If the shown conversation is deleted, the page shows a new one.
    delete('li')
    two.click('[value=delete]')
    two.until('!document.querySelector("#conversations li")')
    assert two.texts('.turn') == []
    assert stored(two) == {}
    assert two.run('$("no-conversations").offsetWidth > 0')


def test_a_switch_stops_and_keeps_the_response(two, engine):
    set_up(two, max_tokens=2000)
    engine.seconds = 0.002
    send(two, 'Long')
    two.until('running && turns.at(-1).content.length > 20')
    two.click('li:last-child .entry')
    until(lambda: engine.state.running == 0)
    two.until('!running')
    engine.seconds = 0
    assert two.texts('.user .content') == ['First question']
    entry = stored(two)['Second question\nwith a second line']
    assert len(entry['turns'][-1]['content']) > 20
    assert entry['turns'][-1]['stats'].endswith('stopped')
    # A deleted conversation does not come back when its response ends.
    two.click('li:first-child .entry')
    engine.open.clear()
    send(two, 'Again')
    two.until('running?.controller')
    two.run('document.querySelector("[aria-current]").nextSibling.click(), 0')
    two.run('document.querySelector(".danger").click(), 0')
    two.click('[value=delete]')
    two.until('!running && document.querySelectorAll("#conversations li").length === 1')
    assert [*stored(two)] == ['First question']


def test_exports(two, tmp_path):
    folder = tmp_path / 'exports'
    folder.mkdir()
    two.send('Page.setDownloadBehavior', behavior='allow', downloadPath=str(folder))
    set_up(two, system='Be short.')
    send(two, 'And now?')
    finished(two, 2)
    two.run('document.querySelector("li .more").click(), 0')
    for number in (2, 3):
        two.run(f'document.querySelector(".actions button:nth-child({number})").click(), 0')
    two.click('#export-all')
    names = {'Second-question.json', 'Second-question.md', 'conversations.jsonl'}
    until(lambda: {path.name for path in folder.iterdir()} == names)
    until(lambda: all(path.stat().st_size for path in folder.iterdir()))
    reply = '# Counting'
    expected = [
        {'role': 'system', 'content': 'Be short.'},
        {'role': 'user', 'content': 'Second question\nwith a second line'},
        {'role': 'assistant', 'content': reply},
        {'role': 'user', 'content': 'And now?'},
        {'role': 'assistant', 'content': reply},
    ]
    one = json.loads((folder / 'Second-question.json').read_text())
    assert (one['messages'], one['title'], one['model']) == (expected, 'Second question', 'tiny')
    assert re.fullmatch(r'\d{4}-\d\d-\d\dT[\d:.]+Z', one['updated'])
    lines = [json.loads(line) for line in (folder / 'conversations.jsonl').read_text().splitlines()]
    assert [line['title'] for line in lines] == ['Second question', 'First question']
    assert lines[0] == one
    assert [message['role'] for message in lines[1]['messages']] == ['user', 'assistant']
    text = (folder / 'Second-question.md').read_text()
    assert text.startswith('# Second question\n\n## System\n\nBe short.\n\n## You\n\nSecond question\nwith')
    assert text.count('\n\n## tiny\n\n') == 2


def test_a_full_storage_is_reported(two):
    two.run('Storage.prototype.setItem = () => { throw new DOMException("full", "QuotaExceededError"); }, 0')
    send(two, 'Third')
    finished(two, 2)
    assert two.run('$("warning").offsetWidth > 0')
    assert len(two.texts('.turn')) == 4


def test_the_conversation_of_a_former_version_is_kept(tab, server):
    turns = [{'role': 'user', 'content': 'Old'}, {'role': 'assistant', 'content': 'Reply'}]
    tab.run(f'localStorage.setItem("maxlm.turns", {json.dumps(json.dumps(turns))}), 0')
    # An invalid entry is ignored.
    tab.run('localStorage.setItem("maxlm.conversation.x", "{]"), 0')
    tab.run('localStorage.setItem("maxlm.conversation.y", "{\\"id\\": 5}"), 0')
    tab.open(server.url)
    assert titles(tab) == ['Old']
    tab.click('.entry')
    assert tab.texts('.assistant .content') == ['Reply']
    assert tab.run('localStorage.getItem("maxlm.turns")') is None


@pytest.mark.parametrize('name', ['conversation.x', 'turns', 'text', 'settings'])
def test_damaged_items_of_the_storage_are_ignored(tab, server, name):
    conversation = {'id': 'x', 'kind': 'chat', 'title': '', 'text': '', 'updated': 1, 'turns': []}
    turns = [[None], [5], [{}], [{'role': 'assistant'}], [{'role': 'user', 'content': 5}], [{'role': 1, 'content': ''}]]
    damaged = [
        *turns,
        *({**conversation, 'turns': one} for one in (*turns, {}, 'a')),
        *({**conversation, key: {}} for key in conversation),
    ]
    for value in (*damaged, {'system': 5, 'mode': {}, 'key': None}, 5, None, '', [], {}, 'a' if name != 'text' else 1):
        tab.run(f'localStorage.clear(), localStorage.setItem("maxlm.{name}", {json.dumps(json.dumps(value))}), 0')
        tab.open(server.url)
        assert tab.faults == [], value
    send(tab, 'Hello')
    finished(tab, 1)
    assert titles(tab) == ['Hello']


def test_other_tabs_are_followed(two):
    entry = stored(two)['First question'] | {'id': 'other', 'title': 'From another tab', 'updated': 9e15}
    two.run(f'localStorage.setItem("maxlm.conversation.other", {json.dumps(json.dumps(entry))}), 0')
    two.run('dispatchEvent(new StorageEvent("storage", { key: "maxlm.conversation.other" })), 0')
    assert titles(two) == ['From another tab', 'Second question', 'First question']
    send(two, 'More')
    finished(two, 2)
    assert len(titles(two)) == 3


def test_sampling_settings_reach_the_engine(tab, engine):
    set_up(tab, temperature=0.75, top_p=0.9, top_k=40, min_p=0.05, max_tokens=7, seed=11)
    send(tab, 'Hello')
    finished(tab, 1)
    request = engine.last_request
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.75, 0.9, 40, 0.05)
    assert (request.max_tokens, request.seed) == (7, 11)
    # An invalid number is neither stored nor sent, and the dialog stays open.
    tab.click('#open-settings')
    tab.run('document.querySelector("[name=min_p]").value = "", 0')
    tab.click('[name=min_p]')
    tab.type('2')
    tab.press('Enter')
    assert tab.run('$("settings").open && document.querySelector("[name=min_p]").matches(":invalid")')
    assert tab.run('settings.min_p') == '0.05'


def test_the_ranges_of_the_settings_are_those_of_the_server(tab, engine):
    schema = RequestBase.model_json_schema()['properties']
    # The server accepts seeds of 64 bits and uses the low 32 bits.
    ranges = {name: each['anyOf'][0] for name, each in schema.items() if 'anyOf' in each}
    ranges['seed'] = {'minimum': 0, 'maximum': MAX_SEED}
    for name in ('temperature', 'top_p', 'top_k', 'min_p', 'seed', 'max_tokens'):
        allowed = ranges[name]
        low, high, step = tab.run(
            f'(({{ min, max, step }}) => [min, max, step])(document.querySelector("[name={name}]"))'
        )
        if 'exclusiveMinimum' in allowed:
            assert float(low) == float(step)
        else:
            assert float(low) == allowed['minimum']
        # The context bounds the number of tokens.
        assert float(high) == (engine.max_context if name == 'max_tokens' else allowed['maximum'])


def test_model_information(browser):
    with ServerThread(served_by(FakeEngine()), limits=ServerLimits(max_tokens=64, drain_seconds=1)) as server:
        with_page(browser, server.url)
        browser.click('#open-info')
        browser.until('$("info").open')
        rows = dict(zip(browser.texts('#info dt'), browser.texts('#info dd'), strict=True))
        assert rows == {
            'Name': 'tiny',
            'Step': '7',
            'Parameters': f'{DETAILS.num_parameters:,}',
            'Context length': '512 tokens',
            'Max tokens of a response': '64',
            'Vocabulary': '259 tokens',
            'Compute dtype': 'float32',
            'Weights': 'Not quantized',
            'Key-value cache': 'Compute dtype',
            'Chat template': 'Yes',
            'Full context': 'The oldest messages are dropped',
            'API': f'{server.url}/v1',
        }
        browser.press('Escape')
        assert browser.run('document.activeElement.id') == 'open-info'
        assert browser.run('document.querySelector("[name=max_tokens]").max') == '64'


def test_texts_of_a_base_model_are_listed(browser):
    with ServerThread(served_by(FakeEngine(), chat=False)) as server:
        with_page(browser, server.url)
        set_up(browser, temperature=0, max_tokens=9)
        for text in ('One: ', 'Two: '):
            browser.click('#document')
            browser.type(text)
            browser.click('#send')
            browser.until(f'!running && text.value === "{text}The quick"')
            browser.click('#new')
            assert browser.run('text.value') == ''
        assert titles(browser) == ['Two: The quick', 'One: The quick']
        browser.click('li:last-child .entry')
        assert browser.run('text.value') == 'One: The quick'
        assert browser.texts('#sidebar-title') == ['Texts']
        assert browser.faults == []
