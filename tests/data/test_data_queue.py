"""Appending never changes what was there, and whatever does not chain or fit is refused."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from assay.data import queue as queues
from assay.data.batches import Batches
from assay.data.order import Stream
from assay.data.queue import Part, Queue
from assay.data.shard import Shard
from assay.errors import AssayError, DataError, InputError, Refused
from assay.files.digest import canonical, digest

MakeShard = Callable[..., Shard]
Command = Callable[..., tuple[int, str, str]]


def proposal(queue: Queue, updates: int = 3, **more: Any) -> bytes:
    return queues.propose(queue, updates=updates, parts=queue.slots[0].parts, global_batch=8, **more)


def head_or_fault(path: Path) -> str:
    try:
        return queues.load(path).head
    except (InputError, DataError):
        return "refused"


def test_a_queue_says_which_slot_an_update_reads(queue: Queue) -> None:
    assert queue.updates_total == 50
    assert [(s.number, s.first_update, s.updates, s.epochs) for s in queue.slots] == [
        (0, 0, 20, 1),
        (1, 20, 9, 2),
        (2, 29, 21, 1),
    ]
    found = [(slot.number, k) for slot, k in map(queue.slot_of, (0, 19, 20, 28, 29, 49))]
    assert found == [(0, 0), (0, 19), (1, 0), (1, 8), (2, 0), (2, 20)]
    with pytest.raises(DataError, match=r"update 52 needs slot 3, .* hold 50 updates; 3 more updates"):
        queue.slot_of(52)


def test_parts_are_cut_where_the_source_changes(queue: Queue, shard: Shard) -> None:
    first = queue.slots[0].parts
    assert [part.source for part in first] == ["en-docs", "pl-docs"]
    assert [(part.start, part.stop) for part in first] == [(s.start, s.stop) for s in shard.sources]
    assert first[0].path == "first"


def test_appending_keeps_every_byte_and_every_prefix_digest(queue: Queue) -> None:
    before = queue.path.read_bytes()
    prefixes = [queue.prefix(slots) for slots in range(4)]
    for _ in range(4):
        line = proposal(queues.load(queue.path))
        slot = queues.append(queue.path, line)
        assert queue.path.read_bytes() == before + line + b"\n"
        assert queues.load(queue.path).head == slot.digest == digest(line)
        before += line + b"\n"
    assert [queues.load(queue.path).prefix(slots) for slots in range(4)] == prefixes
    with pytest.raises(DataError, match="a prefix of 8 does not exist"):
        queues.load(queue.path).prefix(8)


def test_every_flipped_byte_is_refused_or_gives_another_head(queue: Queue) -> None:
    good = queue.path.read_bytes()
    last = len(good) - len(good.splitlines()[-1]) - 1
    for place in range(len(good)):
        queue.path.write_bytes(good[:place] + bytes([good[place] ^ 1]) + good[place + 1 :])
        found = head_or_fault(queue.path)
        assert found != queue.head
        # Only the last line has no line behind it that would name its digest.
        assert found == "refused" or place >= last


def test_every_removed_swapped_or_doubled_line_is_refused(queue: Queue) -> None:
    lines = queue.path.read_bytes().splitlines(keepends=True)
    for first in range(len(lines)):
        without = lines[:first] + lines[first + 1 :]
        doubled = lines[: first + 1] + lines[first:]
        queue.path.write_bytes(b"".join(without))
        assert head_or_fault(queue.path) == ("refused" if first < len(lines) - 1 else queue.prefix(2))
        queue.path.write_bytes(b"".join(doubled))
        assert head_or_fault(queue.path) == "refused"
        for second in range(first):
            swapped = list(lines)
            swapped[first], swapped[second] = swapped[second], swapped[first]
            queue.path.write_bytes(b"".join(swapped))
            assert head_or_fault(queue.path) == "refused"


def test_lines_that_do_not_chain_are_exit_4_and_wrong_files_exit_2(queue: Queue, tmp_path: Path) -> None:
    good = queue.path.read_bytes()
    queue.path.write_bytes(good.replace(b'"updates":20', b'"updates":21'))
    with pytest.raises(DataError, match="line 3 does not chain"):
        queues.load(queue.path)
    for content, says in (
        (b"", "is empty"),
        (b"\n", "is empty"),
        (b"\xff\xfe\n", "not UTF-8"),
        (b"[]\n", "format is 'list'"),
        (b'{"format":"assay-queue/2"}\n', "format is 'assay-queue/2'"),
        (good.replace(b"\n", b"\r\n"), "CRLF"),
        (good.splitlines()[0], "breaks off in its first line"),
        (good[:10], "not valid JSON"),
    ):
        queue.path.write_bytes(content)
        with pytest.raises(InputError, match=says):
            queues.load(queue.path)
        with pytest.raises(InputError, match=says):
            queues.append(queue.path, b"{}")
        assert queue.path.read_bytes() == content
    with pytest.raises(InputError, match="does not exist"):
        queues.load(tmp_path / "none.jsonl")
    with pytest.raises(InputError, match="is a folder"):
        queues.load(tmp_path)


def test_a_torn_tail_is_ignored_by_readers_and_moved_aside_by_the_writer(queue: Queue) -> None:
    line = proposal(queue)
    whole = queue.path.read_bytes()
    queue.path.write_bytes(whole + line[:40])
    assert queues.load(queue.path) == queue
    queues.append(queue.path, line)
    assert queue.path.read_bytes() == whole + line + b"\n"
    assert queue.path.with_name("queue.jsonl.torn-01").read_bytes() == line[:40]


def test_a_line_fits_one_head_only(queue: Queue) -> None:
    line = proposal(queue)
    queues.append(queue.path, line)
    for stale in (line, proposal(queue, updates=4)):
        before = queue.path.read_bytes()
        with pytest.raises(DataError, match="was made for the head"):
            queues.append(queue.path, stale)
        assert queue.path.read_bytes() == before


def test_of_writers_at_the_same_time_one_wins_and_the_queue_stays_whole(queue: Queue) -> None:
    lines = [proposal(queue, updates=updates) for updates in range(1, 9)]
    results: list[str] = []

    def write(line: bytes) -> None:
        try:
            results.append(queues.append(queue.path, line).digest)
        except DataError:
            results.append("refused")

    threads = [threading.Thread(target=write, args=(line,)) for line in lines]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results.count("refused") == 7
    assert queues.load(queue.path).head in results


def test_a_slot_that_is_too_short_is_refused_with_the_exact_shortfall(queue: Queue) -> None:
    tokens = queue.slots[0].tokens
    worst, best = (tokens - 16) // 16, (tokens - 1) // 16
    fits = worst // 8
    assert json.loads(proposal(queue, updates=fits))["updates"] == fits
    needed = (best // 8 + 1) * 8
    with pytest.raises(DataError, match=f"need {needed} windows.*hold {best} with the best.*{needed - best} windows"):
        proposal(queue, updates=needed // 8)
    assert proposal(queue, updates=needed // 8, epochs=2)  # repeating by consent
    line = canonical({**json.loads(proposal(queue)), "updates": 10**6})
    before = queue.path.read_bytes()
    with pytest.raises(DataError, match="too short"):
        queues.append(queue.path, line)
    assert queue.path.read_bytes() == before


@given(seed=st.integers(0, 10**6), tokens=st.integers(33, 400), epochs=st.integers(1, 3))
def test_the_capacity_for_a_seed_is_exact(seed: int, tokens: int, epochs: int) -> None:
    part = Part(digest(b"x"), None, 0, tokens, "a")
    empty = Queue(Path("q"), 16, "uint16", 9, "t", None, None, None, b"{}", digest(b"{}"), (), b"{}\n")
    held = Stream(seed, 0, tokens, 16, epochs).capacity()
    known: dict[str, Any] = {"parts": [part], "global_batch": 1, "epochs": epochs, "seed": seed}
    assert queues.propose(empty, updates=held, **known)
    with pytest.raises(DataError, match="1 windows short"):
        queues.propose(empty, updates=held + 1, **known)
    # Without a seed the slot must suffice for every seed.
    least = epochs * ((tokens - 16) // 16)
    known.pop("seed")
    assert queues.propose(empty, updates=least, **known)
    with pytest.raises(DataError, match="1 windows short"):
        queues.propose(empty, updates=epochs * ((tokens - 1) // 16) + 1, **known)
    if least < held:
        with pytest.raises(DataError, match=rf"hold {least} with the worst offsets .* {held - least} windows short"):
            queues.propose(empty, updates=held, **known)


def test_a_line_that_fits_one_seed_exactly_can_be_appended(queue: Queue) -> None:
    tokens = queue.slots[0].tokens
    best = (tokens - 1) // 16
    seed = next(s for s in range(1000) if Stream(s, 3, tokens, 16, 1).capacity() == best > (tokens - 16) // 16)
    known: dict[str, Any] = {"parts": queue.slots[0].parts, "global_batch": 1, "seed": seed}
    line = queues.propose(queue, updates=best, **known)
    with pytest.raises(DataError, match="worst offsets"):
        queues.append(queue.path, line, global_batch=1)
    assert queues.append(queue.path, line).updates == best  # the global batch is not known: nothing to refuse


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"slot": 4}, "slot 3 comes next"),
        ({"updates": 0}, "updates is 0"),
        ({"updates": 2**53}, "updates is"),
        ({"updates": True}, "updates is True"),
        ({"epochs": 0}, "epochs is 0"),
        ({"tokens": 5}, "the parts hold"),
        ({"parts": []}, "at least one object"),
        ({"parts": [{"shard": "x"}]}, "'path' is missing"),
        ({"weight": 1}, "'weight' is unknown"),
        ({"update": 1}, "did you mean 'updates'"),
        ({"mix": {"a": 0.5}}, "binary float"),
    ],
)
def test_a_line_that_breaks_the_format_is_refused(queue: Queue, change: dict[str, Any], says: str) -> None:
    record = {**json.loads(proposal(queue)), **change}
    before = queue.path.read_bytes()
    with pytest.raises(InputError, match=says):
        queues.append(queue.path, json.dumps(record, sort_keys=True, separators=(",", ":")).encode())
    assert queue.path.read_bytes() == before


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"path": "../first"}, "leaves its folder"),
        ({"path": "/etc"}, "leaves its folder"),
        ({"shard": "sha256:12"}, "64 hex digits"),
        ({"start": 9, "stop": 9}, "is empty"),
        ({"start": -1}, "start is -1"),
        ({"source": ""}, "source is ''"),
    ],
)
def test_a_part_that_breaks_the_format_is_refused(queue: Queue, change: dict[str, Any], says: str) -> None:
    record = json.loads(proposal(queue))
    record["parts"][0].update(change)
    with pytest.raises(InputError, match=says):
        queues.append(queue.path, canonical(record))


def test_only_the_bytes_that_were_proposed_are_appended(queue: Queue) -> None:
    line = proposal(queue)
    for other in (line + b" ", line.replace(b",", b", ", 1), line + b"\n"):
        with pytest.raises(InputError, match="canonical"):
            queues.append(queue.path, other)


def test_shards_are_found_by_digest_wherever_they_lie(queue: Queue, tmp_path: Path, shard: Shard) -> None:
    assert set(queues.locate(queue, [])) == {part.shard for slot in queue.slots for part in slot.parts}
    (tmp_path / "store" / "deep").mkdir(parents=True)
    shard.path.rename(tmp_path / "store" / "deep" / "renamed")
    without = queues.locate(queue, [])
    assert queues.missing(queue, without) == [shard.sha256]
    found = queues.locate(queue, [tmp_path / "nowhere", tmp_path / "store"])
    assert found[shard.sha256].path == tmp_path / "store" / "deep" / "renamed"
    (tmp_path / "data" / "first").symlink_to(tmp_path / "store" / "deep" / "renamed")
    with pytest.raises(InputError, match="leaves its folder through a link"):
        queues.locate(queue, [])


def test_another_shard_at_the_hinted_place_is_not_taken(queue: Queue, shard: Shard, make_shard: MakeShard) -> None:
    shard.path.rename(shard.path.with_name("moved"))
    make_shard(shard.path, seed=99)
    assert queues.missing(queue, queues.locate(queue, [])) == [shard.sha256]
    assert queues.locate(queue, [queue.path.parent])[shard.sha256].path.name == "moved"


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"vocabulary": 400}, "vocabulary 400"),
        ({"tokenizer": "other"}, "tokenizer 'other'"),
        ({"pool": "evaluation"}, "pool 'evaluation'"),
        ({"vocabulary": 70_000}, "dtype 'uint32'"),
    ],
)
def test_a_shard_that_does_not_fit_the_queue_is_refused(
    queue: Queue, tmp_path: Path, make_shard: MakeShard, more: dict[str, Any], says: str
) -> None:
    with pytest.raises(DataError, match=says):
        queues.parts_of(queue, make_shard(tmp_path / "other", **more))


def test_a_line_that_calls_a_source_by_another_name_is_refused_wherever_the_shard_is_at_hand(
    assay: Command, queue: Queue, shard: Shard, tmp_path: Path
) -> None:
    half = shard.sources[1].start
    for start, stop, source in ((0, 400, "pl-docs"), (half - 200, half + 200, "en-docs"), (0, 400, "pl")):
        part = Part(shard.sha256, None, start, stop, source)
        line = queues.propose(queue, updates=2, parts=[part], global_batch=8)
        (tmp_path / "line").write_bytes(line)
        before = queue.path.read_bytes()
        code, _, err = assay("data", "append", queue.path, tmp_path / "line")
        assert code == 4, err
        assert re.search(rf"calls tokens .* {source!r}, its manifest .*'(en|pl)-docs'", err)
        assert queue.path.read_bytes() == before
    # A line that was taken where the shard was not at hand is refused by all who read its tokens.
    queues.append(queue.path, line)
    with pytest.raises(DataError, match="'pl', its manifest 'en-docs'; propose"):
        Batches(queues.load(queue.path), [], seed=1, global_batch=8)


def test_a_strict_queue_takes_fresh_data_only(tmp_path: Path, shard: Shard) -> None:
    path = tmp_path / "data" / "strict.jsonl"
    made = queues.create(path, block=16, dtype="uint16", vocabulary=500, tokenizer="test", freshness="strict")
    first = queues.parts_of(made, shard, 0, 1000)
    queues.append(path, queues.propose(made, updates=2, parts=first, global_batch=8))
    made = queues.load(path)
    with pytest.raises(Refused, match=r"repeats tokens \[999, 1,000\).*which slot 0 holds"):
        queues.propose(made, updates=2, parts=queues.parts_of(made, shard, 999, 1900), global_batch=8)
    with pytest.raises(Refused, match="which slot 1 holds"):
        queues.propose(made, updates=2, parts=queues.parts_of(made, shard, 1000, 1500) * 2, global_batch=8)
    queues.append(path, queues.propose(made, updates=2, parts=queues.parts_of(made, shard, 1000, 1900), global_batch=8))


def test_a_queue_that_demands_approvals_takes_no_line_without_one(queue: Queue) -> None:
    lines = queue.path.read_bytes().splitlines()
    header = canonical({**json.loads(lines[0]), "trust": {"reviewer": ["ed25519:" + "5a" * 32]}})
    queue.path.write_bytes(header + b"\n")
    line = queues.propose(queues.load(queue.path), updates=1, parts=queue.slots[0].parts, global_batch=8)
    with pytest.raises(Refused, match="demands an approval"):
        queues.append(queue.path, line)
    assert queue.path.read_bytes() == header + b"\n"


def test_a_queue_is_created_once(queue: Queue, tmp_path: Path) -> None:
    known: dict[str, Any] = {"block": 16, "dtype": "uint16", "vocabulary": 500, "tokenizer": "test"}
    before = queue.path.read_bytes()
    with pytest.raises(InputError, match="exists already"):
        queues.create(queue.path, **known)
    assert queue.path.read_bytes() == before
    (tmp_path / "empty.jsonl").touch()  # what a kill between making the file and its first line leaves
    assert queues.create(tmp_path / "empty.jsonl", **known).slots == ()
    for key, value in (("block", 0), ("dtype", "int8"), ("vocabulary", 65_537), ("tokenizer", "")):
        with pytest.raises(InputError, match=str(key)):
            queues.create(tmp_path / "new.jsonl", **{**known, key: value})
        assert not (tmp_path / "new.jsonl").exists()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


@pytest.fixture(scope="module")
def fuzzed(tmp_path_factory: pytest.TempPathFactory) -> Queue:
    path = tmp_path_factory.mktemp("fuzz") / "queue.jsonl"
    return queues.create(path, block=16, dtype="uint16", vocabulary=500, tokenizer="test")


@given(key=st.sampled_from(["slot", "updates", "epochs", "parts", "tokens", "previous", "mix"]), value=JSON)
def test_no_slot_line_ends_in_a_traceback(fuzzed: Queue, key: str, value: object) -> None:
    part = {"shard": digest(b"x"), "path": None, "start": 0, "stop": 99, "source": "a"}
    good = {"slot": 0, "updates": 1, "epochs": 1, "parts": [part], "tokens": 99, "previous": fuzzed.head}
    header = fuzzed.header_line + b"\n"
    line = json.dumps({**good, key: value}).encode()
    fuzzed.path.write_bytes(header + line + b"\n")
    head_or_fault(fuzzed.path)
    fuzzed.path.write_bytes(header)
    with pytest.raises(AssayError):  # json.dumps puts blanks in, so it is never the canonical line
        queues.append(fuzzed.path, line)
    assert fuzzed.path.read_bytes() == header


@given(data=st.binary(max_size=80), header=st.booleans())
def test_no_bytes_in_place_of_a_queue_end_in_a_traceback(fuzzed: Queue, data: bytes, header: bool) -> None:
    fuzzed.path.write_bytes(fuzzed.header_line * header + b"\n" * header + data)
    head_or_fault(fuzzed.path)


@given(key=st.sampled_from(["format", "block", "dtype", "vocabulary", "tokenizer", "pool", "trust"]), value=JSON)
def test_no_header_ends_in_a_traceback(fuzzed: Queue, key: str, value: object) -> None:
    fuzzed.path.write_text(json.dumps({**json.loads(fuzzed.header_line), key: value}) + "\n")
    head_or_fault(fuzzed.path)
