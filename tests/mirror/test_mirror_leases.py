"""One owner: the newest lease decides, who sees a higher one stops with 3; what the loser wrote is kept, not merged."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from faulty_proxy import ALWAYS, Fault, Proxy
from hypothesis import given, settings
from hypothesis import strategies as st
from mirror_runs import PIECE, Clock, mirrored
from small import Project, drive

from assay.errors import DataError, Interrupted, Refused
from assay.files.digest import digest
from assay.files.retry import Policy
from assay.launch.arrival import arrive, take_over
from assay.ledger.ledger import read
from assay.mirror import copying, records
from assay.mirror.copying import claim, mirror, own
from assay.mirror.fetching import fetch
from assay.mirror.leases import known_states, newest_lease, put_lease, take_lease
from assay.mirror.place import place
from assay.recipe import load as recipes
from assay.release.verify import verify
from assay.run.consumption import consumption
from assay.run.folder import RunFolder, create
from assay.run.history import history
from assay.run.owner import is_owned, release
from assay.run.status import status


def kinds(run: RunFolder) -> list[str]:
    return [one.kind for one in read(run.ledger)]


@pytest.fixture
def copies(tmp_path: Path) -> str:
    (tmp_path / "copies").mkdir()
    return str(tmp_path / "copies")


def go(run: RunFolder, recipe: Path, **options: Any) -> int:
    return drive(recipe, run.path, resume=True, **options)


def test_an_old_disk_comes_back_after_training_went_on(
    run: RunFolder, trained: Path, copies: str, copy: Callable[..., Any], clock: Clock, tmp_path: Path
) -> None:
    """The whole story: lost, gone on elsewhere with the same bits, and what the old disk has is shown, never merged."""
    project, data = run.path.parent, run.path.parent / "data"
    recipe = project / "recipe.yaml"
    assert own(run, copies, clock.policy()) == 1
    copy(run, copies)
    assert go(run, recipe, until="18") == 0, "six updates that were never copied"
    new = RunFolder(tmp_path / "new")
    fetch(copies, new.path, policy=clock.policy(), project=project, own=True)
    assert own(new, copies, clock.policy()) == 3, "2 was the fetch's"
    assert go(new, recipe) == 0

    with pytest.raises(Refused, match=r"lease 3 of .* was taken by another machine .*, after lease 1 .*assay release"):
        copy(run, copies)
    told = history(run.ledger)
    assert told.hold is not None
    assert (told.hold.body["cause"], told.hold.body["lease"]) == ("lease", 3)
    assert status(run)["state"] == "held"
    before = run.ledger.read_bytes()
    with pytest.raises(Refused, match="training went on elsewhere"):
        copy(run, copies)
    assert run.ledger.read_bytes() == before, "one hold, however often it is asked"
    assert len(list((tmp_path / "copies/orphaned").iterdir())) == 1, "and one orphan"
    assert go(run, recipe) == 3, "nor does a trainer start"

    done, lost = consumption(new), status(new)["recomputed"]
    copy(new, copies)
    [orphan] = history(new.ledger).orphaned
    line = [one for one in read(run.ledger) if one.seq > orphan.body["after"]["seq"]]
    assert (orphan.body["lease"], orphan.body["receipts"]) == (1, len(line))
    assert orphan.body["updates"] == [[12, 18]]
    kept = new.path / orphan.body["folder"] / "ledger.jsonl"
    assert digest(kept.read_bytes()) == orphan.body["files"]["ledger.jsonl"]
    assert status(new)["orphaned"] == [{
        "lease": 1, "receipts": len(line), "updates": 6, "recorded": orphan.time, "folder": "orphaned/00000000",
    }]  # fmt: skip
    again = status(new)["recomputed"]
    assert again["updates"] == lost["updates"] + 6
    assert again["seconds"] == pytest.approx(lost["seconds"] + float(orphan.body["seconds"]), abs=0.002)
    after = consumption(new)
    assert after.recomputed - done.recomputed == 6 * recipes.load(recipe).positions_per_update
    assert after.consumed == done.consumed, "shown, never merged"
    assert history(new.ledger).saved == [one for one in history(new.ledger).saved if one.segment != 1 or one.step <= 12]
    assert [claim for claim in verify(new.path, [data]).claims if claim.result == "failed"] == []
    copy(new, copies)
    assert kinds(new).count("orphaned") == 1, "once"
    assert fetch(copies, tmp_path / "third", policy=clock.policy(), project=project).step == 24
    assert [one.body for one in history(tmp_path / "third/ledger.jsonl").orphaned] == [orphan.body]

    kept.write_bytes(kept.read_bytes().replace(b'"preempted"', b'"signal"') + b"x")
    failed = [claim for claim in verify(new.path, [data]).claims if claim.result == "failed"]
    assert [claim.claim for claim in failed] == ["orphaned receipts"]


def test_a_run_can_be_taken_back_from_a_machine_that_is_gone(
    run: RunFolder, copies: str, copy: Callable[..., Any], clock: Clock, tmp_path: Path
) -> None:
    """It copied nothing; then a person may decide, and whoever has the run then stops."""
    assert own(run, copies, clock.policy()) == 1
    copy(run, copies)
    new = RunFolder(tmp_path / "new")
    fetch(copies, new.path, policy=clock.policy(), project=run.path.parent, own=True)
    with pytest.raises(Refused, match="lease 2"):
        own(run, copies, clock.policy())
    release(run, "that machine is gone")
    assert own(run, copies, clock.policy()) == 3
    copy(run, copies)
    with pytest.raises(Refused, match=r"lease 3 .* after lease 2"):
        own(new, copies, clock.policy())
    assert status(new)["state"] == "held"
    copy(run, copies)
    assert history(run.ledger).orphaned == [], "the other machine had not trained: nothing is lost"
    assert go(run, run.path.parent / "recipe.yaml", until="13") == 0


def test_the_trainer_stops_with_3_when_the_mirror_beside_it_sees_a_higher_lease(copies: str, tmp_path: Path) -> None:
    project = Project(tmp_path / "own", slots=((3, 1),))
    recipe = project.recipe(data__when_missing="wait", evaluate__every=None, checkpoint__mirror={"url": copies})
    run = RunFolder(project.path / "run")
    assert drive(recipe, run.path, until="2") == 0
    own(run, copies, Policy(20))
    mirror(run, copies, once=True, policy=Policy(20), piece=PIECE)
    fetch(copies, tmp_path / "new", policy=Policy(20), project=project.path, own=True)
    faults: list[Exception] = []
    waiting = threading.Event()

    def beside() -> None:
        while not (run.checkpoints / "step-000003").exists():  # the queue's end: the trainer waits for data there
            waiting.wait(0.05)
        try:
            mirror(run, copies, once=False, policy=Policy(20), piece=PIECE)
        except Refused as fault:
            faults.append(fault)

    other = threading.Thread(target=beside)
    other.start()
    code = drive(recipe, run.path, resume=True)
    other.join(60)
    assert code == 3
    assert "lease 2" in str(faults[0])
    assert not is_owned(run)
    outcome = json.loads(run.outcome.read_text())
    assert "stopped at step 3 (lease); the state is saved: another machine took this run" in outcome["message"]
    orphan = records.parse((Path(copies) / "orphaned/00000000.json").read_bytes(), "orphan", records.ORPHAN)
    last = list(read(run.ledger))[-1]
    assert (last.kind, orphan.head) == ("failed", (last.seq, last.digest)), "what the trainer saved last is in it"


def test_two_starts_at_the_same_moment_are_one_owner_and_one_refusal(run: RunFolder, copies: str, clock: Clock) -> None:
    where = place(copies, clock.policy())
    identity = claim(where, run.run_id())
    assert take_lease(where, run, identity, -1, None) == 1
    with pytest.raises(Refused, match=r"leases/00000001.json was taken by another machine at the same moment"):
        take_lease(where, run, identity, -1, None)
    lease = newest_lease(where)
    assert lease is not None
    with pytest.raises(Refused, match="same moment"):
        put_lease(where, 1, b"other")
    assert newest_lease(where) == lease
    (Path(copies) / "leases/00000001.json").write_bytes(b'{"format":"assay-mirror-lease/1"}')
    with pytest.raises(DataError, match=r"00000001.json is damaged: a key is missing"):
        newest_lease(where)


def test_a_start_killed_after_its_receipt_takes_the_lease_the_next_time(
    run: RunFolder, copies: str, clock: Clock
) -> None:
    where = place(copies, clock.policy())
    identity = claim(where, run.run_id())
    (Path(copies) / "leases").touch()  # no folder can be made there: the put fails after the receipt
    with pytest.raises(Refused):
        take_lease(where, run, identity, -1, None)
    (Path(copies) / "leases").unlink()
    assert kinds(run)[-1] == "lease"
    assert own(run, copies, clock.policy()) == 1
    assert copying.stand(run, where, identity)[0].owned


@settings(max_examples=20, deadline=None)
@given(st.lists(st.one_of(st.just(0), st.integers(1, 3)), max_size=9))
def test_the_newest_state_under_the_highest_lease_counts(tmp_path_factory: Any, steps: list[int]) -> None:
    """0: the next lease is taken; k: a state is written under the k-th newest lease, as a machine that lost may."""
    where = place(str(tmp_path_factory.mktemp("place")), Policy(5))
    leases = states = 0
    written: list[tuple[int, int]] = []
    for step in steps:
        if step == 0:
            body = {"format": records.LEASE, "number": leases + 1, "holder": "x", "state": states - 1, "time": "t"}
            where.create(records.lease_name(leases), records.encode(body))
            leases += 1
            continue
        under = max(0, leases - step + 1)
        body = {
            "format": records.STATE, "run_id": "r", "piece": 1, "files": {}, "lease": under,
            "ledger": {"seq": 0, "digest": digest(b"")},
        }  # fmt: skip
        where.create(records.state_name(states), records.encode(body))
        written.append((under, states))
        states += 1
    known = known_states(where, newest_lease(where))
    assert known.last == states - 1
    assert known.number == (max(written)[1] if written else -1)


def fresh(trained: Path, url: str, tmp_path: Path, **mirror_keys: Any) -> tuple[Path, RunFolder]:
    """A node of its own: the project's data and a recipe that names the mirror, and no run."""
    project = tmp_path / "node"
    shutil.copytree(trained, project, ignore=shutil.ignore_patterns("run"))
    values = json.loads((project / "recipe.yaml").read_text())
    values["checkpoint"]["mirror"] = {"url": url} | mirror_keys
    (project / "recipe.yaml").write_text(json.dumps(values))
    return project / "recipe.yaml", RunFolder(project / "run")


