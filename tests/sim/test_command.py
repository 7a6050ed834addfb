"""`lakebed sim`: what it prints, what it returns, and that nothing but the seed decides."""

from __future__ import annotations

import os
import subprocess
import sys

import msgspec
import pytest

from lakebed.cli import exits
from lakebed.cli.main import run
from lakebed.sim import commands
from lakebed.sim.world import World
from lakebed.wiring.part import SimWorld
from support.seeds import seeds


async def breaks_at_seed_three(world: World) -> None:
    """A world that is in order for every seed but one."""
    process = world.process("p")
    await process.spawn(process.clock.sleep(1.0))
    world.check(world.seed != 3, "three is broken")


@pytest.fixture
def broken_world(monkeypatch: pytest.MonkeyPatch) -> None:
    row = SimWorld("broken", "breaks at seed three", f"{__name__}:breaks_at_seed_three")
    monkeypatch.setattr(commands, "WORLDS", (row,))


def test_seeds_that_hold_exit_zero_and_print_their_speed(capsys: pytest.CaptureFixture[str]) -> None:
    """Every world is played, and the numbers are on stdout."""
    code = run(["sim", "--seed", "5", "--count", "3", "-o", "json"])

    rows = msgspec.json.decode(capsys.readouterr().out)
    assert code == exits.OK
    assert [row.name for row in commands.WORLDS] == [row["world"] for row in rows]
    assert all(row["played"] == 3 and row["held"] and row["seeds_per_s"] > 0 for row in rows)


def test_a_broken_invariant_exits_non_zero_and_says_how_to_replay(
    broken_world: None, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first broken seed ends the run; its replay command is the one that was printed."""
    code = run(["sim", "--world", "broken", "--seed", "1", "--count", "10", "-o", "json"])

    out, err = capsys.readouterr()
    (row,) = msgspec.json.decode(out)
    assert code == exits.FAILED
    assert (row["held"], row["played"], row["broken"]["seed"]) == (False, 2, 3)
    assert "three is broken" in err and row["replay"] in err

    assert run(row["replay"].split()[1:]) == exits.FAILED
    assert run(["sim", "--world", "broken", "--seed", "4"]) == exits.OK


def test_the_trace_of_a_seed_that_held_is_shown_when_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    """Every event is a line for people; the data on stdout stays data."""
    run(["sim", "--world", "register", "--seed", "1", "--trace", "-o", "json"])

    out, err = capsys.readouterr()
    (row,) = msgspec.json.decode(out)
    assert err.count("world/register.json") == row["steps"]


def test_an_unknown_world_is_refused_with_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    """A name that is not in the table is a mistake in the command, not a world without findings."""
    assert run(["sim", "--world", "nowhere"]) != exits.OK
    assert "register" in capsys.readouterr().err


@pytest.mark.parametrize("count", seeds([1, 5], quick=[1]))
def test_a_trace_does_not_depend_on_hash_randomisation(count: int) -> None:
    """Two interpreters with different hash seeds play the same worlds."""

    def digests(hash_seed: str) -> list[str]:
        shown = subprocess.run(
            [sys.executable, "-m", "lakebed", "sim", "--seed", "11", "--count", str(count), "-o", "json"],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            check=True,
            capture_output=True,
            timeout=400,
        )
        return [row["digest"] for row in msgspec.json.decode(shown.stdout)]

    assert digests("1") == digests("2")
