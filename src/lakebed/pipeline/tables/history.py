"""As it was called before other parts had tables too: see `lakebed.delta.history`."""

from lakebed.delta.history import *  # noqa: F403
