"""Settings are data: one tree of sections, defaults < lakebed.toml < a running stack < LAKEBED_* < flags.

A section is a frozen struct owned by its part; this module only reads, merges, checks and explains. Unknown keys and
contradictory values are refused with the keys named, before anything starts.

A setting is public when its description gives a reason to change it, and advanced otherwise. Both are set in the same
way; `lakebed settings` and the reference show the public ones first.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar, cast, get_type_hints

import msgspec

from lakebed.core.errors import Invalid

ENV_PREFIX = "LAKEBED_"
CARRIED = "store"  # the section whose secrets travel with pickled settings
ENV_RESERVED = frozenset({"LAKEBED_DIR", "LAKEBED_CONFIG"})  # how a command finds its stack, not settings


def describe(text: str, *, when: str = "") -> msgspec.Meta:
    """What a setting does, in one sentence, and `when` an operator changes it. A setting without `when` is advanced."""
    return msgspec.Meta(description=text, extra={"when": when})


class Contradiction(Invalid):
    """A setting that is out of range, or two that exclude each other."""

    def __init__(self, one: str, other: str, why: str) -> None:
        named = one if one == other else f"{one} and {other}"
        super().__init__(f"settings {named}: {why}", hint="lakebed settings shows each value and where it comes from")


class Secret:
    """A value that is never shown: text forms are masked, only `reveal` returns it."""

    __slots__ = ("_value",)

    def __init__(self, value: str) -> None:
        self._value = value

    def reveal(self) -> str:
        return self._value

    def __bool__(self) -> bool:
        return bool(self._value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Secret) and other._value == self._value

    def __hash__(self) -> int:
        return hash(self._value)

    def __repr__(self) -> str:
        return "***" if self._value else ""

    __str__ = __repr__


class Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One part's settings. Subclasses set `section` and may refuse values in `check` by raising Contradiction.

    `former` is a name that the section had before: its keys are still read.
    """

    section: ClassVar[str] = ""
    former: ClassVar[str] = ""

    def check(self) -> None:
        return None

    def as_layer(self) -> dict[str, Any]:
        """These values as a layer of `load`: every one that differs from its default, secrets in the clear."""
        default = type(self)()
        values = {field.name: getattr(self, field.name) for field in msgspec.structs.fields(self)}
        return {
            f"{self.section}.{name}": value.reveal() if isinstance(value, Secret) else value
            for name, value in values.items()
            if value != getattr(default, name)
        }

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Self:
        try:
            made = msgspec.convert(dict(values), cls, strict=False, dec_hook=_decode)
        except msgspec.ValidationError as error:
            raise Invalid(
                f"settings {cls.section}: {error}", hint="lakebed settings --advanced lists every key"
            ) from error
        made.check()
        return made


S = TypeVar("S", bound=Section)


class Settings:
    """The effective settings. Ask for a section by its type: `settings.of(StoreSettings)`."""

    def __init__(self, sections: Mapping[type[Section], Section], sources: Mapping[str, str]) -> None:
        self._sections = dict(sections)
        self._sources = dict(sources)

    def of(self, kind: type[S]) -> S:
        found = self._sections.get(kind) or kind.of({})
        assert isinstance(found, kind)
        return found

    def __reduce__(self) -> tuple[Any, ...]:
        """Settings are pickled only to travel to Spark's tasks, which read and write the bucket: of all secrets they
        carry the store's alone. Here, so that no task can forget it.
        """
        carried = {
            kind: section if kind.section == CARRIED else cast(Section, _without_secrets(section))
            for kind, section in self._sections.items()
        }
        return Settings, (carried, self._sources)

    def having(self, section: Section) -> Settings:
        """The same settings, with this section in the place of its kind."""
        return Settings({**self._sections, type(section): section}, self._sources)

    def source(self, key: str) -> str:
        """Which layer gave this key its value: a file's name, "stack", "environment", "flag" or "default"."""
        return self._sources.get(key, "default")

    def rows(self, *, section: str = "", advanced: bool = True) -> list[dict[str, Any]]:
        """Settings with value, source and description; secrets are masked.

        `section` keeps one section. Without `advanced`, an advanced setting is listed only if a layer sets it.
        """
        return [
            {
                "key": key,
                "value": _shown(getattr(self._sections[kind], field.name)),
                "source": self.source(key),
                "about": explain(kind, field.name),
            }
            for kind in sorted(self._sections, key=lambda kind: kind.section)
            for field in msgspec.structs.fields(kind)
            if section in ("", kind.section)
            for key in [f"{kind.section}.{field.name}"]
            if advanced or key in self._sources or is_public(kind, field.name)
        ]


