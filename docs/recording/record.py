"""Records a real run of commands and draws it as an animated SVG that needs no script.

    python docs/recording/record.py run        # runs the commands of COMMANDS, writes quickstart.json and the picture
    python docs/recording/record.py draw       # draws the picture again from quickstart.json

A recording is a list of [seconds, text]: what was typed or printed, and when. Waits longer than PAUSE_MAX_S are cut to
it in the picture, which states the real time of the run.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from html import escape
from pathlib import Path

HERE = Path(__file__).parent
COMMANDS = (
    "lakebed up --detach",
    "lakebed status",
    """echo '{"metric":"room_temperature","value":21.5}' | lakebed agent run --stdin 2>&1 | tail -n 1""",
    "lakebed batches query room_temperature --latest",
    "printf 'first\\nsecond\\n' | lakebed topics produce greetings",
    "lakebed topics consume greetings --group readers",
    "lakebed topics groups",
    "lakebed queue put --value hello",
    "lakebed queue drain",
    "lakebed batches query room_temprature",
    "lakebed down",
)
PAUSE_MAX_S = 1.5
HOLD_S = 6.0  # the last picture, before it begins again
COLUMNS, LINES, CHAR, LINE = 100, 30, 8.4, 18


def run() -> list[tuple[float, str]]:
    """The commands in an empty folder, each with what it printed and when."""
    events: list[tuple[float, str]] = []
    started_s = time.monotonic()
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    env = {name: value for name, value in os.environ.items() if not name.startswith("LAKEBED_")} | {"PATH": path}
    with tempfile.TemporaryDirectory(prefix="lakebed-recording-") as folder:
        try:
            for command in COMMANDS:
                events.append((time.monotonic() - started_s, f"$ {command}"))
                shell = subprocess.Popen(
                    ["bash", "-c", command],
                    cwd=folder,
                    env=env,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
                assert shell.stdout is not None
                for line in shell.stdout:
                    events.append((time.monotonic() - started_s, line.rstrip("\n").replace(folder, "~").expandtabs(16)))
                shell.wait()
        finally:
            subprocess.run(["lakebed", "down"], cwd=folder, env=env, capture_output=True, check=False)
    return events


def svg(events: list[tuple[float, str]]) -> str:
    """One group a moment: it is visible from its time to the next, so that the picture scrolls like a terminal."""
    times, at_s, before_s = [], 0.0, 0.0
    for real_s, _ in events:
        at_s += min(real_s - before_s, PAUSE_MAX_S)
        before_s = real_s
        times.append(at_s)
    total_s = times[-1] + HOLD_S
    width, height = COLUMNS * CHAR + 32, LINES * LINE + 64
    title = f"lakebed: a real run of {events[-1][0]:.0f} s; waits are cut to {PAUSE_MAX_S:g} s"
    frames, rules = [], []
    last = [index for index in range(len(events)) if index + 1 == len(events) or times[index + 1] > times[index] + 0.02]
    for number, index in enumerate(last):
        begin_s = times[index] if number else 0.0
        end_s = times[last[number + 1]] if number + 1 < len(last) else total_s
        rules.append(_visible(number, 100 * begin_s / total_s, 100 * end_s / total_s))
        shown = events[max(0, index + 1 - LINES) : index + 1]
        rows = "".join(_line(row, text) for row, (_, text) in enumerate(shown))
        frames.append(f'<g style="animation:f{number} {total_s:.2f}s infinite step-end">{rows}</g>')
    style = (
        "text{font-family:ui-monospace,monospace;font-size:13px;fill:#d6d9de;white-space:pre}.c{fill:#8fc7ff}"
        ".t{fill:#8a919c}g{opacity:0}" + "".join(rules)
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height}" role="img" '
        f'aria-label="{escape(title)}"><style>{style}</style><rect width="100%" height="100%" rx="8" fill="#16181c"/>'
        f'<text class="t" x="16" y="28">{escape(title)}</text>{"".join(frames)}</svg>\n'
    )


def _visible(number: int, begin: float, end: float) -> str:
    """Visible between two percentages of the whole animation; the last one stays until the end."""
    if end >= 100:
        return f"@keyframes f{number}{{0%{{opacity:0}}{begin:.3f}%,100%{{opacity:1}}}}"
    return f"@keyframes f{number}{{0%{{opacity:0}}{begin:.3f}%{{opacity:1}}{end:.3f}%,100%{{opacity:0}}}}"


def _line(row: int, text: str) -> str:
    kind = " class='c'" if text.startswith("$ ") else ""
    return f"<text x='16' y='{58 + LINE * row}'{kind}>{escape(text[:COLUMNS])}</text>"


if __name__ == "__main__":
    stored = HERE / "quickstart.json"
    if sys.argv[1:] == ["run"]:
        lines = ",\n".join(json.dumps([round(at, 2), text]) for at, text in run())
        stored.write_text(f"[\n{lines}\n]\n")
    (HERE / "quickstart.svg").write_text(svg([(at, text) for at, text in json.loads(stored.read_text())]))
