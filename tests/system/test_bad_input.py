"""Every input file, spoilt in every way: the contract's exit code, one sentence, and nothing written or changed."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from bad_inputs import FAULTS, call, fingerprint, spoilt, version
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from small import Project

from assay.data import queue as queues
from assay.data.shard import open_shard
from assay.errors import AssayError
from assay.files.digest import canonical_exact, digest
from assay.ledger.ledger import first_previous
from assay.recipe import load as recipes
from assay.run.history import history

NO_FILE = ("missing", "folder", "pipe", "dangling link", "link to itself")
TRAIN = ("train", "recipe.yaml", "--run", "new")
BATCHES = ("data", "batches", "data/queue.jsonl", "--seed", "7", "--global-batch", "8", "--expect", "expected.json")
OVERLAP = ("data", "overlap", "data/train-0", "--queue", "data/queue.jsonl", "--exact")
SHOW = ("data", "approve", "line.json", "--queue", "data/queue.jsonl", "--overlap", "overlap.json", "--show")
CHECKPOINT = "run/checkpoints/step-000006"

# The file, the command that reads it, the code, and where another code is right: 0 means that the file is still sound.
Case = tuple[str, tuple[str, ...], int, dict[str, int]]
CASES: dict[str, Case] = {
    "recipe for plan": ("recipe.yaml", ("plan", "recipe.yaml"), 2, {"CRLF": 0}),
    "recipe for train": ("recipe.yaml", ("preflight", "recipe.yaml", "--run", "new"), 2, {"CRLF": 0}),
    "corpus description": ("corpus.yaml", ("corpus", "build", "corpus.yaml", "out"), 2, {"CRLF": 0}),
    "tokenizer": ("tokenizer.json", ("corpus", "build", "given.yaml", "out"), 2, {"CRLF": 0}),
    # A cut or giant last line is torn or no chain (4); a queue that is cut within its first line is none at all.
    "queue for order": (
        "data/queue.jsonl", ("data", "order", "data/queue.jsonl", "--seed", "7", "--slot", "0"), 2, {"huge": 4}),
    "queue for train": ("data/queue.jsonl", TRAIN, 2, {"truncated": 4, "huge": 4}),
    "shard.json": ("data/train-0/shard.json", ("data", "inspect", "data/train-0"), 2, {"CRLF": 0}),
    "shard.json for train": ("data/train-0/shard.json", TRAIN, 4, {"CRLF": 0}),
    "tokens.bin": ("data/train-0/tokens.bin", ("data", "verify", "data/train-0"), 4, {}),
    "tokens.bin for train": ("data/train-0/tokens.bin", TRAIN, 4, {}),
    "tokens.bin of validation": ("data/validation/tokens.bin", TRAIN, 4, {}),
    "documents.idx": ("data/train-0/documents.idx", ("data", "verify", "data/train-0"), 4, {"CRLF": 0}),
    # A torn tail is no fault for readers.
    "ledger for status": (
        "run/ledger.jsonl", ("status", "run"), 6, {**dict.fromkeys(NO_FILE, 2), "truncated": 0}),
    "ledger for train": (
        "run/ledger.jsonl", ("train", "recipe.yaml", "--run", "run", "--start", "resume"), 6,
        {**dict.fromkeys(NO_FILE, 2), "truncated": 3}),
    "ledger for bundle": (
        "run/ledger.jsonl", ("bundle", "run", "out"), 6, {**dict.fromkeys(NO_FILE, 2), "truncated": 2}),
    "metrics for status": (
        "run/metrics.jsonl", ("status", "run"), 6, dict.fromkeys(("missing", "empty", "truncated", "CRLF"), 0)),
    "recipe.json": ("run/recipe.json", ("status", "run"), 2, {"CRLF": 0}),
    "checkpoint manifest": (f"{CHECKPOINT}/manifest.json", ("evaluate", "run", "--step", "6"), 4, {}),
    "safetensors": (f"{CHECKPOINT}/model.safetensors", ("export", "run", "out", "--step", "6"), 4, {}),
    "optimizer": (f"{CHECKPOINT}/optimizer.safetensors", ("bundle", "run", "out", "--step", "6"), 4, {}),
    "state.json": (f"{CHECKPOINT}/state.json", ("bundle", "run", "out", "--step", "6"), 4, {}),
    "tokens.bin for overlap": ("data/train-0/tokens.bin", OVERLAP, 4, {}),
    "documents.idx for overlap": ("data/train-0/documents.idx", OVERLAP, 4, {"CRLF": 0}),
    "report on overlap": ("overlap.json", SHOW, 2, {"CRLF": 0}),
    # Any bytes are evidence, if they can be had at all.
    "evidence of a declared term": (
        "evidence.md", ("data", "exposure", "run", "--declared", "1.07:at-least:14520680448:evidence.md"), 2,
        dict.fromkeys(("empty", "truncated", "wrong type", "not UTF-8", "CRLF"), 0)),
    "reserved documents": ("reserved.jsonl", ("corpus", "build", "reserving.yaml", "out"), 2, {"CRLF": 0}),
    "expected batches": ("expected.json", BATCHES, 2, {"CRLF": 0}),
    "Hugging Face config": ("hf/config.json", ("import", "hf", "hf", "out"), 2, {"CRLF": 0}),
    "Hugging Face weights": ("hf/model.safetensors", ("import", "hf", "hf", "out"), 2, {}),
}  # fmt: skip
VERSIONS = {
    "queue for order": ("assay-queue/1", 2), "queue for train": ("assay-queue/1", 2),
    "shard.json": ("assay-shard/1", 2), "shard.json for train": ("assay-shard/1", 4),
    "checkpoint manifest": ("assay-checkpoint/1", 4), "report on overlap": ("assay-overlap/1", 2),
}  # fmt: skip


@pytest.fixture(scope="module")
def project(sound_project: Path) -> Iterator[Path]:
    """The project, with the working directory in it; whoever spoils a file puts it back."""
    before = Path.cwd()
    os.chdir(sound_project)
    yield sound_project
    os.chdir(before)


@pytest.mark.parametrize("name", CASES)
def test_every_fault_has_its_code_and_one_sentence_and_changes_nothing(project: Path, name: str) -> None:
    file, words, code, other = CASES[name]
    faults: dict[str, tuple[Callable[[Path], None], int]] = {
        fault: (spoil, other.get(fault, code)) for fault, spoil in FAULTS.items()
    }
    if name in VERSIONS:
        faults["wrong version"] = version(VERSIONS[name][0]), VERSIONS[name][1]
    for fault, (spoil, wanted) in faults.items():
        if wanted == 0 and words[0] in ("train", "import", "corpus"):
            continue  # the file is sound, and the command would do its work
        back = spoilt(project / file, spoil)
        try:
            before = fingerprint(project)
            found, _, err = call(*words)
            after = fingerprint(project)
        finally:
            back()
        assert found == wanted, (name, fault, err)
        assert after == before, (name, fault)
        assert "Traceback" not in err
        if wanted:
            told = err.strip().splitlines()
            assert len(told) == 1, (name, fault, err)
            assert told[0].startswith("assay: ")
            assert any(part in told[0] for part in Path(file).parts), (name, fault, told)


@pytest.mark.parametrize("file", [
    "run/ledger.jsonl", "run/metrics.jsonl", "run/recipe.json", f"{CHECKPOINT}/manifest.json",
])  # fmt: skip
def test_verify_reports_every_fault_as_a_failed_claim(project: Path, file: str) -> None:
    for fault, spoil in FAULTS.items():
        back = spoilt(project / file, spoil)
        try:
            before = fingerprint(project)
            code, out, err = call("verify", "run", "--json")
            assert fingerprint(project) == before
        finally:
            back()
        if fault == "CRLF" and b"\n" not in (project / file).read_bytes():
            continue
        assert code == 6, (file, fault, err)
        claims = json.loads(out)["claims"]
        assert any(claim["result"] == "failed" for claim in claims), (file, fault)
        assert "Traceback" not in err


def test_the_sound_project_passes_what_the_spoilt_one_fails(project: Path) -> None:
    for words in {case[1] for case in CASES.values()} - {TRAIN}:
        if words[0] in ("train", "import", "corpus", "bundle", "export", "evaluate"):
            continue  # these write; their own tests run them
        code, _, err = call(*words)
        assert code == 0, (words, err)
    code, out, _ = call("verify", "run", "--json")
    assert code == 0, [claim for claim in json.loads(out)["claims"] if claim["result"] == "failed"]


@pytest.mark.parametrize(("words", "code", "json_too"), [
    (("status", "nowhere"), 2, True), (("status", "data"), 2, True), (("status", "recipe.yaml"), 2, True),
    (("train", "recipe.yaml", "--run", "run"), 3, False),
    (("train", "recipe.yaml", "--run", "new", "--start", "resume"), 3, False),
    (("train", "recipe.yaml", "--run", "new", "--start", "again"), 2, False),
    (("train", "recipe.yaml", "--run", "new", "--until", "²"), 2, False),
    (("train", "recipe.yaml", "--run", "new", "--until", "7"), 2, False),
    (("train", "recipe.yaml", "--run", "run", "--start", "resume", "--until", "7"), 2, False),
    (("train", "recipe.yaml", "--run", "new", "--ranks", "two"), 2, False),
    (("train", "recipe.yaml", "--run", "new", "--grace", "-1"), 2, False),
    (("train", "recipe.yaml", "--run", "new", "--grace", "nan"), 2, False),
    (("train", "recipe.yaml", "--run", "new", "--grace", "inf"), 2, False),
    (("train", "recipe.yaml", "--run", "new", "--hang-after", "0"), 2, False),
    (("train", "recipe.yaml", "--run", "new", "--hang-after", "nan"), 2, False),
    (("train", "recipe.yaml", "--run", "new", "--from-step", "3"), 2, False),
    (("release", "run"), 3, True), (("verify", "nowhere"), 2, True), (("data", "verify", "nowhere"), 2, True),
    (("evaluate", "run", "--step", "5"), 4, True), (("export", "run", "data"), 2, True),
    (("bundle", "run", "data"), 2, True), (("import", "hf", "nowhere", "out"), 2, True),
])  # fmt: skip
def test_wrong_uses_are_one_sentence_too(project: Path, words: tuple[str, ...], code: int, json_too: bool) -> None:
    before = fingerprint(project)
    found, out, err = call(*words, *(["--json"] if json_too else []))
    assert found == code, err
    assert fingerprint(project) == before
    assert len(err.strip().splitlines()) == 1
    assert "Traceback" not in err
    if json_too:
        told = json.loads(out)
        assert (told["ok"], told["exit"]) == (False, code)


def test_a_ledger_that_lost_its_end_is_refused_before_anything_is_written(project: Path) -> None:
    ledger = project / "run" / "ledger.jsonl"
    data = ledger.read_bytes()
    end = data.rindex(b"\n", 0, data.index(b'"kind":"end"')) + 1
    back = spoilt(ledger, lambda path: os.truncate(path, end))
    try:
        before = fingerprint(project)
        code, _, err = call("train", "recipe.yaml", "--run", "run", "--start", "resume")
        assert (code, fingerprint(project)) == (3, before)
        assert "restore the ledger" in err
    finally:
        back()


@pytest.mark.parametrize(("file", "words"), [("recipe.yaml", ("plan",)), ("data/queue.jsonl", ("data", "verify"))])
def test_the_real_command_says_the_same(project: Path, assay: Callable[..., Any], file: str, words: Any) -> None:
    back = spoilt(project / file, FAULTS["not UTF-8"])
    try:
        done = assay(*words, project / file)
    finally:
        back()
    assert done.returncode == 2
    assert done.stdout == ""
    assert len(done.stderr.strip().splitlines()) == 1


FUZZ = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)  # fmt: skip


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Project(tmp_path_factory.mktemp("fuzz") / "project", slots=((7, 2),)).path


def mutated(value: Any, choose: st.DataObject) -> Any:
    """The value with one place in it replaced, removed or added to."""
    if isinstance(value, dict) and value and choose.draw(st.integers(0, 4)):
        key = choose.draw(st.sampled_from(sorted(value)))
        act = choose.draw(st.integers(0, 5))
        if act == 0:
            return {name: inner for name, inner in value.items() if name != key}
        if act == 1:
            return value | {choose.draw(st.text(max_size=6)): choose.draw(JSON)}
        return value | {key: mutated(value[key], choose)}
    if isinstance(value, list) and value and choose.draw(st.integers(0, 4)):
        at = choose.draw(st.integers(0, len(value) - 1))
        return [*value[:at], mutated(value[at], choose), *value[at + 1 :]]
    return choose.draw(JSON)


def only_ours(act: Callable[[], object]) -> None:
    """Success or one sentence; whatever else comes out fails the test by itself."""
    try:
        act()
    except AssayError as fault:
        assert "\n" not in str(fault)  # noqa: PT017 - either outcome is right


@FUZZ
@given(st.data())
def test_a_mutated_recipe_is_a_recipe_or_one_sentence(sound: Path, data: st.DataObject) -> None:
    path = sound / "fuzz.yaml"
    value = mutated(json.loads(Project.recipe(_at(sound)).read_bytes()), data)
    path.write_text(json.dumps(value))
    only_ours(lambda: recipes.digest(recipes.load(path)))


def _at(path: Path) -> Project:
    project = Project.__new__(Project)
    project.path = path
    return project


@FUZZ
@given(st.data())
def test_a_mutated_shard_manifest_is_a_shard_or_one_sentence(sound: Path, data: st.DataObject) -> None:
    folder = sound / "fuzzed"
    if not folder.exists():
        shutil.copytree(sound / "data" / "train-0", folder)
    value = mutated(json.loads((sound / "data" / "train-0" / "shard.json").read_bytes()), data)
    (folder / "shard.json").write_text(json.dumps(value))
    only_ours(lambda: open_shard(folder))


@FUZZ
@given(st.data())
def test_a_mutated_and_rechained_queue_is_a_queue_or_one_sentence(sound: Path, data: st.DataObject) -> None:
    path = sound / "data" / "fuzzed.jsonl"
    header, slot = (json.loads(line) for line in (sound / "data" / "queue.jsonl").read_bytes().splitlines())
    number = data.draw(st.integers(0, 1))
    header = mutated(header, data) if number == 0 else header
    first = json.dumps(header).encode()
    slot = slot | {"previous": digest(first)}
    second = json.dumps(mutated(slot, data) if number == 1 else slot).encode()
    path.write_bytes(first + b"\n" + second + b"\n")

    def act() -> None:
        queue = queues.load(path)
        for one in queue.slots:
            one.stream(7, queue.block)

    only_ours(act)


@FUZZ
@given(st.data())
def test_a_mutated_and_rechained_ledger_is_a_history_or_one_sentence(
    project: Path, sound: Path, data: st.DataObject
) -> None:
    records = [json.loads(line) for line in (project / "run" / "ledger.jsonl").read_bytes().splitlines()]
    at = data.draw(st.integers(0, len(records) - 1))
    body = mutated(records[at]["body"], data)
    records[at] = records[at] | {"body": body}
    first = records[0]["body"]
    run_id = first.get("run_id") if isinstance(first, dict) else None
    previous, lines = first_previous(run_id if isinstance(run_id, str) else "none"), []
    for record in records:
        try:
            line = canonical_exact({**record, "previous": previous})
        except ValueError:
            line = json.dumps({**record, "previous": previous}).encode()
        previous = digest(line)
        lines.append(line + b"\n")
    path = sound / "fuzzed.jsonl"
    path.write_bytes(b"".join(lines))

    def act() -> None:
        told = history(path)
        assert told.line is not None
        assert isinstance(told.ended, bool)

    only_ours(act)


@FUZZ
@given(st.binary(max_size=120))
def test_arbitrary_bytes_are_one_sentence_for_every_reader(sound: Path, data: bytes) -> None:
    path = sound / "bytes"
    path.write_bytes(data)
    (sound / "fuzzed").mkdir(exist_ok=True)
    (sound / "fuzzed" / "shard.json").write_bytes(data)
    for act in (
        lambda: recipes.load(path), lambda: queues.load(path), lambda: history(path),
        lambda: open_shard(sound / "fuzzed"),
    ):  # fmt: skip
        with pytest.raises(AssayError) as caught:
            act()
        assert "\n" not in str(caught.value)
