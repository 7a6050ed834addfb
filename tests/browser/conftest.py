"""A real browser, a real gateway, a real bucket. Where no browser is found the lane is skipped, in so many words."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from lakebed.embedded.endpoints import BucketEndpoints
from support.browser_tab import Tab, sync_api
from support.chromium import LAUNCH, found_browser
from support.console_stack import Yard, yard_on


@pytest.fixture(scope="session")
def executable() -> str:
    return found_browser() or pytest.skip("no browser is found: install chromium, or set LAKEBED_TEST_BROWSER")


@pytest.fixture(scope="session")
def yard(executable: str, weed: BucketEndpoints, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Yard]:
    """One gateway for all tests, with a little of everything in its bucket."""
    with yard_on(weed, tmp_path_factory.mktemp("yard")) as made:
        made.seed()
        yield made


@pytest.fixture(scope="module")
def browser(executable: str) -> Iterator[sync_api.Browser]:
    """One browser for each file: Playwright's event loop would not let the session's fixtures run theirs after it."""
    with sync_api.sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=executable, args=LAUNCH)
        yield opened
        opened.close()


@pytest.fixture
def tab(browser: sync_api.Browser, yard: Yard) -> Iterator[Tab]:
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    yield Tab(context.new_page(), yard.url)
    context.close()


@pytest.fixture
def phone(browser: sync_api.Browser, yard: Yard) -> Iterator[Tab]:
    context = browser.new_context(viewport={"width": 390, "height": 844}, has_touch=True, is_mobile=True)
    yield Tab(context.new_page(), yard.url)
    context.close()
