"""A fetched run is the run: every byte compared, training goes on with the same bits, verify is content."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from faulty_proxy import ALWAYS, Fault, Proxy
from mirror_runs import Clock
from small import drive

from assay.checkpoint.manifest import read_manifest
from assay.errors import DataError, InputError, Interrupted, Refused
from assay.files.digest import digest
from assay.ledger.ledger import read
from assay.mirror.copying import Report
from assay.mirror.fetching import Fetched
from assay.release.verify import verify
from assay.run.folder import RunFolder
from assay.run.history import history

Copy, Bring = Callable[..., Report], Callable[..., Fetched]


@pytest.fixture
def folder(tmp_path: Path, run: RunFolder, copy: Copy) -> str:
    """A folder with a copy of the run."""
    (tmp_path / "copies").mkdir()
    copy(address=str(tmp_path / "copies"))
    return str(tmp_path / "copies")


def failed(path: Path, data: Path) -> list[str]:
    """Claims about the run that fail."""
    return [f"{claim.claim}: {claim.evidence}" for claim in verify(path, [data]).claims if claim.result == "failed"]


def state_of(run: Path, step: int) -> str | None:
    """The state digest of a full checkpoint."""
    return read_manifest(run / f"checkpoints/step-{step:06d}").state_sha256


def test_training_goes_on_in_a_fetched_folder_with_the_same_bits(
    run: RunFolder, folder: str, bring: Bring, tmp_path: Path
) -> None:
    back, data = tmp_path / "back", run.path.parent / "data"
    brought = bring(address=folder)
    assert (brought.step, brought.kind, len(brought.missing)) == (12, "full", 2)
    assert failed(back, data) == []
    shutil.copytree(data, back / "project/data", dirs_exist_ok=True)  # the shards come from where data is kept
    assert verify(back).count("failed") == 0
    assert drive(back / "project/recipe.yaml", back, resume=True) == 0
    assert drive(run.path.parent / "recipe.yaml", run.path, resume=True) == 0
    assert state_of(back, 24) == state_of(run.path, 24)
    assert failed(back, data) == []
    kinds = [one.kind for one in read(RunFolder(back).ledger)]
    assert kinds.count("checkpoint.fetched") == 1
    assert (back / "salt").read_bytes() != (run.path / "salt").read_bytes(), "the salt never left its machine"


def test_a_project_that_is_here_is_used(run: RunFolder, folder: str, bring: Bring, tmp_path: Path) -> None:
    project = run.path.parent
    assert bring(address=folder, project=project).missing == []
    assert not (tmp_path / "back/project").exists()
    assert RunFolder(tmp_path / "back").recipe_folder() == project.resolve()
    queue = project / "data/queue.jsonl"
    queue.write_bytes(queue.read_bytes().replace(b'"updates":14', b'"updates":15'))
    with pytest.raises(Refused, match="does not begin with the queue of this run as it was mirrored"):
        bring(tmp_path / "again", folder, project=project)


@pytest.mark.parametrize(("step", "kind"), [(6, "full"), (8, "weights")])
def test_a_named_step_is_brought(folder: str, bring: Bring, tmp_path: Path, step: int, kind: str) -> None:
    brought = bring(address=folder, step=step)
    assert (brought.step, brought.kind) == (step, kind)
    told = history(tmp_path / "back/ledger.jsonl")
    assert [(item.kind, item.step) for item in told.standing] == [(kind, step)]
    with pytest.raises(DataError, match=r"no copy of a checkpoint of step 7; copies of steps: 6, 8, 12"):
        bring(tmp_path / "again", folder, step=7)
    with pytest.raises(InputError, match="back exists already and is never replaced"):
        bring(address=folder)


def test_wrong_bytes_of_the_right_length_are_named_and_refused(folder: str, bring: Bring, tmp_path: Path) -> None:
    name = "model.safetensors"
    commit = json.loads((Path(folder) / "commits/full-000012-01.json").read_text())
    value = commit["files"][name]["pieces"][0].removeprefix("sha256:")
    piece = Path(folder) / "pieces" / value[:2] / value
    data = piece.read_bytes()
    piece.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(
        DataError, match=rf"checkpoints/step-000012/{name}: .*{value} holds other bytes than its name says"
    ):
        bring(address=folder)
    assert not (tmp_path / "back").exists()
    assert bring(address=folder, step=6).step == 6, "the way out that the message names"


def test_records_that_contradict_each_other_are_refused(folder: str, bring: Bring) -> None:
    """Who may write on the mirror may change every record; the ledger's chain is what they would have to forge too."""
    path = Path(folder) / "commits/full-000012-01.json"
    before = path.read_text()
    commit = json.loads(before)
    older = json.loads((Path(folder) / "commits/full-000006-01.json").read_text())
    for changes, message in (
        ({"files": older["files"]}, "manifest.json on the mirror is not the one that receipt"),
        ({"files": commit["files"] | {"model.safetensors": older["files"]["model.safetensors"]}},
         "model.safetensors on the mirror is not the file that its manifest names"),
        ({"ledger": {"seq": 1, "digest": digest(b"x")}}, "records of two histories are mixed"),
        ({"ledger": None}, "a key is missing or of the wrong type"),
        ({"files": {"../../evil": commit["files"]["model.safetensors"]}}, "leaves its folder"),
    ):  # fmt: skip
        path.write_text(json.dumps(commit | changes))
        with pytest.raises((DataError, InputError), match=message):
            bring(address=folder)
    path.write_text(before)
    assert bring(address=folder).step == 12


