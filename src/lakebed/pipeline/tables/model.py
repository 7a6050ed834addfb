"""As it was called before other parts had tables too: see `lakebed.delta.model`."""

from lakebed.delta.model import *  # noqa: F403
