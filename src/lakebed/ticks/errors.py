"""The answers of ticks that have a shape of their own."""

from __future__ import annotations

from collections.abc import Iterable

from lakebed.errors import Conflict


class PartsDiffer(Conflict):
    """409: what was uploaded is not what the manifest lists. Send exactly the parts that are named."""

    code = "parts_differ"

    def __init__(
        self, missing: Iterable[int] = (), mismatched_sha: Iterable[int] = (), unlisted: Iterable[int] = ()
    ) -> None:
        self.missing, self.mismatched_sha, self.unlisted = sorted(missing), sorted(mismatched_sha), sorted(unlisted)
        super().__init__(
            f"{len(self.missing)} parts are missing, {len(self.mismatched_sha)} have another hash, "
            f"{len(self.unlisted)} are not in the manifest",
            hint="PUT what is missing; DELETE, then PUT what has another hash; DELETE what is not listed",
            missing=self.missing,
            mismatched_sha=self.mismatched_sha,
            unlisted=self.unlisted,
        )


class PartDiffers(Conflict):
    """409: another part stands under this number; nothing is overwritten silently."""

    code = "part_differs"
