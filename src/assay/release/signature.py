"""The publisher's signature of a bundle: over SHA256SUMS, which covers every other file, and the ledger's head.

An in-toto statement in a DSSE envelope, so that any verifier of DSSE can check it. It says who stands for the
bundle; whether a reader accepts that key is theirs to say, and no key is searched for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from assay.errors import Refused
from assay.files.digest import digest_file
from assay.files.reading import read_object
from assay.ledger import signing
from assay.ledger.keys import public_key
from assay.ledger.ledger import now

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

FILE = "signature.dsse.json"
PREDICATE_TYPE = "urn:assay:bundle:1"
ROLE = "publisher"
_LIMIT = 4 << 20


@dataclass(frozen=True)
class Signed:
    """What a signature is about."""

    sums: Path
    run_id: str
    step: int
    head: Mapping[str, Any]

    def predicate(self) -> dict[str, Any]:
        """What is signed besides the digest of the sums."""
        return {"role": ROLE, "run_id": self.run_id, "step": self.step, "head": dict(self.head)}


def expect_publisher(key: Ed25519PrivateKey, publishers: Sequence[str]) -> str:
    """The public half of the key; Refused when the recipe names publishers (`trust`) and it is none of them."""
    signer = public_key(key)
    if publishers and signer not in publishers:
        raise Refused(f"{signer} is none of the recipe's publishers (trust.publisher): {', '.join(publishers)}")
    return signer


def sign(about: Signed, key: Ed25519PrivateKey) -> bytes:
    """The envelope's bytes."""
    predicate = {**about.predicate(), "time": now()}
    statement = signing.statement(about.sums.name, digest_file(about.sums), PREDICATE_TYPE, predicate)
    return signing.encode(signing.sign(statement, key))


def check(path: Path, about: Signed, keys: Sequence[str]) -> tuple[list[str], list[str]]:
    """(keys whose signature of the envelope holds, what it states that does not fit) of a bundle's signature.

    Raises what `signing.verify` and reading raise: no signature under these keys, a malformed envelope.
    """
    envelope = read_object(path, "the signature of a bundle", _LIMIT)
    statement = signing.verify(envelope, keys)
    name, sums = signing.subject(statement)
    found = {"predicateType": statement["predicateType"], "subject": name, "digest": sums, **statement["predicate"]}
    expected = {
        "predicateType": PREDICATE_TYPE,
        "subject": about.sums.name,
        "digest": digest_file(about.sums),
        **about.predicate(),
    }
    wrong = [
        f"{path.name}: {key} is {found.get(key)!r:.100}, expected {value!r:.100}"
        for key, value in expected.items()
        if found.get(key) != value
    ]
    return signing.signers(envelope, keys), wrong
