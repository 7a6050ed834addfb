"""The bucket as Spark tasks read it: an answer that is cut short is requested again, never taken for the object."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

import pytest

from lakebed.core.errors import Corrupt, NotFound, Unavailable
from lakebed.store.reader import BucketReader
from lakebed.store.settings import StoreSettings

DATA = bytes(range(256)) * 40
PAGE = (
    b"<?xml version='1.0'?><ListBucketResult><IsTruncated>false</IsTruncated><Contents><Key>a</Key>"
    b"<LastModified>2026-01-01T00:00:00.000Z</LastModified><ETag>x</ETag><Size>1</Size></Contents></ListBucketResult>"
)


class Server:
    """Answers each GET by the next of its steps; the last one stays."""

    def __init__(self) -> None:
        self.steps, self.asked = ["whole"], 0
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                outer.asked += 1
                step = outer.steps.pop(0) if len(outer.steps) > 1 else outer.steps[0]
                body = PAGE if "list-type" in self.path else DATA
                status, asked = 200, self.headers.get("Range", "")
                if asked:
                    first, last = map(int, asked.removeprefix("bytes=").split("-"))
                    status, body = 206, body[first : last + 1]
                if step == "missing":
                    self.answer(404, b"<Error><Code>NoSuchKey</Code></Error>")
                elif asked and not body:
                    self.answer(416, b"<Error><Code>InvalidRange</Code></Error>")
                elif step == "chunked cut":
                    self.chunked(body[: len(body) // 2], end=False)
                elif step == "chunked":
                    self.chunked(body, end=True)
                elif step == "half xml":
                    self.answer(200, body[: len(body) // 2])
                else:
                    self.answer(status, body, cut=step == "cut")

            def answer(self, status: int, body: bytes, *, cut: bool = False) -> None:
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body[: len(body) // 2] if cut else body)
                self.close_connection = cut

            def chunked(self, body: bytes, *, end: bool) -> None:
                self.send_response(200)
                self.send_header("Transfer-Encoding", "chunked")
                self.end_headers()
                self.wfile.write(f"{len(body):x}\r\n".encode() + body + b"\r\n" + (b"0\r\n\r\n" if end else b""))
                self.close_connection = not end

            def log_message(self, *_: object) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.thread = threading.Thread(target=self.http.serve_forever, daemon=True)
        self.thread.start()

    def reader(self) -> BucketReader:
        values = {
            "url": "s3://b",
            "endpoint": f"http://127.0.0.1:{self.http.server_port}",
            "access_key_id": "key",
            "secret_access_key": "secret",
            "retries": 2,
        }
        return BucketReader(StoreSettings.of(values))


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    yield made
    made.http.shutdown()
    made.http.server_close()


@pytest.mark.parametrize("cut", ["cut", "chunked cut"])
def test_a_body_that_is_cut_short_is_asked_for_again(server: Server, cut: str) -> None:
    """Two answers end half-way, the third one is the object."""
    server.steps = [cut, cut, "whole"]

    assert DATA == server.reader().get("k", bytes_max=len(DATA))
    assert 3 == server.asked


@pytest.mark.parametrize("cut", ["cut", "chunked cut"])
def test_a_body_that_never_comes_whole_is_unavailable(server: Server, cut: str) -> None:
    """Not Corrupt, and not half the bytes; the number of tries has a limit."""
    server.steps = [cut]

    with pytest.raises(Unavailable):
        server.reader().get("k", bytes_max=len(DATA))
    assert 3 == server.asked


@pytest.mark.parametrize("cut", ["cut", pytest.param("chunked cut", marks=pytest.mark.full), "half xml"])
def test_a_page_that_is_cut_short_is_asked_for_again(server: Server, cut: str) -> None:
    """Half a listing is none: what it leaves out would be taken for missing."""
    server.steps = [cut, "whole"]
    pages = [page.key for page in server.reader().walk("")]
    server.steps = [cut]

    assert [["a"]] == pages
    with pytest.raises(Unavailable):
        list(server.reader().walk(""))


def test_what_came_whole_is_judged_by_its_size(server: Server) -> None:
    """Exactly the limit is fine, one byte more is Corrupt, with a length in the answer or without."""
    for step in ("whole", "chunked"):
        server.steps = [step]
        assert DATA == server.reader().get("k", bytes_max=len(DATA))
        with pytest.raises(Corrupt):
            server.reader().get("k", bytes_max=len(DATA) - 1)
    server.steps = ["missing"]
    with pytest.raises(NotFound):
        server.reader().get("k", bytes_max=1)


@pytest.mark.parametrize("cut", ["cut", "chunked cut"])
def test_a_range_that_is_cut_short_is_asked_for_again(server: Server, cut: str) -> None:
    """Only an object that ends there is Corrupt: an audit would report one as damaged for a lost connection."""
    server.steps = [cut, "whole"]

    assert DATA[10:2010] == server.reader().get_range("k", 10, 2000)
    assert 2 == server.asked
    server.steps = [cut]
    with pytest.raises(Unavailable):
        server.reader().get_range("k", 10, 2000)


@pytest.mark.parametrize("start", [len(DATA) - 9, len(DATA), len(DATA) + 1])
def test_a_range_behind_the_objects_end_is_corrupt(server: Server, start: int) -> None:
    """Also where no byte of it is there, which S3 refuses: a truncated object stops no audit."""
    assert (b"", DATA[-9:]) == (server.reader().get_range("k", 7, 0), server.reader().get_range("k", len(DATA) - 9, 9))

    with pytest.raises(Corrupt, match="ends before"):
        server.reader().get_range("k", start, 10)


class Listed(NamedTuple):
    """One object, or one version or delete marker of one."""

    key: str
    version_id: str = ""
    marker: bool = False


class PagedBucket:
    """S3's listings over a fixed content, a few entries a page: tokens and markers as S3 gives them."""

    def __init__(self, content: Sequence[Listed], page: int, status: str = "") -> None:
        self.content, self.page, self.status = list(content), page, status

    def close(self) -> None:
        pass

    def get_bucket_versioning(self, **_: Any) -> Any:
        return {"Status": self.status} if self.status else {}

    def list_objects_v2(self, **asked: Any) -> Any:
        last = asked.get("ContinuationToken", "")
        found, more = self._page(asked, lambda each: each.key > last)
        return self._answer(found, more, "Contents") | ({"NextContinuationToken": _last_of(found)} if more else {})

    def list_object_versions(self, **asked: Any) -> Any:
        behind = (asked.get("KeyMarker", ""), asked.get("VersionIdMarker", "~"))
        found, more = self._page(asked, lambda each: (each.key, each.version_id) > behind)
        answer = self._answer(found, more, "Versions")
        if more:
            answer["NextKeyMarker"] = _last_of(found)
            if isinstance(found[-1], Listed):
                answer["NextVersionIdMarker"] = found[-1].version_id
        return answer

    def _page(self, asked: Any, behind: Callable[[Listed], bool]) -> tuple[list[Listed | str], bool]:
        prefix, delimiter = asked["Prefix"], asked.get("Delimiter", "")
        found: list[Listed | str] = []
        for each in self.content:
            rest = each.key.removeprefix(prefix)
            folder = prefix + rest.split("/")[0] + "/" if delimiter and "/" in rest else ""
            if not each.key.startswith(prefix) or not behind(each) or (folder and folder <= _folder_mark(asked)):
                continue
            if folder and folder in found:
                continue
            found.append(folder or each)
        size = min(self.page, asked["MaxKeys"])
        return found[:size], len(found) > size

    def _answer(self, found: list[Listed | str], more: bool, name: str) -> dict[str, Any]:
        listed = [each for each in found if isinstance(each, Listed)]
        rows = {
            name: [_row(each) | {"Size": 7, "ETag": "e"} for each in listed if not each.marker],
            "DeleteMarkers": [_row(each) for each in listed if each.marker],
            "CommonPrefixes": [{"Prefix": each} for each in found if isinstance(each, str)],
        }
        return {key: value for key, value in rows.items() if value} | {"IsTruncated": more}


