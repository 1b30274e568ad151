"""The guard's loop against a clock, a trainer, a mirror and a provider that fail in every way it must survive."""

from __future__ import annotations

import os
from collections.abc import Iterator
from datetime import timedelta
from decimal import Decimal
from pathlib import Path

import pytest
from guard_world import Killed, World
from hypothesis import given, settings
from hypothesis import strategies as st

from assay.errors import Refused
from assay.guard.dead_man import watch as dead_man
from assay.guard.journal import Elsewhere, OnNode
from assay.guard.watch import Guard, alone
from assay.ledger.ledger import read
from assay.run import accounts, inbox
from assay.run.history import history


@pytest.fixture(autouse=True, scope="module")
def memory_alone() -> Iterator[None]:
    """These tests kill no machine: nothing waits for the disk."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: None)
        yield


# 128 positions in 5 s are 92,160 an hour; at 10 dollars an hour 10^9 of them cost 108,507 dollars.
CEILING = {"ceiling": {"usd_per_billion_positions": "150000"}}
RISE = [(0, "10"), (600, "18")]
ORDER = ["save", "copy", "hold", "stop", "prove"]


def done(world: World) -> list[str]:
    return [kind for kind, state in world.steps() if state == "done" and kind in ORDER]


def test_a_price_above_the_ceiling_is_saved_copied_held_stopped_and_proved_in_order(tmp_path: Path) -> None:
    world = World(tmp_path, RISE, **CEILING)
    world.kept(590)
    assert not world.receipts("hold")
    world.kept(1800)
    assert done(world) == ORDER
    (hold,) = world.receipts("hold")
    assert (hold.body["cause"], hold.body["why"]) == ("guard", "ceiling")
    assert (world.state, world.stop_calls) == ("stopped", 1)
    assert world.alarms() == {("stop", "decision 1")}
    before = world.receipts("checkpoint.mirrored")[0]
    assert before.seq < hold.seq, "a verified copy stood before the hold"


def test_a_guard_that_is_killed_anywhere_goes_on_where_the_receipts_end(tmp_path: Path) -> None:
    early = [(0, "10"), (120, "18")]
    plain = World(tmp_path / "plain", early, **CEILING)
    plain.kept(1800)
    all_of_it = OnNode(plain.run).receipts()[0]
    mine = [one.kind for one in all_of_it if one.kind in ("price", "spend", "guard", "hold", "alarm")]
    for left in range(mine.index("guard"), len(mine)):
        world = World(tmp_path / str(left), early, **CEILING)
        with pytest.raises(Killed):
            world.kept(1800, world.guard(left))
        world.kept(world.now + 900)
        assert done(world) == ORDER, left
        assert len(world.receipts("hold")) == 1
        assert world.state == "stopped"
        assert {event for event, _ in world.alarms()} == {"stop"}


def test_there_is_one_guard_of_a_run(tmp_path: Path) -> None:
    world = World(tmp_path, RISE)
    with alone(world.run), pytest.raises(Refused, match="has a guard already"), alone(world.run):
        pass
    with alone(world.run):
        pass


def test_a_save_that_fails_and_a_copy_that_never_verifies_are_alarms_and_the_machine_stops(tmp_path: Path) -> None:
    world = World(tmp_path / "save", RISE, **CEILING)
    world.saves = False
    world.kept(2400)
    assert ("save", "failed") in world.steps()
    assert done(world) == ["copy", "hold", "stop", "prove"]
    assert {event for event, _ in world.alarms()} == {"stale_copy", "stop"}
    world = World(tmp_path / "copy", RISE, **CEILING)
    world.copies = False
    world.kept(2400)
    assert ("copy", "failed") in world.steps()
    assert (done(world), world.state) == (["save", "hold", "stop", "prove"], "stopped")


def test_a_provider_that_does_not_answer_is_asked_until_it_does(tmp_path: Path) -> None:
    world = World(tmp_path, RISE, **CEILING)
    world.api = False
    world.kept(1800)
    assert (world.state, world.steps()[-1]) == ("running", ("stop", "refused"))
    assert ("stop", "decision 1 refused") in world.alarms()
    assert world.receipts("spend")[-1].body["state"] == "running", "nobody can say that it is not billed"
    world.api = True
    world.kept(2400)
    assert (done(world), world.state) == (ORDER, "stopped")


def test_billing_that_does_not_end_is_an_alarm_and_the_stop_is_asked_for_again(tmp_path: Path) -> None:
    world = World(tmp_path, RISE, **CEILING)
    world.stops = False
    world.kept(2400)
    assert "prove" not in done(world)
    assert ("stop", "decision 1 unproven") in world.alarms()
    assert world.stop_calls > 1
    world.stops = True
    world.kept(3000)
    assert (done(world), world.state) == (ORDER, "stopped")


def test_a_clock_that_jumps_back_hides_no_spending_and_one_that_jumps_forward_adds_some(tmp_path: Path) -> None:
    for hours in (-2, 2):
        world = World(tmp_path / str(hours), [(-20_000, "10")], cap_usd="1000")

        def jump(world: World, hours: int = hours) -> None:
            world.jump = timedelta(hours=hours)

        world.events[300] = jump
        guard = world.kept(900)
        spent = guard.observe().purse.spent
        assert spent >= world.billed
        assert spent - world.billed < 21 if hours > 0 else spent - world.billed < Decimal("0.2")
        assert world.state == "running", "nothing speaks for a stop"


@settings(max_examples=8, deadline=None)
@given(
    st.lists(st.decimals("0.75", "1.4", places=2), min_size=4, max_size=20),
    st.integers(2, 12),
    st.sampled_from(["none", "save", "copy"]),
)
def test_nothing_is_spent_beyond_the_limit_before_the_stop_or_beyond_the_cap_after_it(
    tmp_path_factory: pytest.TempPathFactory, moves: list[Decimal], cap: int, fault: str
) -> None:
    price, prices = Decimal(20), [(0, "20")]
    for place, move in enumerate(moves, 1):
        price = max(Decimal(5), min(Decimal(60), (price * move).quantize(Decimal("0.01"))))
        prices.append((place * 60, str(price)))
    world = World(tmp_path_factory.mktemp("world"), prices, cap_usd=str(cap), reserve={"usd": str(cap // 2)})
    world.saves, world.copies = fault != "save", fault != "copy"
    world.kept(3600)
    assert world.state == "stopped"
    assert done(world)[-1] == "prove"
    decided = next(one for one in world.receipts("guard") if one.body["action"] == "decided")
    assert decided.body["cause"] == "budget"
    before = accounts.account(one for one in world.receipts("spend") if one.seq < decided.seq).spent or Decimal(0)
    assert before <= cap - cap // 2, "the stop begins before the limit"
    assert world.billed <= cap, "the reserve pays the stop"


def test_without_any_price_the_reserve_is_unknown_and_nothing_may_be_spent(tmp_path: Path) -> None:
    world = World(tmp_path, [(7200, "10")], cap_usd="100")
    seen = world.guard().observe()
    assert (seen.reserve["usd"], seen.bound) == (None, 0)


def test_a_guard_elsewhere_speaks_through_the_inbox_and_its_chain_is_taken_up(tmp_path: Path) -> None:
    world = World(tmp_path, RISE, **CEILING)
    guard = Guard(world.site(Elsewhere(world.run, tmp_path / "chain")))
    while world.now < 1800:
        *_, pending = guard.look()
        inbox.take_up(world.run, world.ledger)  # what the trainer does once an update
        guard.sleep(5 if pending else 60)
        if world.now > 900 and not pending:
            break
    inbox.take_up(world.run, world.ledger)
    mine = list(read(tmp_path / "chain" / "ledger.jsonl", guard.site.journal.name))  # type: ignore[attr-defined]
    taken = [one.body["inbox"] for one in read(world.run.ledger) if "inbox" in one.body]
    assert [(one["seq"], one["digest"]) for one in taken] == [(one.seq, one.digest) for one in mine]
    assert not inbox.waiting(world.run)


def test_what_another_machine_may_not_say_is_put_aside(tmp_path: Path) -> None:
    world = World(tmp_path, RISE)
    place = inbox.folder(world.run)
    place.mkdir()
    (place / "a-00000000.json").write_text('{"format": "assay-inbox/1", "kind": "funds", "body": {}, "chain": {}}')
    (place / "b-00000000.json").write_text("no JSON")
    said = inbox.take_up(world.run, world.ledger)
    assert [one.kind for one in said] == ["inbox", "inbox"]
    assert "another machine may say" in said[0].body["refused"]
    assert str(tmp_path) not in said[1].body["refused"]
    assert not inbox.waiting(world.run)


def test_when_the_guard_falls_silent_the_switch_saves_holds_and_stops(tmp_path: Path) -> None:
    world = World(tmp_path, RISE, dead_man={"after_seconds": 600, "stop": True})
    world.kept(300)
    released = dead_man(world.site(OnNode(world.run), heart=False, told_to_stop=lambda: world.now > 2400))
    assert released
    assert (done(world), world.state) == (ORDER, "stopped")
    hold = history(world.run.ledger).hold
    assert hold is not None
    assert hold.body["why"] == "dead_man"


def test_an_alarm_that_does_not_arrive_is_recorded_and_sent_again_and_never_stops_the_guard(tmp_path: Path) -> None:
    heard = tmp_path / "heard"
    alarm = {"command": {"argv": ["sh", "-c", f"test -e {heard} && cat >> {heard}"]}}
    world = World(
        tmp_path, RISE, **CEILING, alarms=[alarm, {"webhook": {"url": "http://127.0.0.1:1/"}, "on": ["stalled"]}]
    )
    guard = world.kept(1500)
    told = [one.body for one in world.receipts("guard") if one.body["action"] == "told"]
    assert [one["failed"] for one in told] == [{"1 command": "it ended with code 1"}]
    heard.touch()
    guard.look()
    assert heard.read_text().count('"alarm": "stop"') == 1
    assert world.receipts("guard")[-1].body["delivered"] == ["1 command"]
