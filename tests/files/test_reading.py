"""Every fault of an input file is one sentence that names it, with exit code 2."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from assay.errors import InputError
from assay.files.reading import inside, parse_json, read_bytes, read_json, read_object, read_text
from assay.files.shared import shared


def sparse(path: Path) -> None:
    """A file of 2 TiB that holds nothing."""
    with path.open("wb") as file:
        file.truncate(2 << 40)


def link_to(target: str) -> Callable[[Path], None]:
    return lambda path: path.symlink_to(target)


FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (lambda path: None, "does not exist; a thing is expected there"),
    "empty": (lambda path: path.write_bytes(b""), "is empty"),
    "blank": (lambda path: path.write_bytes(b" \r\n\n"), "is empty"),
    "folder": (lambda path: path.mkdir(), "is a folder"),
    "pipe": (os.mkfifo, "is not a regular file"),
    "device": (link_to("/dev/zero"), "is not a regular file"),
    "dangling": (link_to("nowhere"), "does not exist"),
    "loop": (lambda path: path.symlink_to(path), "cannot be read"),
    "huge": (sparse, "2,199,023,255,552 bytes"),
    "not UTF-8": (lambda path: path.write_bytes(b'{"a": "\xff"}'), r"not UTF-8 text \(byte 7\)"),
    "UTF-16": (lambda path: path.write_bytes('{"a": 1}'.encode("utf-16")), "not UTF-8"),
    "truncated": (lambda path: path.write_bytes(b'{"a": [1, 2'), "not valid JSON"),
    "byte order mark": (lambda path: path.write_bytes(b"\xef\xbb\xbf{}"), "not valid JSON"),
    "more behind": (lambda path: path.write_bytes(b"{} {}"), "not valid JSON"),
    "twice": (lambda path: path.write_bytes(b'{"a": {"b": 1, "b": 1}}'), "the key 'b' appears twice"),
    "NaN": (lambda path: path.write_bytes(b'{"a": NaN}'), "NaN is not a JSON number"),
    "infinite": (lambda path: path.write_bytes(b'{"a": -Infinity}'), "-Infinity is not a JSON number"),
    "beyond float64": (lambda path: path.write_bytes(b'{"a": 1e999}'), "1e999 is beyond"),
    "half a character": (lambda path: path.write_bytes(b'{"a": "\\ud83d"}'), "unpaired surrogate"),
    "endless number": (lambda path: path.write_bytes(b'{"a": ' + b"9" * 5000 + b"}"), "not valid JSON"),
    "deep": (lambda path: path.write_bytes(b"[" * 100_000), "nested too deeply"),
    "a list": (lambda path: path.write_bytes(b"[1]"), "is a JSON object, not list"),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_every_fault_is_one_sentence_that_names_the_file(tmp_path: Path, name: str) -> None:
    make, words = FAULTS[name]
    path = tmp_path / "thing.json"
    make(path)
    with pytest.raises(InputError, match=words) as caught:
        read_object(path, "a thing")
    assert str(path) in str(caught.value)
    assert caught.value.code == 2
    assert "\n" not in str(caught.value)


def test_a_path_through_a_file_and_a_name_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"1")
    for path, words in (
        (tmp_path / "file" / "inner", "a part of the path is a file"),
        (tmp_path / ("x" * 300), "cannot be read"),
        (Path("a\0b"), "cannot be read"),
    ):
        with pytest.raises(InputError, match=words):
            read_bytes(path, "a thing")


def test_the_limit_itself_is_allowed(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"12345")
    assert read_bytes(tmp_path / "file", "a thing", limit=5) == b"12345"
    with pytest.raises(InputError, match="5 bytes; a thing may have 4 at most"):
        read_bytes(tmp_path / "file", "a thing", limit=4)


def test_line_ends_and_whole_characters_survive(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes('{"a":\r\n "ż\\ud83d\\ude00"}\r\n'.encode())
    assert "\r\n" in read_text(tmp_path / "file", "a thing")
    assert read_json(tmp_path / "file", "a thing") == {"a": "ż😀"}


@given(st.binary(max_size=60) | st.text(max_size=60))
def test_arbitrary_bytes_are_a_value_or_one_sentence(data: bytes | str) -> None:
    try:
        parse_json(data, "here")
    except InputError as fault:
        assert str(fault).startswith("here is not")  # noqa: PT017 - either outcome is right, a traceback is not


def test_paths_stay_inside_their_folder(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    (folder / "in").mkdir(parents=True)
    (folder / "out").symlink_to(tmp_path)
    (folder / "loop").symlink_to("loop")
    (folder / "near").symlink_to("in")
    assert inside(folder, "in/./file", "here") == folder / "in" / "file"
    assert inside(folder, "near/file", "here") == folder / "near" / "file"
    for bad, words in {
        "/etc/passwd": "leaves its folder",
        "..": "leaves its folder",
        "in/../../x": "leaves its folder",
        "in\\..\\x": "leaves its folder",
        "out/x": "through a link",
        "loop/x": "",
        "": "is not a path",
        "a\0b": "is not a path",
    }.items():
        if bad == "loop/x":  # Python before 3.13 cannot follow it, later ones leave it to the opening
            try:
                assert not inside(folder, bad, "here").exists()
            except InputError as fault:
                assert "cannot be followed" in str(fault)  # noqa: PT017
            continue
        with pytest.raises(InputError, match=words):
            inside(folder, bad, "here")
    for wrong in (None, 1, ["a"], {}):
        with pytest.raises(InputError, match="is not a path"):
            inside(folder, wrong, "here")


@given(st.text(max_size=30))
def test_no_text_leads_outside(text: str) -> None:
    folder = Path("/nowhere/folder")
    try:
        path = inside(folder, text, "here")
    except InputError:
        return
    assert os.path.normpath(path).startswith("/nowhere/folder")


def test_what_comes_with_assay_is_found_or_named() -> None:
    assert (shared("recipes") / "tiny.yaml").is_file()
    with pytest.raises(InputError, match="recipes/none does not come"):
        shared("recipes/none")
