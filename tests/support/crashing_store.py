"""A store whose process ends at a chosen call, for tests that crash a role at every one of them."""

from __future__ import annotations

from typing import Any


class Died(Exception):
    pass


class Dying:
    """A store whose process ends before (odd points) or right behind (even ones) one of its calls."""

    def __init__(self, store: Any, point: int) -> None:
        self._store, self._point, self._calls, self.dead = store, point, 0, False

    def list(self, *args: Any, **kwargs: Any) -> Any:
        return self._store.list(*args, **kwargs)

    def __getattr__(self, verb: str) -> Any:
        async def call(*args: Any) -> Any:
            before, self._calls = 2 * self._calls + 1, self._calls + 1
            if before == self._point or self.dead:
                self.dead = True
                raise Died
            try:
                return await getattr(self._store, verb)(*args)
            finally:
                if before + 1 == self._point:  # also behind a call that found nothing
                    self.dead = True
                    raise Died

        return call
