"""Signed statements: in-toto Statement v1 in a DSSE envelope, with Ed25519 signatures.

What is verified is what is parsed, byte for byte; the key id is a hint and decides nothing. Any other
verifier of DSSE (https://github.com/secure-systems-lab/dsse) can check these envelopes. It knows no roles.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence
from typing import Any

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from assay.errors import AssayError, InputError, VerificationError
from assay.files.digest import PREFIX as DIGEST
from assay.files.digest import canonical, canonical_exact, is_digest
from assay.files.reading import parse_json
from assay.ledger.keys import keyid, public_key, verifier

PAYLOAD_TYPE = "application/vnd.in-toto+json"
STATEMENT_TYPE = "https://in-toto.io/Statement/v1"


def statement(
    subject_name: str, subject_digest: str, predicate_type: str, predicate: Mapping[str, Any]
) -> dict[str, Any]:
    """A statement about one thing, named by its digest (`sha256:` + hex)."""
    if not is_digest(subject_digest):
        raise InputError(
            f"{subject_name}: {subject_digest!r} is not a digest; 'sha256:' and 64 hex digits are expected"
        )
    return {
        "_type": STATEMENT_TYPE,
        "subject": [{"name": subject_name, "digest": {"sha256": subject_digest.removeprefix(DIGEST)}}],
        "predicateType": predicate_type,
        "predicate": dict(predicate),
    }


def subject(statement: Mapping[str, Any]) -> tuple[str, str]:
    """(name, digest) of a statement's only subject; VerificationError when it has another number of them."""
    things = statement["subject"]
    if len(things) != 1:
        raise VerificationError(f"the statement is about {len(things)} things; one subject is expected")
    return str(things[0].get("name", "")), DIGEST + str(things[0]["digest"]["sha256"])


def pae(payload_type: str, payload: bytes) -> bytes:
    """The bytes that are signed: DSSE's pre-authentication encoding of type and payload."""
    kind = payload_type.encode()
    return b"DSSEv1 %d %b %d %b" % (len(kind), kind, len(payload), payload)


def sign(statement: Mapping[str, Any], key: Ed25519PrivateKey) -> dict[str, Any]:
    """An envelope of the statement's canonical bytes with one signature."""
    payload = canonical_exact(dict(statement))
    envelope = {"payload": base64.b64encode(payload).decode(), "payloadType": PAYLOAD_TYPE, "signatures": []}
    return add_signature(envelope, key)


def add_signature(envelope: Mapping[str, Any], key: Ed25519PrivateKey) -> dict[str, Any]:
    """The envelope with one signature more; InputError when this key has signed it already."""
    payload, signatures = _decode(envelope)
    name = keyid(public_key(key))
    if any(given == name for given, _ in signatures):
        raise InputError(f"the envelope has a signature of {name} already; a second one counts for nothing")
    signature = base64.b64encode(key.sign(pae(PAYLOAD_TYPE, payload))).decode()
    return {**envelope, "signatures": [*envelope["signatures"], {"keyid": name, "sig": signature}]}


def signers(envelope: Mapping[str, Any], keys: Sequence[str]) -> list[str]:
    """Those of the public keys (`ed25519:…`) whose signature of the envelope holds, each once, in their order.

    Raises VerificationError when the envelope is malformed or of another payload type.
    """
    return _accepted(_judge(*_decode(envelope), keys), keys)


def verify(envelope: Mapping[str, Any], keys: Sequence[str], threshold: int = 1) -> dict[str, Any]:
    """The statement, when at least `threshold` of the public keys signed it; VerificationError says why not.

    Several signatures by one key count once; signatures by other keys count for nothing and do no harm.
    """
    payload, signatures = _decode(envelope)
    judged = _judge(payload, signatures, keys)
    accepted, needed = _accepted(judged, keys), max(threshold, 1)
    if len(accepted) < needed:
        raise VerificationError(f"{len(accepted)} of {needed} needed signatures hold: {_reasons(judged, keys)}")
    return _statement(payload)


def unverified(envelope: Mapping[str, Any]) -> dict[str, Any]:
    """The statement, whoever signed it: for messages that say what an envelope claims, never for a decision."""
    return _statement(_decode(envelope)[0])


