"""A bundle is a closed, private-free list of files that a stranger checks with and without Assay."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from forging import edit, flip, lines_of, records, set_receipt
from trained_run import RECIPE, TOKENIZER, assay

from assay.data import queue as queues
from assay.errors import AssayError
from assay.files.digest import digest_file
from assay.release.bundle import SUMS, bundle, sums
from assay.release.claims import FAILED, UNVERIFIABLE
from assay.release.verify import verify
from assay.run.folder import RunFolder
from assay.run.history import history

RESULT = "evaluations/step-000012-validation.json"
FILES = {
    RESULT, "SHA256SUMS", "bundle.json", "checkpoints.json", "code.json", "config.json", "ledger.jsonl",
    "manifest.json",
    "metrics.jsonl", "model.safetensors", "queue.jsonl", "recipe.json", "recipe.yaml", "tokenizer.json",
}  # fmt: skip


def approvals(project: Path) -> set[str]:
    """The names in a bundle of the approvals of the two slots that the project's run consumed."""
    beside = project / "data" / "queue.jsonl.d" / "approved"
    lines = [slot.digest.removeprefix("sha256:") for slot in queues.load(project / "data" / "queue.jsonl").slots[:2]]
    return {f"approvals/{path.name}" for path in beside.iterdir() if path.name.split(".")[0] in lines}


