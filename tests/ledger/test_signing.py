"""Envelopes are DSSE to the letter, hold for whom they say, and fail at the first changed bit."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
)
from hypothesis import given
from hypothesis import strategies as st

from assay.errors import InputError, Refused, VerificationError
from assay.files.digest import canonical, digest
from assay.ledger import keys, signing
from assay.ledger.public import check_public

P = 2**255 - 19
ALICE, BOB, MALLORY = (Ed25519PrivateKey.from_private_bytes(bytes([seed]) * 32) for seed in (1, 2, 3))
A, B, M = map(keys.public_key, (ALICE, BOB, MALLORY))
STATEMENT = signing.statement("slot 3", digest(b"line"), "urn:assay:test:1", {"tokens": 7, "note": "zażółć"})
ENVELOPE = signing.sign(STATEMENT, ALICE)


class Curve:
    """Ed25519 by RFC 8032, section 6, in integers alone: slow, and nothing of it is shared with the library."""

    D = -121665 * pow(121666, P - 2, P) % P
    L = 2**252 + 27742317777372353535851937790883648493
    BASE: tuple[int, int]

    @classmethod
    def recover(cls, encoded: bytes) -> tuple[int, int]:
        number = int.from_bytes(encoded, "little")
        y, sign = number & (2**255 - 1), number >> 255
        square = (y * y - 1) * pow(cls.D * y * y + 1, P - 2, P) % P
        x = pow(square, (P + 3) // 8, P)
        if (x * x - square) % P:
            x = x * pow(2, (P - 1) // 4, P) % P
        assert (x * x - square) % P == 0, "not on the curve"
        return (P - x if x & 1 != sign else x), y

    @classmethod
    def add(cls, p: tuple[int, ...], q: tuple[int, ...]) -> tuple[int, int, int, int]:
        a, b = (p[1] - p[0]) * (q[1] - q[0]) % P, (p[1] + p[0]) * (q[1] + q[0]) % P
        c, d = 2 * p[3] * q[3] * cls.D % P, 2 * p[2] * q[2] % P
        e, f, g, h = b - a, d - c, d + c, b + a
        return e * f % P, g * h % P, f * g % P, e * h % P

    @classmethod
    def times(cls, scalar: int, point: tuple[int, int]) -> tuple[int, int, int, int]:
        result, step = (0, 1, 1, 0), (*point, 1, point[0] * point[1] % P)
        while scalar:
            result = cls.add(result, step) if scalar & 1 else result
            step, scalar = cls.add(step, step), scalar >> 1
        return result

    @classmethod
    def encode(cls, point: tuple[int, int, int, int]) -> bytes:
        inverse = pow(point[2], P - 2, P)
        x, y = point[0] * inverse % P, point[1] * inverse % P
        return (y | (x & 1) << 255).to_bytes(32, "little")

    @classmethod
    def secret(cls, seed: bytes) -> tuple[int, bytes, bytes]:
        h = hashlib.sha512(seed).digest()
        scalar = int.from_bytes(h[:32], "little") & (2**254 - 8) | 2**254
        return scalar, h[32:], cls.encode(cls.times(scalar, cls.BASE))

    @classmethod
    def hashed(cls, *pieces: bytes) -> int:
        return int.from_bytes(hashlib.sha512(b"".join(pieces)).digest(), "little") % cls.L

    @classmethod
    def sign(cls, seed: bytes, message: bytes) -> bytes:
        scalar, prefix, public = cls.secret(seed)
        r = cls.hashed(prefix, message)
        point = cls.encode(cls.times(r, cls.BASE))
        return point + ((r + cls.hashed(point, public, message) * scalar) % cls.L).to_bytes(32, "little")

    @classmethod
    def holds(cls, public: bytes, message: bytes, signature: bytes) -> bool:
        s = int.from_bytes(signature[32:], "little")
        h = cls.hashed(signature[:32], public, message)
        x, y = cls.recover(signature[:32])
        right = cls.add((x, y, 1, x * y % P), cls.times(h, cls.recover(public)))
        return s < cls.L and cls.encode(cls.times(s, cls.BASE)) == cls.encode(right)


Curve.BASE = Curve.recover((4 * pow(5, P - 2, P) % P).to_bytes(32, "little"))


def their_pae(kind: str, body: bytes) -> bytes:
    """Written from the protocol's text: six tokens joined by single spaces."""
    return b" ".join([b"DSSEv1", str(len(kind.encode())).encode(), kind.encode(), str(len(body)).encode(), body])


def raw(public: str) -> bytes:
    return bytes.fromhex(public.split(":")[1])