def encode(envelope: Mapping[str, Any]) -> bytes:
    """The envelope as the bytes of a file."""
    return canonical(dict(envelope)) + b"\n"


def _judge(
    payload: bytes, signatures: Sequence[tuple[str, bytes]], keys: Sequence[str]
) -> list[tuple[str, str | None]]:
    """For each signature the key id that it states and the key under which it holds, or None.

    Other tools name keys otherwise, so a key id that is none of ours leaves every key to be tried.
    """
    signed = pae(PAYLOAD_TYPE, payload)
    judged = []
    for name, signature in signatures:
        candidates = [key for key in keys if keyid(key) == name] or keys
        judged.append((name, next((key for key in candidates if _holds(key, signature, signed)), None)))
    return judged


def _holds(key: str, signature: bytes, signed: bytes) -> bool:
    try:
        verifier(key).verify(signature, signed)
    except InvalidSignature:
        return False
    return True


def _accepted(judged: Sequence[tuple[str, str | None]], keys: Sequence[str]) -> list[str]:
    """The keys under which a signature holds, each once, in the order of `keys`."""
    good = {key for _, key in judged}
    return [key for key in dict.fromkeys(keys) if key in good]


def _decode(envelope: Mapping[str, Any]) -> tuple[bytes, list[tuple[str, bytes]]]:
    """(payload, [(key id or "", signature)]) of a well-formed envelope of our payload type."""
    kind = envelope.get("payloadType")
    if kind != PAYLOAD_TYPE:
        raise VerificationError(f"payloadType is {kind!r:.80}; {PAYLOAD_TYPE!r} is expected: is it a signed statement?")
    entries = envelope.get("signatures")
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise VerificationError("signatures is not a list of objects; the envelope is malformed")
    signatures = []
    for number, entry in enumerate(entries):
        name = entry.get("keyid") or ""
        if not isinstance(name, str):
            raise VerificationError(f"signatures[{number}].keyid is {name!r:.80}; a text is expected")
        signatures.append((name, _base64(entry.get("sig"), f"signatures[{number}].sig")))
    return _base64(envelope.get("payload"), "payload"), signatures


def _base64(value: object, where: str) -> bytes:
    """Standard or URL-safe base64 in its one canonical spelling, so that no changed character goes unseen."""
    if isinstance(value, str) and value.isascii():
        plain = value.replace("-", "+").replace("_", "/")
        try:
            data = base64.b64decode(plain, validate=True)
        except binascii.Error:
            data = b""
        if base64.b64encode(data).decode() == plain:
            return data
    raise VerificationError(f"{where} is not base64; the envelope is malformed or was changed")


def _reasons(judged: Sequence[tuple[str, str | None]], keys: Sequence[str]) -> str:
    known = {keyid(key) for key in keys}
    texts = []
    for name, key in judged:
        if key is not None:
            texts.append(f"the one by {keyid(key)} holds")
        elif name in known:
            texts.append(f"the one by {name} is wrong: the payload or the signature was changed, or it is forged")
        else:
            texts.append(f"{name or 'an unnamed key'} is no trusted key")
    return "; ".join(dict.fromkeys(texts)) or "there is no signature"


def _statement(payload: bytes) -> dict[str, Any]:
    try:
        value = parse_json(payload, "the signed payload")
    except AssayError as error:
        raise VerificationError(str(error)) from None
    if not isinstance(value, dict) or value.get("_type") != STATEMENT_TYPE:
        shown = value.get("_type") if isinstance(value, dict) else type(value).__name__
        raise VerificationError(f"the signed payload is {shown!r:.80}, not a statement of type {STATEMENT_TYPE!r}")
    things = value.get("subject")
    if not isinstance(things, list) or not things or not all(_is_subject(thing) for thing in things):
        raise VerificationError("the signed statement has no subject with a sha256 digest")
    if not isinstance(value.get("predicateType"), str) or not isinstance(value.get("predicate"), dict):
        raise VerificationError("the signed statement has no predicateType or no predicate")
    return value


def _is_subject(thing: object) -> bool:
    named = thing.get("digest") if isinstance(thing, dict) else None
    return isinstance(named, dict) and is_digest(DIGEST + str(named.get("sha256")))
