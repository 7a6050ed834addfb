"""What tests of the documentation share: where the repository is, and whether a command line would be understood."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from cyclopts import CycloptsError

ROOT = Path(__file__).parents[2]
PLACEHOLDERS = {"…": "because", "FOLDER": "folder", "ID": "id", "CONFLICT": "id", "P": "p", "DIR": "folder"}


def misunderstood(line: str) -> str:
    """Why the command would refuse these words, or nothing. Nothing is run."""
    from lakebed.cli.main import app

    words = [PLACEHOLDERS.get(word, word) for word in shlex.split(line, comments=True)]
    words = words[: next((at for at, word in enumerate(words) if word in ("|", ">", "&&", ";", "&")), len(words))]
    assert words[0].rsplit("/", 1)[-1] == "lakebed", line
    try:
        app.parse_args(words[1:], exit_on_error=False, print_error=False)
    except CycloptsError as error:
        return str(error)
    return ""


def commands(page: str) -> list[str]:
    """Every line of a page's code blocks that calls lakebed, without what comes before it."""
    found = []
    for block in re.findall(r"```(?:\w*)\n(.*?)```", page, flags=re.S):
        for line in block.replace("\\\n", " ").splitlines():
            match = re.search(r"(?:^|[\s$(\"])((?:\.venv/bin/)?lakebed [a-z].*)$", line)
            if match and not re.search("[─│┬▶]|from lakebed import", line):  # no drawing, and no line of Python
                shown = re.split(r" {2,}|\s#", match[1])[0]  # what it does stands further right
                found.append(re.sub(r'\)"?$', "", re.sub(r"\s*\[[^\]]*\]", "", shown)))
    return found
