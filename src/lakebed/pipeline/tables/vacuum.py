"""As it was called before other parts had tables too: see `lakebed.delta.vacuum`."""

from lakebed.delta.vacuum import *  # noqa: F403
