"""The part of the queue's scenario that speaks HTTP: a producer that repeats its calls, and two consumers.

One consumer is a shell script with curl; the other is written in Python and uses no code of the queue.
"""

from __future__ import annotations

import base64
import os
import shutil
from pathlib import Path
from typing import Any

from lakebed.core.clock import SystemClock
from lakebed.demo.scenario import ScenarioContext, exited
from lakebed.embedded.child import Child

CALLS = 10
BY_SHELL = 5
DEADLINE_S = 60.0
SCRIPT = r"""#!/bin/sh
# Takes batches from a queue over HTTP: claim, store, ack. Usage: consume.sh CLAIMS_URL FOLDER COUNT
set -eu
url=$1 folder=$2 left=$3
while [ "$left" -gt 0 ]; do
    found=$(curl -fsS -X POST "$url" -H 'content-type: application/json' -d '{"consumer": "shell", "wait_s": 5}')
    claim=$(printf %s "$found" | sed -n 's/.*"claim":"\([^"]*\)".*/\1/p')
    [ -n "$claim" ] || continue
    sequence=$(printf %s "$found" | sed -n 's/.*"sequence":\([0-9]*\).*/\1/p')
    printf %s "$found" | sed -n 's/.*"value":"\([^"]*\)".*/\1/p' > "$folder/$sequence"
    curl -fsS -X POST "$url/$claim/ack" > /dev/null
    left=$((left - 1))
done
"""


async def over_http(stage: ScenarioContext, name: str) -> None:
    """Entries that were sent twice are consumed once, in order, by two programs that share nothing but HTTP."""
    import httpx2

    async with httpx2.AsyncClient(base_url=stage.gateway_url, timeout=20.0) as client:
        answers = [await _put(client, name, number) for number in range(CALLS) for _ in range(2)]
        repeated = sum(answer["repeated"] for answer in answers)
        stage.check("a repeated call with the same key enqueues nothing", repeated == CALLS, f"{repeated} repeated")
        found = await _by_shell(stage, name) if shutil.which("curl") else []
        by_shell = len(found)
        found += await _by_python(client, name)
    wanted = [f"call-{number}" for number in range(CALLS)]
    stage.check(
        "HTTP consumers get every entry once, in order",
        found == wanted,
        f"{by_shell} by a shell script with curl, {len(found) - by_shell} by Python",
    )


async def _put(client: Any, name: str, number: int) -> dict[str, Any]:
    entry = {"key": "", "value": base64.b64encode(f"call-{number}".encode()).decode()}
    headers = {"idempotency-key": f"call-{number}"}
    return dict((await client.post(f"/v1/queues/{name}/entries", json=[entry], headers=headers)).json())


async def _by_shell(stage: ScenarioContext, name: str) -> list[str]:
    folder = stage.folder / "demo" / f"{name}-consumed"
    folder.mkdir(parents=True)
    script = folder.with_suffix(".sh")
    script.write_text(SCRIPT, encoding="utf-8")
    child = Child("shell-consumer", stage.folder / "demo" / "shell-consumer.log", clock=SystemClock())
    claims = f"{stage.gateway_url}/v1/queues/{name}/claims"
    child.start([shutil.which("sh") or "sh", str(script), claims, str(folder), str(BY_SHELL)], env=os.environ)
    code = await exited(child, DEADLINE_S)
    stage.check("the shell script finished", code == 0, f"exit code {code}")
    return consumed(folder)


def consumed(folder: Path) -> list[str]:
    """What the script stored, in order of sequence."""
    files = sorted(folder.iterdir(), key=lambda path: int(path.name))
    return [base64.b64decode(path.read_text()).decode() for path in files]


async def _by_python(client: Any, name: str) -> list[str]:
    found: list[str] = []
    claims = f"/v1/queues/{name}/claims"
    while batches := (await client.post(claims, json={"consumer": "python", "max": 2})).json()["batches"]:
        for batch in batches:
            found += [base64.b64decode(entry["value"]).decode() for entry in batch["entries"]]
            await client.post(f"{claims}/{batch['claim']}/ack")
    return found
