"""Actions of a user on the chat page, and the text that its model generates."""

REPLY = """# Counting

Do it **once**, with `Counter`:

1. Open the *file*.
2. Count <img src=x onerror=alert(1)>.

```python
def count(path): return a_name_that_is_so_long_that_no_line_of_a_phone_has_room_for_it_and_no_desk_either(path)
```

- A_word_that_is_so_long_that_no_line_of_a_phone_has_room_for_it_and_it_must_be_broken_somewhere
> so they say

"""
LENGTH = len(REPLY.encode())


def with_page(browser, url):
    """Opens the page without stored settings and conversations."""
    browser.look(width=1280)
    browser.open(url)
    browser.run('localStorage.clear(), sessionStorage.clear(), 0')
    browser.open(url)
    browser.faults.clear()
    browser.requests.clear()


def set_up(tab, **values):
    """Fills in the settings as a user does."""
    tab.click('#open-settings')
    tab.until('$("settings").open')
    for name, value in values.items():
        tab.run(f'document.querySelector("[name={name}]").value = "", 0')
        tab.click(f'[name={name}]')
        tab.type(str(value))
    tab.click('#settings .strong')
    tab.until('!$("settings").open')


def send(tab, text):
    """Sends a message."""
    tab.click('#prompt')
    tab.type(text)
    tab.press('Enter')


def finished(tab, count):
    """Waits until `count` responses are complete."""
    tab.until(f'!running && document.querySelectorAll(".assistant .stats").length === {count}')
