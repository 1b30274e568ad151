"""On a Ray cluster a build gives the same bytes, faults arrive as they are, and foreign machines are refused."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
from corpus_samples import description, lines, prose, records, source, tree, write

import assay
from assay.corpus.build import build
from assay.corpus.description import load
from assay.corpus.on_ray import Cluster, Expected, meet
from assay.corpus.pieces import code_digest
from assay.errors import DataError, InputError, Interrupted, MachineError, Refused

MARK = uuid.uuid4().hex  # in the environment of all processes that are started here


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A Ray that a `Cluster` started, and behind the last test: nothing of it runs any more."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    folder = tmp_path_factory.mktemp("cluster")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"RAY_ADDRESS": "local", "ASSAY_TEST": MARK}.items():
            patch.setenv(name, value)
        with Cluster(folder, folder):
            assert running()
            yield str(ray.get_runtime_context().gcs_address)
    assert not ray.is_initialized()
    assert running() == []
    assert {number: signal.getsignal(number) for number in before} == before


def running() -> list[str]:
    """The processes of Ray with our mark."""
    found = []
    for process in Path("/proc").iterdir():
        try:
            if process.name.isdigit() and MARK.encode() in (process / "environ").read_bytes():
                found.append((process / "cmdline").read_text(encoding="utf-8", errors="replace"))
        except OSError:
            continue  # it has gone, or is somebody else's
    return [words for words in found if "ray" in words]


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """Three sources that use every stage."""
    alike = [{**r, "id": f"near/{r['id']}", "text": r["text"] + " more"} for r in records(5)]
    files = {"a": lines(records(40)) + b"{\n", "b": lines(records(40, "pl")), "c": lines([*alike, *records(2)])}
    (tmp_path / "held-out.txt").write_text(f"en: {prose(30)}\n", encoding="utf-8")
    asked = {"duplicates": {"near": {"threshold": 0.7}}, "decontamination": {"held_out": ["held-out.txt"]}}
    return write(tmp_path, description([source("a"), source("b", language="pl"), source("c")], **asked), files)


def command(arguments: list[str], address: str, **more: str) -> subprocess.CompletedProcess[str]:
    """`assay corpus …` in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "assay.cli.main", "corpus", *arguments],
        env={**os.environ, "RAY_ADDRESS": address, **more},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_every_file_is_the_same_with_one_process_with_two_and_on_ray(
    corpus: Path, tmp_path: Path, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = build(load(corpus), tmp_path / "one")
    assert {"exact_duplicate", "near_duplicate", "held_out_exact"} <= set(one["rejected"]) | {"repeated_id"}
    build(load(corpus), tmp_path / "two", workers=2)
    monkeypatch.chdir(tmp_path)  # relative places are made absolute: the machines have working folders of their own
    build(load(Path("corpus.yaml")), Path("ray"), on="ray")
    assert tree(tmp_path / "one") == tree(tmp_path / "two") == tree(tmp_path / "ray")
    assert not (tmp_path / "ray.work").exists()
    assert ray.is_initialized(), "a Ray that was there before stays"


def test_results_come_in_the_order_of_the_tasks_and_faults_arrive_as_they_are(tmp_path: Path, address: str) -> None:
    def raised(fault: Exception) -> None:
        raise fault

    with Cluster(tmp_path, tmp_path) as cluster:
        assert list(cluster.each(abs, range(-30, 0))) == list(range(30, 0, -1))
        with pytest.raises(ValueError, match="invalid literal"):
            list(cluster.each(int, ["1", "2", "x", "4"]))
        for fault in (DataError("gone"), Interrupted("no network", "network")):
            with pytest.raises(type(fault), match=str(fault)) as found:
                list(cluster.each(raised, [fault]))
            assert type(found.value) is type(fault)
            assert vars(found.value) == vars(fault)
        assert list(cluster.each(int, [])) == []


def test_no_more_tasks_than_asked_for_are_on_their_way(tmp_path: Path, address: str) -> None:
    taken: list[int] = []

    def tasks() -> Iterator[int]:
        for number in range(8):
            taken.append(number)
            yield number

    with Cluster(tmp_path, tmp_path, most=3) as cluster:
        for done, _ in enumerate(cluster.each(abs, tasks()), start=1):
            assert len(taken) - done <= 3


def test_a_process_that_dies_is_told_with_the_way_out(tmp_path: Path, address: str) -> None:
    with Cluster(tmp_path, tmp_path) as cluster, pytest.raises(MachineError, match="it goes on where it was"):
        list(cluster.each(os._exit, [1, 1, 1]))


def test_a_machine_that_does_not_see_the_folders_is_told_before_anything_is_done(
    corpus: Path, tmp_path: Path, address: str
) -> None:
    shared, private = tmp_path, os.open(tmp_path, os.O_RDONLY)
    here = Path(f"/proc/self/fd/{private}")  # a name of the folder that no other process can use
    try:
        with pytest.raises(InputError, match=r"does not see .*/out\.work as this machine does; .*file system"):
            build(load(corpus), here / "out", on="ray")
        with pytest.raises(InputError, match=r"does not see /proc/self/fd/\d+; .*file system"):
            build(load(here / "corpus.yaml"), shared / "out", on="ray")
    finally:
        os.close(private)
    assert not (tmp_path / "out").exists()
    other = tmp_path / "of-the-same-name"
    other.mkdir()
    (other / "seen").write_text("another machine's", encoding="ascii")
    with pytest.raises(InputError, match="does not see"):
        meet(Expected(assay.__version__, code_digest(), tmp_path, other, "mine"))


def test_machines_with_other_code_are_refused(corpus: Path, tmp_path: Path, address: str) -> None:
    changed = tmp_path / "changed"
    shutil.copytree(Path(assay.__file__).parent, changed / "assay", ignore=shutil.ignore_patterns("__pycache__"))
    with (changed / "assay" / "corpus" / "words.py").open("a", encoding="utf-8") as file:
        file.write("# a change\n")
    done = command(["build", str(corpus), str(tmp_path / "out"), "--on", "ray"], address, PYTHONPATH=str(changed))
    assert done.returncode == Refused.code, done.stderr
    assert "install the same on every machine of the cluster" in done.stderr
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_ray_is_not_imported_unless_asked_for_and_its_absence_is_told(tmp_path: Path, corpus: Path) -> None:
    code = (
        "import sys; sys.modules['ray'] = None\n"
        "from pathlib import Path; from assay.corpus.build import build; from assay.corpus.description import load\n"
        "build(load(Path(sys.argv[1])), Path(sys.argv[2]) / 'one')\n"
        "build(load(Path(sys.argv[1])), Path(sys.argv[2]) / 'two', on='ray')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(corpus), str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert (tmp_path / "one").is_dir()
    assert done.stderr.splitlines()[-1].endswith("InputError: --on ray needs Ray; pip install 'assay[ray]' brings it")
