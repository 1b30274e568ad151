"""One digest function and one canonical form, held against the RFC's own examples and its rules."""

from __future__ import annotations

import hashlib
import json
import math
import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from assay.files.digest import canonical, canonical_exact, digest, digest_file, integer, is_digest, raw

# RFC 8785, appendix B: the IEEE 754 bits and the text of the number.
NUMBERS = {
    "0000000000000000": "0",
    "8000000000000000": "0",
    "0000000000000001": "5e-324",
    "8000000000000001": "-5e-324",
    "7fefffffffffffff": "1.7976931348623157e+308",
    "ffefffffffffffff": "-1.7976931348623157e+308",
    "4340000000000000": "9007199254740992",
    "c340000000000000": "-9007199254740992",
    "4430000000000000": "295147905179352830000",
    "44b52d02c7e14af5": "9.999999999999997e+22",
    "44b52d02c7e14af6": "1e+23",
    "44b52d02c7e14af7": "1.0000000000000001e+23",
    "444b1ae4d6e2ef4e": "999999999999999700000",
    "444b1ae4d6e2ef4f": "999999999999999900000",
    "444b1ae4d6e2ef50": "1e+21",
    "3eb0c6f7a0b5ed8c": "9.999999999999997e-7",
    "3eb0c6f7a0b5ed8d": "0.000001",
    "41b3de4355555553": "333333333.3333332",
    "41b3de4355555554": "333333333.33333325",
    "41b3de4355555555": "333333333.3333333",
    "41b3de4355555556": "333333333.3333334",
    "41b3de4355555557": "333333333.33333343",
    "becbf647612f3696": "-0.0000033333333333333333",
    "43143ff3c1cb0959": "1424953923781206.2",
}


@pytest.mark.parametrize(("bits", "text"), NUMBERS.items())
def test_numbers_have_the_text_of_the_rfc(bits: str, text: str) -> None:
    (number,) = struct.unpack(">d", bytes.fromhex(bits))
    assert canonical(number).decode() == text


def test_keys_are_sorted_by_utf_16_units_as_in_the_rfc() -> None:
    keys = {"\u20ac": "Euro Sign", "\r": "Carriage Return", "\ufb33": "Hebrew Letter Dalet With Dagesh",
            "1": "One", "\U0001f600": "Emoji: Grinning Face", "\u0080": "Control",
            "\u00f6": "Latin Small Letter O With Diaeresis"}  # fmt: skip
    names = [value.split('"')[0] for value in json.loads(canonical(keys)).values()]
    assert names == ["Carriage Return", "One", "Control", "Latin Small Letter O With Diaeresis", "Euro Sign",
                     "Emoji: Grinning Face", "Hebrew Letter Dalet With Dagesh"]  # fmt: skip
    assert sorted(keys) != list(json.loads(canonical(keys))), "code points would be another order"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53) + 1, 2**53 - 1) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@given(JSON)
def test_canonical_text_reads_back_and_is_a_fixed_point(value: object) -> None:
    text = canonical_exact(value)
    assert json.loads(text) == value
    assert canonical_exact(json.loads(text)) == text
    assert b"\n" not in text, "a canonical value is always one line"


@given(JSON, st.floats())
def test_a_float_anywhere_is_refused_in_a_record(value: object, number: float) -> None:
    for record in ({"a": [value, {"b": number}]}, [value, number], {"a": (number,)}):
        with pytest.raises(ValueError, match="binary float"):
            canonical_exact(record)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 2**53, -(2**53), {"a": [2**60]}, "\ud800"])
def test_what_the_form_cannot_hold_is_refused(value: object) -> None:
    with pytest.raises(ValueError, match=r"canonical|surrogate"):
        canonical(value)


@given(st.integers(-(2**70), 2**70))
def test_integers_become_strings_exactly_where_float64_ends(value: int) -> None:
    held = integer(value)
    assert int(held) == value
    assert isinstance(held, int) == (abs(value) <= 2**53 - 1)
    canonical_exact({"value": held})


@given(st.lists(st.binary()))
def test_a_digest_does_not_depend_on_the_pieces(pieces: list[bytes]) -> None:
    whole = b"".join(pieces)
    wanted = "sha256:" + hashlib.sha256(whole).hexdigest()
    assert digest(whole) == digest(pieces) == digest(memoryview(whole)) == digest(bytearray(whole)) == wanted
    assert raw(wanted) == hashlib.sha256(whole).digest()


def test_a_files_digest_is_that_of_its_bytes(tmp_path: Path) -> None:
    data = bytes(range(256)) * 8193  # two pieces and a rest
    (tmp_path / "file").write_bytes(data)
    assert digest_file(tmp_path / "file") == digest(data)


@pytest.mark.parametrize(
    "value",
    [None, 1, "", "sha256:", "sha256:" + "a" * 63, "sha256:" + "A" * 64, "md5:" + "a" * 64, "a" * 64,
     "sha256:" + "a" * 64 + "\n", "sha256:" + "١" * 64],
)  # fmt: skip
def test_what_is_no_digest_is_not_taken_for_one(value: object) -> None:
    assert not is_digest(value)
