"""Who approved the data and who stands for the bundle: both signed, both checked, and neither believed unasked."""

from __future__ import annotations

import base64
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from forging import edit, rechain, records, set_receipt
from trained_run import assay, public

from assay.data import approval
from assay.data import queue as queues
from assay.errors import AssayError, InputError, Refused
from assay.files.digest import canonical, digest
from assay.ledger import keys, signing
from assay.release import signature
from assay.release.bundle import SUMS, bundle, sums
from assay.release.claims import FAILED, UNVERIFIABLE, VERIFIED, Claim
from assay.release.verify import verify
from assay.run.folder import RunFolder

APPROVED, TRUSTED = "approvals", "approved by keys that the reader trusts"
SIGNED, PUBLISHER = "signature", "signed by a key that the reader trusts"


@pytest.fixture(scope="module")
def made(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle signed by mallory, who publishes here and reviews nothing; only to be read."""
    out = tmp_path_factory.mktemp("signed") / "bundle"
    done = assay(trained, "bundle", "run", out, "--key", "keys/mallory", "--json")
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    assert facts["signed"] is True
    assert signature.FILE in facts["files"]
    assert not any("signature" in one for one in facts["unsupported"])
    return out


@pytest.fixture
def copy(made: Path, trained: Path, tmp_path: Path) -> Path:
    """A copy of the bundle that a test may damage, and of the keys beside it."""
    shutil.copytree(trained / "keys", tmp_path / "keys")
    return Path(shutil.copytree(made, tmp_path / "bundle"))


def told(path: Path, *trust: str) -> dict[str, Claim]:
    """The claims for a reader who accepts these people's keys."""
    return {claim.claim: claim for claim in verify(path, trust=public(path.parent, *trust)).claims}


def failed(path: Path, *trust: str) -> dict[str, str]:
    return {name: claim.evidence for name, claim in told(path, *trust).items() if claim.result == FAILED}


def resum(path: Path) -> None:
    """Write the sums anew, as a forger would, who cannot sign them anew."""
    here = {one.relative_to(path).as_posix() for one in path.rglob("*") if one.is_file()}
    edit_names(path, sorted(here - {SUMS, signature.FILE}))
    (path / SUMS).write_bytes(sums(path, sorted(here - {SUMS, signature.FILE})))


def edit_names(path: Path, names: list[str]) -> None:
    about = json.loads((path / "bundle.json").read_bytes())
    (path / "bundle.json").write_text(json.dumps({**about, "files": names}))


def envelopes(path: Path, slot: int) -> list[Path]:
    """The approvals of a slot in a bundle, by name."""
    line = queues.load(path / "queue.jsonl").slots[slot].digest.removeprefix("sha256:")
    return sorted(one for one in (path / "approvals").iterdir() if one.name.startswith(line))


def sign_again(path: Path, envelope: Path, name: str, **changes: object) -> None:
    """Sign what the envelope states, with these changes of the predicate, by another person's key."""
    statement = signing.unverified(json.loads(envelope.read_bytes()))
    statement["predicate"].update(changes)
    key = keys.load_key(path.parent / "keys" / name)
    envelope.write_bytes(signing.encode(signing.sign(statement, key)))


def change_payload(envelope: Path) -> None:
    """Change what is signed and leave the signature as it is."""
    value = json.loads(envelope.read_bytes())
    payload = json.loads(base64.b64decode(value["payload"]))
    payload["predicate"]["licences"] = []
    envelope.write_text(json.dumps({**value, "payload": base64.b64encode(canonical(payload)).decode()}))


def swap(path: Path) -> None:
    """Exchange the approvals of two slots."""
    one, other = envelopes(path, 0)[0], envelopes(path, 1)[0]
    first, second = one.read_bytes(), other.read_bytes()
    one.write_bytes(second)
    other.write_bytes(first)


def test_approvals_and_signature_hold_and_only_the_reader_says_whose_keys_count(made: Path, trained: Path) -> None:
    (made.parent / "keys").mkdir()
    for path in (trained / "keys").glob("*.pub"):
        shutil.copy(path, made.parent / "keys")
    alone = told(made)
    assert (alone[APPROVED].result, alone[SIGNED].result) == (VERIFIED, VERIFIED)
    assert "2 consumed slots, 2 of 2 reviewers demanded" in alone[APPROVED].evidence
    for name in public(made.parent, "alice", "bob"):
        assert keys.keyid(name) in alone[APPROVED].evidence
        assert name in alone[TRUSTED].evidence  # so that the reader knows whom to ask about
    assert (alone[TRUSTED].result, alone[PUBLISHER].result) == (UNVERIFIABLE, UNVERIFIABLE)
    assert public(made.parent, "mallory")[0] in alone[PUBLISHER].evidence
    everybody = told(made, "alice", "bob", "mallory")
    assert {everybody[name].result for name in (APPROVED, TRUSTED, SIGNED, PUBLISHER)} == {VERIFIED}
    reviewers = told(made, "alice", "bob")
    assert (reviewers[TRUSTED].result, reviewers[PUBLISHER].result) == (VERIFIED, FAILED)
    one = told(made, "alice", "mallory")
    assert (one[TRUSTED].result, one[PUBLISHER].result) == (FAILED, VERIFIED)
    assert "slot 0: 1 of 2 needed signatures are by keys that the reader trusts" in one[TRUSTED].evidence


def test_a_run_is_told_the_same_of_its_queue(project: Path) -> None:
    assert told(project / "run", "alice", "bob")[TRUSTED].result == VERIFIED
    assert set(failed(project / "run", "mallory")) == {TRUSTED}
    beside = approval.folder(project / "data" / "queue.jsonl")
    shutil.move(beside, project / "approved")
    assert told(project / "run")[APPROVED].result == UNVERIFIABLE
    shutil.move(project / "approved", beside)
    line = queues.load(project / "data" / "queue.jsonl").slots[1].digest.removeprefix("sha256:")
    next(beside.glob(f"{line}.*")).unlink()
    assert "slot 1 (line sha256:" in failed(project / "run")[APPROVED]
    with pytest.raises(Refused, match="slot 1"):
        bundle(RunFolder(project / "run"), project / "out")
    assert not (project / "out").exists()


FORGERY: dict[str, tuple[Callable[[Path], object], str, str]] = {
    "an approval removed": (lambda path: envelopes(path, 1)[0].unlink(), APPROVED, "slot 1 (line"),
    "all approvals removed": (lambda path: shutil.rmtree(path / "approvals"), APPROVED, "slot 0 (line"),
    "two approvals swapped": (swap, APPROVED, "it approves line"),
    "the payload changed": (
        lambda path: change_payload(envelopes(path, 0)[0]),
        APPROVED,
        "the payload or the signature was changed",
    ),
    "another head": (
        lambda path: sign_again(path, envelopes(path, 1)[0], "alice", head="sha256:" + "0" * 64),
        APPROVED,
        "it is for head",
    ),
    "another queue": (
        lambda path: sign_again(path, envelopes(path, 1)[0], "bob", queue="sha256:" + "0" * 64),
        APPROVED,
        "it is for queue",
    ),
    "another role": (
        lambda path: sign_again(path, envelopes(path, 0)[0], "alice", role="operator"),
        APPROVED,
        "it is for role 'operator'",
    ),
    "a key that is no reviewer's": (
        lambda path: sign_again(path, envelopes(path, 0)[0], "mallory"),
        APPROVED,
        "is no trusted key",
    ),
    "one reviewer twice": (
        lambda path: envelopes(path, 0)[0].write_bytes(envelopes(path, 0)[1].read_bytes()),
        APPROVED,
        "has 1; ",
    ),
    "an approval of a slot that was not consumed": (
        lambda path: shutil.copy(envelopes(path, 0)[0], path / "approvals" / f"{'0' * 64}.{'0' * 16}.json"),
        APPROVED,
        f"approvals/{'0' * 64}.{'0' * 16}.json is for no slot that this run consumed",
    ),
    "another file among the approvals": (
        lambda path: (path / "approvals" / "note.txt").write_text("fine"),
        "closed list",
        "approvals/note.txt does not belong to a bundle",
    ),
    "a receipt that names another reviewer": (
        lambda path: set_receipt(path, "slot.entered", 0, approved_by=["sha256:" + "1" * 64]),
        APPROVED,
        "approved_by is",
    ),
    "a receipt that names none": (
        lambda path: rechain(path, lambda lines: [one["body"].pop("approved_by", None) for one in lines]),
        APPROVED,
        "approved_by is None",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", FORGERY)
def test_a_forged_approval_fails_by_name_even_when_all_sums_are_written_anew(what: str, copy: Path) -> None:
    forge, claim, words = FORGERY[what]
    forge(copy)
    assert failed(copy)["SHA256SUMS" if "receipt" not in what else claim]
    resum(copy)
    found = failed(copy, "alice", "bob", "mallory")
    assert claim in found, found
    assert words in found[claim], found[claim]
    assert "digest is" in found[SIGNED]  # the publisher did not sign these sums


def test_a_queue_that_names_other_reviewers_is_not_the_one_that_was_trained_on(copy: Path) -> None:
    """The strongest forger: reviewers of their own, every line chained anew and signed by them."""
    forger = keys.load_key(copy.parent / "keys" / "mallory")
    lines = records(copy / "queue.jsonl")
    lines[0]["trust"] = {"reviewer": [keys.public_key(forger)], "threshold": 1}
    shutil.rmtree(copy / "approvals")
    (copy / "approvals").mkdir()
    previous, written = "", b""
    for number, line in enumerate(lines):
        encoded = canonical({**line, **({"previous": previous} if number else {})})
        previous, written = digest(encoded), written + encoded + b"\n"
    (copy / "queue.jsonl").write_bytes(written)
    queue = queues.load(copy / "queue.jsonl")
    for slot in queue.slots[:2]:
        path, _ = approval.approve(queue, slot, forger, {})
        shutil.move(path, copy / "approvals" / path.name)
    shutil.rmtree(copy / "queue.jsonl.d")
    resum(copy)
    found = failed(copy, "mallory")
    assert "queue" in found  # the ledger entered other lines


def test_a_slot_without_reviewers_claims_nobody_s_approval(copy: Path) -> None:
    lines = records(copy / "queue.jsonl")
    del lines[0]["trust"]
    previous, written = "", b""
    for number, line in enumerate(lines):
        encoded = canonical({**line, **({"previous": previous} if number else {})})
        previous, written = digest(encoded), written + encoded + b"\n"
    (copy / "queue.jsonl").write_bytes(written)
    resum(copy)
    found = told(copy, "alice", "bob")
    assert found["queue"].result == FAILED
    assert found[APPROVED].result == UNVERIFIABLE


SIGNATURES: dict[str, tuple[Callable[[Path], object], str, str]] = {
    "a signature removed": (
        lambda path: (path / signature.FILE).unlink(),
        "closed list",
        "signed is True, but signature.dsse.json is not there",
    ),
    "other sums": (
        lambda path: (path / SUMS).write_bytes((path / SUMS).read_bytes() + b"\n"),
        SIGNED,
        "digest is",
    ),
    "another head": (
        lambda path: sign_again(path, path / signature.FILE, "mallory", head={"seq": 1, "digest": "sha256:0"}),
        SIGNED,
        "head is",
    ),
    "another run": (
        lambda path: sign_again(path, path / signature.FILE, "mallory", run_id="other"),
        SIGNED,
        "run_id is 'other'",
    ),
    "another signer than stated": (
        lambda path: sign_again(path, path / signature.FILE, "alice"),
        SIGNED,
        "is no trusted key",
    ),
    "an approval in its place": (
        lambda path: sign_again(path, Path(shutil.copy(envelopes(path, 0)[0], path / signature.FILE)), "mallory"),
        SIGNED,
        "predicateType is",
    ),
    "no envelope": (lambda path: (path / signature.FILE).write_text("{}"), SIGNED, "payloadType"),
    "a link": (
        lambda path: ((path / signature.FILE).rename(path.parent / "s"),
                      (path / signature.FILE).symlink_to(path.parent / "s")),
        SIGNED,
        "no regular file",
    ),
    "no publisher named": (
        lambda path: (edit(path / "bundle.json", '"publisher": "ed25519:', '"publisher": "'), resum(path)),
        SIGNED,
        "is not a public key",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", SIGNATURES)
def test_a_forged_signature_fails_by_name(what: str, copy: Path) -> None:
    forge, claim, words = SIGNATURES[what]
    forge(copy)
    found = failed(copy)
    assert claim in found, found
    assert words in found[claim], found[claim]


def test_a_forger_who_signs_in_their_own_name_meets_the_reader(copy: Path) -> None:
    about = json.loads((copy / "bundle.json").read_bytes())
    stranger = public(copy.parent, "alice")[0]
    (copy / "bundle.json").write_text(json.dumps({**about, "publisher": stranger}))
    resum(copy)
    signed = signature.Signed(copy / SUMS, about["run_id"], about["step"], about["head"])
    (copy / signature.FILE).write_bytes(signature.sign(signed, keys.load_key(copy.parent / "keys" / "alice")))
    assert told(copy)[SIGNED].result == VERIFIED
    assert set(failed(copy, "mallory", "bob")) >= {PUBLISHER}
    (copy / signature.FILE).unlink()
    (copy / "bundle.json").write_text(json.dumps({**about, "signed": False, "publisher": None}))
    resum(copy)
    unsigned = verify(copy, trust=public(copy.parent, "alice", "bob", "mallory"))
    assert {claim.claim: claim.result for claim in unsigned.claims}[PUBLISHER] == UNVERIFIABLE
    assert (unsigned.holds(strict=False), unsigned.holds(strict=True)) == (True, False)


def test_only_the_recipe_s_publishers_may_sign(project: Path) -> None:
    private = keys.load_key(project / "keys" / "mallory")
    with pytest.raises(Refused, match=r"none of the recipe's publishers \(trust\.publisher\)"):
        signature.expect_publisher(private, public(project, "alice"))
    assert signature.expect_publisher(private, public(project, "alice", "mallory")) == keys.public_key(private)


def test_a_key_that_is_none_is_wrong_usage(trained: Path, made: Path) -> None:
    done = assay(trained, "verify", made, "--trust", "ed25519:00")
    assert (done.returncode, "Traceback" in done.stderr) == (2, False)
    assert "64 hex digits are expected" in done.stderr
    with pytest.raises(InputError, match="public key"):
        keys.load_key(trained / "keys" / "alice.pub")
    done = assay(trained, "bundle", "run", trained / "never", "--key", "keys/alice.pub")
    assert (done.returncode, (trained / "never").exists()) == (2, False)
    assert issubclass(InputError, AssayError)
