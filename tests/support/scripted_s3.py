"""An S3 server that misbehaves on cue: a small correct bucket, and a script of what goes wrong with which request.

Steps are consumed in order by the first request that matches their method and key. A step may answer any status,
with or without the request taking effect, hang, or reset the connection.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from email.utils import formatdate
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

from lakebed.store.settings import StoreSettings

REASONS = {200: "OK", 204: "No Content", 206: "Partial Content", 404: "Not Found", 409: "Conflict"}


@dataclass
class Step:
    """What happens to one request. `apply`: it takes effect although the answer says otherwise; status 0: no fault."""

    status: int = 200
    code: str = "InternalError"
    method: str = "PUT"
    key: str = ""
    apply: bool = False
    hang_s: float = 0.0
    reset: bool = False
    cut: bool = False  # the honest answer, ended in the middle of its body
    then: Callable[[ScriptedS3], None] | None = None  # what another client does right after this request


@dataclass
class Request:
    method: str
    key: str
    query: dict[str, list[str]]
    headers: dict[str, str]
    body: bytes


@dataclass
class ScriptedS3:
    """`async with ScriptedS3([...]) as server: connect(server.settings())`."""

    script: list[Step] = field(default_factory=list)
    ignore_conditions: bool = False
    objects: dict[str, bytes] = field(default_factory=dict)
    page_keys: int = 1000  # keys in one page of a listing
    seen: list[Request] = field(default_factory=list)
    parts: dict[int, bytes] = field(default_factory=dict)  # of the one upload under way
    port: int = 0

    async def __aenter__(self) -> ScriptedS3:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._server.close()

    def settings(self, **more: object) -> StoreSettings:
        values: dict[str, object] = {
            "url": "s3://scripted",
            "endpoint": f"http://127.0.0.1:{self.port}",
            "access_key_id": "key",
            "secret_access_key": "secret",
            "timeout_s": 30.0,  # a test whose step hangs takes a shorter one; elsewhere a pause is no lost answer
            "retries": 2,
            "retry_timeout_s": 60.0,
        }
        return StoreSettings.of(values | more)

    def count(self, method: str, key: str = "") -> int:
        return sum(1 for request in self.seen if request.method == method and key in request.key)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while request := await _read(reader):
                self.seen.append(request)
                step = self._next_step(request)
                if step is None:
                    await _answer(writer, request, *self._apply(request))
                    continue
                if step.cut or step.status == 0:  # the honest answer
                    await _answer(writer, request, *self._apply(request), cut=step.cut)
                    if step.then is not None:
                        step.then(self)
                    if step.cut:
                        return
                    continue
                if step.apply:
                    self._apply(request)
                if step.then is not None:
                    step.then(self)
                if step.hang_s:
                    await asyncio.sleep(step.hang_s)
                if step.reset:
                    writer.transport.abort()
                    return
                await _answer(writer, request, step.status, {}, _error(step.code, request.key))
        except (ConnectionError, asyncio.IncompleteReadError):
            return
        finally:
            writer.close()

    def _next_step(self, request: Request) -> Step | None:
        for step in self.script:
            if step.method == request.method and step.key in request.key:
                self.script.remove(step)
                return step
        return None

    def _apply(self, request: Request) -> tuple[int, dict[str, str], bytes]:
        held = self.objects.get(request.key)
        if "uploads" in request.query:
            return 200, {}, b"<InitiateMultipartUploadResult><UploadId>1</UploadId></InitiateMultipartUploadResult>"
        if "partNumber" in request.query:
            self.parts[int(request.query["partNumber"][0])] = request.body
            return 200, {"ETag": _etag(request.body)}, b""
        if "uploadId" in request.query and request.method == "POST":
            whole = self.objects[request.key] = b"".join(self.parts[number] for number in sorted(self.parts))
            reported = f"<ETag>{escape(_etag(whole))}</ETag>"
            return 200, {}, f"<CompleteMultipartUploadResult>{reported}</CompleteMultipartUploadResult>".encode()
        if request.method == "PUT":
            if not self.ignore_conditions:
                if request.headers.get("if-none-match") == "*" and held is not None:
                    return 412, {}, _error("PreconditionFailed", request.key)
                match = request.headers.get("if-match")
                if match is not None and (held is None or _etag(held) != match):
                    return 412, {}, _error("PreconditionFailed", request.key)
            self.objects[request.key] = request.body
            return 200, {"ETag": _etag(request.body)}, b""
        if request.method == "DELETE":
            self.objects.pop(request.key, None)
            return 204, {}, b""
        if "list-type" in request.query:
            return 200, {"Content-Type": "application/xml"}, self._list(request)
        if held is None:
            return 404, {}, _error("NoSuchKey", request.key)
        headers = {"ETag": _etag(held), "Last-Modified": formatdate(usegmt=True)}
        if (span := request.headers.get("range")) is None:
            return 200, headers, held
        first, last = (int(each) for each in span.removeprefix("bytes=").split("-"))
        if first >= len(held):
            return 416, {}, _error("InvalidRange", request.key)
        body = held[first : last + 1]
        return 206, headers | {"Content-Range": f"bytes {first}-{first + len(body) - 1}/{len(held)}"}, body

    def _list(self, request: Request) -> bytes:
        prefix = request.query.get("prefix", [""])[0]
        after = request.query.get("continuation-token", request.query.get("start-after", [""]))[0]
        keys = sorted(key for key in self.objects if key.startswith(prefix) and key > after)
        page = keys[: self.page_keys]
        rows = "".join(
            f"<Contents><Key>{escape(key)}</Key><LastModified>2026-01-01T00:00:00.000Z</LastModified>"
            f"<ETag>{escape(_etag(self.objects[key]))}</ETag><Size>{len(self.objects[key])}</Size></Contents>"
            for key in page
        )
        more = len(keys) > len(page)
        token = f"<NextContinuationToken>{escape(page[-1])}</NextContinuationToken>" if more else ""
        cut_off = f"<IsTruncated>{str(more).lower()}</IsTruncated>{token}"
        return f"<ListBucketResult>{cut_off}{rows}</ListBucketResult>".encode()


def _etag(data: bytes) -> str:
    return f'"{hashlib.md5(data).hexdigest()}"'


def _error(code: str, key: str) -> bytes:
    return f"<Error><Code>{code}</Code><Message>scripted</Message><Resource>{escape(key)}</Resource></Error>".encode()


async def _read(reader: asyncio.StreamReader) -> Request | None:
    line = await reader.readline()
    if not line:
        return None
    method, target, _ = line.decode().split(" ", 2)
    headers: dict[str, str] = {}
    while (header := await reader.readline()) not in (b"\r\n", b""):
        name, _, value = header.decode().partition(":")
        headers[name.strip().lower()] = value.strip()
    body = await reader.readexactly(int(headers.get("content-length", "0")))
    parts = urlsplit(target)
    key = unquote(parts.path).lstrip("/").partition("/")[2]
    return Request(method, key, parse_qs(parts.query, keep_blank_values=True), headers, body)


async def _answer(
    writer: asyncio.StreamWriter,
    request: Request,
    status: int,
    headers: dict[str, str],
    body: bytes,
    *,
    cut: bool = False,
) -> None:
    lines = [f"HTTP/1.1 {status} {REASONS.get(status, 'Scripted')}", f"Content-Length: {len(body)}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    sent = b"" if request.method == "HEAD" else body[: len(body) // 2] if cut else body
    writer.write(("\r\n".join(lines) + "\r\n\r\n").encode() + sent)
    await writer.drain()
