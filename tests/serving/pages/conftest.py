"""Fixtures: a server with a fake engine, and a browser with its page."""

import pytest

from tests.serving.devtools import Tab
from tests.serving.fake_engine import FakeEngine
from tests.serving.pages.chat_tab import REPLY, with_page


@pytest.fixture(scope='module')
def engine():
    return FakeEngine(reply=REPLY, max_context=3000)


@pytest.fixture(scope='module')
def browser(tmp_path_factory):
    with Tab(tmp_path_factory.mktemp('browser')) as tab:
        yield tab


@pytest.fixture
def tab(browser, server, engine):
    """Opens a new page, and checks afterwards that no errors occurred."""
    with_page(browser, server.url)
    yield browser
    engine.open.set()
    assert browser.faults == []
    # Exports are `blob:` URLs.
    requested = [url for url in browser.requests if not url.startswith('blob:')]
    assert {url.removeprefix(server.url).partition('/v1')[0] for url in requested} <= {'/', ''}
