"""Sends ticks to the service: parts beside each other, then the finalize, and exactly what a 409 names again.

A tick that was begun before is finalized first: the answer names the parts that are missing, and only those are sent.
Whatever is worth trying again is, with growing pauses; a 422 is for a person.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from pathlib import Path
from typing import Any

import httpx2
import msgspec

from lakebed.clock import Clock
from lakebed.errors import Conflict, Denied, Invalid, NotFound, TooLarge, Unavailable, Unprocessable
from lakebed.ids import Ids
from lakebed.settings import Secret
from lakebed.tick_manifest import read_manifest
from lakebed.ticks.model import Result
from lakebed.ticks.outbox import Outbox, Waiting
from lakebed.ticks.packing import CHUNK_BYTES, Packed

PARALLEL = 4
ROUNDS_MAX = 10  # times that a finalize may name parts before a person has to look
TRIES_MAX = 12  # tries of one request in a row; with the pauses below some ten minutes
PAUSE_BASE_S = 0.5
PAUSE_CAP_S = 60.0
TIMEOUT_S = 120.0


class FailedManual(Unprocessable):
    """The service will never take this tick as it is."""

    code = "failed_manual"


def client(url: str, org_id: str, secret: Secret) -> httpx2.AsyncClient:
    headers = {"x-api-key": org_id, "x-api-secret": secret.reveal()}
    return httpx2.AsyncClient(base_url=url, headers=headers, timeout=httpx2.Timeout(TIMEOUT_S, connect=10.0))


class Uploader:
    def __init__(
        self,
        http: httpx2.AsyncClient,
        *,
        clock: Clock,
        ids: Ids,
        parallel: int = PARALLEL,
        tries_max: int = TRIES_MAX,
        sent: Callable[[int], None] = lambda size_bytes: None,
    ) -> None:
        self._http, self._clock, self._ids, self._sent = http, clock, ids, sent
        self._lanes, self._tries_max = asyncio.Semaphore(parallel), tries_max

    async def drain(self, outbox: Outbox) -> dict[str, Result]:
        """Sends every ready tick of the outbox, oldest first; one that is refused for good is marked and left."""
        done: dict[str, Result] = {}
        for waiting in list(outbox.waiting()):
            if waiting.state == "ready" and (result := await self.deliver(outbox, waiting)) is not None:
                done[waiting.packed.tick_id] = result
                outbox.remove(waiting.packed.tick_id)
        return done

    async def deliver(self, outbox: Outbox, waiting: Waiting) -> Result | None:
        """Sends one tick that waits; None when it is refused for good, which is marked. It stays in the outbox.

        That it is under way is on disk before its first byte is sent: a tick that was begun is resumed, not begun anew.
        """
        begun = msgspec.structs.replace(waiting, tries=waiting.tries + 1)
        outbox.put(begun)
        try:
            return await self.upload(waiting.packed, resume=waiting.tries > 0)
        except FailedManual as error:
            outbox.put(begun.refused(str(error.detail.get("error_class", "")), error.message))
            return None

    async def upload(self, packed: Packed, *, resume: bool = False) -> Result:
        """Sends one tick until it is committed. Raises FailedManual, Denied, Invalid; Unavailable after many tries."""
        if not resume:
            await self._put_all(packed, packed.files)
        for _ in range(ROUNDS_MAX):
            answer = await self._try("POST", f"{_tick(packed)}/finalize", content=lambda: packed.manifest.encode())
            if answer.status_code == 200:
                return msgspec.json.decode(answer.content, type=Result)
            if answer.status_code == 409 and "missing" in (told := answer.json()):
                again = [*told["mismatched_sha"], *told.get("unlisted", ())]
                await asyncio.gather(*(self._try("DELETE", _part(packed, seq)) for seq in again))
                await self._put_all(packed, [*told["missing"], *told["mismatched_sha"]])
                continue
            raise _refusal(answer)
        raise FailedManual(f"tick {packed.tick_id} was still not whole after {ROUNDS_MAX} rounds")

    async def _put_all(self, packed: Packed, numbers: Iterable[int]) -> None:
        ended = await asyncio.gather(*(self._put(packed, seq) for seq in numbers), return_exceptions=True)
        for error in ended:
            if error is not None:
                raise error

    async def _put(self, packed: Packed, seq: int) -> None:
        part = next(part for part in read_manifest(packed.manifest.encode()).parts if part.file_seq == seq)
        file = Path(packed.files[seq])
        _unchanged(file, part.size)
        headers = {"x-sha256": part.sha256, "content-length": str(part.size)}
        async with self._lanes:
            answer = await self._try("PUT", _part(packed, seq), headers=headers, content=lambda: _chunks(file))
        if answer.status_code == 409:
            return  # another part stands there: the finalize names it, and it is deleted and put again
        if answer.status_code not in (200, 202):
            raise _refusal(answer)
        self._sent(part.size)

    async def _try(self, method: str, path: str, *, content: Callable[[], Any] | None = None, **more: Any) -> Any:
        """One request, tried again while that makes sense. A body is made anew for every try."""
        why = ""
        for tries in range(self._tries_max):
            pause_s = self._ids.jitter_s(tries, base_s=PAUSE_BASE_S, cap_s=PAUSE_CAP_S)
            try:
                answer = await self._http.request(method, path, content=content() if content else None, **more)
            except httpx2.TransportError as error:
                why = f"{type(error).__name__}: {error}"
            else:
                if not _again(method, answer):
                    return answer
                why = f"{answer.status_code} {_message(answer)}"
                pause_s = max(pause_s, min(PAUSE_CAP_S, float(answer.headers.get("retry-after", "0") or 0)))
            await self._clock.sleep(pause_s)
        raise Unavailable(
            f"{method} {path} failed {self._tries_max} times: {why}", hint="it stays in the outbox: resume"
        )


def _again(method: str, answer: httpx2.Response) -> bool:
    # A part whose bytes did not arrive as they were sent is damaged on the way, not at its source.
    damaged = method == "PUT" and answer.status_code == 422 and answer.json().get("error_class") == "sha_mismatch"
    return damaged or answer.status_code >= 500 or answer.status_code in (408, 425, 429)


def _refusal(answer: httpx2.Response) -> Exception:
    message, status = _message(answer), answer.status_code
    if status == 422:
        return FailedManual(message, hint="look at the manifest", error_class=answer.json().get("error_class", ""))
    kinds: dict[int, type[Exception]] = {401: Denied, 403: Denied, 404: NotFound, 409: Conflict, 413: TooLarge}
    return kinds.get(status, Invalid)(f"{status}: {message}")


def _message(answer: httpx2.Response) -> str:
    try:
        return str(msgspec.json.decode(answer.content)["message"])
    except (msgspec.DecodeError, KeyError, TypeError):
        return answer.text[:200]


def _unchanged(file: Path, size: int) -> None:
    """Raises FailedManual when the file is not what was packed; its hash is checked by the service."""
    try:
        found = file.stat().st_size
    except OSError as error:
        raise FailedManual(f"{file} cannot be read: {error.strerror}", error_class="file_gone") from error
    if found != size:
        raise FailedManual(f"{file} has changed since it was packed", error_class="file_changed")


async def _chunks(file: Path) -> AsyncIterator[bytes]:
    with file.open("rb") as source:
        while chunk := source.read(CHUNK_BYTES):
            yield chunk


def _tick(packed: Packed) -> str:
    return f"/v1/projects/{packed.project_id}/ticks/{packed.tick_id}"


def _part(packed: Packed, seq: int) -> str:
    return f"{_tick(packed)}/parts/{seq}"