def _without_secrets(value: Any) -> Any:
    """The same value with every secret in it empty."""
    if isinstance(value, Secret):
        return Secret("")
    if isinstance(value, tuple):
        return tuple(map(_without_secrets, value))
    if isinstance(value, msgspec.Struct):
        fields = {name: getattr(value, name) for name in value.__struct_fields__}
        return msgspec.structs.replace(value, **{name: _without_secrets(each) for name, each in fields.items()})
    return value


def load(
    kinds: Iterable[type[Section]],
    *,
    file: Path | None = None,
    stack: Mapping[str, Any] | None = None,
    env: Mapping[str, str] | None = None,
    flags: Mapping[str, Any] | None = None,
) -> Settings:
    """Merges the layers and builds every section. Raises Invalid naming the key that is unknown or wrong."""
    known = {f"{kind.section}.{field.name}": kind for kind in kinds for field in msgspec.structs.fields(kind)}
    values: dict[type[Section], dict[str, Any]] = {kind: {} for kind in kinds}
    renamed = {f"{kind.former}.{key.partition('.')[2]}": key for key, kind in known.items() if kind.former}
    sources: dict[str, str] = {}
    for source, layer in (
        (str(file), _from_file(file)),
        ("stack", dict(stack or {})),
        ("environment", _from_env(env or {}, {**known, **renamed})),
        ("flag", dict(flags or {})),
    ):
        for given, value in layer.items():
            key = renamed.get(given, given)
            if key not in known:
                raise _unknown(key, source, known)
            values[known[key]][key.split(".", 1)[1]] = value
            sources[key] = source
    return Settings({kind: kind.of(values[kind]) for kind in values}, sources)


def env_name(key: str) -> str:
    return ENV_PREFIX + key.upper().replace(".", "_")


def about(kind: type[Section], field: str) -> str:
    """What this setting does, in one sentence."""
    return _meta(kind, field).description or ""


def when(kind: type[Section], field: str) -> str:
    """When an operator changes this setting; empty for an advanced one."""
    found = (_meta(kind, field).extra or {}).get("when", "")
    assert isinstance(found, str)
    return found


def is_public(kind: type[Section], field: str) -> bool:
    return bool(when(kind, field))


def explain(kind: type[Section], field: str) -> str:
    """Both sentences, as people read them."""
    reason = when(kind, field)
    return f"{about(kind, field)} Change it when {reason}." if reason else about(kind, field)


def _meta(kind: type[Section], field: str) -> msgspec.Meta:
    hint = get_type_hints(kind, include_extras=True)[field]
    return next((m for m in getattr(hint, "__metadata__", ()) if isinstance(m, msgspec.Meta)), msgspec.Meta())


def _from_file(file: Path | None) -> dict[str, Any]:
    if file is None:
        return {}
    try:
        tree = tomllib.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise Invalid(f"settings file {file} does not exist", hint="leave out --config, or create it") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise Invalid(f"settings file {file} is not TOML: {error}") from error
    flat: dict[str, Any] = {}
    for name, table in tree.items():
        if isinstance(table, dict):
            flat |= {f"{name}.{key}": value for key, value in table.items()}
        else:
            flat[name] = table
    return flat


def _from_env(env: Mapping[str, str], known: Iterable[str]) -> dict[str, Any]:
    by_name = {env_name(key): key for key in known}
    return {
        by_name.get(name, name): _from_text(value)
        for name, value in env.items()
        if name.startswith(ENV_PREFIX) and name not in ENV_RESERVED
    }


def _from_text(text: str) -> Any:
    """Lists and tables come as JSON; everything else stays text and is converted by its field's type."""
    if text[:1] in ("[", "{"):
        try:
            return msgspec.json.decode(text)
        except msgspec.DecodeError:
            return text
    return text


def _unknown(key: str, source: str, known: Iterable[str]) -> Invalid:
    names = list(known)
    if key.startswith(ENV_PREFIX):
        names = [env_name(name) for name in names]
    near = difflib.get_close_matches(key, names, n=1)
    hint = f"did you mean {near[0]}?" if near else "lakebed settings --advanced lists every key"
    return Invalid(f"unknown setting {key} (from {source})", hint=hint)


def _decode(kind: type, value: Any) -> Any:
    if kind is Secret:
        return Secret(str(value))
    if kind is Path:
        return Path(value)
    raise TypeError(f"no settings type {kind}")


def _shown(value: Any) -> Any:
    return str(value) if isinstance(value, (Secret, Path)) else msgspec.to_builtins(value, enc_hook=str)