def test_trace_and_control_come_with_the_project(
    run: RunFolder, folder: str, copy: Copy, bring: Bring, tmp_path: Path
) -> None:
    """What a start elsewhere reads is there."""
    project, files = run.path.parent, ("control.json", "model.safetensors", "windows.bin", "SHA256SUMS")
    (project / "known").mkdir()
    for name in ("traces.csv", *(f"known/{one}" for one in files)):
        (project / name).write_text(f"the bytes of {name}")
    (project / "known/notes").write_text("nobody needs them")
    recipe = json.loads(run.recipe_json.read_text())
    recipe["checkpoint"] |= {"every": "auto", "auto": {"trace": "traces.csv"}}
    recipe["control"] |= {"path": "known", "required": True}
    run.recipe_json.write_text(json.dumps(recipe))
    copy(address=folder)
    bring(address=folder)
    home = tmp_path / "back/project"
    there = sorted(path.relative_to(home).as_posix() for path in home.rglob("*") if path.is_file())
    assert there == sorted(["data/queue.jsonl", "recipe.yaml", "traces.csv", *(f"known/{one}" for one in files)])
    assert (home / "known/model.safetensors").read_text() == "the bytes of known/model.safetensors"


def test_an_interrupted_fetch_goes_on(store: Proxy, copy: Copy, bring: Bring) -> None:
    copy()
    store.faults = [Fault("GET", "drop", ALWAYS, skip=18)]
    with pytest.raises(Interrupted, match="given up at the deadline of 20 s; what is done is kept"):
        bring()
    store.faults, store.asked[:] = [], []
    brought = bring()
    assert brought.step == 12
    assert brought.kept > 0
    assert len([line for line in store.asked if "/pieces/" in line]) < 20


def test_an_address_without_a_mirror_says_so(store: Proxy, bring: Bring, tmp_path: Path, clock: Clock) -> None:
    with pytest.raises(DataError, match="holds no mirror of a run: correct the address"):
        bring()
    with pytest.raises(DataError, match=r"is not there \(HTTP 404 NoSuchBucket\)"):
        bring(address="s3://no-such-bucket/run")
    with pytest.raises(InputError, match="not in the address"):
        bring(address="s3://key:verysecret@copies/run")
    assert not (tmp_path / "back").exists()