def _row(each: Listed) -> dict[str, Any]:
    at = datetime(2026, 1, 1, microsecond=1, tzinfo=UTC)
    return {"Key": each.key, "LastModified": at} | ({"VersionId": each.version_id} if each.version_id else {})


def _last_of(found: list[Listed | str]) -> str:
    return found[-1].key if isinstance(found[-1], Listed) else found[-1] + "\U0010ffff"


def _folder_mark(asked: Any) -> str:
    return str(asked.get("KeyMarker", "") or asked.get("ContinuationToken", ""))


def reader_of(
    bucket: PagedBucket, monkeypatch: pytest.MonkeyPatch, *, versions: bool, prefix: str = ""
) -> BucketReader:
    monkeypatch.setattr("lakebed.store.admin.client", lambda *_, **__: bucket)
    return BucketReader(StoreSettings.of({"url": "s3://b", "prefix": prefix}), versions=versions)


def walked(reader: BucketReader, prefix: str = "", *, deep: bool = True) -> list[tuple[str, str | None, bool]]:
    return [
        row
        for page in reader.walk(prefix, deep=deep)
        for row in zip(page.key, page.version_id, page.is_delete_marker, strict=True)
    ]


@pytest.mark.parametrize("page", [1, 2, 3, 100])
@pytest.mark.parametrize("prefix", ["", "lake/one"])
def test_every_version_and_marker_is_listed_once_whatever_a_page_takes(
    monkeypatch: pytest.MonkeyPatch, page: int, prefix: str
) -> None:
    """A page may end between two versions of one key; keys are relative to the deployment's prefix."""
    root = f"{prefix}/" if prefix else ""
    mine = [Listed(f"{root}{key}", f"v{n}", n == 1) for key in ("a/1", "a/2", "b") for n in range(3)]
    bucket = PagedBucket(sorted([*mine, *([Listed("zz", "v0"), Listed("lake/other/a", "v0")] if prefix else [])]), page)
    reader = reader_of(bucket, monkeypatch, versions=True, prefix=prefix)

    found = walked(reader)

    assert sorted((each.key.removeprefix(root), each.version_id, each.marker) for each in mine) == sorted(found)
    assert 6 == len(walked(reader, "a/"))


