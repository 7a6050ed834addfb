"""A tab of a real browser."""

from __future__ import annotations

import pytest

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: make setup")


DEADLINE_MS = 120_000


class Tab:
    """A page that notices what it should not do: query elsewhere, fail, complain, or query its user by itself."""

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
