"""`put_all` for the backends that have nothing better than as many puts at once."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from lakebed.errors import LakebedError
from lakebed.meta.model import Entry, Put
from lakebed.meta.protocol import Meta


async def put_each(meta: Meta, puts: Sequence[Put]) -> list[Entry | LakebedError]:
    async def one(put: Put) -> Entry | LakebedError:
        try:
            return await meta.put(put.key, put.value, expected=put.expected, partition_key=put.partition_key)
        except LakebedError as error:
            return error

    return list(await asyncio.gather(*map(one, puts)))