def test_the_published_example_of_dsse_comes_out() -> None:
    kind, body = "http://example.com/HelloWorld", b"hello world"
    assert signing.pae(kind, body) == b"DSSEv1 29 http://example.com/HelloWorld 11 hello world"
    # The protocol's key and signature: ECDSA over P-256, made deterministically, r and s joined.
    key = ec.derive_private_key(
        97358161215184420915383655311931858321456579547487070936769975997791359926199, ec.SECP256R1()
    )
    made = key.sign(signing.pae(kind, body), ec.ECDSA(hashes.SHA256(), deterministic_signing=True))
    joined = b"".join(number.to_bytes(32, "big") for number in decode_dss_signature(made))
    published = "A3JqsQGtVsJ2O2xqrI5IcnXip5GToJ3F+FnZ+O88SjtR6rDAajabZKciJTfUiHqJPcIAriEGAHTVeCUjW2JIZA=="
    assert base64.b64encode(joined).decode() == published


@given(kind=st.text(max_size=9), body=st.binary(max_size=30))
def test_the_signed_bytes_count_bytes_and_not_characters(kind: str, body: bytes) -> None:
    assert signing.pae(kind, body) == their_pae(kind, body)


def test_the_second_implementation_gives_the_vectors_of_its_standard() -> None:
    seed = bytes.fromhex("c5aa8df43f9f837bedb7442f31dcb7b166d38535076f094b85ce3a2e0b4458f7")  # RFC 8032, 7.1, test 3
    public = bytes.fromhex("fc51cd8e6218a1a38da47ed00230f0580816ed13ba3303ac5deb911548908025")
    signature = (
        "6291d657deec24024827e69c3abe01a30ce548a284743a445e3680d7db5ac3ac"
        "18ff9b538d16f290ae67f760984dc6594a7c15e9716ed28dc027beceea1ec40a"
    )
    assert Curve.secret(seed)[2] == public
    assert Curve.sign(seed, b"\xaf\x82").hex() == signature
    assert Curve.holds(public, b"\xaf\x82", bytes.fromhex(signature))
    assert not Curve.holds(public, b"\xaf\x83", bytes.fromhex(signature))


def test_another_verifier_accepts_our_envelope_and_we_accept_another_signers() -> None:
    ours = json.loads(signing.encode(ENVELOPE))
    body = base64.b64decode(ours["payload"])
    assert ours["payloadType"] == "application/vnd.in-toto+json"
    (entry,) = ours["signatures"]
    assert entry["keyid"] == "sha256:" + hashlib.sha256(raw(A)).hexdigest()
    assert Curve.holds(raw(A), their_pae(ours["payloadType"], body), base64.b64decode(entry["sig"]))
    said = json.loads(body)
    assert said["_type"] == "https://in-toto.io/Statement/v1"
    assert said["subject"] == [{"name": "slot 3", "digest": {"sha256": hashlib.sha256(b"line").hexdigest()}}]
    assert (said["predicateType"], said["predicate"]) == ("urn:assay:test:1", {"tokens": 7, "note": "zażółć"})

    loose = json.dumps(STATEMENT, indent=2).encode()  # other tools write JSON otherwise, and name keys otherwise
    signature = Curve.sign(bytes([2]) * 32, their_pae("application/vnd.in-toto+json", loose))
    for encode in (base64.b64encode, base64.urlsafe_b64encode):
        theirs: dict[str, Any] = {
            "payload": encode(loose).decode(),
            "payloadType": "application/vnd.in-toto+json",
            "signatures": [{"keyid": "theirs", "sig": encode(signature).decode(), "more": 1}],
            "unknown": [],
        }
        assert signing.verify(theirs, [A, B]) == STATEMENT
        assert signing.signers(theirs, [A, B]) == [B]
        del theirs["signatures"][0]["keyid"]
        assert signing.verify(theirs, [B]) == STATEMENT
    assert signing.subject(STATEMENT) == ("slot 3", digest(b"line"))


@given(data=st.data())
def test_any_flipped_bit_of_payload_signature_or_type_fails(data: st.DataObject) -> None:
    field = data.draw(st.sampled_from(["payload", "sig", "type"]))
    entry = ENVELOPE["signatures"][0]
    text = {"payload": ENVELOPE["payload"], "sig": entry["sig"], "type": ENVELOPE["payloadType"]}[field]
    if field == "type" or data.draw(st.booleans()):  # a character of what is written, or a byte of what it stands for
        place = data.draw(st.integers(0, len(text) - 1))
        other = data.draw(st.characters(codec="utf-8").filter(lambda c: c != text[place]))
        changed = text[:place] + other + text[place + 1 :]
    else:
        content = bytearray(base64.b64decode(text))
        content[data.draw(st.integers(0, len(content) - 1))] ^= 1 << data.draw(st.integers(0, 7))
        changed = base64.b64encode(content).decode()
    forged = {
        "payload": changed if field == "payload" else ENVELOPE["payload"],
        "payloadType": changed if field == "type" else ENVELOPE["payloadType"],
        "signatures": [{**entry, "sig": changed if field == "sig" else entry["sig"]}],
    }
    if changed.translate({45: 43, 95: 47}) == text:
        return  # the same byte in the other alphabet that DSSE allows
    with pytest.raises(VerificationError):
        signing.verify(forged, [A])


