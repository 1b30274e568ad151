"""Folders that cannot be listed, followed or removed are told; nothing in them is passed over in silence."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from corpus_samples import description, lines, records, source, write

from assay.corpus.build import build
from assay.corpus.description import load
from assay.errors import DataError, InputError

# Permissions count for root as well once the capabilities to pass over them are given up; that works at an exec.
PLAIN_USER = """
import ctypes, os, sys
for capability in (1, 2):  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH
    ctypes.CDLL(None).prctl(24, capability, 0, 0, 0)  # PR_CAPBSET_DROP
os.execv(sys.executable, [sys.executable, "-c", "from assay.cli.main import main; main()", *sys.argv[1:]])
"""


def assay(*arguments: object) -> subprocess.CompletedProcess[str]:
    """The command as a user without special rights runs it."""
    command = [sys.executable, "-c", PLAIN_USER, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def corpus(folder: Path) -> Path:
    """A corpus whose source is the folder `a`, with a folder in it; its description."""
    (folder / "a" / "deep").mkdir(parents=True)
    (folder / "a" / "one.jsonl").write_bytes(lines(records(20)))
    (folder / "a" / "deep" / "two.jsonl").write_bytes(lines(records(40)[20:]))
    return write(folder, description([source("a", path="a")], shards=1, validation={"fraction": 0.3}), {})


def test_a_folder_that_may_not_be_listed_ends_the_build_with_its_name(tmp_path: Path) -> None:
    path = corpus(tmp_path)
    (tmp_path / "a" / "deep").chmod(0)
    done = assay("corpus", "build", path, tmp_path / "out", "--workers", 1)
    (tmp_path / "a" / "deep").chmod(0o700)
    assert done.returncode == DataError.code
    assert f"source 'a': {tmp_path / 'a' / 'deep'} cannot be listed: Permission denied" in done.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("target", ["deep", ".", "../../elsewhere"])
def test_a_link_to_a_folder_is_refused_wherever_it_leads(tmp_path: Path, target: str) -> None:
    path = corpus(tmp_path / "here")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "here" / "a" / "linked").symlink_to(target)
    with pytest.raises(InputError, match=r"source 'a': .*(linked is a link to a folder|through a link)"):
        build(load(path), tmp_path / "out")


def test_a_link_to_a_file_of_the_folder_is_read(tmp_path: Path) -> None:
    path = corpus(tmp_path)
    (tmp_path / "more.jsonl").write_bytes(lines(records(10, "pl")))
    (tmp_path / "a" / "linked.jsonl").symlink_to("../more.jsonl")
    assert build(load(path), tmp_path / "out")["admitted"] == 50


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("nowhere.jsonl")], ids=["pipe", "dangling"])
def test_what_is_no_file_is_told_and_not_waited_for(tmp_path: Path, make: Callable[[Path], None]) -> None:
    path = corpus(tmp_path)
    make(tmp_path / "a" / "odd.jsonl")
    with pytest.raises(
        DataError, match=r"source 'a': .*odd\.jsonl is no file but a pipe, a device or a link to nothing"
    ):
        build(load(path), tmp_path / "out")


def test_a_work_folder_that_cannot_be_removed_is_noted_and_the_corpus_is_whole(tmp_path: Path) -> None:
    path, stuck = corpus(tmp_path), tmp_path / "out.work" / "stuck"
    stuck.mkdir(parents=True)
    (stuck / "file").write_bytes(b"")
    stuck.chmod(0o500)
    done = assay("corpus", "build", path, tmp_path / "out", "--workers", 1)
    stuck.chmod(0o700)
    assert done.returncode == 0, done.stderr
    assert f"{tmp_path / 'out'} is complete, but its work folder {stuck.parent} could not be removed" in done.stderr
    assert (tmp_path / "out" / "corpus.json").is_file()
    assert [each.name for each in stuck.parent.iterdir()] == ["stuck"]
