"""zstd with a limit: decompression never produces more than the caller allows, whatever a frame declares."""

from __future__ import annotations

import sys

from lakebed.core.errors import Invalid

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

WINDOW_LOG_MAX = 23  # 8 MiB: what stored formats allow, so that a frame cannot demand more memory


def compress(data: bytes, level: int | None = None) -> bytes:
    return zstd.compress(data, level)


def decompress(data: bytes | memoryview, bytes_max: int, *, what: str, window_log_max: int = WINDOW_LOG_MAX) -> bytes:
    """The content of exactly one frame. Raises Invalid, naming `what`, for other bytes and for more than the limit."""
    frame = zstd.ZstdDecompressor(options={zstd.DecompressionParameter.window_log_max: window_log_max})
    try:
        plain = frame.decompress(data, max_length=bytes_max + 1)
    except zstd.ZstdError as error:
        raise Invalid(f"{what} does not decompress: {error}") from error
    if len(plain) > bytes_max or not frame.eof or frame.unused_data:
        raise Invalid(f"{what} is truncated, has trailing bytes, or is larger than {bytes_max} bytes")
    return plain
