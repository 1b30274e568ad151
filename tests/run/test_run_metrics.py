"""Metrics read back to the same bits, and the seals cover the file without a gap."""

from __future__ import annotations

import json
import math
import os
import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from assay.errors import VerificationError
from assay.files.digest import digest
from assay.ledger.ledger import Ledger, read
from assay.run import metrics
from assay.run.metrics import MetricsWriter

RUN = "run"


def bits(value: float) -> bytes:
    return struct.pack("<d", value)


@given(st.dictionaries(st.sampled_from(["loss", "lr", "grad_norm", "seconds"]), st.floats(), min_size=1))
def test_floats_read_back_to_the_same_bits_and_the_rest_is_named(line: dict[str, float]) -> None:
    text = metrics.encode(line)
    assert text.endswith(b"\n")
    assert text.count(b"\n") == 1
    back = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    bad = {key for key, value in line.items() if not math.isfinite(value)}
    assert set(back.pop("nonfinite", [])) == bad
    assert back.keys() == line.keys()
    for key, value in back.items():
        assert value is None if key in bad else bits(value) == bits(line[key])


def line(update: int, **more: object) -> dict[str, object]:
    return {"update": update, "segment": 1, "time": "t", "loss": 2.5, "order_digest": "d"} | more


def ledger(folder: Path) -> Ledger:
    made = Ledger.create(folder / "ledger.jsonl", RUN)
    made.append("run.created", {"run_id": RUN})
    return made


def seals(folder: Path) -> list[tuple[int, int]]:
    """The sealed stretches, each checked against the file's bytes."""
    data = (folder / "metrics.jsonl").read_bytes()
    found = []
    for receipt in read(folder / "ledger.jsonl", RUN):
        if receipt.kind == "metrics.sealed":
            start, stop = receipt.body["start"], receipt.body["stop"]
            assert digest(data[start:stop]) == receipt.body["sha256"]
            found.append((start, stop))
    return found


def test_seals_are_contiguous_and_cover_the_file(tmp_path: Path) -> None:
    told, path = ledger(tmp_path), tmp_path / "metrics.jsonl"
    writer = MetricsWriter(path, told, 0, every=3)
    for update in range(10):
        writer.add(line(update))
        if update in (1, 6):
            writer.seal("step")
    writer.seal("step")
    writer.seal("step")  # nothing new: no receipt
    writer.close()
    found = seals(tmp_path)
    assert [start for start, _ in found] == [0, *(stop for _, stop in found[:-1])]
    assert found[-1][1] == path.stat().st_size
    assert len(found) == 3
    assert [one["update"] for one in metrics.updates(path)] == list(range(10))


def test_lines_reach_the_file_every_so_many(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    writer = MetricsWriter(path, ledger(tmp_path), 0, every=3)
    seen = []
    for update in range(7):
        writer.add(line(update))
        seen.append(len(list(metrics.read(path))))
    writer.close()
    assert seen == [0, 0, 3, 3, 3, 6, 6]
    assert len(list(metrics.read(path))) == 7


@pytest.mark.parametrize("torn", [b"", b'{"update": 4', b"\0\0\0"])
def test_a_killed_writers_lines_are_sealed_and_its_torn_line_is_moved_aside(tmp_path: Path, torn: bytes) -> None:
    told, path = ledger(tmp_path), tmp_path / "metrics.jsonl"
    child = os.fork()
    if child == 0:
        writer = MetricsWriter(path, told, 0, every=1)
        writer.add(line(0))
        writer.seal("step")
        writer.add(line(1))  # written out, never sealed
        os.write(os.open(path, os.O_WRONLY | os.O_APPEND), torn)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert [one["update"] for one in metrics.read(path)] == [0, 1], "readers ignore what is behind the last newline"
    sealed_to = seals(tmp_path)[-1][1]
    writer = MetricsWriter(path, Ledger(tmp_path / "ledger.jsonl", RUN), sealed_to, every=1)
    writer.add(line(1, segment=2))
    writer.seal("end")
    writer.close()
    assert [stop for _, stop in seals(tmp_path)][-1] == path.stat().st_size
    assert len(seals(tmp_path)) == 3
    assert metrics.by_update(path)[1]["segment"] == 2
    aside = list(tmp_path.glob("metrics.jsonl.torn-*"))
    assert [one.read_bytes() for one in aside] == ([torn] if torn else [])
    told_kinds = [receipt.kind for receipt in read(tmp_path / "ledger.jsonl", RUN)]
    assert ("recovered" in told_kinds) == bool(torn)


def test_a_sealed_end_that_was_lost_is_refused(tmp_path: Path) -> None:
    told, path = ledger(tmp_path), tmp_path / "metrics.jsonl"
    path.write_bytes(metrics.encode(line(0)))
    size = path.stat().st_size
    with pytest.raises(VerificationError, match=f"receipts seal {size + 1}: its end was lost"):
        MetricsWriter(path, told, size + 1, every=1)
    with pytest.raises(VerificationError, match="its end was lost"):
        metrics.stretch(path, 0, size + 1)


def test_an_unfinished_update_is_no_completed_one(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(metrics.encode(line(0)) + metrics.encode(line(1, loss=math.nan)))
    assert [one["update"] for one in metrics.read(path)] == [0, 1]
    assert list(metrics.by_update(path)) == [0]
    path.write_bytes(metrics.encode(line(1, lr=math.inf)))
    assert list(metrics.by_update(path)) == [1], "only loss and gradient stop an update"


@pytest.mark.parametrize("bad", [
    b"[]\n", b"1\n", b"\n", b"{\n", b"\xff\n", b'{"update": 0}\n', b'{"a": 1, "a": 1}\n', b'{"loss": 1e999}\n',
    json.dumps(line(-1)).encode() + b"\n", json.dumps(line(0, loss="2")).encode() + b"\n",
    json.dumps(line(0, nonfinite=1)).encode() + b"\n", b" " * (1 << 20) + b"{}\n",
])  # fmt: skip
def test_a_line_that_is_none_is_named(tmp_path: Path, bad: bytes) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(metrics.encode(line(0)) + bad)
    with pytest.raises(VerificationError, match=r"metrics\.jsonl, line 2"):
        metrics.by_update(path)
