"""Which stored batches hold the records a reader wants. Pure.

The index may carry an entry too many: a writer that was held up between its commit and its index entry may put that
entry after a compaction has already merged the place away. So an entry counts only where it covers the offset that is
wanted next, a compacted one is preferred, and what does not cover is passed over.
"""

from __future__ import annotations

from collections.abc import Sequence

from lakebed.log.model import Control, Span


def tail(control: Control) -> Span | None:
    """The pending append, as the readable tail that it is."""
    pending = control.pending
    return Span(pending.start_offset, pending.end_offset, pending.entry()) if pending is not None else None


def chain(
    offset: int, spans: Sequence[Span], control: Control, *, avoid: frozenset[str] = frozenset()
) -> tuple[list[Span], int]:
    """The spans to read one after another from `offset`, and the offset behind the last of them."""
    found: list[Span] = []
    last = tail(control)
    usable = [span for span in [*spans, *([last] if last else [])] if span.entry.data_key not in avoid]
    while offset <= control.sequence_counter:
        covering = [span for span in usable if span.covers(offset)]
        if not covering:
            break
        best = min(covering, key=lambda span: (span.entry.type != "COMPACTED", -span.end_offset))
        found.append(best)
        offset = best.end_offset + 1
        usable = [span for span in usable if span.end_offset >= offset]
    return found, offset


def within(spans: Sequence[Span], bytes_max: int) -> list[Span]:
    """As many of the first spans as are likely to fill `bytes_max`, at least one. A compacted one fills it alone."""
    taken: list[Span] = []
    size = 0
    for span in spans:
        taken.append(span)
        size += span.entry.byte_length or bytes_max
        if size >= bytes_max:
            break
    return taken
