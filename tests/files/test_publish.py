"""Files and folders appear whole or not at all, also when the process dies in the middle."""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from assay.errors import InputError
from assay.files.publish import MARK, leftovers, publish_file, publish_folder


def in_a_child(act: Callable[[], object]) -> int:
    """Run `act` in a forked process that ends at once, without any tear-down; its exit code, 0 after `act`."""
    child = os.fork()
    if child == 0:
        try:
            act()
            os._exit(0)
        finally:
            os._exit(99)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_folder_is_not_there_until_it_is_whole(tmp_path: Path) -> None:
    with publish_folder(tmp_path / "deep" / "made") as draft:
        (draft / "inner").mkdir()
        (draft / "inner" / "file").write_bytes(b"1")
        assert not (tmp_path / "deep" / "made").exists()
    assert (tmp_path / "deep" / "made" / "inner" / "file").read_bytes() == b"1"
    assert not leftovers(tmp_path / "deep")


def test_an_error_in_the_middle_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), publish_folder(tmp_path / "made") as draft:  # noqa: PT012
        (draft / "file").write_bytes(b"1")
        raise ZeroDivisionError
    assert not list(tmp_path.iterdir())


def test_a_kill_in_the_middle_leaves_only_what_readers_ignore(tmp_path: Path) -> None:
    def die_half_way() -> None:
        with publish_folder(tmp_path / "made") as draft:
            (draft / "file").write_bytes(b"half")
            os._exit(7)

    assert in_a_child(die_half_way) == 7
    assert not (tmp_path / "made").exists()
    (rest,) = leftovers(tmp_path)
    assert rest.name.startswith("made" + MARK)
    with publish_folder(tmp_path / "made") as draft:  # and it is in nobody's way
        (draft / "file").write_bytes(b"whole")
    assert (tmp_path / "made" / "file").read_bytes() == b"whole"


@pytest.mark.parametrize("limit", [0, 1, 99])
def test_a_full_disk_leaves_the_older_file_and_no_rest(tmp_path: Path, limit: int) -> None:
    path = tmp_path / "file"
    publish_file(path, b"older")

    def write_on_a_full_disk() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        try:
            publish_file(path, b"x" * 100)
        except OSError:
            os._exit(3)

    assert in_a_child(write_on_a_full_disk) == 3
    assert path.read_bytes() == b"older"
    assert [one.name for one in tmp_path.iterdir()] == ["file"]


def test_what_exists_is_never_replaced_by_a_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"1")
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("nowhere")
    for name in ("file", "folder", "link"):
        with pytest.raises(InputError, match=f"{name} exists already"), publish_folder(tmp_path / name):
            raise AssertionError("the block is not entered")


def test_what_appears_meanwhile_is_not_replaced_either(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="exists already"), publish_folder(tmp_path / "made") as draft:  # noqa: PT012
        (draft / "mine").write_bytes(b"1")
        (tmp_path / "made").mkdir()
        (tmp_path / "made" / "theirs").write_bytes(b"2")
    assert (tmp_path / "made" / "theirs").read_bytes() == b"2"
    assert not leftovers(tmp_path)


def test_a_file_is_replaced_in_one_step_and_keeps_its_mode(tmp_path: Path) -> None:
    path = tmp_path / "salt"
    publish_file(path, b"1", mode=0o600)
    first = path.stat()
    assert first.st_mode & 0o777 == 0o600
    publish_file(path, b"2")
    assert path.read_bytes() == b"2"
    assert path.stat().st_ino != first.st_ino, "the old bytes were not written over"


def test_a_folder_that_is_not_there_has_no_leftovers(tmp_path: Path) -> None:
    assert leftovers(tmp_path / "nowhere") == []
