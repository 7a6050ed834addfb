"""The fast path of a PUT: its signature, and the stores it applies to."""

from __future__ import annotations

import hashlib
from urllib.parse import quote

import msgspec
import pytest
from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials
from hypothesis import given
from hypothesis import strategies as st

from lakebed.core import errors as kinds
from lakebed.core.http_connection import HttpResponse
from lakebed.core.settings import Secret
from lakebed.store.fast import puts
from lakebed.store.fast.puts import UNRESERVED, PutClient, Signer
from lakebed.store.settings import StoreSettings

KEYS = st.text(st.characters(exclude_categories=("Cs", "Cc")), min_size=1, max_size=40)
PLAIN = StoreSettings(
    url="s3://lake", endpoint="http://10.0.0.7:8333", access_key_id=Secret("id"), secret_access_key=Secret("secret")
)


@given(key=KEYS, data=st.binary(max_size=64))
def test_a_head_is_signed_as_the_reference_signs_it(key: str, data: bytes) -> None:
    """The signature of any key and any bytes is the one that botocore computes at the same time."""
    digest = hashlib.sha256(data).hexdigest()
    path = quote(f"/lake/{key}", safe=UNRESERVED)
    head = Signer("id", "secret", "eu-west-1", "10.0.0.7:8333").head(
        path, digest, len(data), b"if-match: x", 1_800_000_000
    )
    fields = dict(line.split(": ", 1) for line in head.decode().split("\r\n")[1:] if line)

    request = AWSRequest("PUT", f"http://10.0.0.7:8333{path}", data=data)
    request.headers["X-Amz-Content-SHA256"] = digest
    request.context["timestamp"] = fields["x-amz-date"]
    request.headers["X-Amz-Date"] = fields["x-amz-date"]
    auth = S3SigV4Auth(Credentials("id", "secret"), "s3", "eu-west-1")
    signed = auth.signature(auth.string_to_sign(request, auth.canonical_request(request)), request)

    assert fields["x-amz-date"] == "20270115T080000Z"
    assert fields["authorization"].endswith(f"SignedHeaders=host;x-amz-content-sha256;x-amz-date, Signature={signed}")


def test_a_signer_turns_with_the_day() -> None:
    """One signer signs for the day it is, also after midnight."""
    kept = Signer("id", "secret", "us-east-1", "h")

    before, after = kept.head("/b/k", "0", 0, b"c", 86_399), kept.head("/b/k", "0", 0, b"c", 86_400)

    assert after == Signer("id", "secret", "us-east-1", "h").head("/b/k", "0", 0, b"c", 86_400)
    assert (b"19700101/us-east-1" in before, b"19700102/us-east-1" in after) == (True, True)


def test_the_fast_path_is_for_plain_stores_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """TLS, other kinds of stores, keys from the environment and a proxy in between use obstore."""
    monkeypatch.delenv("http_proxy", raising=False)
    monkeypatch.delenv("HTTP_PROXY", raising=False)
    assert PutClient.applies(PLAIN)
    assert not PutClient.applies(StoreSettings(url="s3://lake"))
    assert not PutClient.applies(StoreSettings(url="s3://lake", endpoint="http://10.0.0.7:8333"))
    assert not PutClient.applies(
        StoreSettings(
            url="s3://lake", endpoint="https://s3.test", access_key_id=Secret("i"), secret_access_key=Secret("s")
        )
    )
    assert not PutClient.applies(msgspec.structs.replace(PLAIN, fast_path=False))
    monkeypatch.setenv("http_proxy", "http://10.9.9.9:3128")
    assert not PutClient.applies(PLAIN)


def test_a_missing_key_is_a_conflict_and_a_missing_bucket_is_not() -> None:
    """S3 and MinIO answer 404 NoSuchKey to a replace of an object that is gone: another truth, not a wrong bucket."""
    gone, absent = HttpResponse(), HttpResponse()
    gone.status, gone.body = 404, b"<Error><Code>NoSuchKey</Code></Error>"
    absent.status, absent.body = 404, b"<Error><Code>NoSuchBucket</Code></Error>"

    assert type(puts._error(gone, "key")) is kinds.Conflict
    assert type(puts._error(absent, "key")) is kinds.NotFound
