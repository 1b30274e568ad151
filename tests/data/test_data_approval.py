"""A slot of a queue with reviewers enters only as they signed it: that line, that head, that queue, enough of them."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from small import GLOBAL_BATCH, Project

from assay.data import approval
from assay.data import queue as queues
from assay.data.queue import Queue, Slot
from assay.data.shard import Shard, open_shard
from assay.errors import AssayError, InputError, Refused
from assay.files.digest import canonical, digest
from assay.launch.preflight import preflight, refusals
from assay.ledger import keys, signing
from assay.recipe import load as recipes
from assay.run.folder import RunFolder
from assay.run.history import history

Answer = tuple[int, str, str]
Command = Callable[..., Answer]
MakeShard = Callable[..., Shard]


def facts(answer: Answer, code: int = 0) -> dict[str, Any]:
    assert answer[0] == code, answer
    value = json.loads(answer[1])
    assert value["ok"] is (code == 0)
    return dict(value)


class Bench:
    """Keys of alice, bob and mallory, a queue whose slots alice and bob approve, both, and the line of its slot 0."""

    def __init__(self, assay: Command, folder: Path) -> None:
        self.assay, self.folder = assay, folder
        self.shard = open_shard(folder / "data" / "first")
        self.queue, self.line = folder / "data" / "queue.jsonl", folder / "data" / "line"
        self.ids = {name: keys.keyid(self.public(name)) for name in ("alice", "bob", "mallory")}

    def propose(self, updates: int = 5, queue: Path | None = None) -> str:
        """The next line, in the file that is approved and appended; its digest."""
        now = queues.load(queue or self.queue)
        parts = queues.parts_of(now, self.shard, 0, 3000)
        line = queues.propose(now, updates=updates, parts=parts, global_batch=4)
        self.line.write_bytes(line + b"\n")
        return digest(line)

    def approve(self, name: str, *more: object, queue: Path | None = None) -> Answer:
        words = ("--key", self.folder / name, "--queue", queue or self.queue, "--json")
        return self.assay("data", "approve", self.line, *words, *more)

    def append(self) -> Answer:
        return self.assay("data", "append", self.queue, self.line, "--json")

    def refused(self) -> str:
        """What the refusal of the line says, after nothing was written."""
        before = self.queue.read_bytes()
        said: str = facts(self.append(), 3)["error"]
        assert self.queue.read_bytes() == before
        return said

    def private(self, name: str) -> Ed25519PrivateKey:
        return keys.load_key(self.folder / name)

    def public(self, name: str) -> str:
        return keys.public_key(self.private(name))

    @property
    def slot(self) -> Slot:
        now = queues.load(self.queue)
        return queues.next_slot(now, self.line.read_bytes().rstrip(b"\n"), "line")

    def envelopes(self) -> list[Path]:
        return sorted(approval.folder(self.queue).iterdir())

    def put(self, envelope: dict[str, Any], name: str) -> Path:
        """The envelope under the name that an approval of the present line by `name` has."""
        place = approval.folder(self.queue)
        place.mkdir(parents=True, exist_ok=True)
        path = place / f"{self.slot.digest[7:]}.{self.ids[name][7:23]}.json"
        path.write_bytes(signing.encode(envelope))
        return path


def create(path: Path, shard: Shard, reviewers: list[str] | None, threshold: int) -> Queue:
    trust = None if reviewers is None else {"reviewer": reviewers, "threshold": threshold}
    return queues.create(path, block=16, dtype="uint16", vocabulary=500, tokenizer="test", pool=shard.pool, trust=trust)


@pytest.fixture(scope="session")
def prepared(tmp_path_factory: pytest.TempPathFactory, make_shard: MakeShard) -> Path:
    folder = tmp_path_factory.mktemp("bench")
    shard = make_shard(folder / "data" / "first")
    alice, bob, _ = (keys.new_key(folder / name) for name in ("alice", "bob", "mallory"))
    create(folder / "data" / "queue.jsonl", shard, [alice, bob], 2)
    return folder


@pytest.fixture
def bench(assay: Command, tmp_path: Path, prepared: Path) -> Bench:
    shutil.copytree(prepared, tmp_path / "bench")
    made = Bench(assay, tmp_path / "bench")
    made.propose()
    return made


def test_reviewers_are_named_when_the_queue_is_made(assay: Command, tmp_path: Path, shard: Shard) -> None:
    made = [facts(assay("key", "new", tmp_path / name, "--json")) for name in ("alice", "bob")]
    assert made[0]["keyid"] == digest(bytes.fromhex(made[0]["public_key"].removeprefix("ed25519:")))
    queue = shard.path.with_name("queue.jsonl")
    words = ("data", "create", queue, "--shard", shard.path, "--block", 16)
    who = ("--reviewer", made[0]["public"], "--reviewer", made[1]["public_key"])
    trust = facts(assay(*words, *who, "--threshold", 2, "--json"))["trust"]
    assert trust == queues.load(queue).trust == {"reviewer": [one["public_key"] for one in made], "threshold": 2}
    queue.unlink()
    assert "1 of 2 reviewer(s)" in assay(*words, *who)[1]
    queue.unlink()
    for wrong in (("--threshold", 1), (*who, "--threshold", 3), ("--reviewer", shard.path), (*who, *who)):
        assert assay(*words, *wrong)[0] == 2
        assert not queue.exists()


def test_from_a_proposal_to_an_approved_slot(bench: Bench, tmp_path: Path) -> None:
    slot = ("--global-batch", 4, "--updates", 5)
    _, line_text, _ = bench.assay("data", "propose", bench.queue, f"{bench.shard.path}:0:3000", *slot)
    bench.line.write_text(line_text)
    assert "has 0; approve that line" in bench.refused()
    (tmp_path / "licences.txt").write_bytes(b"all is well")
    signed = facts(bench.approve("alice", "--licences", tmp_path / "licences.txt"))
    assert (signed["approvals"], signed["approvals_needed"], signed["keyid"]) == (1, 2, bench.ids["alice"])
    assert "by 2 of its 2 reviewer(s); slot 0" in (said := bench.refused())
    assert "has 1;" in said
    assert facts(bench.approve("bob"))["approvals"] == 2
    appended = facts(bench.append())
    assert appended["approved_by"] == [bench.ids["alice"], bench.ids["bob"]]
    assert appended["head"] == queues.load(bench.queue).head == digest(bench.line.read_bytes().rstrip(b"\n"))

    line = bench.line.read_bytes().rstrip(b"\n")
    half = bench.shard.sources[0].stop
    for path, name in zip(bench.envelopes(), sorted(("alice", "bob"), key=lambda n: bench.ids[n]), strict=True):
        assert path.name == f"{hashlib.sha256(line).hexdigest()}.{bench.ids[name][7:23]}.json"
        said_there = json.loads(base64.b64decode(json.loads(path.read_bytes())["payload"]))
        assert said_there["subject"] == [{"name": "slot 0", "digest": {"sha256": hashlib.sha256(line).hexdigest()}}]
        predicate = said_there["predicate"]
        assert predicate["queue"] == predicate["head"] == digest(bench.queue.read_bytes().split(b"\n")[0])
        assert [predicate[key] for key in ("slot", "updates", "epochs", "tokens")] == [0, 5, 1, 3000]
        assert {part["shard"] for part in predicate["parts"]} == {bench.shard.sha256}
        assert predicate["licences_report"] == (digest(b"all is well") if name == "alice" else None)
        assert predicate["overlap_report"] is predicate["overlap"] is None
        assert [(entry["source"], entry["licence"], entry["tokens"]) for entry in predicate["licences"]] == [
            ("en-docs", "CC-BY", half),
            ("pl-docs", None, 3000 - half),
        ]
    verified = facts(bench.assay("data", "verify", bench.queue, "--json"))
    assert [one["valid"] for one in verified["approvals"][0]["approvals"]] == [True, True]
    bench.envelopes()[0].unlink()
    assert "slot 0" in facts(bench.assay("data", "verify", bench.queue, "--json"), 4)["problems"][0]


def test_no_command_shows_a_private_key(bench: Bench) -> None:
    secret = bench.private("alice").private_bytes_raw()
    pem = (bench.folder / "alice").read_text().splitlines()[1]
    shown = "".join(
        "".join(map(str, answer))
        for answer in (
            bench.assay("key", "new", bench.folder / "alice"),
            bench.assay("data", "approve", bench.line, "--key", bench.folder / "alice"),  # the queue beside the line
            bench.approve("alice"),
            bench.append(),
            bench.assay("data", "verify", bench.queue),
        )
    )
    assert bench.ids["alice"] in shown
    assert not any(text in shown for text in (pem, secret.hex(), base64.b64encode(secret).decode(), "PRIVATE"))


def test_a_line_edited_after_its_approval_is_refused(bench: Bench) -> None:
    approved = bench.slot.digest
    for name in ("alice", "bob"):
        assert bench.approve(name)[0] == 0
    record = json.loads(bench.line.read_bytes())
    bench.line.write_bytes(canonical({**record, "updates": 6}))
    said = bench.refused()
    assert f"(line {bench.slot.digest}) has 0" in said
    assert said.count(f"is for line {approved}, slot 0 at head {queues.load(bench.queue).head}") == 2
    bench.line.write_bytes(canonical(record) + b"\n")
    assert len(facts(bench.append())["approved_by"]) == 2


def test_an_approval_of_another_head_or_line_under_this_lines_name_is_refused(bench: Bench) -> None:
    first, head = bench.propose(7), queues.load(bench.queue).head
    bench.approve("alice")
    bench.approve("bob")
    (old, *_) = bench.envelopes()
    bench.append()
    second = bench.propose(7)  # the same data and length, at the new head
    assert second != first
    signed = bench.put(json.loads(old.read_bytes()), "alice")
    bench.approve("bob")
    assert f"{signed.name} does not count: it approves line {first}, slot 0 at head {head} of queue" in bench.refused()
    assert len(approval.approvals(queues.load(bench.queue), bench.slot)) == 2, "those of slot 0 are not looked at"


def test_an_approval_of_another_queue_is_refused(bench: Bench) -> None:
    other = bench.queue.with_name("other.jsonl")
    header = create(other, bench.shard, [bench.public("alice")], 1).head
    line = bench.line.read_bytes()
    bench.propose(5, queue=other)
    facts(bench.approve("alice", queue=other))
    (envelope,) = approval.folder(other).iterdir()
    bench.line.write_bytes(line)
    bench.put(json.loads(envelope.read_bytes()), "alice")
    assert f"of queue {header}" in bench.refused()
    (approval.folder(bench.queue) / envelope.name).write_bytes(envelope.read_bytes())
    assert f"{envelope.name} is for line" in bench.refused()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("queue", digest(b"another queue")),
        ("head", digest(b"another head")),
        ("slot", 1),
        ("updates", 6),
        ("tokens", 2999),
        ("parts", []),
        ("role", "publisher"),
    ],
)
def test_a_reviewers_statement_of_another_thing_about_this_line_is_refused(
    bench: Bench, key: str, value: object
) -> None:
    for name in ("alice", "bob"):
        bench.approve(name)
        (path,) = [one for one in bench.envelopes() if bench.ids[name][7:23] in one.name]
        statement = signing.unverified(json.loads(path.read_bytes()))
        statement["predicate"][key] = value
        bench.put(signing.sign(statement, bench.private(name)), name)
    assert bench.refused().count(f"does not count: it is for {key} {value!r}") == 2


def test_forged_and_unknown_signatures_are_refused_by_name(bench: Bench) -> None:
    assert "is none of its reviewers" in facts(bench.approve("mallory"), 3)["error"]
    assert not approval.folder(bench.queue).exists()
    bench.approve("alice")
    statement = signing.unverified(json.loads(bench.envelopes()[0].read_bytes()))
    forged = signing.sign(statement, bench.private("mallory"))
    path = bench.put(forged, "bob")
    assert f"{path.name} does not count: 0 of 1 needed signatures hold: {bench.ids['mallory']} is no" in bench.refused()
    forged["signatures"][0]["keyid"] = bench.ids["bob"]
    bench.put(forged, "bob")
    assert f"the one by {bench.ids['bob']} is wrong" in bench.refused()
    path.write_bytes(b"{}")
    assert f"{path.name} does not count: payloadType is None" in bench.refused()
    bench.put(signing.sign({**statement, "predicateType": "urn:assay:other:1"}, bench.private("bob")), "bob")
    assert "states 'urn:assay:other:1'" in bench.refused()
    path.unlink()
    bench.approve("bob")
    assert len(facts(bench.append())["approved_by"]) == 2


def test_one_reviewer_twice_is_one_and_two_in_one_envelope_are_two(bench: Bench) -> None:
    bench.approve("alice")
    before = bench.envelopes()[0].read_bytes()
    assert "exists already" in facts(bench.approve("alice"), 2)["error"]
    assert bench.envelopes()[0].read_bytes() == before
    envelope = json.loads(before)
    signed = signing.sign({**signing.unverified(envelope)}, bench.private("alice"))
    envelope["signatures"] *= 2
    bench.put(envelope, "alice")
    bench.put(signed, "bob")
    assert "has 1;" in bench.refused()
    for path in bench.envelopes():
        path.unlink()
    bench.put(signing.add_signature(signed, bench.private("bob")), "mallory")
    assert facts(bench.append())["approved_by"] == [bench.ids["alice"], bench.ids["bob"]]


def test_a_key_that_others_can_read_signs_nothing(bench: Bench) -> None:
    (bench.folder / "alice").chmod(0o644)
    assert "chmod 600" in facts(bench.approve("alice"), 3)["error"]
    assert not approval.folder(bench.queue).exists()


def at_once(count: int, act: Callable[[], object]) -> list[object]:
    """What `count` threads that start together get, or the faults that they end with."""
    gate, results = threading.Barrier(count), []

    def run() -> None:
        gate.wait()
        try:
            results.append(act())
        except AssayError as fault:
            results.append(fault)

    threads = [threading.Thread(target=run) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def test_of_many_writers_one_approves_and_one_appends(bench: Bench) -> None:
    now, slot, line = queues.load(bench.queue), bench.slot, bench.line.read_bytes().rstrip(b"\n")
    for name in ("alice", "bob"):
        key = bench.private(name)
        found = at_once(4, lambda key=key: approval.approve(now, slot, key, {}))  # type: ignore[misc]
        assert [isinstance(one, InputError) for one in found].count(False) == 1
    assert len(bench.envelopes()) == 2
    found = at_once(4, lambda: queues.append(bench.queue, line))
    assert [one for one in found if not isinstance(one, AssayError)] == [slot]
    assert queues.load(bench.queue).slots == (slot,)


@pytest.mark.parametrize("call", ["link", "unlink"])
def test_a_kill_while_approving_leaves_the_old_queue_and_no_half_approval(bench: Bench, call: str) -> None:
    bench.approve("bob")
    before, now, slot, key = bench.queue.read_bytes(), queues.load(bench.queue), bench.slot, bench.private("alice")
    child = os.fork()
    if child == 0:
        try:
            setattr(os, call, lambda *_, **__: os._exit(9))
            approval.approve(now, slot, key, {})
        finally:
            os._exit(99)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    assert any(".partial-" in one.name for one in bench.envelopes())
    assert bench.queue.read_bytes() == before
    if call == "link":  # killed before the name was given: there is no approval, and a second try makes it
        assert "has 1;" in bench.refused()
        bench.approve("alice")
    assert len(facts(bench.append())["approved_by"]) == 2


def test_a_queue_without_reviewers_takes_lines_as_before(bench: Bench) -> None:
    bench.queue = bench.queue.with_name("free.jsonl")
    create(bench.queue, bench.shard, None, 0)
    bench.propose()
    assert facts(bench.approve("mallory"))["approvals_needed"] == 0
    assert facts(bench.append())["approved_by"] is None
    approval.check_slots(queues.load(bench.queue))


@pytest.mark.parametrize(
    ("trust", "says"),
    [
        ({}, "'reviewer' is missing"),
        ({"reviewer": []}, "at least one public key"),
        ({"reviewer": "ed25519:" + "5a" * 32}, "at least one public key"),
        ({"reviewer": ["key"]}, r"reviewer\[0\]: 'key' is not a public key"),
        ({"reviewer": ["ed25519:" + "00" * 32]}, "forged"),
        ({"reviewer": ["ed25519:" + "5a" * 32] * 2}, "twice"),
        ({"reviewer": ["ed25519:" + "5a" * 32], "threshold": 2}, "threshold is 2"),
        ({"reviewer": ["ed25519:" + "5a" * 32], "threshold": 0}, "threshold is 0"),
        ({"reviewers": ["ed25519:" + "5a" * 32]}, "did you mean 'reviewer'"),
    ],
)
def test_a_header_that_names_reviewers_wrongly_is_no_queue(tmp_path: Path, trust: dict[str, Any], says: str) -> None:
    path = tmp_path / "queue.jsonl"
    known: dict[str, Any] = {"block": 16, "dtype": "uint16", "vocabulary": 500, "tokenizer": "test"}
    with pytest.raises(InputError, match=says):
        queues.create(path, **known, trust=trust)
    assert not path.exists()
    path.write_bytes(canonical({"format": queues.FORMAT, **known, "trust": trust}) + b"\n")
    with pytest.raises(InputError, match=says):
        queues.load(path)


def test_the_queue_is_found_beside_the_line_or_asked_for(bench: Bench) -> None:
    words = ("--key", bench.folder / "alice", "--json")
    assert facts(bench.assay("data", "approve", bench.line, *words))["queue"] == str(bench.queue)
    (bench.queue.with_name("copy.jsonl")).write_bytes(bench.queue.read_bytes())
    assert "2 queues" in facts(bench.assay("data", "approve", bench.line, *words), 2)["error"]
    bench.line.write_text("[]")
    assert "0 queues" in facts(bench.assay("data", "approve", bench.line, *words), 2)["error"]


def approved_project(folder: Path) -> tuple[Project, Ed25519PrivateKey]:
    """A small project whose two slots one reviewer approved."""
    project, key = Project(folder), Ed25519PrivateKey.generate()
    path = project.path / "data" / "queue.jsonl"
    lines = path.read_bytes().splitlines()
    path.write_bytes(canonical({**json.loads(lines[0]), "trust": {"reviewer": [keys.public_key(key)]}}) + b"\n")
    for line in lines[1:]:
        now = queues.load(path)
        again = canonical({**json.loads(line), "previous": now.head})
        approval.approve(now, queues.next_slot(now, again, "line"), key, {})
        queues.append(path, again)
    return project, key


def third(queue: Queue) -> bytes:
    parts = queues.parts_of(queue, open_shard(queue.path.with_name("train-0")))
    return queues.propose(queue, updates=6, epochs=2, parts=parts, global_batch=GLOBAL_BATCH)


def test_a_running_trainer_enters_no_slot_that_nobody_approved(tmp_path: Path) -> None:
    project, key = approved_project(tmp_path / "project")
    path, run = project.path / "data" / "queue.jsonl", tmp_path / "run"
    recipe = project.recipe(
        schedule__updates=30,
        data={"queue": "data/queue.jsonl", "validation": "data/validation", "seed": 7, "when_missing": "wait"},
        checkpoint={"every": 100, "keep": "all", "slot_ends": False},
    )
    now = queues.load(path)
    line = third(now)
    process = subprocess.Popen(
        [sys.executable, "-m", "assay.cli.main", "train", str(recipe), "--run", str(run)],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert process.stderr is not None
    with process.stderr:
        told = ""
        for text in process.stderr:
            told += text
            if "SCRATCH" in text:  # its queue of two slots is read; no checkpoint is due before their end
                with path.open("ab") as file:  # past the command, which would refuse it
                    file.write(line + b"\n")
        assert process.wait(120) == 3
    assert f"slot 2 (line {digest(line)}) has 0" in told
    outcome = json.loads((run / "outcome.json").read_text())
    assert (outcome["code"], outcome["step"]) == (3, 24)
    entered = history(RunFolder(run).ledger).slots
    assert [(receipt.body["slot"], receipt.body["approved_by"]) for receipt in entered] == [
        (number, [keys.keyid(keys.public_key(key))]) for number in (0, 1)
    ]
    assert (run / "checkpoints" / "step-000024").is_dir()

    loaded, folder = recipes.load(recipe), RunFolder(run)
    (refused,) = refusals(preflight(loaded, recipe.parent, folder))
    assert (refused.name, refused.code) == ("queue", Refused.code)
    with pytest.raises(Refused, match="slot 2"):
        approval.check_slots(queues.load(path))
    approval.approve(now, queues.next_slot(now, line, "line"), key, {})
    assert not refusals(preflight(loaded, recipe.parent, folder))