def quiet(stage: str, done: int, total: int | None, unit: str) -> None:
    """No progress."""


def test_a_fresh_node_goes_on_with_what_the_mirror_has(
    run: RunFolder, trained: Path, store: Proxy, url: str, copy: Callable[..., Any], clock: Clock, tmp_path: Path
) -> None:
    recipe, node = fresh(trained, url, tmp_path)
    loaded = recipes.load(recipe)

    def asked(auto: bool = True) -> Any:
        return arrive(loaded, recipe.parent, node, auto, quiet, clock.policy())

    for kind in ("drop", "500", "hang"):
        store.faults = [Fault("", kind, ALWAYS)]
        store.well.set()
        with pytest.raises(Interrupted, match="given up at the deadline") as ended:
            asked()
        assert (ended.value.code, ended.value.cause) == (75, "network")
    store.faults = [Fault("", "403", ALWAYS)]
    with pytest.raises(Refused, match="ExpiredToken") as refused:
        asked()
    assert "verysecret" not in str(refused.value)
    assert "AKIDSECRET" not in str(refused.value)
    assert not node.path.exists(), "never with a new history"
    store.faults = []
    assert asked() is None, "the mirror holds nothing: a new run may begin"
    own(run, url, clock.policy())
    copy()
    store.faults = [Fault("leases/00000002", "lost", 1), Fault("GET", "500", 2, skip=9)]
    assert asked().step == 12
    assert history(node.ledger).leases[-1].body["lease"] == 2
    with pytest.raises(Refused, match="lease 2"):
        copy()
    assert take_over(loaded, node) == 3


