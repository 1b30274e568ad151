"""A copy counts when it was read back: whatever the network and the store do, and wherever the process is ended."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from faulty_proxy import ALWAYS, Fault, Proxy
from mirror_runs import PIECE, Clock, mirrored
from small import drive

from assay.errors import DataError, InputError, Interrupted, Refused
from assay.files.digest import digest
from assay.ledger.ledger import read
from assay.mirror import records
from assay.mirror.copying import Report, claim
from assay.mirror.place import place
from assay.run.folder import RunFolder
from assay.run.history import history
from assay.run.status import status

Copy = Callable[..., Report]


ALL = [("full", step, "readback") for step in (12, 6)] + [("weights", 8, "readback")]


def test_the_ledger_is_there_before_a_checkpoint_and_its_commit_after_it(
    run: RunFolder, store: Proxy, copy: Copy
) -> None:
    report = copy()
    assert mirrored(run) == ALL
    assert (report.copied, report.verified, report.step) == (3, 3, 12)
    asked = [f"{method} {path.split('/', 3)[3]}" for method, path in (line.split() for line in store.asked)]
    saved = {
        one.body["manifest_sha256"]: one.body["folder"] for one in read(run.ledger) if one.kind == "checkpoint.saved"
    }
    first_state = asked.index("PUT states/00000000.json")
    for kind, step, _ in ALL:
        commit = asked.index(f"PUT commits/{kind}-{step:06d}-01.json")
        folder = next(run.path / place for place in saved.values() if place.endswith(f"{step:06d}") and
                      place.startswith("weights") == (kind == "weights"))  # fmt: skip
        data = (folder / "model.safetensors").read_bytes()
        for at in range(0, len(data), PIECE):
            value = digest(data[at : at + PIECE]).removeprefix("sha256:")
            name = f"pieces/{value[:2]}/{value}"
            assert first_state < asked.index(f"PUT {name}") < asked.index(f"GET {name}") < commit, (
                "the ledger's state, then the piece, then its reading back, then the commit"
            )
    assert status(run)["mirrored"] == 12
    assert copy().copied == 0, "what was copied is not copied again"
    assert mirrored(run) == ALL


FAULTS = [
    Fault("PUT", "drop", 2, skip=3), Fault("GET", "drop", 2, skip=2), Fault("HEAD", "drop", 1), Fault("PUT", "500", 3),
    Fault("GET", "503", 2, skip=5), Fault("PUT", "lost", 3, skip=10), Fault("leases/", "lost", 1, skip=2),
    Fault("commits/", "lost", 1), Fault("states/", "lost", 2, skip=3), Fault("GET", "cut", 3, skip=14),
    Fault("pieces", "wrong", 3, skip=24), Fault("mirror.json", "500", 1), Fault("create-only", "lost", 1),
]  # fmt: skip


def test_a_bad_network_changes_nothing(run: RunFolder, store: Proxy, copy: Copy, bring: Any, tmp_path: Path) -> None:
    store.faults = [Fault(one.word, one.kind, one.times, one.skip) for one in FAULTS]
    copy()
    assert mirrored(run) == ALL
    assert all(fault.taken >= fault.skip + fault.times for fault in store.faults), "every fault happened"
    store.faults = [Fault("GET", kind, 2, skip) for kind, skip in (("drop", 1), ("cut", 4), ("500", 8))]
    store.faults.append(Fault("pieces", "wrong", 1, skip=5))
    assert bring().step == 12
    for name in ("model.safetensors", "optimizer.safetensors", "manifest.json"):
        place = Path("checkpoints/step-000012") / name
        assert (tmp_path / "back" / place).read_bytes() == (run.path / place).read_bytes()


def test_wrong_bytes_of_the_right_length_are_never_a_copy(run: RunFolder, store: Proxy, copy: Copy) -> None:
    model = (run.path / "checkpoints/step-000012/model.safetensors").read_bytes()[:PIECE]
    value = digest(model).removeprefix("sha256:")
    store.faults = [Fault(value, "wrong", ALWAYS)]
    with pytest.raises(Interrupted, match="other bytes came back than were sent"):
        copy()
    assert mirrored(run) == []
    assert not [line for line in store.asked if line.startswith("PUT") and "/commits/" in line]
    assert status(run)["mirrored"] is None
    store.faults = []
    copy()
    assert mirrored(run) == ALL


def test_wrong_bytes_that_lie_there_already_are_replaced(run: RunFolder, copy: Copy, tmp_path: Path) -> None:
    """Nothing is believed because its name and size are right: somebody may have been killed, or a disk may rot."""
    value = digest((run.checkpoints / "step-000012/model.safetensors").read_bytes()[:PIECE]).removeprefix("sha256:")
    piece = tmp_path / "copies/pieces" / value[:2] / value
    piece.parent.mkdir(parents=True)
    piece.write_bytes(bytes(PIECE))
    copy(address=str(tmp_path / "copies"))
    assert digest(piece.read_bytes()) == f"sha256:{value}"
    assert mirrored(run) == ALL


def test_beyond_the_deadline_is_75_and_the_next_call_goes_on(run: RunFolder, store: Proxy, copy: Copy) -> None:
    store.faults = [Fault("PUT", "drop", ALWAYS, skip=15)]
    with pytest.raises(Interrupted, match="given up at the deadline of 20 s; what is done is kept") as ended:
        copy()
    assert (ended.value.code, ended.value.cause) == (75, "network")
    arrived = {line.split()[1] for line in store.asked if "PUT" in line and "/pieces/" in line}
    store.faults, store.asked[:] = [], []
    report = copy()
    again = [line for line in store.asked if line.startswith("PUT") and line.split()[1] in arrived]
    assert len(again) <= 1, "only the piece that was being sent"
    assert report.skipped > 0
    assert mirrored(run) == ALL


def test_expired_credentials_are_one_sentence_without_a_secret(store: Proxy, copy: Copy, bring: Any) -> None:
    store.faults = [Fault("", "403", ALWAYS)]
    with pytest.raises(
        Refused, match=r"may not be written with these credentials \(HTTP 403 ExpiredToken\); give others"
    ):
        copy()
    with pytest.raises(Refused, match=r"may not be read with these credentials \(HTTP 403 ExpiredToken\)") as refused:
        bring()
    assert "AKIDSECRET" not in str(refused.value)
    assert "verysecret" not in str(refused.value)
    assert len(store.asked) == 2, "no second try: they do not get better"


def test_a_store_that_replaces_is_refused_at_once(run: RunFolder, store: Proxy, copy: Copy) -> None:
    store.faults = [Fault("PUT", "unconditional", ALWAYS)]
    with pytest.raises(Refused, match="does not honour create-only puts"):
        copy()
    assert not [line for line in store.asked if "pieces" in line or "mirror.json" in line]


def test_another_history_of_the_run_is_refused(run: RunFolder, copy: Copy, tmp_path: Path, clock: Clock) -> None:
    twin = RunFolder(Path(shutil.copytree(run.path, tmp_path / "twin")))
    (tmp_path / "copies").mkdir()
    copy(address=str(tmp_path / "copies"))
    twin.open_ledger().append("price", {"reading": "1"})
    before = {path for path in (tmp_path / "copies").rglob("*.json") if path.parent.name != "orphaned"}
    with pytest.raises(Refused, match=r"holds receipt \d+ \(sha256:.*training went on elsewhere"):
        copy(twin, str(tmp_path / "copies"))
    assert {path for path in (tmp_path / "copies").rglob("*.json") if path.parent.name != "orphaned"} == before


def test_a_commit_of_another_writer_is_not_replaced_and_ours_has_a_name_of_its_own(
    run: RunFolder, store: Proxy, copy: Copy, bring: Any, url: str, clock: Clock
) -> None:
    where = place(url, clock.policy())
    claim(where, run.run_id())
    item = next(one for one in history(run.ledger).saved if one.step == 12)
    ledger = {"seq": 0, "digest": digest(b"x")}
    names = [path.name for path in (run.path / item.folder).iterdir()]
    theirs = records.encode({
        "format": records.COMMIT, "run_id": run.run_id(), "piece": PIECE, "ledger": ledger,
        "files": {name: {"bytes": 0, "sha256": digest(b""), "pieces": []} for name in names},
        "manifest_sha256": digest(b"another"), "verify": "readback",
    })  # fmt: skip
    name = records.commit_name("full", 12, 1, True)
    assert where.create(name, theirs) == theirs
    copy()
    assert where.read(name) == theirs
    assert mirrored(run) == ALL
    own = records.commit_name("full", 12, 1, True, item.manifest_sha256)
    assert records.parse((where.read(own) or b""), own, records.COMMIT).body["manifest_sha256"] == item.manifest_sha256
    assert bring().step == 12


def test_a_place_belongs_to_one_run(run: RunFolder, copy: Copy, tmp_path: Path, clock: Clock) -> None:
    (tmp_path / "copies").mkdir()
    claim(place(str(tmp_path / "copies"), clock.policy()), "another")
    with pytest.raises(Refused, match=r"holds run another, not .*take an address of its own for each run"):
        copy(address=str(tmp_path / "copies"))
    with pytest.raises(InputError, match="is not a folder; mount it or make it first"):
        copy(address=str(tmp_path / "not-mounted"))


def test_stored_is_called_stored_and_never_verified(
    run: RunFolder, store: Proxy, copy: Copy, bring: Any, tmp_path: Path
) -> None:
    report = copy(verify="stored")
    assert (report.copied, report.verified, report.read_back) == (3, 0, 0)
    assert {how for _, _, how in mirrored(run)} == {"stored"}
    assert not [line for line in store.asked if line.startswith("GET") and "/pieces/" in line], "nothing is read back"
    assert status(run)["mirrored"] is None
    (tmp_path / "copies").mkdir()
    with pytest.raises(Refused, match=r"states no MD5 of what it holds.*use --verify readback"):
        copy(address=str(tmp_path / "copies"), verify="stored")
    assert copy().verified == 3, "a stored copy may be verified later"
    assert status(run)["mirrored"] == 12


def test_a_damaged_checkpoint_is_named_and_the_others_are_copied(run: RunFolder, copy: Copy, tmp_path: Path) -> None:
    (tmp_path / "copies").mkdir()
    path = run.checkpoints / "step-000012/optimizer.safetensors"
    path.write_bytes(bytes(path.stat().st_size))
    with pytest.raises(DataError, match=r"step-000012 is not copied: .*optimizer.safetensors is damaged"):
        copy(address=str(tmp_path / "copies"))
    assert [step for _, step, _ in mirrored(run)] == [6, 8]


def test_bandwidth_is_kept_in_the_mean(run: RunFolder, copy: Copy, tmp_path: Path, clock: Clock) -> None:
    (tmp_path / "copies").mkdir()
    report = copy(address=str(tmp_path / "copies"), bandwidth=1000.0)
    assert report.bytes > 50_000
    assert clock.now == pytest.approx((report.bytes + report.read_back) / 1000.0)


def test_it_watches_until_the_schedule_is_done(
    run: RunFolder, copy: Copy, tmp_path: Path, clock: Clock, capfd: Any
) -> None:
    (tmp_path / "copies").mkdir()
    legs = ["18", None]

    def train_on() -> None:
        """What happens while the mirror waits: the trainer goes on, in two legs."""
        assert drive(run.path.parent / "recipe.yaml", run.path, resume=True, until=legs.pop(0)) == 0

    clock.meanwhile = train_on
    copy(address=str(tmp_path / "copies"), once=False)
    assert not legs
    assert [step for kind, step, _ in mirrored(run) if kind == "full"] == [12, 6, 18, 24]
    assert status(run)["state"] == "ended"


def test_a_kill_and_a_signal_lose_nothing(run: RunFolder, store: Proxy, copy: Copy, url: str) -> None:
    for number, code, skip in ((signal.SIGKILL, -9, 40), (signal.SIGTERM, 75, 20)):
        store.faults = [Fault("/pieces/", "hang", 1, skip)]
        store.reached.clear()
        process = subprocess.Popen(
            [sys.executable, "-m", "assay.cli.main", "mirror", str(run.path), url, "--json"],
            env={**os.environ, **store.environment}, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        assert store.reached.wait(60)
        process.send_signal(number)
        out, _ = process.communicate(timeout=20)
        assert process.returncode == code
        if code == 75:
            assert "run the same command again and it goes on" in json.loads(out)["error"]
    store.faults, store.asked[:] = [], []
    assert copy(piece=64 << 20).skipped > 0, "what is there is not sent again"
    assert sorted(mirrored(run)) == sorted(ALL)
