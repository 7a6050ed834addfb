"""The table of parts: every place that it names is there."""

from __future__ import annotations

import pytest

from lakebed.wiring.part import Part
from lakebed.wiring.parts import PARTS, resolve


def places(part: Part) -> list[str]:
    named = [
        getattr(part, field)
        for field in ("settings", "component", "workers", "machine", "checks", "bench", "load_test", "demo")
    ]
    named += [command.place for command in part.commands] + [world.script for world in part.worlds]
    return [place for place in named if place]


@pytest.mark.parametrize("place", [place for part in PARTS for place in places(part)])
def test_every_place_in_the_table_can_be_loaded(place: str) -> None:
    """A row that names a module or a name that is gone fails here, not in front of a user."""
    assert resolve(place) is not None


def test_no_two_parts_share_a_name_or_a_settings_section() -> None:
    """A part, a command, a world and a section of settings are each known by one name."""
    sections = [resolve(part.settings).section for part in PARTS if part.settings]
    commands = [command.name for part in PARTS for command in part.commands]
    worlds = [world.name for part in PARTS for world in part.worlds]

    for names in ([part.name for part in PARTS], sections, commands, worlds):
        assert sorted(set(names)) == sorted(names)
