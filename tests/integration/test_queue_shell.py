"""The shell script of the demo, against a gateway: a consumer that is not Python."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest

from lakebed.queue.demo_http import SCRIPT, consumed


@pytest.mark.skipif(shutil.which("curl") is None, reason="the script needs curl")
async def test_a_shell_script_claims_stores_and_acks(tmp_path: Path) -> None:
    """With curl and sed alone: it takes the batches in order and acks each by its claim."""
    asked: list[str] = []
    left = [("0-1-0000000a", 7, "YQ=="), ("0-2-0000000b", 8, "Yg==")]

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        asked.append(head.split()[1])
        body = "{}"
        if head.split()[1] == "/claims":
            claim, sequence, value = left.pop(0)
            entries = f'[{{"key":"","value":"{value}"}}]'
            body = f'{{"batches":[{{"claim":"{claim}","shard":0,"sequence":{sequence},"entries":{entries}}}]}}'
        writer.write(f"HTTP/1.1 200 OK\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n{body}".encode())
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    script = tmp_path / "consume.sh"
    script.write_text(SCRIPT)
    (tmp_path / "found").mkdir()
    url, folder = f"http://127.0.0.1:{port}/claims", str(tmp_path / "found")
    child = await asyncio.create_subprocess_exec("sh", str(script), url, folder, "2")
    code = await asyncio.wait_for(child.wait(), 30)
    server.close()

    assert (0, ["a", "b"]) == (code, consumed(tmp_path / "found"))
    assert ["/claims", "/claims/0-1-0000000a/ack", "/claims", "/claims/0-2-0000000b/ack"] == asked
