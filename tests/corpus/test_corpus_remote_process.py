"""The command over a network that fails: saved with exit code 75, gone on with, and no byte differs in the end."""

from __future__ import annotations

import gzip
import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from corpus_samples import description, lines, prose, records, source, tree, write
from faulty_server import ALWAYS, COMMIT, Fault, Server

from assay.corpus.build import build
from assay.corpus.description import load

Command = Callable[..., subprocess.CompletedProcess[str]]
SECRETS = ("hf_secretsecret", "AKIDSECRET", "verysecret", "Signature=", "X-Amz")
README = b"---\nconfigs:\n- config_name: default\n  data_files:\n  - {split: train, path: data/*}\n---\n"


def parquet(rows: list[dict[str, Any]]) -> bytes:
    """A parquet file of these rows."""
    sink = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), sink)
    return sink.getvalue()


def far_side(vocabulary: bytes) -> Server:
    """Every format from both kinds of place, and a tokenizer."""
    web = records(90)
    return Server(
        {
            "owner/data": {
                "README.md": README,
                "data/0.parquet": parquet(web[:45]),
                "data/1.parquet": parquet(web[45:]),
            },
            "owner/model": {"tokenizer.json": vocabulary},
        },
        {
            "bucket": {
                "lines/a.jsonl.zst": zstandard.compress(lines(records(30, "pl"))),
                "lines/b.jsonl.gz": gzip.compress(lines(records(40, "pl")[30:]), mtime=0),
                "books/one/first.txt": prose(1000).encode(),
                "books/two.txt": prose(1001).encode(),
            }
        },
    )


def given(folder: Path) -> Path:
    """The description of all that."""
    sources = [
        source("web", path="hf://datasets/owner/data", format="parquet", split="train", revision=COMMIT),
        source("archive", path="s3://bucket/lines", language="pl"),
        source("books", path="s3://bucket/books", format="text", columns={}),
    ]
    remote = {"path": "hf://owner/model", "revision": COMMIT}
    return write(folder, description(sources, tokenizer=remote, validation={"fraction": 0.2}, shards=1), {})


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The file of a small tokenizer."""
    folder = tmp_path_factory.mktemp("tokenizer")
    build(load(write(folder, description([source("a")]), {"a": lines(records(40))})), folder / "out")
    return (folder / "out" / "tokenizer" / "tokenizer.json").read_bytes()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, vocabulary: bytes) -> dict[str, bytes]:
    """What comes out when nothing fails."""
    folder = tmp_path_factory.mktemp("undisturbed")
    with far_side(vocabulary) as server, pytest.MonkeyPatch.context() as local:
        for name, value in server.environment.items():
            local.setenv(name, value)
        facts = build(load(given(folder)), folder / "out")
    counts = {name: facts["by_source"][name]["documents"] for name in ("web", "archive", "books")}
    assert counts == {"web": 90, "archive": 40, "books": 2}
    assert facts["tokenizer"]["trained"] is False
    return tree(folder / "out")


def test_an_outage_ends_saved_and_the_same_command_goes_on_to_the_same_bytes(
    assay: Command, tmp_path: Path, vocabulary: bytes, undisturbed: dict[str, bytes]
) -> None:
    given(tmp_path)
    words = ("corpus", "build", tmp_path / "corpus.yaml", tmp_path / "out", "--json", "--deadline", "1.5")
    with far_side(vocabulary) as server:
        server.faults += [Fault("1.parquet", "cut"), Fault("1.parquet", "503", times=ALWAYS)]
        saved = assay(*words, env=server.environment)
        assert saved.returncode == json.loads(saved.stdout)["exit"] == 75, saved.stderr
        sentence = saved.stderr.splitlines()[-1]
        assert sentence.startswith(f"assay: hf://datasets/owner/data at {COMMIT}: data/1.parquet: HTTP 503; given up")
        assert sentence.endswith("run the same command again and it goes on where it was")
        assert not (tmp_path / "out").exists()
        kept = tree(tmp_path / "out.work" / "remote")
        server.faults.clear()
        server.answered.clear()
        done = assay(*words, env=server.environment)
        assert done.returncode == 0, done.stderr
        files = [line for line in server.answered if "/owner/data/" in line]
        assert [line.partition(" ")[2][:6] for line in files] == ["bytes="]  # no more than the rest of the one file
    assert tree(tmp_path / "out") == undisturbed
    assert not (tmp_path / "out.work").exists()
    everything = [saved.stdout.encode(), saved.stderr.encode(), done.stdout.encode(), done.stderr.encode()]
    everything += [*kept.values(), *undisturbed.values()]
    assert [secret for secret in SECRETS if secret.encode() in b"".join(everything)] == []


def test_signals_in_the_middle_of_files_end_saved_too(
    assay: Command, tmp_path: Path, vocabulary: bytes, undisturbed: dict[str, bytes]
) -> None:
    given(tmp_path)
    words = ("corpus", "build", str(tmp_path / "corpus.yaml"), str(tmp_path / "out"))
    with far_side(vocabulary) as server:
        for word, number in (("1.parquet", signal.SIGINT), ("b.jsonl", signal.SIGTERM)):
            server.faults[:] = [Fault(word, "cut"), Fault(word, "hang", times=ALWAYS)]
            server.reached.clear()
            process = subprocess.Popen(
                [sys.executable, "-m", "assay.cli.main", *words],
                env={**os.environ, **server.environment, "OMP_NUM_THREADS": "1"},
                stderr=subprocess.PIPE,
            )
            assert server.reached.wait(100)
            process.send_signal(number)
            told = process.communicate(timeout=100)[1].decode()
            assert process.returncode == 75, told
            assert told.endswith("run the same command again and it goes on where it was\n")
        server.faults.clear()
        server.answered.clear()
        done = assay(*words, env=server.environment)
        assert done.returncode == 0, done.stderr
        assert not [line for line in server.answered if "/owner/data/" in line]  # all of it came before
    assert tree(tmp_path / "out") == undisturbed
