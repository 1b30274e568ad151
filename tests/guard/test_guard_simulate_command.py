"""`assay guard simulate`: what it prints and draws, what it says of faulty traces, and the policies that come along."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from typer.testing import CliRunner

from assay.cli.commands import app
from assay.errors import InputError
from assay.files.shared import shared
from assay.guard import traces
from assay.guard.policy import load

HEADER = "time,zone,available,usd_per_hour\n"
SMALL = (
    HEADER + "2026-11-01T00:00:00Z,a,1,14.00\n2026-11-01T00:00:00Z,b,1,16.50\n2026-11-01T04:00:00Z,a,0,14.00\n"
    "2026-11-01T08:00:00Z,a,1,14.00\n2026-11-02T00:00:00Z,,,\n"
)
SHIPPED = ("spot-patient", "spot-steady", "plain-17")


@pytest.fixture
def small(tmp_path: Path) -> Path:
    path = tmp_path / "small.csv"
    path.write_text(SMALL, encoding="utf-8")
    return path


def simulate(*words: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["guard", "simulate", *words])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.exit_code, done.stdout


def shipped() -> list[str]:
    return [word for name in SHIPPED for word in ("--policy", str(shared(f"policies/{name}.yaml")))]


def test_it_answers_with_the_contracts_keys_for_the_first_policy_and_for_all(small: Path, tmp_path: Path) -> None:
    image = tmp_path / "drawn.svg"
    code, out = simulate(*shipped(), "--prices", str(small), "--image", str(image), "--json")
    told = json.loads(out)
    assert code == 0
    assert {"ok", "decision", "readings", "spent", "positions", "interruptions"} <= set(told)
    assert [one["policy"] for one in told["policies"]] == list(SHIPPED)
    assert told["spent"] == told["policies"][0]["spent"]
    plain = told["policies"][2]
    # a until it is lost at 04:00, b from the same look on: 4 × 14 + 20 × 16.50
    assert (plain["spent"], plain["interruptions"], plain["starts"]) == ("386.00", 1, 2)
    assert plain["positions"] == (24 * 3600 - 2 * 900 - 10) * 370_000
    drawn = ElementTree.fromstring(image.read_bytes())  # noqa: S314 - our own
    assert drawn.tag.endswith("svg")
    assert all(name in image.read_text(encoding="utf-8") for name in SHIPPED)


def test_people_get_one_table_of_all_policies(small: Path) -> None:
    code, out = simulate(*shipped(), "--prices", str(small), "--from", "2026-11-01T06:00:00Z")
    assert code == 0
    assert all(out.count(name) == 3 for name in SHIPPED)  # what it did, its waste, the optimum beside it
    assert "dollars a useful hour" in out


def test_policies_of_other_machines_are_told_apart(small: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.yaml"
    other.write_text("name: other\nmachine: {gpus: 8, restart_seconds: 60, positions_per_second: 370000}\n",
                     encoding="utf-8")  # fmt: skip
    mixed = [*shipped()[:2], "--policy", str(other), "--prices", str(small)]
    told = json.loads(simulate(*mixed, "--json")[1])
    assert told["unequal"] == {"restart_seconds": [900, 60], "interval_seconds": [600, 300]}
    assert "not the same in all: restart_seconds is 900, 60" in simulate(*mixed)[1]
    assert json.loads(simulate(*shipped(), "--prices", str(small), "--json")[1])["unequal"] == {}


def test_the_policies_that_come_along_are_named_as_their_files() -> None:
    folder = shared("policies")
    assert {path.stem for path in folder.glob("*.yaml")} == set(SHIPPED)
    for name in SHIPPED:
        assert load(folder / f"{name}.yaml").name == name


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is empty"),
        ("time,zone\n", "line 1 is 'time,zone'"),
        (HEADER, "covers no time"),
        (HEADER + "2026-11-01T00:00:00Z,a,1,14\n", "covers no time"),
        (HEADER + "2026-11-01T00:00:00Z,a,1\n", "line 2 has 3 fields"),
        (HEADER + "2026-11-01T00:00:00,a,1,14\n", "line 2: '2026-11-01T00:00:00' is not a time"),
        (HEADER + "yesterday,a,1,14\n", "line 2: 'yesterday' is not a time"),
        (HEADER + "2026-11-01T00:00:00Z,a,yes,14\n", "available is 'yes'"),
        (HEADER + "2026-11-01T00:00:00Z,a,1,0\n", "usd_per_hour is '0'"),
        (HEADER + "2026-11-01T00:00:00Z,a,1,NaN\n", "usd_per_hour is 'NaN'"),
        (HEADER + "2026-11-01T00:00:00Z,a,1,-4\n", "usd_per_hour is '-4'"),
        (HEADER + "2026-11-02T00:00:00Z,a,1,14\n2026-11-01T00:00:00Z,a,1,14\n", "earlier than the line before"),
        (HEADER + '2026-11-02T00:00:00Z,a,1,"14\n', "is not CSV"),
    ],
)
def test_a_faulty_trace_is_refused_with_its_line(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(InputError) as fault:
        traces.load(path)
    assert str(fault.value).startswith(str(path))
    assert said in str(fault.value)


def test_a_blank_price_is_no_reading(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(HEADER + "2026-11-01T00:00:00Z,a,1,\n2026-11-01T01:00:00+01:00,a,1,14\n"
                    "2026-11-01T02:00:00Z,,,\n", encoding="utf-8")  # fmt: skip
    found = traces.load(path)
    assert [change.usd_per_hour for change in found.changes] == [None, 14]
    assert found.changes[1].time == found.changes[0].time
