"""Settings come in layers, report where they came from, and refuse what they do not know."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, ClassVar

import msgspec
import pytest

from lakebed.core.errors import Invalid
from lakebed.core.settings import (
    Contradiction,
    Secret,
    Section,
    about,
    describe,
    env_name,
    explain,
    is_public,
    load,
    when,
)
from lakebed.wiring.parts import sections


class TankSettings(Section, frozen=True):
    section: ClassVar[str] = "tank"

    litres: Annotated[int, describe("Sets the size of the tank.", when="the tank is larger")] = 10
    label: Annotated[str, describe("Sets the label.", when="the tank holds something else")] = "water"
    key: Annotated[Secret, describe("Opens the tank.")] = Secret("")
    pipes: Annotated[tuple[str, ...], describe("Lists the pipes to the tank.")] = ()

    def check(self) -> None:
        if self.litres > 100 and self.label == "cup":
            raise Contradiction("tank.litres", "tank.label", "no cup holds that much")


def file_with(folder: Path, text: str) -> Path:
    file = folder / "lakebed.toml"
    file.write_text(text)
    return file


def test_later_layers_win_and_are_named(tmp_path: Path) -> None:
    """Defaults < file < stack < environment < flags, and each value reports its source."""
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


def test_a_setting_without_a_reason_to_change_it_is_advanced() -> None:
    """Advanced settings are listed when requested or when a layer sets them, and can be set like all others."""
    settings = load([TankSettings], flags={"tank.pipes": ["x"]})

    assert ["tank.litres", "tank.label", "tank.pipes"] == [row["key"] for row in settings.rows(advanced=False)]
    assert ["tank.litres", "tank.label", "tank.key", "tank.pipes"] == [row["key"] for row in settings.rows()]
    assert ("x",) == settings.of(TankSettings).pipes


def test_a_public_setting_is_explained_with_its_reason() -> None:
    """The two sentences of a public setting, the one sentence of an advanced one."""
    assert "Sets the size of the tank. Change it when the tank is larger." == explain(TankSettings, "litres")
    assert "Opens the tank." == explain(TankSettings, "key")


def test_rows_can_be_kept_to_one_section() -> None:
    """A section shows its own settings only."""
    settings = load(sections())

    assert {"queue"} == {row["key"].partition(".")[0] for row in settings.rows(section="queue")}


FIELDS = [(kind, field) for kind in sections() for field in kind.__struct_fields__]
PUBLIC_MAX = 100  # what a person can read through and choose from


def test_public_settings_stay_few() -> None:
    """A setting that nobody has a reason to change is advanced or a constant."""
    assert sum(is_public(kind, field) for kind, field in FIELDS) <= PUBLIC_MAX


@pytest.mark.parametrize(("kind", "field"), FIELDS, ids=[f"{kind.section}.{field}" for kind, field in FIELDS])
def test_every_setting_says_what_it_does_in_one_sentence(kind: type[Section], field: str) -> None:
    """One sentence from a capital or a digit to a full stop; the reason to change a public one completes a sentence."""
    text, reason = about(kind, field), when(kind, field)

    assert text.endswith(".") and ". " not in text and len(text.split()) >= 3
    assert not text.startswith(" ") and "  " not in text
    assert not reason.endswith(".") and not reason[:1].isspace()
    assert not {"told", "mend", "whoever", "whom"} & set(f"{text} {reason}".lower().split())


class GateSettings(Section, frozen=True):
    section: ClassVar[str] = "gate"

    folder: Annotated[Path, describe("where it is")] = Path("here")
    open: Annotated[bool, describe("whether it is open")] = False
    wide_m: Annotated[float, describe("how wide it is")] = 1.5


def test_every_layer_wins_over_the_one_before(tmp_path: Path) -> None:
    """One key in all layers: the last layer's value and its name."""
    file = file_with(tmp_path, "[tank]\nlitres = 1\n")
    layers: list[tuple[dict[str, Any], int, str]] = [
        ({}, 10, "default"),
        ({"file": file}, 1, str(file)),
        ({"file": file, "stack": {"tank.litres": 2}}, 2, "stack"),
        ({"file": file, "stack": {"tank.litres": 2}, "env": {"LAKEBED_TANK_LITRES": "3"}}, 3, "environment"),
        ({"stack": {"tank.litres": 2}, "env": {"LAKEBED_TANK_LITRES": "3"}, "flags": {"tank.litres": 4}}, 4, "flag"),
    ]
    for given, litres, source in layers:
        settings = load([TankSettings], **given)
        (row,) = [row for row in settings.rows() if row["key"] == "tank.litres"]
        assert (litres, litres, source, "Sets the size of the tank. Change it when the tank is larger.") == (
            settings.of(TankSettings).litres, row["value"], row["source"], row["about"],
        )  # fmt: skip