def test_a_mirror_whose_disk_is_not_mounted_begins_nothing_new(
    run: RunFolder, trained: Path, copies: str, copy: Callable[..., Any], clock: Clock, tmp_path: Path
) -> None:
    """Its mount point is an empty folder: not for a run that has copies there, nor on a node that has nothing."""
    own(run, copies, clock.policy())
    copy(run, copies)
    disk, point = Path(copies).rename(tmp_path / "disk"), Path(copies)
    point.mkdir()
    recipe, node = fresh(trained, copies, tmp_path)
    loaded = recipes.load(recipe)
    with pytest.raises(Refused, match=r"is empty and on a disk of this machine's own.* mount it; or.*--start new"):
        arrive(loaded, recipe.parent, node, True, quiet)
    assert arrive(loaded, recipe.parent, node, False, quiet) is None, "somebody says that it is a new one"
    with pytest.raises(Interrupted, match=r"holds no mirror, but .* has its copies there") as waits:
        arrive(loaded, recipe.parent, run, True, quiet)
    assert waits.value.cause == "network"
    before = run.ledger.read_bytes()
    for act in (
        lambda: arrive(loaded, recipe.parent, run, False, quiet),
        lambda: own(run, copies, clock.policy()),
        lambda: copy(run, copies),
    ):
        with pytest.raises(Refused, match="is its disk mounted"):
            act()
    assert run.ledger.read_bytes() == before
    assert [path.name for path in point.iterdir()] == ["create-only"], "and no second mirror is claimed"
    back = RunFolder(tmp_path / "back")
    fetch(str(disk), back.path, policy=clock.policy(), project=run.path.parent)
    disk.rename(tmp_path / "gone")
    disk.mkdir()
    with pytest.raises(Refused, match="is its disk mounted"):
        own(back, str(disk), clock.policy())
    (tmp_path / "other").mkdir()
    assert own(run, str(tmp_path / "other"), clock.policy()) == 1, "another address is a new mirror"


