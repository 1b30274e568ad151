"""The meter charges every second once, tells its parts apart, and goes on where another process ended."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small import Project

from assay.guard import budget, expenses
from assay.guard.meter import Meter, State, Use
from assay.guard.policy import Policy, from_yaml
from assay.guard.prices import NoReading, Reading, body, read
from assay.ledger.ledger import Ledger, Receipt
from assay.recipe import load as recipes
from assay.run.accounts import GROUPS, PARTS
from assay.run.folder import RunFolder, create
from assay.run.history import history
from assay.run.status import status

T0 = datetime(2026, 11, 10, 4, 50, tzinfo=UTC)
POSITIONS = 8 * 16  # of an update of the small recipe
POLICY = """
name: meter
machine: {gpus: 8, disk_gb: 730, disk_usd_per_gb_month_running: "0.10", disk_usd_per_gb_month_stopped: "0.20",
          egress_usd_per_gb: "0.05"}
"""


def at(price: str | None) -> Reading | NoReading:
    """A reading of so many dollars per machine-hour, or none."""
    return read(price, unit="machine-hour", currency="USD", source="test", fetched=T0, gpus=8, rates={}, raw=b"")


class Machine:
    """A machine whose run, ledger and clock a test moves on by hand."""

    def __init__(self, run: RunFolder, policy: Policy) -> None:
        self.run, self.policy, self.now = run, policy, T0
        self.ledger: Ledger = run.open_ledger()
        self.meter = Meter(run, policy)

    def trains(self, updates: range, seconds: float, *, start: float = 0.0) -> None:
        """Metrics lines of these updates, one after another, beginning `start` seconds from now."""
        with self.run.metrics.open("a") as file:
            for number, update in enumerate(updates, 1):
                time = (self.now + timedelta(seconds=start + number * seconds)).isoformat()
                line = {
                    "update": update,
                    "segment": 1,
                    "time": time,
                    "loss": 4.0,
                    "seconds": seconds,
                    "order_digest": "d",
                }
                file.write(json.dumps(line) + "\n")

    def passes(
        self, seconds: float, state: State = "running", price: str | None = "36", name: str | None = "a01", **more: Any
    ) -> Receipt | None:
        """Let time pass, then look."""
        self.now += timedelta(seconds=seconds)
        return self.meter.charge(self.ledger, Use(name, state, at(price)), self.now, since=T0, **more)

    def costs(self, *args: Any, **more: Any) -> dict[str, Decimal]:
        """The parts of the next interval that cost anything."""
        receipt = self.passes(*args, **more)
        assert receipt is not None
        return {part: Decimal(usd) for part, usd in receipt.body["usd"].items() if usd is None or Decimal(usd)}


def fresh(folder: Path) -> RunFolder:
    project = Project(folder)
    recipe = project.recipe(schedule__updates=30)
    return create(project.path / "run", recipe, recipes.load(recipe))


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(fresh(tmp_path / "project"), from_yaml(POLICY, "meter.yaml"))


def test_the_parts_of_a_life_are_told_apart(machine: Machine) -> None:
    """36 dollars an hour are a cent a second; 730 GB at 10 cents a month are 10 cents an hour."""
    disk = Decimal("0.1") / 3600
    assert machine.costs(600, "provisioning") == {"gpu_provisioning": 6, "disk_running": _nano(disk * 600)}
    machine.trains(range(10), 20)
    assert machine.costs(300) == {"gpu_useful": 2, "gpu_overhead": 1, "disk_running": _nano(disk * 300)}
    machine.trains(range(6, 14), 20)
    assert machine.costs(300) == {
        "gpu_useful": Decimal("0.8"), "gpu_recomputed": Decimal("0.8"), "gpu_overhead": Decimal("1.4"),
        "disk_running": _nano(disk * 300),
    }  # fmt: skip
    assert machine.costs(3600, "stopped") == {"disk_stopped": Decimal("0.2")}
    said = machine.meter.account
    assert [(one.useful, one.recomputed) for one in said.spends] == [(0, 0), (10, 0), (4, 4), (0, 0)]
    assert said.estimated == sum(sum(one.usd[part] or 0 for part in PARTS) for one in said.spends)


def _nano(value: Decimal) -> Decimal:
    return value.quantize(Decimal("1e-9"))


def test_receipts_count_positions_and_are_what_the_account_reads(machine: Machine) -> None:
    machine.trains(range(5), 10)
    receipt = machine.passes(60)
    assert receipt is not None
    assert receipt.body["positions"] == {"useful": 5 * POSITIONS, "recomputed": 0}
    again = Meter(machine.run, machine.policy).account
    assert again == machine.meter.account


@settings(max_examples=25, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.integers(1, 400),
            st.sampled_from(["provisioning", "running", "stopped"]),
            st.sampled_from(["36", "50.123", "0.7", None]),
            st.integers(0, 12),
            st.integers(1, 50),
        ),
        max_size=8,
    )
)
def test_gpu_parts_add_up_to_time_at_the_higher_price_of_its_ends(
    tmp_path_factory: pytest.TempPathFactory, looks: list[tuple[int, State, str | None, int, int]]
) -> None:
    machine = _shared(tmp_path_factory)
    name = machine.now.isoformat()  # an allocation of its own
    machine.meter.charge(machine.ledger, Use(name, "running", at(None)), machine.now)
    last: Decimal | None = None
    reached = machine.meter.account.reached or 0
    useful = 0
    for seconds, state, price, updates, took in looks:
        machine.trains(range(reached, reached + updates), took)
        reached += updates
        machine.now += timedelta(seconds=seconds)
        receipt = machine.meter.charge(machine.ledger, Use(name, state, at(price)), machine.now)
        assert receipt is not None
        usd, spans = receipt.body["usd"], receipt.body["microseconds"]
        assert sum(spans.values()) == seconds * 10**6
        useful += receipt.body["metrics"]["useful"]
        if state == "stopped":
            assert {usd[part] for part in GROUPS["gpu"]} == {"0"}, "a stopped machine's GPUs cost nothing, as is known"
        else:
            known = [one for one in (last, Decimal(price) if price else None) if one is not None]
            if known:
                whole = sum(Decimal(usd[part]) for part in GROUPS["gpu"])
                assert whole == _nano(max(known) * seconds / 3600)
            else:
                assert {usd[part] for part in GROUPS["gpu"]} == {None}, "no price is not measured, never free"
            last = Decimal(price) if price else last
    assert useful == sum(updates for _, _, _, updates, _ in looks), "no update is lost or counted twice"


_MACHINES: list[Machine] = []


def _shared(factory: pytest.TempPathFactory) -> Machine:
    """One run for all examples of a property: a folder each would only cost time."""
    if not _MACHINES:
        _MACHINES.append(Machine(fresh(factory.mktemp("meter") / "project"), from_yaml(POLICY, "meter.yaml")))
    return _MACHINES[0]


def test_without_a_reading_the_last_one_counts_and_the_receipt_says_so(machine: Machine) -> None:
    machine.passes(100, price="36")
    receipt = machine.passes(100, price=None)
    assert receipt is not None
    assert (receipt.body["usd_per_hour"], receipt.body["price"]["read"]) == ("36", False)
    assert "no price" in receipt.body["price"]["reason"]


def test_a_price_that_fell_is_not_charged_for_ever(machine: Machine) -> None:
    bodies = [receipt.body for price in ("72", "36", "36") if (receipt := machine.passes(100, price=price))]
    assert [body["usd_per_hour"] for body in bodies] == ["72", "72", "36"], "the higher of both ends, no longer"


def test_lines_that_come_late_are_useful_in_the_next_interval(machine: Machine) -> None:
    """The trainer writes its lines every `log.every` updates: 65 s of updates appear in an interval of 60 s."""
    machine.trains(range(13), 5, start=-4)
    first, second = machine.passes(60), machine.passes(60)
    assert first is not None
    assert second is not None
    assert first.body["microseconds"] == {"useful": 60_000_000, "recomputed": 0, "rest": 0}
    assert second.body["microseconds"] == {"useful": 5_000_000, "recomputed": 0, "rest": 55_000_000}


def test_a_line_that_is_not_finished_waits(machine: Machine) -> None:
    machine.trains(range(2), 5)
    whole = machine.run.metrics.read_bytes()
    machine.run.metrics.write_bytes(whole[:-9])
    first = machine.passes(60)
    machine.run.metrics.write_bytes(whole)
    second = machine.passes(60)
    assert [one and one.body["metrics"]["useful"] for one in (first, second)] == [1, 1]


def test_updates_with_a_loss_that_is_no_number_were_not_done(machine: Machine) -> None:
    machine.trains(range(2), 5)
    with machine.run.metrics.open("a") as file:
        file.write('{"update": 2, "loss": null, "nonfinite": ["loss"], "seconds": 5.0}\n')
    receipt = machine.passes(60)
    assert receipt is not None
    assert receipt.body["metrics"]["useful"] == 2


def test_what_was_trained_before_somebody_metered_is_nobody_s(machine: Machine) -> None:
    machine.trains(range(7), 10)
    machine.now += timedelta(seconds=100)
    assert machine.meter.charge(machine.ledger, Use("a01", "running", at("36")), machine.now) is None, "the first look"
    machine.trains(range(7, 9), 10)
    machine.now += timedelta(seconds=100)
    receipt = machine.meter.charge(machine.ledger, Use("a01", "running", at("36")), machine.now)
    assert receipt is not None
    assert receipt.body["metrics"]["first"] == 7
    assert receipt.body["positions"]["useful"] == 2 * POSITIONS
    assert machine.meter.account.first_reached == 7


def test_a_guard_that_died_is_made_up_for_by_the_next(machine: Machine) -> None:
    machine.trains(range(3), 10)
    machine.passes(60)
    machine.trains(range(3, 6), 10)
    machine.meter = Meter(machine.run, machine.policy)
    machine.now += timedelta(hours=3)
    receipt = machine.meter.charge(machine.ledger, Use("a01", "running", at("30")), machine.now)
    assert receipt is not None
    assert sum(Decimal(receipt.body["usd"][part]) for part in GROUPS["gpu"]) == 3 * 36, "the gap, at the higher price"
    assert receipt.body["metrics"]["useful"] == 3


def test_two_guards_at_once_charge_once(machine: Machine) -> None:
    other = Meter(machine.run, machine.policy)
    machine.trains(range(4), 10)
    machine.passes(60)
    other.charge(machine.ledger, Use("a01", "running", at("36")), machine.now, since=T0)
    told = Meter(machine.run, machine.policy).account
    assert told.estimated == machine.meter.account.estimated
    assert sum(one.useful for one in told.spends) == 4


def test_a_clock_that_was_set_back_gives_no_interval(machine: Machine) -> None:
    machine.passes(60)
    assert machine.passes(0) is None
    assert machine.passes(-50) is None
    receipt = machine.passes(60)
    assert receipt is not None
    assert sum(receipt.body["microseconds"].values()) == 10_000_000, "from where it was metered to"


def test_the_largest_amounts_are_metered_and_reported(tmp_path: Path) -> None:
    dear = POLICY.replace("gpus: 8, disk_gb: 730", "gpus: 8, disk_gb: 9007199254740991").replace('"0.10"', '"1e12"')
    machine = Machine(fresh(tmp_path / "project"), from_yaml(dear, "meter.yaml"))
    assert machine.passes(10**8, price="1e12") is not None
    facts = expenses.report(machine.run)
    assert Decimal(facts["spent_estimated"]) > 10**27
    assert "e+" not in expenses.as_markdown(facts).lower()


def test_the_mirror_s_receipts_are_the_egress_unless_somebody_measured_it(machine: Machine) -> None:
    body = {"manifest_sha256": "m", "mirror": "x", "verify": "readback", "bytes": 2 * 10**9}
    machine.ledger.append("checkpoint.mirrored", body)
    machine.meter.see([Receipt(0, "", "checkpoint.mirrored", body, "")])
    assert machine.costs(60)["egress"] == Decimal("0.1")
    assert "egress" not in machine.costs(60), "once"
    receipt = machine.passes(60)
    assert receipt is not None
    machine.now += timedelta(seconds=60)
    receipt = machine.meter.charge(machine.ledger, Use("a01", "running", at("36"), egress_bytes=10**9), machine.now)
    assert receipt is not None
    assert receipt.body["usd"]["egress"] == "0.05"


def test_what_the_policy_does_not_price_is_not_measured(tmp_path: Path) -> None:
    bare = Machine(fresh(tmp_path / "project"), from_yaml("name: bare\nmachine: {gpus: 8}\n", "bare.yaml"))
    receipt = bare.passes(60)
    assert receipt is not None
    assert [part for part, usd in receipt.body["usd"].items() if usd is None] == ["disk_running", "egress"]
    assert bare.meter.account.not_measured() == ["disk_running", "egress"]


def test_status_shows_what_the_money_pays_for(machine: Machine) -> None:
    run = machine.run
    assert (status(run)["affordable"], status(run)["affordable_unknown"]) == (None, "no budget stated")
    budget.fund(run, budget.Money(Decimal(100)), purpose="main", reserve=budget.stated_reserve(Decimal(40)))
    assert "no useful update" in status(run)["affordable_unknown"]
    machine.trains(range(6), 10)
    machine.passes(3600, price="10")
    spent = machine.meter.account.estimated
    assert spent is not None
    facts = status(run)
    assert facts["affordable"] == 6 + int((60 - spent) * 6 / spent)
    assert facts["affordable_unknown"] is None
    assert not any("budget" in one for one in facts["warnings"])
    machine.passes(3600 * 6, price="10")
    facts = status(run)
    assert facts["affordable"] == 6, "not one more"
    assert any("exceed the funds by" in one for one in facts["warnings"])


def test_the_reserve_travels_with_the_spend_when_it_changes(machine: Machine) -> None:
    reserves = []
    for price in ("36", "36", "20", "20"):
        told = history(machine.run.ledger)
        receipt = machine.passes(
            60, price=price, reserve=budget.reserve(machine.run, told, machine.policy, Decimal(price))
        )
        assert receipt is not None
        reserves.append(receipt.body["reserve"])
    assert [one is not None for one in reserves] == [True, False, True, False]
    assert machine.meter.account.reserve_usd == Decimal(reserves[2]["usd"])


def jumped(price: str) -> NoReading:
    return NoReading("it jumped", "test", T0, None, Decimal(price))


def test_a_dearer_price_that_nobody_confirmed_is_charged_until_there_is_a_reading(machine: Machine) -> None:
    def look(price: Reading | NoReading) -> str:
        machine.meter = Meter(machine.run, machine.policy)  # a guard may die between any two looks
        machine.now += timedelta(seconds=100)
        receipt = machine.meter.charge(machine.ledger, Use("a01", "running", price), machine.now, since=T0)
        assert receipt is not None
        return str(receipt.body["usd_per_hour"])

    prices = [at("36"), jumped("720"), at(None), at(None), at("36"), at("36")]
    assert [look(price) for price in prices] == ["36", "720", "720", "720", "720", "36"]
    assert look(jumped("36")) == "36", "the higher one was the last price"


def test_an_unconfirmed_price_is_known_where_there_never_was_another(machine: Machine) -> None:
    machine.now += timedelta(seconds=3600)
    receipt = machine.meter.charge(machine.ledger, Use("a01", "running", jumped("17")), machine.now, since=T0)
    assert receipt is not None
    assert (receipt.body["usd_per_hour"], receipt.body["price"]["usd_per_hour"]) == ("17", None)
    assert Meter(machine.run, machine.policy).account == machine.meter.account


@pytest.mark.parametrize("same", [True, False])
def test_the_price_of_the_very_first_look_counts(machine: Machine, same: bool) -> None:
    """Billing that begins at the first look has that look's reading at its first end."""
    assert machine.meter.charge(machine.ledger, Use("a01", "running", at("72")), T0) is None
    if not same:  # another process goes on: the loop's receipt of the price tells it
        machine.ledger.append("price", {**body(at("72")), "at": T0.isoformat()})
        machine.meter = Meter(machine.run, machine.policy)
    assert [receipt.body["usd_per_hour"] for _ in range(2) if (receipt := machine.passes(100))] == ["72", "36"]
