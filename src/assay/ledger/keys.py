"""Ed25519 keys: made once, kept in files that only their owner can read, named by their public half.

A public key is written `ed25519:` and the 64 hex digits of its 32 bytes; its `keyid` is the digest of
those bytes. A private key file is PEM (PKCS 8, not encrypted), mode 0600, never replaced, never shown.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, load_pem_private_key

from assay.errors import InputError, Refused
from assay.files.digest import digest
from assay.files.publish import publish_new, refuse_existing
from assay.files.reading import read_text
from assay.ledger.public import PREFIX, check_public

MODE = 0o600
_LIMIT = 1 << 16


def new_key(path: Path) -> str:
    """Make a key pair: `path` holds the private key, `path` + `.pub` the public one, which is returned.

    Raises InputError when either exists or the folder does not.
    """
    public_path = path.with_name(path.name + ".pub") if path.name else path
    if not path.parent.is_dir():
        raise InputError(f"{path.parent} is no folder; make it first, readable for its owner alone")
    refuse_existing(path)
    refuse_existing(public_path)
    key = Ed25519PrivateKey.generate()
    text = public_key(key)
    try:
        publish_new(path, key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()), MODE)
        publish_new(public_path, f"{text}\n".encode())
    except OSError as error:
        raise InputError(f"{path} cannot be written: {error.strerror}; choose another folder") from None
    return text


def load_key(path: Path) -> Ed25519PrivateKey:
    """The private key in a file.

    Raises InputError when it holds no such key, Refused when others than the owner may touch it.
    """
    what = "a private key (assay key new makes one)"
    text = read_text(path, what, _LIMIT)
    mode = stat.S_IMODE(os.stat(path).st_mode)
    if text.startswith(PREFIX):
        raise InputError(f"{path} holds a public key; name the file without .pub, which holds the private one")
    try:
        key = load_pem_private_key(text.encode(), password=None)
    except TypeError:  # how cryptography says that a password is needed
        raise InputError(f"{path} is encrypted; Assay reads private keys that the file mode alone protects") from None
    except (ValueError, UnsupportedAlgorithm):
        raise InputError(f"{path} is not a private key in PEM form; assay key new makes one") from None
    if not isinstance(key, Ed25519PrivateKey):
        raise InputError(f"{path} holds another kind of key than Ed25519; assay key new makes one")
    if mode != MODE:
        raise Refused(f"{path} has the mode {mode:04o}, but a private key has 0600; run chmod 600 {path}")
    return key


def public_key(key: Ed25519PrivateKey) -> str:
    """The text form of a private key's public half."""
    return PREFIX + key.public_key().public_bytes_raw().hex()


def read_public(text: str) -> str:
    """A public key given as its text, or as the path of the `.pub` file that holds it; InputError otherwise."""
    if text.startswith(PREFIX):
        return check_public(text, text)
    return check_public(read_text(Path(text), "a public key (NAME.pub)", _LIMIT).strip(), text)


def keyid(public: str) -> str:
    """The digest of a public key's 32 bytes, which names it in envelopes."""
    return digest(bytes.fromhex(public.removeprefix(PREFIX)))


def verifier(public: str) -> Ed25519PublicKey:
    """The object that checks signatures of a public key in text form."""
    return Ed25519PublicKey.from_public_bytes(bytes.fromhex(check_public(public, "key").removeprefix(PREFIX)))
