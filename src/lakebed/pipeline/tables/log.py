"""As it was called before other parts had tables too: see `lakebed.delta.log`."""

from lakebed.delta.log import *  # noqa: F403
