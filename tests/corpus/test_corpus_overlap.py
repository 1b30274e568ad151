"""Overlap is what counting by hand gives: exact, near and fresh documents, and which of their positions were used."""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from assay.cli.main import main
from assay.corpus.alike import Alike, signed
from assay.corpus.duplicates import Parameters
from assay.corpus.earlier import Before, earlier
from assay.corpus.overlap import KINDS, Range, merged, parameters, report
from assay.data import queue as queues
from assay.data.batches import windows_of
from assay.data.exposure import Consumed
from assay.data.queue import Queue
from assay.data.shard import Shard, Source, adopt, open_shard, write_shard
from assay.errors import DataError, InputError
from assay.files.digest import digest
from assay.run.consumption import Consumption

VOCABULARY, BLOCK, BATCH = 400, 8, 2
NOTHING_NEAR = Parameters(threshold=1.0)
Document = list[int]


def shard(path: Path, documents: list[Document], *, source: str = "s", tokenizer: str = "t") -> Shard:
    """A shard of these documents, each ended by 0; the second half of them another source."""
    arrays = [np.array([*document, 0]) for document in documents]
    total, half = sum(map(len, arrays)), sum(map(len, arrays[: len(arrays) // 2]))
    cuts = [Source(f"{source}1", 0, half, "en"), Source(f"{source}2", half, total, "pl")]
    about: dict[str, Any] = {"vocabulary": VOCABULARY, "tokenizer": tokenizer, "end_of_text": 0, "pool": "base"}
    return write_shard(path, arrays, sources=[cut for cut in cuts if cut.start < cut.stop], **about)


def queue_of(path: Path, slots: list[tuple[Shard, int, int]]) -> Queue:
    """A queue with a slot of one epoch for each range, as many updates as it holds."""
    made = queues.create(path, block=BLOCK, dtype="uint16", vocabulary=VOCABULARY, tokenizer=slots[0][0].tokenizer)
    for each, start, stop in slots:
        updates = (stop - start - BLOCK) // (BLOCK * BATCH)  # with the worst offset
        line = queues.propose(made, updates=updates, parts=queues.parts_of(made, each, start, stop), global_batch=BATCH)
        queues.append(path, line)
        made = queues.load(path)
    return made


def run_of(queue: Queue, last: int, seed: int = 3) -> Consumption:
    """A run that did the first `last` updates."""
    return Consumption("r" * 32, "run", Consumed(queue, seed, BATCH, 0, last), 0, (), digest(b"ledger"))


def targets(run: Consumption) -> Counter[tuple[str, int]]:
    """(shard, token) of every target that the run was trained on, window by window."""
    taken, result = run.consumed, Counter[tuple[str, int]]()
    for update in range(taken.first, taken.last):
        slot, starts = windows_of(taken.queue, taken.seed, taken.global_batch, update)
        stream = [(part.shard, index) for part in slot.parts for index in range(part.start, part.stop)]
        for start in starts.tolist():
            result.update(stream[start + 1 : start + 1 + BLOCK])
    return result


Documents = st.lists(st.lists(st.integers(1, 3), max_size=5), min_size=12, max_size=20)


@settings(max_examples=25, deadline=None)
@given(old=Documents, new=Documents, last=st.integers(0, 3), queued=st.booleans(), data=st.data())
def test_exact_overlap_is_what_counting_token_by_token_gives(
    old: list[Document], new: list[Document], last: int, queued: bool, data: st.DataObject
) -> None:
    folder = Path(tempfile.mkdtemp())
    try:
        first, second = shard(folder / "old", [*old, [9] * 40]), shard(folder / "new", new, source="n")
        begin = data.draw(st.integers(0, second.tokens - 1))
        end = data.draw(st.integers(begin + 1, second.tokens))
        queue = queue_of(folder / "queue.jsonl", [(first, 0, first.tokens)])
        run = run_of(queue, min(last, queue.updates_total))
        here = {first.sha256: first}
        facts = report([Range(second, begin, end)], [run], queue if queued else None, here, near=None)

        used, held = targets(run), {(first.sha256, i) for i in range(first.tokens)} if queued else set()
        copies: dict[tuple[int, ...], list[int]] = {}
        at = 0
        for document in [*old, [9] * 40]:
            places = [(first.sha256, i) for i in range(at, at + len(document) + 1)]
            if document and any(place in used or place in held for place in places):
                copies.setdefault(tuple(document), []).append(at)
            at += len(document) + 1
        expected = {kind: Counter[str]() for kind in KINDS}
        at = 0
        for document in new:
            inside = [i for i in range(len(document) + 1) if begin <= at + i < end]
            at += len(document) + 1
            if not inside:
                continue
            earlier_ones = copies.get(tuple(document))
            sums = expected["exact" if earlier_ones else "fresh"]
            sums.update(documents=1, tokens=len(inside))
            for name, had in (("positions_consumed", used), ("positions_queued", held)):
                sums[name] += sum(any((first.sha256, c + i) in had for c in earlier_ones or ()) for i in inside)
        for kind in KINDS:
            assert Counter(facts["total"][kind]) == expected[kind], kind
        for key in ("documents", "tokens"):
            assert facts["total"][key] == sum(one[key] for one in expected.values())
            assert facts["total"][key] == sum(one[key] for one in facts["by_source"].values())
        assert facts["earlier"]["positions_consumed"] == len(used)
        assert facts["parts"][0]["same_range_consumed"] == facts["parts"][0]["same_range_queued"] == 0
    finally:
        shutil.rmtree(folder)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.lists(st.integers(1, 4), max_size=7), min_size=1, max_size=30), st.sampled_from([0.3, 0.75, 1.0]))
def test_the_table_finds_the_most_similar_document_as_looking_at_all_does(old: list[Document], least: float) -> None:
    asked = Parameters(shingle=2, bands=8, rows=2, threshold=least)
    ids = np.array([i for document in old for i in (*document, 0)])
    stops = np.cumsum([len(document) + 1 for document in old])
    starts = np.concatenate([[0], stops[:-1]])
    which, found = signed(ids, starts, stops, 0, asked)
    assert which.tolist() == [n for n, document in enumerate(old) if document]
    if not len(which):
        return
    best, equal = Alike.of(found, asked).find(found[::-1])
    for row, signature in enumerate(found[::-1]):
        counts = (found == signature).sum(axis=1)  # itself among them, or an equal one before it
        assert (best[row], equal[row]) == (int(counts.argmax()), int(counts.max())) == (best[row], 16)
    others = Alike.of(found[:-1], asked)
    row, similar = (each[0] for each in others.find(found[-1:]))
    shares = [(found[n].reshape(8, 2) == found[-1].reshape(8, 2)).all(axis=1).any() for n in range(len(found) - 1)]
    counts = [int((found[n] == found[-1]).sum()) * shared for n, shared in enumerate(shares)]
    top = max(counts, default=0)
    assert (row, similar) == ((counts.index(top), top) if top >= least * 16 and top else (-1, 0))


def texts(count: int, length: int, seed: int) -> list[Document]:
    random = np.random.default_rng(seed)
    return [random.integers(1, VOCABULARY, length).tolist() for _ in range(count)]


def edited(document: Document, places: int) -> Document:
    """The document with so many ids replaced by others."""
    return [399 - i if n < places else i for n, i in enumerate(document)]


def test_near_documents_are_found_with_the_share_that_was_consumed(tmp_path: Path) -> None:
    old = texts(6, 99, 1)
    first = shard(tmp_path / "old", old)
    new = [old[0], edited(old[1], 4), edited(old[2], 24), *texts(2, 99, 2), edited(old[5], 3)]
    second = shard(tmp_path / "new", new, source="n")
    queue = queue_of(tmp_path / "queue.jsonl", [(first, 0, 350)])
    run = run_of(queue, 12)
    facts = report([Range(second, 0, second.tokens)], [run], None, {first.sha256: first}, near=Parameters(), examples=9)
    used = targets(run)

    def had(document: int) -> int:
        return sum((first.sha256, i) in used for i in range(100 * document, 100 * document + 100))

    assert [(one["document"], one["kind"], one["earlier"]["document"]) for one in facts["examples"]] == [
        (0, "exact", 0),
        (1, "near", 1),
    ]  # documents 4 and 5 were never queued, and 24 ids of 99 leave 0.6
    near = facts["examples"][1]
    assert (near["positions_consumed"], near["tokens"], near["source"]) == (had(1), 100, "n1")
    true = (95 - 4) / (95 + 4)  # runs of five ids that both have, of all that either has
    assert abs(float(near["similarity"]) - true) < 0.12
    assert facts["total"]["exact"] == {
        "documents": 1, "tokens": 100, "positions_consumed": had(0), "positions_queued": 0,
    }  # fmt: skip
    assert facts["total"]["fresh"] == {"documents": 4, "tokens": 400}
    assert facts["parameters"]["parameters"]["threshold"] == "0.75"
    low = report([Range(second, 0, second.tokens)], [run], None, {first.sha256: first}, near=parameters(0.5))
    assert [one["document"] for one in low["examples"]] == [0, 1, 2]
    assert 0.5 < float(facts["parameters"]["recall_at_threshold"]) < 1
    none = report([Range(second, 0, second.tokens)], [run], None, {first.sha256: first}, near=NOTHING_NEAR)
    assert none["total"]["near"]["documents"] == 0


def test_every_member_of_a_family_is_compared_with(tmp_path: Path) -> None:
    """A new text like the second of two like ones, but not like the first, is near."""
    base = texts(1, 200, 3)[0]
    middle, far = edited(base, 14), edited(base, 22)
    first, second = shard(tmp_path / "old", [base, middle]), shard(tmp_path / "new", [far], source="n")
    queue = queue_of(tmp_path / "queue.jsonl", [(first, 0, first.tokens)])
    facts = report([Range(second, 0, 201)], [], queue, {first.sha256: first}, near=Parameters(threshold=0.85))
    assert [(one["kind"], one["earlier"]["document"]) for one in facts["examples"]] == [("near", 1)]
    alone = report([Range(second, 0, 201)], [], queue_of(tmp_path / "q2.jsonl", [(first, 0, 201)]),
                   {first.sha256: first}, near=Parameters(threshold=0.85))  # fmt: skip
    assert alone["total"]["fresh"]["documents"] == 1


def test_copies_of_one_document_count_each_position_once(tmp_path: Path) -> None:
    text = list(range(1, 40))
    first = shard(tmp_path / "old", [text] * 12)
    second = shard(tmp_path / "new", [text, text], source="n")
    queue = queue_of(tmp_path / "queue.jsonl", [(first, 0, first.tokens)])
    run = run_of(queue, 5)
    used = {index % 40 for _, index in targets(run)}
    assert len(used) > 0
    facts = report([Range(second, 0, 40), Range(second, 50, 80)], [run], queue, {first.sha256: first}, near=None)
    exact = facts["total"]["exact"]
    assert (exact["documents"], exact["tokens"], exact["positions_queued"]) == (2, 70, 70)
    assert exact["positions_consumed"] == len(used) + len(used & set(range(10, 40)))
    assert [(one["start"], one["stop"], one["documents"]) for one in facts["parts"]] == [(0, 40, 1), (50, 80, 1)]


def test_the_same_range_is_known_even_without_document_ends(tmp_path: Path) -> None:
    ids = np.array([i for document in texts(8, 30, 5) for i in (*document, 0)], dtype="<u2")
    ids.tofile(tmp_path / "pack.bin")
    about: dict[str, Any] = {"vocabulary": VOCABULARY, "tokenizer": "t", "end_of_text": 0, "pool": "base"}
    pack = adopt(tmp_path / "pack.bin", None, tmp_path / "pack", dtype="uint16", **about)
    queue = queue_of(tmp_path / "queue.jsonl", [(pack, 0, 100)])
    facts = report([Range(pack, 60, 248)], [], queue, {}, near=None)
    assert facts["parts"][0]["same_range_queued"] == 40
    # Documents 1 (its tokens from 60 on), 2 and 3 (of which 7 tokens are queued) are in the queue.
    assert facts["total"]["exact"] == {
        "documents": 3, "tokens": 64, "positions_consumed": 0, "positions_queued": 40,
    }  # fmt: skip


def test_what_cannot_be_compared_is_named_with_its_positions(tmp_path: Path) -> None:
    gone, other = shard(tmp_path / "gone", texts(5, 30, 6)), shard(tmp_path / "other", texts(5, 30, 7), tokenizer="u")
    new = shard(tmp_path / "new", texts(3, 30, 8), tokenizer="u")
    run = run_of(queue_of(tmp_path / "queue.jsonl", [(gone, 0, 155)]), 4)
    facts = report([Range(new, 0, 93)], [run], None, {gone.sha256: gone}, near=None, unaccounted=["elsewhere"])
    positions = 4 * BATCH * BLOCK
    assert facts["not_compared"]["shards"] == [
        {"shard": gone.sha256, "positions_consumed": positions, "positions_queued": 0,
         "why": "it was made with another tokenizer (t)"}
    ]  # fmt: skip
    assert (facts["not_compared"]["unaccounted"], facts["not_compared"]["near"]) == (["elsewhere"], True)
    absent = report([Range(new, 0, 93)], [run], None, {}, near=None)["not_compared"]["shards"]
    assert [(one["positions_consumed"], one["why"]) for one in absent] == [
        (positions, "its bytes are not on this machine")
    ]
    with pytest.raises(InputError, match="2 tokenizers"):
        report([Range(new, 0, 93), Range(gone, 0, 9)], [], queues.load(tmp_path / "queue.jsonl"), {}, near=None)
    assert merged([Range(other, 4, 9), Range(new, 0, 5), Range(other, 0, 4), Range(new, 3, 7)]) == [
        Range(other, 0, 9),
        Range(new, 0, 7),
    ]


def test_bytes_that_are_not_those_of_the_manifest_are_refused(tmp_path: Path) -> None:
    first, second = shard(tmp_path / "old", texts(5, 30, 9)), shard(tmp_path / "new", texts(5, 30, 10), source="n")
    queue = queue_of(tmp_path / "queue.jsonl", [(first, 0, first.tokens)])
    for victim in (first, second):
        good = (victim.path / "tokens.bin").read_bytes()
        (victim.path / "tokens.bin").write_bytes(b"\1\0" + good[2:-2] + good[-2:])
        with pytest.raises(DataError, match="other bytes than its manifest names"):
            report([Range(second, 0, second.tokens)], [], queue, {first.sha256: first}, near=None)
        (victim.path / "tokens.bin").write_bytes(good)


def test_the_index_takes_the_memory_that_is_stated(tmp_path: Path) -> None:
    first = shard(tmp_path / "old", texts(1500, 20, 11))
    queue = queue_of(tmp_path / "queue.jsonl", [(first, 0, first.tokens)])
    before = Before.of([], queue)

    def tell(what: str, done: int, total: int) -> None:
        assert done <= total == first.tokens

    index = earlier(before, {first.sha256: first}, "t", Parameters(), tell)
    assert index.bytes <= 1500 * (56 + 704) + 100
    assert earlier(before, {first.sha256: first}, "t", None, tell).bytes == 1500 * 48


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    def call(*words: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["assay", "data", "overlap", *map(str, words)])
        with pytest.raises(SystemExit) as ended:
            main()
        return int(ended.value.code or 0), *capsys.readouterr()

    return call


def test_the_command_writes_one_report_for_equal_inputs_and_says_source_positions(
    tmp_path: Path, command: Callable[..., tuple[int, str, str]]
) -> None:
    old = texts(6, 99, 1)
    first = shard(tmp_path / "data" / "old", old)
    second = shard(tmp_path / "data" / "new", [old[0], edited(old[1], 3), *texts(2, 99, 2)], source="n")
    queue = queue_of(tmp_path / "data" / "queue.jsonl", [(first, 0, first.tokens)])
    (tmp_path / "card").write_bytes(b"card")
    words = (second.path, "--queue", queue.path, "--declared", f"1.07:at-most:14520680448:{tmp_path / 'card'}")
    code, printed, _ = command(*words, "--out", tmp_path / "a.json", "--json")
    assert code == 0
    facts = json.loads(printed)
    assert {"ok": True, **json.loads((tmp_path / "a.json").read_bytes())} == facts
    assert facts["queue"] == {"queue": queue.header_digest, "head": queue.head, "slots": 1}
    assert facts["not_compared"]["declared"][0]["bound"] == "at most"
    assert str(tmp_path) not in printed
    assert "not a count of unique tokens" in facts["method"]
    code, shown, _ = command(*words, "--out", tmp_path / "b.json")
    assert (code, (tmp_path / "b.json").read_bytes()) == (0, (tmp_path / "a.json").read_bytes())
    assert "in source positions" in shown
    assert "is like, by 0." in shown
    assert "declared: 1.07, at most 14,520,680,448 positions" in shown
    others = ((second.path,), (f"{second.path}:5:5", *words[1:]), (f"{second.path}:0:9999", *words[1:]))
    for wrong in (
        *others,
        (*words, "--out", tmp_path / "a.json"),
        (*words, "--threshold", 2),
        (*words, "--run", tmp_path),
    ):
        assert command(*wrong)[0] == 2, wrong
    assert open_shard(second.path).tokens == 400