@pytest.fixture(scope="module")
def made(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundle of the newest checkpoint, made by the command; only to be read."""
    out = tmp_path_factory.mktemp("made") / "bundle"
    done = assay(trained, "bundle", "run", out, "--json")
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    head = records(trained / "run" / "ledger.jsonl")[-1]["seq"]
    assert (facts["ok"], facts["signed"], facts["step"], facts["head"]["seq"]) == (True, False, 12, head)
    assert set(facts["files"]) == FILES | approvals(trained)
    assert any(one.startswith("signature") for one in facts["unsupported"])
    return out


@pytest.fixture
def copy(made: Path, tmp_path: Path) -> Path:
    """A copy of the bundle that a test may damage."""
    return Path(shutil.copytree(made, tmp_path / "bundle"))


def failed(path: Path) -> dict[str, str]:
    return {claim.claim: claim.evidence for claim in verify(path).claims if claim.result == FAILED}


def resum(path: Path) -> None:
    """Write SHA256SUMS anew, as a forger would."""
    (path / SUMS).write_bytes(sums(path, sorted(inside(path) - {SUMS})))


def inside(path: Path) -> set[str]:
    """The files of a bundle, by their names in it."""
    return {one.relative_to(path).as_posix() for one in path.rglob("*") if one.is_file()}


def test_the_list_is_closed_and_sha256sum_agrees(made: Path, trained: Path) -> None:
    signed = approvals(trained)
    assert len(signed) == 4  # two reviewers, two slots; nothing of the third, which the run did not reach
    assert inside(made) == FILES | signed
    done = subprocess.run(["sha256sum", "--strict", "-c", SUMS], cwd=made, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(done.stdout.splitlines()) == len(FILES | signed) - 1
    assert (made / "tokenizer.json").read_bytes() == TOKENIZER
    code = json.loads((made / "code.json").read_bytes())
    assert [one["segment"] for one in code["training_source"]] == [1, 2]
    assert code["modelling_file"] == code["converter"] == {"sha256": None, "reason": "not exported"}
    steps = [(one["step"], one["kind"]) for one in json.loads((made / "checkpoints.json").read_bytes())["checkpoints"]]
    assert {(4, "full"), (12, "full"), (12, "weights"), (3, "weights")} <= set(steps)


def test_a_bundle_verifies_alone_and_fully_with_the_data(made: Path, trained: Path) -> None:
    report = verify(made)
    assert report.holds(strict=False), failed(made)
    open_claims = {claim.claim for claim in report.claims if claim.result == UNVERIFIABLE}
    assert open_claims == {"order digest recomputed", "other checkpoints", "approved by keys that the reader trusts"}
    again = verify(made, [trained / "data"])
    told = {claim.claim: claim for claim in again.claims}
    assert told["order digest recomputed"].result == "verified"
    assert told["bundled weights, step 12"].result == "verified"
    assert told["tokenizer"].result == "verified"
    assert told["exposure"].result == "verified"


def test_nothing_private_is_in_a_bundle(made: Path, trained: Path) -> None:
    salt = (trained / "run" / "salt").read_text()
    words = [str(trained), str(trained.parent), os.getcwd(), str(Path.home()), platform.node(), salt]
    words += [str(Path(os.path.realpath(trained))), "origin", "owner.lock"]
    for path in map(made.joinpath, inside(made)):
        content = path.read_bytes()
        for word in words:
            # A name of one or two letters would be found in any bytes.
            assert len(word) < 3 or word.encode() not in content, f"{path.name} holds {word!r}"


def test_a_full_checkpoint_gives_its_weights_alone(trained: Path, tmp_path: Path) -> None:
    made = bundle(RunFolder(trained / "run"), tmp_path / "seven", 7)
    assert set(made.files) == FILES | approvals(trained)
    about = json.loads((tmp_path / "seven" / "bundle.json").read_bytes())
    assert (about["step"], about["checkpoint"]["kind"]) == (7, "full")
    assert any("optimizer" in one for one in about["unsupported"])
    told = {claim.claim: claim.result for claim in verify(tmp_path / "seven").claims}
    assert told["bundled weights, step 7"] == "verified"
    assert FAILED not in told.values()


def test_the_last_export_names_converter_and_modelling_file(project: Path, tmp_path: Path) -> None:
    run = RunFolder(project / "run")
    weights = history(run.ledger).standing[-1]
    body = {"step": weights.step, "weights_sha256": weights.weights_sha256, "converter": "sha256:" + "a" * 64}
    run.open_ledger().append("export", {**body, "modelling_file": "sha256:" + "b" * 64})
    bundle(run, tmp_path / "out")
    code = json.loads((tmp_path / "out" / "code.json").read_bytes())
    assert (code["converter"]["sha256"][7:], code["modelling_file"]["sha256"][7:]) == ("a" * 64, "b" * 64)
    assert not failed(tmp_path / "out")
    run.open_ledger().append("export", {**body, "step": weights.step - 1})
    assert "no checkpoint of step 11 has the weights" in failed(run.path)["export of step 11"]


def test_a_result_that_is_gone_is_said_and_one_of_other_bytes_is_not_bundled(project: Path, tmp_path: Path) -> None:
    whole = (project / "run" / RESULT).read_bytes()
    (project / "run" / RESULT).unlink()
    made = bundle(RunFolder(project / "run"), tmp_path / "without")
    assert RESULT not in made.files
    assert f"aggregate scores: {RESULT} not here" in made.unsupported
    told = {claim.claim: claim for claim in verify(tmp_path / "without").claims}
    assert told["validation of step 12"].result == UNVERIFIABLE
    (project / "run" / RESULT).write_bytes(whole.replace(b"validation", b"Validation"))
    with pytest.raises(AssayError, match="is not the file that receipt"):
        bundle(RunFolder(project / "run"), tmp_path / "other")


def test_a_tokenizer_of_other_bytes_stays_out_and_is_said(project: Path, tmp_path: Path) -> None:
    (project / "data" / "tokenizer" / "tokenizer.json").write_bytes(b"{}")
    made = bundle(RunFolder(project / "run"), tmp_path / "out")
    assert "tokenizer.json" not in made.files
    assert any(one.startswith("tokenizer: no tokenizer.json with sha256:") for one in made.unsupported)
    assert {claim.claim: claim.result for claim in verify(tmp_path / "out").claims}["tokenizer"] == UNVERIFIABLE


def test_lines_that_no_receipt_seals_stay_out(project: Path, tmp_path: Path) -> None:
    path = project / "run" / "metrics.jsonl"
    sealed = path.read_bytes()
    path.write_bytes(sealed + sealed.splitlines(keepends=True)[-1])
    bundle(RunFolder(project / "run"), tmp_path / "out")
    assert (tmp_path / "out" / "metrics.jsonl").read_bytes() == sealed
    about = json.loads((tmp_path / "out" / "bundle.json").read_bytes())
    assert about["metrics"]["left_out_bytes"] == path.stat().st_size - len(sealed)


@pytest.mark.parametrize("name", [*sorted(FILES), "an approval"])
def test_a_changed_a_missing_and_a_foreign_byte_of_any_file_fail(name: str, copy: Path) -> None:
    name = name if name in FILES else min(one for one in inside(copy) if one.startswith("approvals/"))
    whole = (copy / name).read_bytes()
    flip(copy / name)
    assert failed(copy), f"a bit of {name} was changed"
    (copy / name).unlink()
    assert failed(copy), f"{name} was removed"
    (copy / name).write_bytes(whole)
    assert not failed(copy)


FORGERY: dict[str, tuple[Callable[[Path], object], str, str]] = {
    "a foreign file": (lambda path: (path / "notes.txt").write_text("hello"), "closed list", "notes.txt"),
    "a foreign folder": (
        lambda path: ((path / "more").mkdir(), (path / "more" / "x").write_text("x")),
        "closed list",
        "more/x does not belong",
    ),
    "a link": (
        lambda path: ((path / "config.json").unlink(), (path / "config.json").symlink_to("recipe.json")),
        "SHA256SUMS",
        "no regular file",
    ),
    "a name twice": (
        lambda path: (path / SUMS).write_bytes((path / SUMS).read_bytes() * 2),
        "SHA256SUMS",
        "2 times",
    ),
    "other weights": (
        lambda path: (flip(path / "model.safetensors", 5000), resum(path)),
        "bundled weights, step 12",
        "weights_sha256 is",
    ),
    "another config": (
        lambda path: (edit(path / "config.json", '"layers": 2', '"layers": 3'), resum(path)),
        "bundled weights, step 12",
        "config.json is damaged",
    ),
    "another index": (
        lambda path: (edit(path / "checkpoints.json", '"step": 9', '"step": 8'), resum(path)),
        "indexes",
        "checkpoints.json is not what the ledger gives: checkpoints[7].step is 8, expected 9",
    ),
    "other code": (
        lambda path: (edit(path / "code.json", '"segment": 2', '"segment": 3'), resum(path)),
        "indexes",
        "code.json is not what the ledger gives: training_source[1].segment is 3, expected 2",
    ),
    "a key too few": (
        lambda path: (edit(path / "code.json", '"converter"', '"convertor"'), resum(path)),
        "indexes",
        "converter is missing",
    ),
    "a result without a receipt": (
        lambda path: (shutil.copyfile(path / RESULT, path / "evaluations/other.json"), resum(path)),
        "indexes",
        "other.json: no receipt names this result",
    ),
    "another score": (
        lambda path: (edit(path / RESULT, '"perplexity": ', '"perplexity": 1'), resum(path)),
        "validation of step 12",
        "the digest is",
    ),
    "another step": (
        lambda path: (edit(path / "bundle.json", '"step": 12', '"step": 9'), resum(path)),
        "description",
        "step is 9, expected 12",
    ),
    "another tokenizer": (
        lambda path: ((path / "tokenizer.json").write_bytes(b"{}"), resum(path)),
        "tokenizer",
        "by the queue",
    ),
    "a receipt changed and chained again": (
        lambda path: (set_receipt(path, "end", 1, step=11), resum(path)),
        "description",
        "head is",
    ),
    "a signature that is none": (
        lambda path: (edit(path / "bundle.json", '"signed": false', '"signed": true'), resum(path)),
        "closed list",
        "signed is True, but signature.dsse.json is not there",
    ),
}


@pytest.mark.parametrize("what", FORGERY)
def test_a_forged_bundle_fails_the_claim_and_names_it(what: str, copy: Path) -> None:
    forge, claim, words = FORGERY[what]
    forge(copy)
    if what.startswith("a foreign"):
        assert "not covered" in failed(copy)["SHA256SUMS"]
        resum(copy)
    found = failed(copy)
    assert claim in found, found
    assert words in found[claim], found[claim]


REFUSED: dict[str, tuple[Callable[[Path], object], int | None, int, str]] = {
    "no such step": (lambda run: None, 5, 2, "3, 6, 7, 8, 9, 12"),
    "a removed step": (lambda run: None, 4, 2, "no checkpoint of step 4 stands"),
    "damaged weights": (lambda run: flip(run / "weights/step-000012/model.safetensors"), None, 4, "is damaged"),
    "another manifest": (
        lambda run: edit(run / "weights/step-000012/manifest.json", '"time": "2', '"time": "3'),
        None,
        4,
        "is not the one that receipt",
    ),
    "another recipe": (lambda run: edit(run / "recipe.yaml", "stays", "went"), None, 6, "recipe.yaml"),
    "a broken chain": (lambda run: flip(run / "ledger.jsonl"), None, 6, "ledger.jsonl"),
    "metrics cut": (lambda run: os.truncate(run / "metrics.jsonl", 100), None, 6, "is shorter than"),
    "another queue": (
        lambda run: (
            lines_of(run.parent / "data/queue.jsonl", lambda lines: lines[:3]),
            edit(run.parent / "data/queue.jsonl", '"updates":8', '"updates":7'),
        ),
        None,
        4,
        "does not begin with the queue",
    ),
    "no run": (shutil.rmtree, None, 2, "is not a folder"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_does_not_hold_is_not_bundled(what: str, project: Path, tmp_path: Path) -> None:
    damage, step, code, words = REFUSED[what]
    damage(project / "run")
    with pytest.raises(AssayError, match=words) as fault:
        bundle(RunFolder(project / "run"), tmp_path / "out", step)
    assert fault.value.code == code
    assert not (tmp_path / "out").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["project"]


def test_what_exists_is_never_replaced(trained: Path, made: Path) -> None:
    before = digest_file(made / SUMS)
    done = assay(trained, "bundle", "run", made)
    assert (done.returncode, "Traceback" in done.stderr) == (2, False)
    assert digest_file(made / SUMS) == before


def test_both_commands_run_where_torch_cannot_be_imported(trained: Path, tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ModuleNotFoundError('no torch here', name='torch')\n")
    done = assay(trained, "bundle", "run", tmp_path / "out", PYTHONPATH=str(tmp_path))
    assert done.returncode == 0, done.stderr
    for words in (("run",), (tmp_path / "out", "--data", "data")):
        done = assay(trained, "verify", *words, PYTHONPATH=str(tmp_path))
        assert done.returncode == 0, done.stderr + done.stdout
    assert RECIPE.encode() == (tmp_path / "out" / "recipe.yaml").read_bytes()