def test_rows_are_of_every_section_in_order_as_plain_values() -> None:
    rows = load([TankSettings, GateSettings], flags={"gate.folder": "there", "gate.open": "true"}).rows()

    assert [
        ("gate.folder", "there"), ("gate.open", True), ("gate.wide_m", 1.5),
        ("tank.litres", 10), ("tank.label", "water"), ("tank.key", ""), ("tank.pipes", ()),
    ] == [(row["key"], row["value"]) for row in rows]  # fmt: skip


def test_a_layer_of_a_section_holds_what_differs_with_secrets_in_the_clear() -> None:
    """Loaded again it gives the same section."""
    section = TankSettings(litres=3, key=Secret("s3cret"))

    assert {"tank.litres": 3, "tank.key": "s3cret"} == section.as_layer()
    assert section == load([TankSettings], stack=section.as_layer()).of(TankSettings)
    assert {} == TankSettings().as_layer()


def test_a_section_that_was_not_loaded_has_its_defaults() -> None:
    assert GateSettings() == load([TankSettings]).of(GateSettings)


@pytest.mark.parametrize("name", ["LAKEBED_DIR", "LAKEBED_CONFIG"])
def test_names_that_find_a_stack_are_no_settings(name: str) -> None:
    assert 10 == load([TankSettings], env={name: "x", "PATH": "y"}).of(TankSettings).litres


def test_text_that_only_begins_as_json_stays_text() -> None:
    settings = load([TankSettings], env={"LAKEBED_TANK_LABEL": "[a"})

    assert "[a" == settings.of(TankSettings).label


def test_an_unknown_variable_is_offered_as_a_variable_and_a_stranger_gets_the_list() -> None:
    with pytest.raises(Invalid) as near:
        load([TankSettings], env={"LAKEBED_TANK_LITERS": "3"})
    with pytest.raises(Invalid) as far:
        load([TankSettings], flags={"zzzzzz": 3})

    assert ("did you mean LAKEBED_TANK_LITRES?", True) == (near.value.hint, "from environment" in near.value.message)
    assert ("lakebed settings --advanced lists every key", True) == (far.value.hint, "from flag" in far.value.message)


def test_a_contradiction_of_one_key_names_it_once() -> None:
    assert "settings a.b: why" == Contradiction("a.b", "a.b", "why").message
    assert "settings a.b and a.c: why" == Contradiction("a.b", "a.c", "why").message


def test_secrets_compare_by_value_and_an_empty_one_is_none() -> None:
    assert (Secret("a") == Secret("a"), Secret("a") == Secret("b"), Secret("a") == "a") == (True, False, False)
    assert hash(Secret("a")) == hash(Secret("a"))
    assert (bool(Secret("a")), bool(Secret("")), str(Secret(""))) == (True, False, "")


def test_a_file_that_is_no_text_is_refused_with_its_name(tmp_path: Path) -> None:
    file = tmp_path / "lakebed.toml"
    file.write_bytes(b"\xff\xfe")

    with pytest.raises(Invalid, match="is not TOML"):
        load([TankSettings], file=file)


def test_a_section_checks_itself_wherever_its_values_come_from() -> None:
    with pytest.raises(Contradiction):
        TankSettings.of({"litres": 101, "label": "cup"})
    assert 100 == TankSettings.of({"litres": 100, "label": "cup"}).litres


class PondSettings(Section, frozen=True):
    section: ClassVar[str] = "pond"
    former: ClassVar[str] = "puddle"

    litres: Annotated[int, describe("Sets the size of the pond.")] = 5


@pytest.mark.parametrize(
    "given",
    [{"flags": {"puddle.litres": 7}}, {"env": {"LAKEBED_PUDDLE_LITRES": "7"}}, {"stack": {"puddle.litres": 7}}],
)
def test_a_section_is_also_read_under_its_former_name(given: dict[str, Any]) -> None:
    """A file or an environment from before a rename keeps working, and is shown under the new name."""
    settings = load([PondSettings], **given)

    assert 7 == settings.of(PondSettings).litres
    assert ["pond.litres"] == [row["key"] for row in settings.rows()]


def test_the_former_name_does_not_make_other_keys_known() -> None:
    """A wrong key is refused under either name."""
    with pytest.raises(Invalid):
        load([PondSettings], flags={"puddle.depth": 1})
