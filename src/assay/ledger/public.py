"""The text of a public key: `ed25519:` and the 64 hex digits of its 32 bytes.

Whoever reads a file that names keys checks them here, at once; it needs no cryptography, whose import is slow.
Which key signed what is the matter of `signing`.
"""

from __future__ import annotations

from assay.errors import InputError

PREFIX = "ed25519:"
# The field of edwards25519 (RFC 8032, 5.1) and one y of its points of order 8; the other one is -y.
_P = 2**255 - 19
_Y8 = int.from_bytes(bytes.fromhex("c7176a703d4dd84fba3c0b760d10670f2a2053fa2c39ccc64ec7fd7792ac037a"), "little")
_SMALL_ORDER = {0, 1, _P - 1, _Y8, _P - _Y8}


def check_public(value: object, where: str) -> str:
    """The value, if it is the text form of a usable public key; InputError naming `where` otherwise.

    Points of small order are refused: under them one signature fits every message, so that such a key
    (all zeros is one) would approve whatever anybody writes. So are second spellings of a point.
    """
    digits = value.removeprefix(PREFIX) if isinstance(value, str) and value.startswith(PREFIX) else ""
    if len(digits) != 64 or not all(c in "0123456789abcdef" for c in digits):
        raise InputError(f"{where}: {value!r:.80} is not a public key; {PREFIX!r} and 64 hex digits are expected")
    y = int.from_bytes(bytes.fromhex(digits), "little") & (2**255 - 1)
    if y in _SMALL_ORDER or y >= _P:
        raise InputError(f"{where}: {value} is no key that anybody holds: it accepts forged signatures")
    assert isinstance(value, str)
    return value