def test_no_other_spelling_of_the_same_bytes_passes() -> None:
    sig = ENVELOPE["signatures"][0]["sig"]
    tail = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"
    bits = sig[:-3] + tail[tail.index(sig[-3]) + 1] + "=="  # a bit behind the last byte
    assert base64.b64decode(bits) == base64.b64decode(sig)
    for text in (bits, sig + "\n", " " + sig, sig.rstrip("="), sig + "=", "", None, 7):
        with pytest.raises(VerificationError, match=r"signatures\[0\].sig is not base64|hold"):
            signing.verify({**ENVELOPE, "signatures": [{"sig": text}]}, [A])


def test_a_threshold_counts_different_trusted_keys() -> None:
    both = signing.add_signature(ENVELOPE, BOB)
    assert signing.verify(both, [A, B], 2) == STATEMENT
    assert signing.signers(both, [B, M, A, B]) == [B, A]
    twice = {**ENVELOPE, "signatures": ENVELOPE["signatures"] * 2}
    nameless = {**ENVELOPE, "signatures": [*ENVELOPE["signatures"], {"sig": ENVELOPE["signatures"][0]["sig"]}]}
    for envelope in (ENVELOPE, twice, nameless):
        assert signing.verify(envelope, [A, B], 1) == STATEMENT
        with pytest.raises(VerificationError, match=r"1 of 2 needed signatures hold: the one by sha256:\w+ holds"):
            signing.verify(envelope, [A, A, B], 2)
    with pytest.raises(VerificationError, match="1 of 2"):
        signing.verify(signing.add_signature(ENVELOPE, MALLORY), [A, B], 2)
    with pytest.raises(InputError, match="already"):
        signing.add_signature(both, ALICE)


def test_a_refusal_names_the_key_and_the_reason() -> None:
    with pytest.raises(VerificationError, match=f"{keys.keyid(A)} is no trusted key"):
        signing.verify(ENVELOPE, [B])
    with pytest.raises(VerificationError, match="is no trusted key"):
        signing.verify(ENVELOPE, [])
    stolen = {**ENVELOPE, "signatures": [{**signing.sign(STATEMENT, MALLORY)["signatures"][0], "keyid": keys.keyid(A)}]}
    with pytest.raises(VerificationError, match=f"the one by {keys.keyid(A)} is wrong: .* or it is forged"):
        signing.verify(stolen, [A, B])
    with pytest.raises(VerificationError, match="there is no signature"):
        signing.verify({**ENVELOPE, "signatures": []}, [A], 0)
    with pytest.raises(VerificationError, match=r"payloadType is 'application/json'"):
        signing.verify({**ENVELOPE, "payloadType": "application/json"}, [A])


@pytest.mark.parametrize(
    ("payload", "says"),
    [
        (b"{", "not valid JSON"),
        (b'{"_type":1,"_type":2}', "appears twice"),
        (b"[]", "not a statement"),
        (canonical({**STATEMENT, "_type": "https://in-toto.io/Statement/v0.1"}), "v0.1"),
        (canonical({**STATEMENT, "subject": []}), "no subject"),
        (canonical({**STATEMENT, "subject": [{"name": "x", "digest": {"sha1": "00"}}]}), "no subject"),
        (canonical({**STATEMENT, "predicate": None}), "no predicate"),
    ],
)
def test_what_is_signed_but_no_statement_is_refused(payload: bytes, says: str) -> None:
    signature = base64.b64encode(ALICE.sign(signing.pae(signing.PAYLOAD_TYPE, payload))).decode()
    envelope = {**ENVELOPE, "payload": base64.b64encode(payload).decode(), "signatures": [{"sig": signature}]}
    assert signing.signers(envelope, [A]) == [A]
    with pytest.raises(VerificationError, match=says):
        signing.verify(envelope, [A])


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


@given(key=st.sampled_from(["payload", "payloadType", "signatures", "keyid", "sig"]), value=JSON)
def test_no_envelope_ends_in_a_traceback(key: str, value: Any) -> None:
    if key in ("keyid", "sig"):
        envelope = {**ENVELOPE, "signatures": [{**ENVELOPE["signatures"][0], key: value}]}
    else:
        envelope = {**ENVELOPE, key: value}
    try:
        signing.verify(envelope, [A])
    except VerificationError:
        return
    assert key == "keyid", "the key id is a hint; nothing else may change"


