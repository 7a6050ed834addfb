"""Where a browser is, if there is one: the system's Chromium or Chrome, or what LAKEBED_TEST_BROWSER names."""

from __future__ import annotations

import os
import shutil

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
LAUNCH = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]


def found_browser() -> str:
    return os.environ.get("LAKEBED_TEST_BROWSER", "") or next(filter(None, map(shutil.which, NAMES)), "")


if __name__ == "__main__":
    raise SystemExit(0 if found_browser() else 1)
