"""Exit codes, on one page. Scripts may rely on them."""

from __future__ import annotations

from lakebed.core import errors

OK = 0
FAILED = 1  # an invariant, check or bar did not hold
USAGE = 2  # the command line itself is wrong
INTERRUPTED = 130

CODES: dict[type[errors.LakebedError], int] = {
    errors.LakebedError: FAILED,
    errors.Invalid: 3,
    errors.NotFound: 4,
    errors.Denied: 5,
    errors.Conflict: 6,
    errors.Fenced: 7,
    errors.Overloaded: 8,
    errors.Unavailable: 9,
    errors.OutcomeUnknown: 10,
    errors.Corrupt: 11,
}


def code_for(error: errors.LakebedError) -> int:
    return next(CODES[kind] for kind in type(error).__mro__ if kind in CODES)
