"""`make screenshots`: every page, light, dark and on a phone, on the data of the demo.

Runs the demo and keeps its folder (or uses a folder of `lakebed demo --keep`), starts the stack on it again, sends a
little more so that the charts move, and takes the pictures. The demo's ticks have a prefix of their own in the bucket:
their pages are taken from a second gateway.

    make screenshots                                              the pictures of the documentation
    python tests/browser/screenshots.py --folder demo --out shots log tables   some pages, of a demo that was kept
"""

from __future__ import annotations

import argparse
import math
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from urllib.parse import urlencode

import httpx2
from playwright.sync_api import Browser, sync_playwright

import lakebed
from lakebed.console.pages import PAGES
from lakebed.embedded.endpoints import find
from support.chromium import LAUNCH, found_browser

OUT = Path(__file__).parents[2] / "docs/screenshots"
LOOKS: dict[str, tuple[str, dict[str, int]]] = {
    "light": ("light", {"width": 1280, "height": 860}),
    "dark": ("dark", {"width": 1280, "height": 860}),
    "phone": ("light", {"width": 390, "height": 844}),
}
IN_DOCS = {("overview", "dark"), ("overview", "phone"), ("ticks", "phone")}  # besides every page in light
MOVING_S = 90.0  # how long numbers move before the pictures are taken: the lake is sampled every 15 s
READY_S = 60.0
HEIGHT_MAX = 1600  # of a picture of the documentation
QUERY = "select country, orders, spent from gold.acme.shop.spent_by_country order by spent desc"
SHOWN = {  # what is chosen on a page, where the page alone would show less
    "tables": {"table": "silver/acme/shop/orders", "sql": QUERY, "profile": "1"},
    "batches": {"metric": "cpu", "match": "host=web-1", "span": "15m"},
    "log": {"topic": "orders"},
    "queue": {"queue": "resize"},
    "search": {"q": "demo"},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("pages", nargs="*", help="names of pages (default: all)")
    parser.add_argument("--folder", type=Path, help="folder of a demo that was kept")
    parser.add_argument("--out", type=Path, help="write every look of every page here, not into docs/screenshots")
    asked = parser.parse_args()
    if not (browser_path := found_browser()):
        raise SystemExit("no browser is found: install chromium, or set LAKEBED_TEST_BROWSER")
    out: Path = asked.out or OUT
    out.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        folder = asked.folder or Path(stack.enter_context(tempfile.TemporaryDirectory())) / "demo"
        if asked.folder is None:
            _run("demo", "--scale", "0.5", "--keep", str(folder))
        url = stack.enter_context(started(folder))
        stack.enter_context(traffic(folder))
        time.sleep(MOVING_S)
        browser = stack.enter_context(sync_playwright()).chromium.launch(executable_path=browser_path, args=LAUNCH)
        shoot(browser, url, out, asked.pages, everything=asked.out is not None)
        browser.close()


@contextmanager
def started(folder: Path) -> Iterator[str]:
    """The stack of the demo; the address of its gateway."""
    _run("up", "--dir", str(folder), "--detach", env={**os.environ, "LAKEBED_PIPELINE_WARM": "false"})
    try:
        yield find(folder).gateway
    finally:
        _run("down", "--dir", str(folder))


@contextmanager
def traffic(folder: Path) -> Iterator[None]:
    """Sends records, entries and samples until the end, as other programs would, past the console."""
    done = threading.Event()
    sender = threading.Thread(target=_send, args=(folder, done))
    sender.start()
    try:
        yield
    finally:
        done.set()
        sender.join(READY_S)


def _send(folder: Path, done: threading.Event) -> None:
    lake = lakebed.connect(dir=folder)
    number = 0
    keyed = ("topics", "produce", "payments", "--key", "customer-7", "--header", "trace=4bf92f35", "--dir", str(folder))
    _run(*keyed, text="".join(f'{{"order": {each}, "paid": true}}\n' for each in range(8)))
    while not done.wait(1.0):
        number += 1
        wave = 0.5 + 0.3 * math.sin(number / 9)
        orders = [{"id": number * 10 + each, "country": ("de", "fr", "br", "in")[each % 4]} for each in range(10)]
        lake.topic("orders").produce(orders)
        lake.batches.send(
            [{"metric": "cpu", "value": round(wave / host, 3), "labels": {"host": f"web-{host}"}} for host in (1, 2)]
        )
        if number % 2:
            lake.queue("resize").put(f"images/{number}.png")
        if number % 10 == 0:
            for record in lake.topic("orders").consume(group="billing"):
                record.commit()
    lake.close()


def shoot(browser: Browser, base: str, out: Path, names: list[str], *, everything: bool) -> None:
    for look, (theme, size) in LOOKS.items():
        context = browser.new_context(viewport=size, color_scheme=theme, device_scale_factor=1)  # type: ignore[arg-type]
        for page in PAGES:
            wanted = everything or look == "light" or (page.name, look) in IN_DOCS
            if (names and page.name not in names) or not wanted:
                continue
            tab = context.new_page()
            tab.goto(f"{base}{page.path}?{urlencode(_shown(base, page.name))}")
            tab.wait_for_selector("html[data-live]", state="attached")
            tab.wait_for_timeout(2500)
            file = out / f"{page.name}-{look}.png"
            if everything:
                tab.screenshot(path=file, full_page=True)
            else:
                height = min(HEIGHT_MAX, tab.evaluate("document.documentElement.scrollHeight"))
                tab.screenshot(
                    path=file, full_page=True, clip={"x": 0, "y": 0, "width": size["width"], "height": height}
                )
            tab.close()
        context.close()


def _shown(base: str, page: str) -> dict[str, str]:
    if page != "lifecycle":
        return SHOWN.get(page, {})
    rules = httpx2.get(f"{base}/lifecycle.json", timeout=READY_S, trust_env=False).json()["rules"]
    return {"bucket": rules[0]["bucket"], "preview": "1", "days": "2"} if rules else {}


def _run(*arguments: str, env: Mapping[str, str] | None = None, text: str | None = None) -> None:
    subprocess.run([sys.executable, "-m", "lakebed", *arguments], env=env, check=True, input=text, text=True)


if __name__ == "__main__":
    main()
