"""Settings come in layers, say where they came from, and refuse what they do not know."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar

import msgspec
import pytest

from lakebed.errors import Invalid
from lakebed.parts import sections
from lakebed.settings import Contradiction, Secret, Section, about, describe, env_name, load


class TankSettings(Section, frozen=True):
    section: ClassVar[str] = "tank"

    litres: Annotated[int, describe("how much fits")] = 10
    label: Annotated[str, describe("what is written on it")] = "water"
    key: Annotated[Secret, describe("opens it")] = Secret("")
    pipes: Annotated[tuple[str, ...], describe("what leads to it")] = ()

    def check(self) -> None:
        if self.litres > 100 and self.label == "cup":
            raise Contradiction("tank.litres", "tank.label", "no cup holds that much")


def file_with(folder: Path, text: str) -> Path:
    file = folder / "lakebed.toml"
    file.write_text(text)
    return file


def test_later_layers_win_and_are_named(tmp_path: Path) -> None:
    """Defaults < file < stack < environment < flags, and each value says its source."""
    file = file_with(tmp_path, "[tank]\nlitres = 1\nlabel = 'a'\npipes = ['x']\n")

    settings = load(
        [TankSettings],
        file=file,
        stack={"tank.litres": 2, "tank.label": "b"},
        env={"LAKEBED_TANK_LABEL": "c", "OTHER": "no"},
        flags={"tank.key": "s3cret"},
    )

    tank = settings.of(TankSettings)
    assert (tank.litres, tank.label, tank.pipes, tank.key.reveal()) == (2, "c", ("x",), "s3cret")
    assert {
        "tank.litres": "stack",
        "tank.label": "environment",
        "tank.key": "flag",
        "tank.pipes": str(file),
    } == {row["key"]: row["source"] for row in settings.rows()}


def test_a_section_can_be_had_another_way_without_changing_the_settings() -> None:
    """`having` gives settings of their own; those it came from stay as they are."""
    settings = load([TankSettings], flags={"tank.litres": 2})

    other = settings.having(msgspec.structs.replace(settings.of(TankSettings), label="wine"))

    assert ("wine", 2) == (other.of(TankSettings).label, other.of(TankSettings).litres)
    assert "water" == settings.of(TankSettings).label


def test_secrets_are_masked_wherever_they_are_shown() -> None:
    """Neither rows nor text forms give a secret away."""
    settings = load([TankSettings], flags={"tank.key": "s3cret"})

    assert "s3cret" not in str(settings.rows())
    assert "s3cret" not in repr(settings.of(TankSettings))
    assert str(settings.of(TankSettings).key) == "***"


@pytest.mark.parametrize(
    ("env", "flags", "named"),
    [
        ({"LAKEBED_TANK_LITERS": "3"}, {}, "LAKEBED_TANK_LITERS"),
        ({}, {"tank.liters": 3}, "tank.liters"),
        ({}, {"pond.litres": 3}, "pond.litres"),
    ],
)
def test_unknown_keys_are_refused_by_name(env: dict[str, str], flags: dict[str, int], named: str) -> None:
    """A key nobody knows is Invalid, named, with the nearest known one as a hint."""
    with pytest.raises(Invalid) as caught:
        load([TankSettings], env=env, flags=flags)

    assert named in caught.value.message
    assert caught.value.hint


def test_the_nearest_known_key_is_offered() -> None:
    """A slip of the pen gets the right name back."""
    with pytest.raises(Invalid) as caught:
        load([TankSettings], flags={"tank.liters": 3})

    assert "tank.litres" in caught.value.hint


def test_contradictions_name_both_keys() -> None:
    """Two values that cannot both hold are refused with both keys."""
    with pytest.raises(Contradiction) as caught:
        load([TankSettings], flags={"tank.litres": 200, "tank.label": "cup"})

    assert "tank.litres" in caught.value.message
    assert "tank.label" in caught.value.message


@pytest.mark.parametrize("value", ["many", "1.5", "", "0x10"])
def test_a_value_of_the_wrong_type_is_refused_with_its_key(value: str) -> None:
    """Text that is no number is Invalid and names the setting."""
    with pytest.raises(Invalid, match="litres"):
        load([TankSettings], env={"LAKEBED_TANK_LITRES": value})


@pytest.mark.parametrize("text", ["tank = 3\n", "[tank\n", "litres = 3\n"])
def test_a_file_that_makes_no_sense_is_refused(tmp_path: Path, text: str) -> None:
    """A settings file that is not TOML, or not sections, is Invalid."""
    with pytest.raises(Invalid):
        load([TankSettings], file=file_with(tmp_path, text))


def test_a_file_that_is_missing_is_refused(tmp_path: Path) -> None:
    """A settings file that was named must exist."""
    with pytest.raises(Invalid, match="does not exist"):
        load([TankSettings], file=tmp_path / "no.toml")


def test_lists_come_from_the_environment_as_json() -> None:
    """An environment variable can carry a list."""
    settings = load([TankSettings], env={"LAKEBED_TANK_PIPES": '["a","b"]'})

    assert settings.of(TankSettings).pipes == ("a", "b")


def test_environment_names_are_unambiguous() -> None:
    """No two settings of the whole tree share an environment variable."""
    names = [env_name(f"{kind.section}.{field.name}") for kind in sections() for field in msgspec.structs.fields(kind)]

    assert len(set(names)) == len(names)


def test_every_setting_says_what_it_is_for() -> None:
    """Each key of the tree has a line of explanation."""
    silent = [
        f"{kind.section}.{field.name}"
        for kind in sections()
        for field in msgspec.structs.fields(kind)
        if not about(kind, field.name)
    ]

    assert silent == []