def test_a_key_pair_is_made_once_and_only_its_owner_can_read_it(tmp_path: Path) -> None:
    path = tmp_path / "alice"
    public = keys.new_key(path)
    assert path.stat().st_mode & 0o7777 == 0o600
    assert keys.public_key(keys.load_key(path)) == public == keys.read_public(str(tmp_path / "alice.pub"))
    assert keys.read_public(public) == public
    assert signing.verify(signing.sign(STATEMENT, keys.load_key(path)), [public]) == STATEMENT
    before = path.read_bytes()
    with pytest.raises(InputError, match="alice exists already"):
        keys.new_key(path)
    assert path.read_bytes() == before
    path.unlink()
    with pytest.raises(InputError, match=r"alice\.pub exists already"):
        keys.new_key(path)
    assert sorted(one.name for one in tmp_path.iterdir()) == ["alice.pub"]
    with pytest.raises(InputError, match="is no folder"):
        keys.new_key(tmp_path / "none" / "key")


def test_of_many_who_make_one_key_one_succeeds(tmp_path: Path) -> None:
    made: list[str] = []
    gate = threading.Barrier(4)

    def make() -> None:
        gate.wait()
        with contextlib.suppress(InputError):
            made.append(keys.new_key(tmp_path / "key"))

    threads = [threading.Thread(target=make) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert made == [keys.public_key(keys.load_key(tmp_path / "key"))]
    assert sorted(one.name for one in tmp_path.iterdir()) == ["key", "key.pub"]


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o660, 0o604, 0o700, 0o400])
def test_a_private_key_that_is_not_0600_is_refused(tmp_path: Path, mode: int) -> None:
    keys.new_key(tmp_path / "key")
    (tmp_path / "key").chmod(mode)
    with pytest.raises(Refused, match=rf"mode {mode:04o}, but a private key has 0600; run chmod 600 .*key"):
        keys.load_key(tmp_path / "key")


def pem(key: Any, encryption: Any) -> bytes:
    return bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, encryption))


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (lambda: pem(ALICE, BestAvailableEncryption(b"x")), "encrypted"),
        (lambda: pem(ec.generate_private_key(ec.SECP256R1()), NoEncryption()), "another kind of key"),
        (lambda: f"{A}\n".encode(), "holds a public key"),
        (lambda: b"hello\n", "not a private key in PEM form"),
        (lambda: pem(ALICE, NoEncryption()).replace(b"M", b"N", 1), "not a private key|another kind"),
        (lambda: b"\xff\xfe", "not UTF-8"),
        (lambda: b"", "empty"),
    ],
)
def test_what_is_no_private_key_is_one_sentence(tmp_path: Path, content: Callable[[], bytes], says: str) -> None:
    (tmp_path / "key").write_bytes(content())
    for mode in (0o600, 0o644):  # nobody is told to shut away a file that is no key
        (tmp_path / "key").chmod(mode)
        with pytest.raises(InputError, match=says):
            keys.load_key(tmp_path / "key")


def small_order() -> list[bytes]:
    """Every encoding of a point of small order, by adding a generator of that group to itself."""
    eighth = Curve.recover(bytes.fromhex("c7176a703d4dd84fba3c0b760d10670f2a2053fa2c39ccc64ec7fd7792ac037a"))
    points = {Curve.encode(Curve.times(k, eighth)) for k in range(8)}
    assert len(points) == 8
    return sorted(points)


def test_keys_under_which_forgeries_hold_are_refused() -> None:
    forged = bytes([1]) + bytes(63)  # the neutral point and 0: signed by nobody
    for encoded in small_order():
        held = 0
        for number in range(64):
            try:
                Ed25519PublicKey.from_public_bytes(encoded).verify(forged, b"message %d" % number)
                held += 1
            except InvalidSignature:
                pass
        assert held, "this is what the refusal prevents"
        with pytest.raises(InputError, match="accepts forged signatures"):
            check_public("ed25519:" + encoded.hex(), "header")
    for second in (P, P + 1, 2**255 - 1):  # other spellings of points that have one already
        with pytest.raises(InputError, match="forged"):
            check_public("ed25519:" + second.to_bytes(32, "little").hex(), "header")
    for text in ("", "ed25519:", A.upper(), A[:-1], A + "0", A.replace("ed25519", "rsa"), None, 7, [A], A[8:]):
        with pytest.raises(InputError, match="header"):
            check_public(text, "header")
    assert check_public(A, "header") == A
