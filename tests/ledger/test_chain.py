"""Nothing can be changed in a chain without being found, and a kill never breaks one."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from assay.errors import AssayError, InputError, Refused, VerificationError
from assay.files.digest import canonical_exact, digest
from assay.ledger import chain
from assay.ledger.ledger import Ledger, first_previous, read

RUN = "run"
RELAXED = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def made(path: Path, count: int = 6) -> Ledger:
    """A ledger of `count` receipts."""
    ledger = Ledger.create(path, RUN)
    ledger.append("run.created", {"run_id": RUN, "recipe": "r"})
    for number in range(1, count):
        ledger.append("price", {"reading": number, "text": "ż" * number})
    return ledger


def rewritten(path: Path, lines: list[bytes]) -> Path:
    """A copy with other lines, beside."""
    other = path.with_name("edited.jsonl")
    other.write_bytes(b"".join(lines))
    return other


def named_line(path: Path) -> int | None:
    """The line (from one) that verification names, or None when all hold."""
    try:
        for _ in read(path, RUN):
            pass
    except VerificationError as fault:
        text = str(fault)
    else:
        return None
    found = re.search(r", line (\d+)", text)
    assert found, text
    assert str(path) in text
    assert "\n" not in text
    return int(found[1])


@pytest.fixture(scope="module")
def ledger(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("ledger") / "ledger.jsonl"
    made(path)
    return path


@RELAXED
@given(place=st.floats(0, 1, exclude_max=True), byte=st.integers(0, 255))
def test_an_edited_byte_before_the_last_line_is_found_there_or_just_after(
    ledger: Path, place: float, byte: int
) -> None:
    data = bytearray(ledger.read_bytes())
    last = data.rstrip(b"\n").rfind(b"\n") + 1
    at = int(place * last)
    if data[at] == byte:
        return
    line = data[:at].count(b"\n") + 1
    data[at] = byte
    found = named_line(rewritten(ledger, [bytes(data)]))
    assert found in (line, line + 1), "the line itself, or the one that names its digest"


def test_an_edit_of_the_last_line_is_left_to_whoever_knows_the_head(ledger: Path) -> None:
    lines = ledger.read_bytes().splitlines(keepends=True)
    heads = [receipt.digest for receipt in read(ledger, RUN)]
    edited = rewritten(ledger, [*lines[:-1], lines[-1].replace(b'"reading":5', b'"reading":6')])
    assert named_line(edited) is None, "a chain alone cannot know its end"
    assert [receipt.digest for receipt in read(edited, RUN)][-1] != heads[-1], "its head is another one"
    for damage in (b'"seq":5', b'"seq":4'), (b'"previous"', b'"before"'), (b"{", b"["), (b'"kind":"p', b'"kind":1"p'):
        assert named_line(rewritten(ledger, [*lines[:-1], lines[-1].replace(*damage)])) == 6


@pytest.mark.parametrize("number", range(5))
def test_removed_repeated_swapped_and_inserted_lines_are_named(ledger: Path, number: int) -> None:
    lines = ledger.read_bytes().splitlines(keepends=True)
    head, rest = lines[:number], lines[number:]
    assert named_line(rewritten(ledger, head + rest[1:])) == number + 1
    assert named_line(rewritten(ledger, [*head, rest[0], *rest])) == number + 2
    assert named_line(rewritten(ledger, [*head, rest[1], rest[0], *rest[2:]])) == number + 1
    record = json.loads(rest[0])
    forged = canonical_exact({**record, "body": {"forged": True}}) + b"\n"
    assert named_line(rewritten(ledger, [*head, forged, *rest])) == number + 2
    assert named_line(rewritten(ledger, [*head, b"\n", *rest])) == number + 1


def test_a_rechained_forgery_still_needs_seq_time_kind_and_body(ledger: Path) -> None:
    lines = ledger.read_bytes().splitlines(keepends=True)
    record = json.loads(lines[-1])
    for wrong in (
        {"seq": 6}, {"seq": 5.0}, {"seq": "5"}, {"seq": True}, {"kind": 5}, {"body": []}, {"body": None},
        {"time": 1}, {"time": "yesterday"}, {"time": "2026-11-30T10:00:00"}, {"time": "2026-13-30T10:00:00Z"},
    ):  # fmt: skip
        assert named_line(rewritten(ledger, [*lines[:-1], json.dumps(record | wrong).encode() + b"\n"])) == 6, wrong
    for key in record:
        less = {name: value for name, value in record.items() if name != key}
        assert named_line(rewritten(ledger, [*lines[:-1], json.dumps(less).encode() + b"\n"])) == 6, key


def test_another_runs_ledger_is_not_this_ones(ledger: Path) -> None:
    with pytest.raises(VerificationError, match="line 1 does not chain"):
        list(read(ledger, "other"))
    assert [receipt.seq for receipt in read(ledger)] == list(range(6)), "the first receipt states the run's own id"


def test_a_kill_at_every_byte_of_an_append_leaves_the_old_chain(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    made(path, 3)
    old = path.read_bytes()
    made_of = Ledger(path, RUN)
    made_of.append("price", {"reading": 3})
    whole = path.read_bytes()
    for end in range(len(old), len(whole)):
        path.write_bytes(whole[:end])
        assert [receipt.seq for receipt in read(path, RUN)] == [0, 1, 2], "a torn tail is ignored by readers"
        assert path.read_bytes() == whole[:end], "and left alone by them"
        Ledger(path, RUN).append("price", {"reading": 4})
        kinds = [(receipt.kind, receipt.body.get("torn_bytes")) for receipt in read(path, RUN)]
        torn = end - len(old)
        tail = [("recovered", torn), ("price", None)] if torn else [("price", None)]
        assert kinds[3:] == tail
        aside = sorted(tmp_path.glob("*.torn-*"))
        assert [one.read_bytes() for one in aside] == ([whole[len(old) : end]] if torn else [])
        assert path.read_bytes().startswith(old)
        for one in aside:
            one.unlink()


def test_torn_tails_never_replace_one_another(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    made(path, 2)
    for text in (b'{"first', b'{"second'):
        with path.open("ab") as file:
            file.write(text)
        Ledger(path, RUN).append("price", {})
    assert [one.read_bytes() for one in sorted(tmp_path.glob("*.torn-*"))] == [b'{"first', b'{"second']


def append_many(path: Path, name: str, count: int) -> None:
    """What each of several processes does."""
    ledger = Ledger(path, RUN)
    for number in range(count):
        ledger.append("price", {"by": name, "number": number})
    os._exit(0)


def test_two_processes_append_to_one_chain(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    made(path, 1)
    processes = [
        multiprocessing.get_context("fork").Process(target=append_many, args=(path, name, 200)) for name in "ab"
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
        assert process.exitcode == 0
    receipts = list(read(path, RUN))
    assert len(receipts) == 401
    for name in "ab":
        mine = [receipt.body["number"] for receipt in receipts if receipt.body.get("by") == name]
        assert mine == list(range(200)), "each writer's receipts are all there, in its order"


def test_a_writer_refuses_a_chain_that_changed_under_it(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    ledger = made(path, 4)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:-1]))
    with pytest.raises(VerificationError, match="lines at its end are missing"):
        ledger.append("price", {})
    assert path.read_bytes() == b"".join(lines[:-1]), "nothing was written"
    path.write_bytes(b"".join(lines) + b'{"seq":9}\n')
    with pytest.raises(VerificationError, match="line 5 does not chain"):
        ledger.append("price", {})


def test_a_lock_that_somebody_holds_is_refused_in_time(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    made(path, 1)
    with chain.lock(path), pytest.raises(Refused, match="locked by another process"), chain.lock(path, wait=0.0):
        raise AssertionError
    with chain.lock(path, wait=0.0):
        pass


def test_what_cannot_be_canonical_is_not_half_written(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    ledger = made(path, 2)
    before = path.read_bytes()
    for body in ({"loss": 2.5}, {"big": 2**60}, {"half": "\ud800"}):
        with pytest.raises(ValueError, match=r"float|canonical|surrogate"):
            ledger.append("price", body)
    assert path.read_bytes() == before
    ledger.append("price", {"loss": "2.5"})
    assert len(list(read(path, RUN))) == 3


def test_lines_are_canonical_and_the_first_names_the_run(ledger: Path) -> None:
    lines = ledger.read_bytes().splitlines()
    records = [json.loads(line) for line in lines]
    assert [canonical_exact(record) for record in records] == lines
    assert records[0]["previous"] == first_previous(RUN) == digest(RUN.encode())
    assert [record["previous"] for record in records[1:]] == [digest(line) for line in lines[:-1]]


def test_a_ledger_is_made_once_and_must_be_there(tmp_path: Path, ledger: Path) -> None:
    with pytest.raises(InputError, match="exists already"):
        Ledger.create(ledger, RUN)
    with pytest.raises(InputError, match="does not exist"):
        list(read(tmp_path / "none", RUN))


@RELAXED
@given(st.binary(max_size=200), st.integers(0, 5), st.floats(0, 1))
def test_arbitrary_bytes_give_one_sentence(ledger: Path, data: bytes, keep: int, cut: float) -> None:
    lines = ledger.read_bytes().splitlines(keepends=True)
    rest = b"".join(lines[keep:])
    edited = rewritten(ledger, [*lines[:keep], data, rest[int(cut * len(rest)) :]])
    try:
        assert [receipt.seq for receipt in read(edited)] == list(range(len(list(read(edited)))))
    except AssayError as fault:
        assert "\n" not in str(fault)  # noqa: PT017 - either outcome is right


def test_a_line_beyond_the_limit_is_not_read_into_memory(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    with path.open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(VerificationError, match="a line above 16,777,216 bytes"):
        list(read(path, RUN))


def synthetic(path: Path, count: int) -> None:
    """A chain of `count` receipts, made without flushing each."""
    previous = first_previous(RUN)
    with path.open("wb") as file:
        for number in range(count):
            body = f'{{"reading":{number}}}' if number else f'{{"run_id":"{RUN}"}}'
            content = (
                f'{{"body":{body},"kind":"price","previous":"{previous}","seq":{number},'
                '"time":"2026-11-30T10:00:00.000Z"}'
            ).encode()
            file.write(content + b"\n")
            previous = digest(content)


def test_a_hundred_thousand_receipts_verify(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    synthetic(path, 100_000)
    assert sum(1 for _ in read(path)) == 100_000
    data = path.read_bytes().replace(b'"reading":99998}', b'"reading":99997}')
    path.write_bytes(data)
    assert named_line(path) == 100_000
