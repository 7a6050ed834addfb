"""`python -m lakebed.reference [FOLDER]`: writes every made page below the folder, by default the current one."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

from lakebed.reference.pages import pages


def write(folder: Path, made: Mapping[str, str]) -> list[str]:
    """Writes the pages that differ from what is there, and gives their names."""
    changed = []
    for name, text in made.items():
        file = folder / name
        if not file.exists() or file.read_text(encoding="utf-8") != text:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
            changed.append(name)
    return changed


if __name__ == "__main__":
    for name in write(Path(sys.argv[1] if len(sys.argv) > 1 else "."), pages()):
        print(name)
