"""`lakebed` whose hourly check of the path comes several times a second: `python hasty_watch.py serve …`."""

from __future__ import annotations

import sys

from lakebed.cli.main import run
from lakebed.wiring import boot

boot.CHECK_EVERY_S = 0.2

sys.exit(run(sys.argv[1:]))