def test_only_copies_of_the_mirror_that_the_recipe_names_make_a_checkpoint_safe(
    copies: str, clock: Clock, tmp_path: Path
) -> None:
    project = Project(tmp_path / "own")
    (tmp_path / "second").mkdir()

    def recipe(url: str) -> Path:
        return project.recipe(checkpoint={"every": 2, "keep": "all", "mirror": {"url": url}}, evaluate={"every": None})

    def train(url: str, until: str) -> None:
        own(run, url, clock.policy())
        assert drive(recipe(url), run.path, resume=until != "2", until=until) == 0

    run = RunFolder(project.path / "run")
    create(run.path, recipe(copies), recipes.load(recipe(copies)))
    train(copies, "2")
    mirror(run, copies, once=True, policy=clock.policy())
    assert status(run)["mirrored"] == 2
    assert copies not in run.ledger.read_text(), "no path of this machine in the ledger"
    train(str(tmp_path / "second"), "4")
    assert [one.copy for one in history(run.ledger).standing] == ["awaited", "awaited"]
    assert status(run)["mirrored"] is None
    mirror(run, str(tmp_path / "second"), once=True, policy=clock.policy())
    assert [one.copy for one in history(run.ledger).standing] == ["safe", "safe"]


def test_auto_through_the_command(
    trained: Path, run: RunFolder, copies: str, copy: Callable[..., Any], clock: Clock, assay: Any, tmp_path: Path
) -> None:
    """On a node that has nothing: 75 while the mirror is not mounted, then training to the end with the same bits."""
    own(run, copies, clock.policy())
    copy(run, copies)
    recipe, node = fresh(trained, str(tmp_path / "mount"), tmp_path)
    with pytest.raises(Interrupted, match="cannot be reached: it is not a folder here; mount it") as waits:
        arrive(recipes.load(recipe), recipe.parent, node, True, quiet)
    assert (waits.value.code, waits.value.cause) == (75, "network")
    assert not node.path.exists()
    (tmp_path / "mount").symlink_to(copies)
    done = assay("train", recipe, "--run", node.path, "--start", "auto")
    assert done.returncode == 0, done.stderr
    assert f"--start auto took resume of what {tmp_path / 'mount'} holds" in done.stderr
    assert "RESUME @ 12" in done.stderr
    assert go(run, run.path.parent / "recipe.yaml") == 0
    states = [{one.step: one.state_sha256 for one in history(each.ledger).saved} for each in (node, run)]
    assert states[0][24] == states[1][24]
    assert [one.body["lease"] for one in history(node.ledger).leases] == [1, 2, 3]
    assert status(node)["state"] == "ended"


