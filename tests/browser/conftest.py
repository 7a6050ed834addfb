"""A real browser, a real gateway, a real bucket. Where no browser is found the lane is skipped, in so many words."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from chromium import LAUNCH, found_browser

from console_yard import Yard, yard_on
from lakebed.embedded.endpoints import BucketEndpoints

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: make setup")

DEADLINE_MS = 120_000


@pytest.fixture(scope="session")
def yard(weed: BucketEndpoints, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Yard]:
    """One gateway for all tests, with a little of everything in its bucket."""
    if not found_browser():
        pytest.skip("no browser is found: install chromium, or set LAKEBED_TEST_BROWSER")
    with yard_on(weed, tmp_path_factory.mktemp("yard")) as made:
        made.seed()
        yield made


@pytest.fixture(scope="session")
def browser(yard: Yard) -> Iterator[sync_api.Browser]:
    with sync_api.sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=found_browser(), args=LAUNCH)
        yield opened
        opened.close()


class Tab:
    """A page that notices what it should not do: ask elsewhere, fail, complain, or ask its user by itself."""

    def __init__(self, page: sync_api.Page, url: str) -> None:
        self.page, self.url = page, url
        self.asked: list[str] = []
        self.complaints: list[str] = []
        page.set_default_timeout(DEADLINE_MS)
        page.on("request", lambda request: self.asked.append(request.url))
        page.on("console", lambda message: self._hear(message.type, message.text))
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("dialog", lambda dialog: (self.complaints.append(f"dialog {dialog.message}"), dialog.dismiss()))

    def _hear(self, kind: str, text: str) -> None:
        if kind == "error":
            self.complaints.append(text)

    def go(self, path: str) -> sync_api.Page:
        self.page.goto(f"{self.url}{path}")
        self.page.wait_for_selector("html[data-live]", state="attached")
        return self.page

    @property
    def elsewhere(self) -> list[str]:
        return [url for url in self.asked if not url.startswith((f"{self.url}/", "data:"))]


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
