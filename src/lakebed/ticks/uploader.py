"""Sends ticks to the service: parts in parallel, then the finalize, and again exactly the parts that a 409 names.

A tick that was started before is finalized first: the response names the missing parts, and only those are sent.
Temporary errors are retried with growing pauses; a 422 needs a person. So does a tick that the service keeps answering
with another error (a 500, a 400) for an hour, while a service that is away or busy is waited for without a limit.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from pathlib import Path
from typing import Any

import httpx2
import msgspec

from lakebed.core.clock import now_ms
from lakebed.core.errors import (
    Conflict,
    Denied,
    Invalid,
    LakebedError,
    NotFound,
    TooLarge,
    Unavailable,
    Unprocessable,
)
from lakebed.core.retry import retry_after_s
from lakebed.core.runtime import Runtime
from lakebed.core.settings import Secret
from lakebed.core.tls import client_context
from lakebed.ticks.codec import read_manifest
from lakebed.ticks.model import FinalizeResult
from lakebed.ticks.outbox import Outbox, OutboxTick
from lakebed.ticks.packing import CHUNK_BYTES, PackedTick, sha256_of

PARALLEL = 4
ROUNDS_MAX = 10  # finalizes that may name parts before the tick is marked failed_manual
TRIES_MAX = 12  # attempts of one request; with the pauses below about ten minutes
PAUSE_BASE_S = 0.5
PAUSE_CAP_S = 60.0
TIMEOUT_S = 120.0
TEMPORARY = (408, 425, 429, 502, 503, 504)  # the service is away or busy: not about this tick
TOLD = (200, 202, 409, 422)  # a gateway answers these with a JSON object; a page is another's, and tells nothing
NOT_OURS = "not of a gateway: "
OF_THE_PROJECT = (401, 403)  # the same for all its ticks, until an operator changes the secret


class FailedManual(Unprocessable):
    """The service refused this tick: retrying it unchanged does not help."""

    code = "failed_manual"


def client(url: str, org_id: str, secret: Secret, ca_file: Path | None = None) -> httpx2.AsyncClient:
    """A gateway's certificate is verified with the authorities in `ca_file`, else with the system's."""
    headers = {"x-api-key": org_id, "x-api-secret": secret.reveal()}
    timeout = httpx2.Timeout(TIMEOUT_S, connect=10.0)
    return httpx2.AsyncClient(base_url=url, headers=headers, timeout=timeout, verify=client_context(ca_file))


class Uploader:
    def __init__(
        self,
        http: httpx2.AsyncClient,
        runtime: Runtime,
        *,
        parallel: int = PARALLEL,
        tries_max: int = TRIES_MAX,
        sent: Callable[[int], None] = lambda size_bytes: None,
    ) -> None:
        self._http, self._clock, self._ids, self._sent = http, runtime.clock, runtime.ids, sent
        self._slots, self._tries_max = asyncio.Semaphore(parallel), tries_max

    async def drain(self, outbox: Outbox) -> dict[str, FinalizeResult]:
        """Sends every ready tick of the outbox, oldest first; a refused one is marked and stays.

        A tick that fails alone does not stop the others: its error is raised at the end. A service that is away does.
        """
        done: dict[str, FinalizeResult] = {}
        failed: LakebedError | None = None
        for waiting in list(outbox.waiting()):
            if waiting.state != "ready":
                continue
            try:
                result = await self.deliver(outbox, waiting)
            except LakebedError as error:
                if is_away(error):
                    raise
                failed = error
                continue
            if result is not None:
                done[waiting.packed.tick_id] = result
                outbox.remove(waiting.packed.tick_id)
        if failed is not None:
            raise failed
        return done

    async def deliver(self, outbox: Outbox, waiting: OutboxTick) -> FinalizeResult | None:
        """Sends one tick that waits; None when it was refused, which is marked. It stays in the outbox.

        The attempt is recorded on disk before the first byte is sent: a tick that was started is resumed. A tick that
        the service keeps answering with an error of its own becomes failed_manual after an hour of it.
        """
        begun = msgspec.structs.replace(waiting, tries=waiting.tries + 1)
        outbox.put(begun)
        try:
            return await self.upload(
                waiting.packed,
                resume=waiting.tries > 0,
                attempted=lambda seq: outbox.attempt(waiting.packed.tick_id, seq),
            )
        except FailedManual as error:
            outbox.put(begun.refused(str(error.detail.get("error_class", "")), error.message))
            return None
        except LakebedError as error:
            if is_away(error) or error.detail.get("status") in (*TEMPORARY, *OF_THE_PROJECT):
                raise  # not of this tick: it waits without a limit
            counted = begun.refused_again(error.message, now_ms=now_ms(self._clock))
            outbox.put(counted)
            if counted.state == "failed_manual":
                return None
            raise

    async def upload(
        self, packed: PackedTick, *, resume: bool = False, attempted: Callable[[int], None] = lambda seq: None
    ) -> FinalizeResult:
        """Sends one tick until it is committed. Raises FailedManual, Denied, Invalid; Unavailable after retries.

        `attempted` is called with a part's number before each attempt to send it.
        """
        if not resume:
            await self._put_all(packed, packed.files, attempted)
        for _ in range(ROUNDS_MAX):
            answer = await self._try("POST", f"{_tick(packed)}/finalize", content=lambda: packed.manifest.encode())
            if answer.status_code == 200:
                return _committed(answer)
            if answer.status_code == 409 and "missing" in (parts := answer.json()):
                again = [*parts["mismatched_sha"], *parts.get("unlisted", ())]
                await asyncio.gather(*(self._try("DELETE", _part(packed, seq)) for seq in again))
                await self._put_all(packed, [*parts["missing"], *parts["mismatched_sha"]], attempted)
                continue
            raise _refusal(answer)
        raise FailedManual(f"tick {packed.tick_id} was still incomplete after {ROUNDS_MAX} finalizes")

    async def _put_all(self, packed: PackedTick, numbers: Iterable[int], attempted: Callable[[int], None]) -> None:
        ended = await asyncio.gather(*(self._put(packed, seq, attempted) for seq in numbers), return_exceptions=True)
        for error in ended:
            if error is not None:
                raise error

    async def _put(self, packed: PackedTick, seq: int, attempted: Callable[[int], None]) -> None:
        part = next(part for part in read_manifest(packed.manifest.encode()).parts if part.file_seq == seq)
        file = Path(packed.files[seq])
        _unchanged(file, part.size)
        headers = {"x-sha256": part.sha256, "content-length": str(part.size)}

        def content() -> AsyncIterator[bytes]:
            attempted(seq)
            return _chunks(file)

        async def damaged(answer: httpx2.Response) -> bool:
            """Whether the bytes were damaged in transit. Raises FailedManual when the file itself has changed."""
            if answer.status_code != 422 or answer.json().get("error_class") != "sha_mismatch":
                return False
            if await asyncio.to_thread(sha256_of, file) != part.sha256:
                raise FailedManual(f"{file} has changed since it was packed", error_class="file_changed")
            return True

        async with self._slots:
            answer = await self._try("PUT", _part(packed, seq), headers=headers, content=content, again=damaged)
        if answer.status_code == 409:
            return  # another part has this number: the finalize names it, and it is deleted and sent again
        if answer.status_code not in (200, 202):
            raise _refusal(answer)
        self._sent(part.size)

    async def _try(
        self,
        method: str,
        path: str,
        *,
        content: Callable[[], Any] | None = None,
        again: Callable[[httpx2.Response], Awaitable[bool]] | None = None,
        **more: Any,
    ) -> Any:
        """One request with retries. The body is created again for every attempt; `again` names more to retry."""
        why, status = "", dict[str, int]()
        for tries in range(self._tries_max):
            status = {}
            pause_s = self._ids.jitter_s(tries, base_s=PAUSE_BASE_S, cap_s=PAUSE_CAP_S)
            try:
                answer = await self._http.request(method, path, content=content() if content else None, **more)
            except httpx2.TransportError as error:
                why = f"{type(error).__name__}: {error}"
            else:
                temporary = answer.status_code >= 500 or answer.status_code in TEMPORARY
                foreign = method != "DELETE" and answer.status_code in TOLD and not isinstance(_json(answer), dict)
                if not temporary and not foreign and not (again and await again(answer)):
                    return answer
                status = {} if foreign else {"status": answer.status_code}
                why = f"{answer.status_code} {NOT_OURS if foreign else ''}{_message(answer)}"
                asked_s = retry_after_s(answer.headers.get("retry-after", ""), self._clock.now_ns() / 1e9) or 0.0
                pause_s = max(pause_s, min(PAUSE_CAP_S, asked_s))
            await self._clock.sleep(pause_s)
        raise Unavailable(
            f"{method} {path} failed {self._tries_max} times: {why}",
            hint="the tick stays in the outbox: lakebed ticks resume",
            **status,
        )


def is_away(error: LakebedError) -> bool:
    """Whether the service could not be reached: then no other tick can be sent either."""
    return isinstance(error, Unavailable) and "status" not in error.detail


def _refusal(answer: httpx2.Response) -> Exception:
    message, status = _message(answer), answer.status_code
    if status == 422:
        return FailedManual(
            message, hint="fix the manifest or the files", error_class=answer.json().get("error_class", "")
        )
    kinds: dict[int, type[LakebedError]] = {401: Denied, 403: Denied, 404: NotFound, 409: Conflict, 413: TooLarge}
    return kinds.get(status, Invalid)(f"{status}: {message}", status=status)


def _committed(answer: httpx2.Response) -> FinalizeResult:
    """Raises Unavailable for a 200 that no gateway gives: it commits nothing."""
    try:
        return msgspec.json.decode(answer.content, type=FinalizeResult)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise Unavailable(f"200 {NOT_OURS}{_message(answer)}", hint="check the address of the service") from error


def _json(answer: httpx2.Response) -> Any:
    """None for what is no JSON, such as a proxy's page."""
    try:
        return msgspec.json.decode(answer.content)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


def _message(answer: httpx2.Response) -> str:
    found = _json(answer)
    return str(found["message"]) if isinstance(found, dict) and "message" in found else answer.text[:200]


def _unchanged(file: Path, size: int) -> None:
    """Raises FailedManual when the file has changed since it was packed; the service checks its hash."""
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


def _tick(packed: PackedTick) -> str:
    return f"/v1/projects/{packed.project_id}/ticks/{packed.tick_id}"


def _part(packed: PackedTick, seq: int) -> str:
    return f"{_tick(packed)}/parts/{seq}"
