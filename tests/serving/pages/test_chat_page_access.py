"""Tests that the chat page is accessible: contrast, names, focus, keyboard, and the drawer of narrow screens."""

import json

import pytest

from tests.serving.pages.chat_tab import finished, send, set_up

# Contrast of visible texts and of the borders of controls against their background, as defined in WCAG 2:
# [ratio, text] in ascending order.
CONTRASTS = """((isBorder) => {
  const channels = (color) => color.match(/[\\d.]+/g).map(Number);
  const light = (color) => channels(color).slice(0, 3).map((value) => value / 255)
    .map((value) => (value <= 0.03928 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4))
    .reduce((sum, value, i) => sum + value * [0.2126, 0.7152, 0.0722][i], 0);
  const isOpaque = (color) => (channels(color)[3] ?? 1) > 0;
  const background = (node) => {
    for (let one = node; one; one = one.parentElement) {
      const color = getComputedStyle(one).backgroundColor;
      if (isOpaque(color)) return color;
    }
  };
  const ratio = (a, b) => {
    const [high, low] = [light(a), light(b)].sort((x, y) => y - x);
    return (high + 0.05) / (low + 0.05);
  };
  const modal = document.querySelector('dialog[open]') ?? document.body;
  const isShown = (node) => node.checkVisibility({ opacityProperty: true, visibilityProperty: true });
  const found = [];
  for (const node of modal.querySelectorAll('*')) {
    const style = getComputedStyle(node);
    if (!isShown(node) || node.closest('[inert]') || node.closest('.visually-hidden')) continue;
    const text = node.value || node.placeholder || [...node.childNodes].filter((one) => one.nodeType === 3)
      .map((one) => one.data.trim()).join('');
    const color = node.value || !node.placeholder ? style.color : getComputedStyle(node, '::placeholder').color;
    const isControl = node.matches('textarea, input:not([type=radio]), #new');
    if (!isBorder && text) found.push([ratio(color, background(node)), text.slice(0, 30)]);
    const border = style.borderTopColor;
    if (isBorder && isControl) found.push([ratio(border, background(node.parentElement)), node.outerHTML]);
  }
  return found.sort((a, b) => a[0] - b[0]);
})"""


def contrasts(tab, *, borders=False):
    found = tab.run(f'{CONTRASTS}({json.dumps(borders)})')
    assert found
    return found


@pytest.mark.parametrize('dark', [False, True])
def test_the_contrast_is_sufficient_everywhere(tab, dark):
    set_up(tab, temperature=0, max_tokens=200)
    send(tab, 'Hello')
    finished(tab, 1)
    tab.look(width=1280, dark=dark)
    tab.run('turns.push({ role: "assistant", content: "", error: "It failed." }), renderTurns(), 0')
    tab.click('#conversations .more')
    tab.run('$("warning").hidden = false, 0')
    for state, selector in {
        'page': '',
        'delete': '.danger',
        'settings': '#open-settings',
        'info': '#open-info',
    }.items():
        if selector:
            tab.click(selector)
            tab.until('document.querySelector("dialog[open]")')
        texts = contrasts(tab)
        assert texts[0][0] >= 4.5, (state, texts[0])
        if state in ('page', 'settings'):
            assert contrasts(tab, borders=True)[0][0] >= 3, (state, contrasts(tab, borders=True)[0])
        if selector:
            tab.press('Escape')
            tab.until('!document.querySelector("dialog[open]")')
    assert {'Hello', 'Send', 'Enter a message', 'It failed.', 'Delete'} <= {text for _, text in contrasts(tab)}
    # Control: low contrast is detected.
    tab.run('document.querySelector("#about").style.color = "var(--line)", 0')
    assert contrasts(tab)[0][0] < 4.5


