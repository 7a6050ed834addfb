"""`lakebed completion`: the script that completes commands in a shell."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from lakebed.cli.output import say


def completion(
    *,
    shell: Annotated[Literal["bash", "zsh", "fish"] | None, Parameter(help="the shell (default: this one)")] = None,
    output: Annotated[Path | None, Parameter(name=["--output", "-o"], help="write the script to this file")] = None,
    install: Annotated[
        bool, Parameter(help="write the script where the shell finds it, and load it in its startup file", negative="")
    ] = False,
) -> None:
    """Print the completion script of a shell; --install adds it to the shell's startup file.

    Without --install no file of the shell is touched.
    """
    from lakebed.cli.main import app

    if install:
        say(f"installed: {app.install_completion(shell=shell, output=output)}")
    elif output is not None:
        output.write_text(app.generate_completion(shell=shell))
        say(f"written to {output}; no startup file was changed")
    else:
        print(app.generate_completion(shell=shell))
