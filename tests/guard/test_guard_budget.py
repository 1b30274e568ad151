"""Funds and bills are receipts that bind; the reserve pays a safe end; the report leaves nothing out."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from small import Project
from typer.testing import CliRunner

from assay.cli.budget import budget_app
from assay.errors import InputError, Refused
from assay.files.digest import digest, digest_file
from assay.guard import budget, expenses
from assay.guard.budget import Money, bill, fund
from assay.guard.meter import Meter, State, Use
from assay.guard.policy import Rate, from_yaml
from assay.guard.prices import read
from assay.ledger.ledger import read as read_ledger
from assay.recipe import load as recipes
from assay.run.folder import RunFolder, create
from assay.run.history import gather, history

T0 = datetime(2026, 11, 10, tzinfo=UTC)
EUR = Rate(usd=Decimal("1.08"), source="ECB", date="2026-11-11")
POLICY = """
name: small
machine: {gpus: 8, disk_gb: 730, disk_usd_per_gb_month_running: "0.10", disk_usd_per_gb_month_stopped: "0.20",
          egress_usd_per_gb: "0.05", restart_seconds: 900, save_seconds: 60, disk_days: 10}
prices: [{fixed: {value: "4.50", unit: gpu-hour}}]
interval_seconds: 300
save_timeout_seconds: 1800
"""
USD = {"unit": "machine-hour", "currency": "USD", "source": "test", "fetched": T0, "gpus": 8, "rates": {}, "raw": b""}


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Project:
    return Project(tmp_path_factory.mktemp("budget") / "project")


@pytest.fixture
def run(template: Project, tmp_path: Path) -> RunFolder:
    """A run that was created and never started."""
    recipe = template.recipe(schedule__updates=30)
    return create(tmp_path / "run", recipe, recipes.load(recipe))


@pytest.fixture
def lived(run: RunFolder) -> RunFolder:
    """A run of two allocations: an hour each at 36 and 18 dollars, four updates of the first done again."""
    ledger, policy = run.open_ledger(), from_yaml(POLICY, "policy.yaml")
    ledger.append("allocation", {"allocation": "a01", "provider": "runpod", "zone": "US-KS-2", "gpus": 8})
    meter = Meter(run, policy)

    def look(name: str, state: State, hours: float, price: str, since: float) -> None:
        meter.charge(ledger, Use(name, state, read(price, **USD)), T0 + timedelta(hours=hours),
                     since=T0 + timedelta(hours=since))  # fmt: skip

    look("a01", "provisioning", 0.5, "36", 0)
    _train(run, range(10), T0 + timedelta(hours=0.5))
    look("a01", "running", 1, "36", 0)
    look("a01", "stopped", 2, "36", 0)
    _train(run, range(6, 14), T0 + timedelta(hours=2))
    look("a02", "running", 3, "18", 2)
    return run


def _train(run: RunFolder, updates: range, start: datetime) -> None:
    with run.metrics.open("a") as file:
        for number, update in enumerate(updates, 1):
            time = (start + timedelta(seconds=60 * number)).isoformat()
            line = {"update": update, "segment": 1, "time": time, "loss": 4.0, "seconds": 60.0, "order_digest": "d"}
            file.write(json.dumps(line) + "\n")


def hours(start: float, stop: float) -> dict[str, datetime]:
    return {"start": T0 + timedelta(hours=start), "stop": T0 + timedelta(hours=stop)}


def test_funds_are_receipts_in_us_dollars_with_their_rate(run: RunFolder) -> None:
    fund(run, Money(Decimal("425")), purpose="main base", received="2026-11-10")
    done = fund(run, Money(Decimal("100"), "EUR", EUR), purpose="main base", received="2026-11-11", reference=" T 1 ")
    assert done.kind == "funds"
    assert done.body == {
        "usd": "108", "amount": "100", "currency": "EUR",
        "rate": {"usd": "1.08", "source": "ECB", "date": "2026-11-11"},
        "date": "2026-11-11", "purpose": "main base", "reference": digest(b"T 1"), "reserve": None, "replaces": None,
    }  # fmt: skip
    assert expenses.report(run)["funds"] == "533"


@pytest.mark.parametrize(
    ("money", "said"),
    [
        (Money(Decimal(0)), "above 0"), (Money(Decimal(-5)), "above 0"), (Money(Decimal("NaN")), "above 0"),
        (Money(Decimal("sNaN")), "above 0"), (Money(Decimal("1e999")), "digits"),
        (Money(Decimal("1e13")), "are expected"),
        (Money(Decimal("1e-12")), "are expected"),
        (Money(Decimal("1e10"), "XAU", Rate(usd=Decimal(4000), source="LBMA", date="2026-11-11")), "are expected"),
        (Money(Decimal("1e99")), "digits"), (Money(Decimal(5), "EUR"), "needs --usd-per-unit"),
        (Money(Decimal(5), "USD", EUR), "takes no rate"),
    ],
)  # fmt: skip
def test_an_amount_is_positive_and_has_the_rate_that_it_needs(run: RunFolder, money: Money, said: str) -> None:
    with pytest.raises(InputError, match=said):
        fund(run, money, purpose="main")
    with pytest.raises(InputError, match=said):
        bill(run, money, **hours(0, 1))
    assert not history(run.ledger).money


def test_funds_of_one_purpose_are_not_spent_on_another(run: RunFolder) -> None:
    first = fund(run, Money(Decimal(500)), purpose="main base")
    with pytest.raises(Refused, match="for 'main base', and these are for 'gold'"):
        fund(run, Money(Decimal(10)), purpose="gold")
    fund(run, Money(Decimal(500)), purpose="gold", replaces=first.seq)
    assert expenses.report(run)["purpose"] == "gold"


def test_the_same_transfer_funds_one_run_once(run: RunFolder, template: Project, tmp_path: Path) -> None:
    fund(run, Money(Decimal(500)), purpose="main", reference="T-7")
    with pytest.raises(Refused, match="already"):
        fund(run, Money(Decimal(500)), purpose="main", reference="T-7")
    recipe = template.recipe(schedule__updates=30)
    beside = create(tmp_path / "other", recipe, recipes.load(recipe))
    with pytest.raises(Refused, match="the same money, and stays there"):
        fund(beside, Money(Decimal(500)), purpose="main", reference="T-7")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "ledger.jsonl").write_text("nonsense\n")
    fund(beside, Money(Decimal(500)), purpose="main", reference="T-8")


def test_mistakes_are_replaced_and_stay_in_the_ledger(run: RunFolder) -> None:
    wrong = fund(run, Money(Decimal(5000)), purpose="main", reference="T-7")
    fund(run, Money(Decimal(500)), purpose="main", reference="T-7", replaces=wrong.seq)
    assert expenses.report(run)["funds"] == "500"
    assert [one.body["usd"] for one in history(run.ledger).money] == ["5000", "500"]
    with pytest.raises(InputError, match=r"--replaces is 99; the receipts funds that stand are: 2"):
        fund(run, Money(Decimal(1)), purpose="main", replaces=99)
    with pytest.raises(InputError, match="receipts bill that stand are: none"):
        bill(run, Money(Decimal(1)), **hours(0, 1), replaces=wrong.seq)


def test_funds_that_are_still_to_come_are_none(run: RunFolder) -> None:
    for day in ("2999-01-01", "tomorrow", "2026-13-01"):
        with pytest.raises(InputError, match="--date is"):
            fund(run, Money(Decimal(1)), purpose="main", received=day)
    with pytest.raises(InputError, match="--purpose"):
        fund(run, Money(Decimal(1)), purpose=" ")


def test_a_bill_shows_its_difference_from_the_estimate(lived: RunFolder, tmp_path: Path) -> None:
    invoice = tmp_path / "invoice.pdf"
    invoice.write_bytes(b"%PDF")
    done = bill(lived, Money(Decimal("40.10")), **hours(0, 1), covers=["gpu", "disk"], allocation="a01", file=invoice,
                provider="runpod")  # fmt: skip
    assert (done.body["estimated_usd"], done.body["difference_usd"]) == ("36.1", "4")
    assert done.body["file"] == digest_file(invoice)
    facts = expenses.report(lived)
    assert (facts["spent_estimated"], facts["spent_billed"]) == ("54.4", "40.1")
    assert facts["spent"] == "58.4", "the bill for what it covers, the estimate for the rest"
    assert facts["allocations"][0]["difference_usd"] == "4"
    assert facts["allocations"][1]["billed_usd"] is None


def test_bills_do_not_cover_the_same_twice_nor_what_is_to_come(lived: RunFolder) -> None:
    first = bill(lived, Money(Decimal(40)), **hours(0, 2), covers=["gpu"], allocation="a01")
    for more in ({"covers": ["gpu"]}, {"allocation": "a01"}, {}):
        with pytest.raises(Refused, match=rf"receipt {first.seq} covers gpu"):
            bill(lived, Money(Decimal(1)), **hours(1, 3), **more)
    bill(lived, Money(Decimal(1)), **hours(1, 3), covers=["disk"])
    bill(lived, Money(Decimal(1)), **hours(1, 3), covers=["gpu"], allocation="a02")
    bill(lived, Money(Decimal(2)), **hours(0, 2), covers=["gpu"], allocation="a01", replaces=first.seq)
    with pytest.raises(InputError, match="still to come"):
        bill(lived, Money(Decimal(1)), start=T0, stop=datetime.now(UTC) + timedelta(hours=1))
    with pytest.raises(InputError, match="begins before it ends"):
        bill(lived, Money(Decimal(1)), **hours(2, 2))
    with pytest.raises(InputError, match="allowed are gpu, disk, egress"):
        bill(lived, Money(Decimal(1)), **hours(5, 6), covers=["tax"])
    with pytest.raises(InputError, match="no allocation of that name"):
        bill(lived, Money(Decimal(1)), **hours(5, 6), allocation="a03")


def test_the_reserve_is_one_safe_stop_one_copy_disk_days_and_one_restart(run: RunFolder) -> None:
    """36 dollars an hour are a cent a second; 730 GB at 20 cents a month are 20 cents an hour, stopped."""
    policy = from_yaml(POLICY, "policy.yaml")
    found = budget.reserve(run, history(run.ledger), policy, Decimal(36))
    size = found["from"]["copy_bytes"]
    parts = {name: Decimal(usd) for name, usd in found["parts"].items()}
    assert parts == {
        "safe_stop": Decimal("3.60"), "full_copy": 18, "disk_days": 48, "restart": 9,
        "full_copy_egress": (Decimal("0.05") * size / 10**9).quantize(Decimal("1e-9")),
    }  # fmt: skip
    assert Decimal(found["usd"]) == sum(parts.values())
    assert (found["how"], found["from"]["copy_seconds_measured"]) == ("computed", False)
    assert budget.reserve(run, history(run.ledger), policy, None)["usd"] is None, "without a price nobody knows"
    fixed = from_yaml(POLICY + 'reserve: {usd: "25"}\n', "policy.yaml")
    assert budget.reserve(run, history(run.ledger), fixed, None) == budget.stated_reserve(Decimal(25))


def test_a_copy_that_was_made_says_how_long_one_takes(run: RunFolder) -> None:
    ledger = run.open_ledger()
    body = {"checkpoint": "full", "step": 6, "segment": 1, "folder": "checkpoints/step-000006", "manifest_sha256": "m",
            "state_sha256": None, "weights_sha256": "w", "order_digest": "o"}  # fmt: skip
    ledger.append("checkpoint.saved", body)
    ledger.append("checkpoint.mirrored", {"manifest_sha256": "m", "mirror": "x", "verify": "readback", "bytes": 12_345})
    used = budget.reserve(run, history(run.ledger), from_yaml(POLICY, "policy.yaml"), Decimal(36))["from"]
    assert (used["copy_bytes"], used["copy_seconds_measured"]) == (12_345, True)
    assert used["copy_seconds"] < 60


def test_a_copy_that_waited_for_the_mirror_does_not_swell_the_reserve(run: RunFolder) -> None:
    """Saved at 1 h, 2 h and 8 h; the mirror was away until 20 h, and proves the copies ten minutes apart."""
    ledger = run.open_ledger()
    body = {"checkpoint": "full", "step": 6, "segment": 1, "folder": "checkpoints/step-000006", "state_sha256": None,
            "weights_sha256": "w", "order_digest": "o"}  # fmt: skip
    copied = {"mirror": "x", "verify": "readback", "bytes": 12_345}
    for name in "abc":
        ledger.append("checkpoint.saved", {**body, "manifest_sha256": name})
    for name in "abc":
        ledger.append("checkpoint.mirrored", {**copied, "manifest_sha256": name})
    times = {"saved": iter((1.0, 2.0, 8.0)), "mirrored": iter((20.0, 20 + 1 / 6, 20 + 2 / 6))}
    first, *later = read_ledger(run.ledger)
    receipts = [replace(one, time=(T0 + timedelta(hours=next(times[one.kind[11:]]))).isoformat()) for one in later]
    policy = from_yaml(POLICY, "policy.yaml")
    for copies, seconds, measured in ((3, 600, True), (1, 1800, False)):
        told = gather([first, *receipts[: 3 + copies]])
        used = budget.reserve(run, told, policy, Decimal(36))["from"]
        assert (used["copy_seconds"], used["copy_seconds_measured"]) == (seconds, measured)


def test_a_reserve_without_a_price_of_egress_is_at_least_so_much(run: RunFolder) -> None:
    bare = from_yaml(POLICY.replace('egress_usd_per_gb: "0.05", ', ""), "policy.yaml")
    for policy, at_least in ((bare, True), (from_yaml(POLICY, "policy.yaml"), False)):
        facts = expenses.report(run, budget.reserve(run, history(run.ledger), policy, Decimal(36)))
        assert facts["reserve_at_least"] is at_least
        assert ("reserve (computed, at least)" in expenses.as_markdown(facts)) is at_least


def test_the_report_tells_allocations_useful_and_wasted_apart(lived: RunFolder) -> None:
    facts = expenses.report(lived)
    first, second = facts["allocations"]
    assert (first["provider"], first["zone"], first["gpus"], second["provider"]) == ("runpod", "US-KS-2", 8, None)
    assert (first["useful_updates"], first["recomputed_updates"]) == (10, 0)
    assert (second["useful_updates"], second["recomputed_updates"]) == (4, 4)
    assert (first["useful_usd"], first["wasted_usd"], first["disk_stopped"]) == ("6", "18", "0.2")
    assert (second["useful_usd"], second["wasted_usd"]) == ("1.2", "1.2")
    assert facts["useful_positions"] == 14 * 128
    assert facts["recomputed_positions"] == 4 * 128
    estimated = Decimal(facts["spent_estimated"])
    assert Decimal(facts["usd_per_billion_positions"]) == (estimated * 10**9 / (14 * 128)).quantize(Decimal("1e-9"))
    assert sum(Decimal(row["estimated_usd"]) for row in facts["allocations"]) == estimated


def test_updates_that_were_given_up_are_useful_no_more(lived: RunFolder) -> None:
    _train(lived, range(6, 9), T0 + timedelta(hours=4))
    facts = expenses.report(lived)
    assert (facts["useful_updates"], facts["lost_updates"]) == (9, 5), "9 stand, 14 were reached"


def test_a_run_that_nobody_metered_says_so(run: RunFolder) -> None:
    _train(run, range(3), T0)
    facts = expenses.report(run)
    assert (facts["spent_estimated"], facts["useful_positions"], facts["updates_before_metering"]) == (None, None, 3)
    page = expenses.as_markdown(facts)
    assert "| spent, estimated | not measured |" in page
    assert "No allocation is known." in page
    assert "| updates that nobody metered | 3 |" in page


def test_an_allocation_that_nobody_metered_is_there_with_its_times(run: RunFolder) -> None:
    ledger = run.open_ledger()
    facts = {"allocation": "1", "provider": "gcp", "zone": "us-east5-a", "gpus": 8}
    ledger.append("allocation", {**facts, "event": "began", "time": "2026-11-10T04:50:00Z"})
    (row,) = expenses.report(run)["allocations"]
    assert (row["start"], row["stop"], row["hours"]) == ("2026-11-10T04:50:00Z", None, None)
    ledger.append("allocation", {**facts, "event": "ended", "time": "2026-11-10T06:20:00Z"})
    (row,) = expenses.report(run)["allocations"]
    assert (row["zone"], row["hours"], row["estimated_usd"], row["useful_updates"]) == ("us-east5-a", "1.5", None, None)
    (first, whole) = csv.DictReader(io.StringIO(expenses.as_csv(expenses.report(run))))
    assert first["gpu_useful"] == first["wasted_usd"] == whole["estimated_usd"] == "not measured"


def test_csv_and_markdown_hold_the_same_figures(lived: RunFolder) -> None:
    fund(lived, Money(Decimal(500)), purpose="main | base <b>")
    facts = expenses.report(lived)
    rows = list(csv.DictReader(io.StringIO(expenses.as_csv(facts))))
    assert [row["allocation"] for row in rows] == ["a01", "a02", "whole run"]
    assert rows[0]["gpu_useful"] == "6"
    assert rows[1]["provider"] == "not measured"
    assert rows[2]["estimated_usd"] == facts["spent_estimated"]
    assert Decimal(rows[2]["gpu_useful"]) == Decimal(rows[0]["gpu_useful"]) + Decimal(rows[1]["gpu_useful"])
    assert rows[2]["billed_usd"] == "not measured"
    page = expenses.as_markdown(facts)
    assert "main \\| base \\<b\\>" in page
    assert f"| gpu useful | {expenses.dollars('6')} |" in page
    tables = [line for line in page.splitlines() if line.startswith("|")]
    assert all(line.endswith("|") for line in tables)


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """`assay budget …` in this process; its JSON."""
    monkeypatch.chdir(tmp_path)

    def run_it(*words: str) -> dict[str, Any]:
        done = CliRunner().invoke(budget_app, [*words, "--json"], catch_exceptions=False)
        assert done.exit_code == 0, done.output
        facts: dict[str, Any] = json.loads(done.stdout)
        return facts

    return run_it


KEYS = {"funds", "spent_estimated", "spent_billed", "reserve", "remaining", "affordable"}


def test_the_command_answers_with_the_contract_s_keys(
    lived: RunFolder, call: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    (tmp_path / "policy.yaml").write_text(POLICY)
    funded = call("fund", "run", "--amount", "500", "--purpose", "main", "--reserve-usd", "25")
    assert funded.keys() >= KEYS
    assert (funded["funds"], funded["reserve"], funded["remaining"]) == ("500", "25", str(500 - 25 - Decimal("54.4")))
    billed = call("bill", "run", "--amount", "30", "--currency", "EUR", "--usd-per-unit", "1.10", "--rate-source",
                  "ECB", "--rate-date", "2026-11-11", "--from", "2026-11-10", "--to",
                  "2026-11-10T01:00:00Z")  # fmt: skip
    assert billed.keys() >= KEYS
    assert (billed["spent_billed"], billed["difference_usd"]) == ("33", "-3.1")
    report = call("report", "run", "--policy", "policy.yaml", "--out", "expenses")
    assert report.keys() >= KEYS
    assert report["reserve_how"] == "computed"
    assert report["reserve_from"]["usd_per_hour"] == "18", "at the price that was metered last"
    assert call("report", "run")["reserve"] == "25", "a report changes nothing"
    assert {path.name for path in (tmp_path / "expenses").iterdir()} == {"expenses.md", "expenses.csv"}


def test_people_see_the_same_figures(lived: RunFolder, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "policy.yaml").write_text(POLICY)
    shown = CliRunner().invoke(
        budget_app, ["fund", "run", "--amount", "500", "--purpose", "main", "--policy", "policy.yaml"],
        catch_exceptions=False,
    ).stdout  # fmt: skip
    assert "reserve for disk days         48.00" in shown
    assert "spent, billed                 no bill entered" in shown
    shown = CliRunner().invoke(budget_app, ["report", "run"], catch_exceptions=False).stdout
    assert "a02         1      18.10" in shown


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["fund", "run", "--amount", "many", "--purpose", "x"], "--amount is 'many'"),
        (["fund", "run", "--amount", "5", "--purpose", "x", "--usd-per-unit", "2"], "give all three"),
        (["fund", "run", "--amount", "5", "--purpose", "x", "--currency", "EUR", "--usd-per-unit", "0",
          "--rate-source", "s", "--rate-date", "2026-11-11"], "usd is"),
        (["fund", "run", "--amount", "5", "--purpose", "x", "--currency", "EUR", "--usd-per-unit", "1",
          "--rate-source", "s", "--rate-date", "once"], "date is 'once'"),
        (["fund", "run", "--amount", "5", "--purpose", "x", "--reserve-usd", "-1"], "--reserve-usd is -1"),
        (["fund", "run", "--amount", "5", "--purpose", "x", "--reserve-usd", "1e30"], "--reserve-usd is 1E+30"),
        (["fund", "run", "--amount", "5", "--purpose", "x", "--reserve-usd", "1e-9999"], "--reserve-usd is 1E-9999"),
        *((["fund", "run", "--amount", "5", "--purpose", "x", "--currency", "EUR", "--usd-per-unit", rate,
            "--rate-source", "s", "--rate-date", "2026-11-11"], "usd is")
          for rate in ("-1.08", "NaN", "sNaN", "Infinity", "1e999", "1e13")),
        (["fund", "run", "--amount", "5", "--purpose", "x", "--reserve-usd", "1", "--policy", "p"], "give one of them"),
        (["bill", "run", "--amount", "5", "--from", "soon", "--to", "2026-11-10"], "--from is 'soon'"),
        (["report", "nothing"], "is not a folder"),
        (["report", "run", "--policy", "nothing.yaml"], "nothing.yaml does not exist"),
    ],
)  # fmt: skip
def test_a_wrong_word_is_one_sentence(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, words: list[str], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError) as fault:
        CliRunner().invoke(budget_app, words, catch_exceptions=False)
    assert said in str(fault.value)
    assert not history(run.ledger).money


def test_the_report_shows_no_figure_for_gpu_time_at_no_price(run: RunFolder) -> None:
    ledger, meter = run.open_ledger(), Meter(run, from_yaml(POLICY, "policy.yaml"))
    _train(run, range(3), T0)
    meter.charge(ledger, Use("a01", "running", read(None, **USD)), T0 + timedelta(hours=10), since=T0)
    facts = expenses.report(run)
    (row,) = facts["allocations"]
    for figure in (facts, row):
        assert figure["usd_per_billion_positions"] is None
    assert (facts["spent_estimated"], facts["spent"], row["estimated_usd"]) == (None, None, None)
    assert "For 36,000 s of GPU time no price was known: nobody knows" in expenses.as_markdown(facts)


def test_the_report_names_what_nobody_metered(lived: RunFolder) -> None:
    ledger, facts = lived.open_ledger(), {"allocation": "a03", "provider": "gcp", "zone": None, "gpus": 8}
    for event, time in (("began", "2026-11-10T04:00:00Z"), ("ended", "2026-11-10T06:00:00Z")):
        ledger.append("allocation", {**facts, "event": event, "time": time, "usd_per_machine_hour": "12"})
    told = expenses.report(lived)
    assert (told["spent_estimated"], told["spent"]) == ("54.4", "78.4")
    assert "Nobody metered 2 GPU machine-hours of allocation a03: counted as 24.00" in expenses.as_markdown(told)
    assert told["unmetered"][0]["usd"] == "24"
    bill(lived, Money(Decimal(20)), **hours(4, 6), covers=["gpu"], allocation="a03")
    assert expenses.report(lived)["spent"] == "74.4"


@pytest.mark.parametrize("edge", ["0001-01-01T00:00:00+14:00", "9999-12-31T23:59:59-14:00"])
def test_a_period_at_the_edge_of_the_calendar_is_refused(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, edge: str
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["bill", "run", "--amount", "5", "--from", edge, "--to", "2026-11-10"]
    with pytest.raises(InputError, match="--from is"):
        CliRunner().invoke(budget_app, words, catch_exceptions=False)