def test_every_control_has_an_accessible_name(tab):
    send(tab, 'Hello')
    finished(tab, 1)
    tab.click('#conversations .more')
    roles = {'button', 'textbox', 'spinbutton', 'radio', 'dialog', 'log', 'navigation'}

    def names():
        tree = tab.send('Accessibility.getFullAXTree')['nodes']
        found = [(node['role']['value'], node.get('name', {}).get('value', '')) for node in tree if not node['ignored']]
        return [entry for entry in found if entry[0] in roles]

    shown = names()
    tab.click('#open-settings')
    shown += names()
    assert roles <= {role for role, _ in shown}
    assert [entry for entry in shown if not entry[1]] == []
    expected = {'Actions for Hello', 'Conversation list', 'tiny: model information', 'Message', 'Rename', 'Export JSON'}
    expected |= {'Temperature', 'Top-p', 'Top-k', 'Min-p', 'Max tokens', 'Seed', 'API key', 'System prompt'}
    assert expected <= {name for _, name in shown}
    # Control: a button without a name is found.
    tab.press('Escape')
    tab.run('document.querySelector(".more").ariaLabel = " ", document.querySelector(".more").textContent = "", 0')
    assert [entry for entry in names() if not entry[1].strip()] != []


def focused(tab):
    return tab.run('document.activeElement.id || document.activeElement.className')


def test_the_drawer_of_a_phone(tab):
    tab.look(width=360, height=740, mobile=True)
    tab.until('!document.body.classList.contains("with-sidebar")')
    # A closed drawer receives no focus.
    assert tab.run('$("sidebar").inert && !$("page").inert')
    tab.click('#toggle-sidebar')
    assert focused(tab) == 'close-sidebar'
    assert tab.run('$("page").inert && $("toggle-sidebar").ariaExpanded === "true" && $("sidebar").role === "dialog"')
    assert tab.run('$("sidebar").getBoundingClientRect().right') <= 360
    tab.press('Escape')
    assert focused(tab) == 'toggle-sidebar'
    assert tab.run('$("sidebar").inert && !$("page").inert && $("toggle-sidebar").ariaExpanded === "false"')
    tab.click('#toggle-sidebar')
    tab.run('$("backdrop").click(), 0')
    assert tab.run('$("sidebar").inert')
    # A choice closes the drawer.
    send(tab, 'Hello')
    finished(tab, 1)
    tab.click('#new-narrow')
    assert tab.texts('.turn') == []
    tab.click('#toggle-sidebar')
    tab.click('.entry')
    assert tab.texts('.user .content') == ['Hello']
    assert tab.run('$("sidebar").inert && !$("page").inert')
    # On a wide screen the list stays open until the button closes it.
    tab.look(width=1280)
    tab.until('!$("sidebar").inert && !$("page").inert && $("sidebar").role === "navigation"')
    tab.click('#toggle-sidebar')
    assert tab.run('$("sidebar").inert && $("new-narrow").offsetWidth > 0')


def test_the_keyboard_reaches_the_list(tab):
    send(tab, 'First')
    finished(tab, 1)
    tab.run('document.body.focus(), document.querySelector(".skip").focus(), 0')
    order = []
    for _ in range(7):
        tab.press('Tab')
        order.append(focused(tab))
    names = ['new', 'entry', 'quiet more', 'export-all', 'toggle-sidebar', 'open-info', 'open-settings']
    assert order == names
    # Enter opens the actions; Escape closes them and returns the focus.
    tab.run('document.querySelector(".more").focus(), 0')
    tab.press('Enter')
    assert tab.run('document.querySelector(".more").ariaExpanded') == 'true'
    assert focused(tab) == 'quiet more'
    tab.press('Escape')
    assert tab.run('document.querySelector(".more").ariaExpanded') == 'false'
    assert focused(tab) == 'quiet more'


def test_touch_targets_are_large_enough(tab):
    send(tab, 'Hello')
    finished(tab, 1)
    tab.click('#conversations .more')
    script = (
        '[...document.querySelectorAll("button")].filter((one) => one.offsetWidth)'
        '.map((one) => Math.min(one.offsetWidth, one.offsetHeight))'
    )
    # The minimum of WCAG 2.2 level AA is 24 pixels.
    assert min(tab.run(script)) >= 24
