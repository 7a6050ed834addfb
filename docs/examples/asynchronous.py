"""The same lake from asyncio: python docs/examples/asynchronous.py"""

from __future__ import annotations

import asyncio

import lakebed


async def main() -> None:
    async with await lakebed.connect_async() as lake:
        await lake.topic("example-async").produce(["one", "two"])
        async for record in lake.topic("example-async").consume():
            print(record.offset, record.text)


asyncio.run(main())