def test_the_recipe_s_cadence_and_room_on_the_mirror(store: Proxy, url: str, clock: Clock, tmp_path: Path) -> None:
    """Every second full checkpoint is copied, one is kept, the newest verified one always; removal is a receipt."""
    project = Project(tmp_path / "own")
    recipe = project.recipe(
        checkpoint={"every": 2, "keep": "all", "slot_ends": False, "extra": [6],
                    "mirror": {"url": url, "every": 2, "keep": 1}},
        evaluate={"every": None},
    )  # fmt: skip
    run = RunFolder(project.path / "run")
    assert drive(recipe, run.path, until="8") == 0
    told = history(run.ledger)
    assert [one.step for one in told.standing if one.copy == "awaited"] == [2, 6, 8], "each second, and the newest"

    def copied(**options: Any) -> Any:
        return mirror(run, url, **{"once": True, "policy": clock.policy(), "piece": PIECE, **options})

    where = place(url, clock.policy())

    def there(step: int) -> bool:
        commit = where.read(records.commit_name("full", step, 1, True))
        return commit is not None and all(
            where.exists(records.piece_name(piece))
            for one in records.parse(commit, str(step), records.COMMIT).files.values()
            for piece in one.pieces
        )

    store.faults = [Fault("?delete", "drop", ALWAYS, skip=2)]
    with pytest.raises(Interrupted):
        copied()
    assert sorted(step for _, step, _ in mirrored(run)) == [2, 6, 8]
    store.faults = []
    assert copied().removed == 0, "only what was begun is ended"
    assert [one.body["step"] for one in history(run.ledger).unmirrored] == [2]
    assert [there(step) for step in (2, 6, 8)] == [False, True, True], "6 is an extra step"
    assert where.read(records.commit_name("full", 2, 1, True)) is None
    assert copied().copied == 0, "what was removed is not copied again"
    assert status(run)["mirrored"] == 8

    assert drive(recipe, run.path, resume=True, until="11") == 0
    store.faults = [Fault("?delete", "403", ALWAYS)]
    done = copied()
    assert done.removed == 1
    assert "the copy of checkpoints/step-000008 could not be removed" in done.notes[0]
    store.faults = []
    copied()
    assert [step for step in (2, 4, 6, 8, 10, 11) if there(step) or there_second(where, step)] == [6, 11]
    brought = fetch(url, tmp_path / "back", policy=clock.policy(), project=project.path)
    assert brought.step == 11
    with pytest.raises(DataError, match="no copy of a checkpoint of step 8; copies of steps: 6, 11"):
        fetch(url, tmp_path / "again", policy=clock.policy(), project=project.path, step=8)
    assert [claim for claim in verify(run.path, [project.path / "data"]).claims if claim.result == "failed"] == []


def there_second(where: Any, step: int) -> bool:
    """Whether the second segment's checkpoint of that step has a commit."""
    return where.exists(records.commit_name("full", step, 2, True))
