"""`lakebed` and `python -m lakebed`."""

from __future__ import annotations

import sys


def main() -> None:
    if sys.argv[1:] == ["--version"]:  # asked often by scripts: answered before anything heavy is imported
        from lakebed import __version__

        print(__version__)
        return
    from lakebed.cli.main import run

    sys.exit(run(sys.argv[1:]))


if __name__ == "__main__":
    main()