@pytest.mark.parametrize("page", [1, 2, 100])
def test_a_listing_without_depth_gives_what_is_directly_in_the_folder(
    monkeypatch: pytest.MonkeyPatch, page: int
) -> None:
    """Over pages that hold only folders too; without versions there is no marker and no version."""
    bucket = PagedBucket([Listed(key) for key in ("d/a/1", "d/a/2", "d/b/1", "d/c", "d/e/1", "d/f")], page)
    reader = reader_of(bucket, monkeypatch, versions=False)

    assert [("d/c", None, False), ("d/f", None, False)] == walked(reader, "d/", deep=False)
    assert 6 == len(walked(reader, "d/"))


def test_folders_are_told_unless_there_are_too_many_for_one_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A page that is cut may hide some: then the folder is listed as one. Suspended versioning has versions too."""
    content = [Listed("lake/d/a/1"), Listed("lake/d/b/1"), Listed("lake/d/c")]
    whole = reader_of(PagedBucket(content, 100, "Suspended"), monkeypatch, versions=False, prefix="lake")
    assert ["d/a/", "d/b/"] == whole.folders("d/")
    assert whole.versioned()

    cut = reader_of(PagedBucket(content, 2), monkeypatch, versions=False, prefix="lake")
    assert (None, False) == (cut.folders("d/"), cut.versioned())


def test_a_page_has_sizes_times_and_etags_of_objects_and_none_of_markers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Times are whole nanoseconds; columns have one length."""
    bucket = PagedBucket([Listed("a", "v1"), Listed("a", "v2", marker=True)], 100)

    (page,) = reader_of(bucket, monkeypatch, versions=True).walk("")

    assert ([7, None], ["e", None]) == (page.size_bytes, page.etag)
    assert [1_767_225_600_000_001_000] * 2 == page.modified_ns
