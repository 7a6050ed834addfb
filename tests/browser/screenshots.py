"""`make screenshots`: every page, light, dark and on a phone, from a real gateway with a little of everything in it."""

from __future__ import annotations

import asyncio
import sys
import tempfile
import threading
import time
from pathlib import Path
from urllib.parse import urlencode

from playwright.sync_api import Browser, sync_playwright

from lakebed.console.pages import PAGES
from lakebed.core.runtime import system_runtime
from lakebed.embedded.weed import Weed
from support.chromium import LAUNCH, found_browser
from support.console_stack import Yard, yard_on

OUT = Path(__file__).parents[2] / "docs/screenshots"
WIDE, PHONE = {"width": 1280, "height": 860}, {"width": 390, "height": 844}
MOVING_S = 50.0  # how long numbers move before the pictures are taken: the lake is sampled every 15 s
QUERY = "select city, count(*) as orders, sum(total) as total from silver.shop.orders group by city order by city"
SHOWN = {  # what is chosen on a page, where the page alone would show less
    "tables": f"?{urlencode({'table': 'silver/acme/shop/orders', 'sql': QUERY})}",
    "batches": "?metric=cpu",
    "search": "?q=orders",
}


def main(names: list[str]) -> None:
    browser_path = found_browser()
    if not browser_path:
        raise SystemExit("no browser is found: install chromium, or set LAKEBED_TEST_BROWSER")
    out = Path(names.pop(0)) if names and "/" in names[0] else OUT
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        server = Weed(Path(folder) / "weed", runtime=system_runtime())
        asyncio.run(server.start())
        try:
            with yard_on(server.endpoints, Path(folder)) as env, sync_playwright() as playwright:
                env.seed()
                browser = playwright.chromium.launch(executable_path=browser_path, args=LAUNCH)
                shoot(browser, env, out, names)
                browser.close()
        finally:
            asyncio.run(server.stop(grace_s=0.0))


def shoot(browser: Browser, env: Yard, out: Path, names: list[str]) -> None:
    done = threading.Event()
    threading.Thread(target=_send, args=(env, done), daemon=True).start()
    time.sleep(MOVING_S)
    for look, theme, size in (("light", "light", WIDE), ("dark", "dark", WIDE), ("phone", "light", PHONE)):
        context = browser.new_context(viewport=size, color_scheme=theme, device_scale_factor=1)  # type: ignore[arg-type]
        for page in PAGES:
            if names and page.name not in names:
                continue
            tab = context.new_page()
            tab.goto(f"{env.url}{page.path}{SHOWN.get(page.name, '')}")
            tab.wait_for_selector("html[data-live]", state="attached")
            tab.wait_for_timeout(900)
            tab.screenshot(path=out / f"{page.name}-{look}.png", full_page=True)
            tab.close()
        context.close()
    done.set()


def _send(env: Yard, done: threading.Event) -> None:
    number = 1
    while not done.wait(0.4):
        env.send(number)
        number += 1


if __name__ == "__main__":
    main(sys.argv[1:])
