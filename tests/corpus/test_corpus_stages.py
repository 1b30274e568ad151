"""Every stage at work: planted faults leave by name, a killed build goes on, workers and listings change no byte."""

from __future__ import annotations

import gzip
import io
import json
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from corpus_samples import built, description, left, lines, listed, prose, records, source, tree, write
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from assay.corpus.build import build
from assay.corpus.description import load
from assay.corpus.pieces import Stage
from assay.corpus.stages import firsts
from assay.data.shard import open_shard
from assay.errors import DataError, InputError, Refused
from assay.files.shared import shared

LICENCE = {"spdx": "CC-BY-4.0", "evidence": "title page", "decision": "admitted"}
KILLED = """
import os, signal, sys
from pathlib import Path
from assay.corpus import build, description
stage, after = sys.argv[3], int(sys.argv[4])
def tell(told, done, total, unit):
    global after
    after -= told == stage
    if after == 0:
        os.kill(os.getpid(), signal.SIGKILL)
if __name__ == "__main__":
    build.build(description.load(Path(sys.argv[1])), Path(sys.argv[2]), tell, int(sys.argv[5]))
    print(__import__("resource").getrusage(__import__("resource").RUSAGE_SELF).ru_maxrss)
"""


def pages(language: str, count: int = 24) -> list[dict[str, Any]]:
    """Real pages with a score."""
    with shared(f"corpora/gnome-help/documents-{language}.jsonl").open(encoding="utf-8") as file:
        long = (record for record in map(json.loads, file) if len(record["text"]) > 600)
        return [{**next(long), "score": 3.5} for _ in range(count)]


def everything(folder: Path, late_first: bool = False) -> Path:
    """A corpus with all formats, all stages and a planted fault of every kind; its description."""
    english, polish = pages("en"), pages("pl")
    folder.mkdir(parents=True)
    for name in ("en", "pl", "txt"):
        (folder / name).mkdir()
    planted = [
        {**english[0], "id": "again"},  # exact duplicate
        {**english[1], "text": "A word before. " + english[1]["text"]},  # repeated id
        {**english[2], "id": "near", "text": english[2]["text"] + " And one more sentence."},
        {**polish[3], "id": "polish"},  # another language than its source's
        {**english[4], "id": "low", "score": 2.9},
        {**english[4], "id": "unscored", "score": None},
        {**english[4], "id": "short", "text": "short"},
        {**english[4], "id": "held", "text": english[5]["text"] + "\n" + QUESTION + "\n" + english[6]["text"]},
        {**english[4], "id": "blank", "text": "  "},
    ]
    rows = pa.Table.from_pylist(english[12:])
    data = io.BytesIO()
    pq.write_table(rows, data, row_group_size=4, write_page_checksum=True, use_dictionary=False, compression="zstd")
    broken = bytearray(data.getvalue())
    chunk = pq.ParquetFile(io.BytesIO(bytes(broken))).metadata.row_group(1).column(3)
    broken[chunk.data_page_offset + chunk.total_compressed_size - 9] ^= 0xFF
    files: dict[str, bytes] = {
        "en/a.jsonl": lines(english[:6]) + b"{broken\n" + b"\xff\n" + b"\n",
        "en/b.jsonl.gz": gzip.compress(lines(english[6:12] + planted), mtime=0),
        "en/c.jsonl.gz": gzip.compress(lines(pages("en", 4)), mtime=0)[:-30],
        "pl/a.jsonl": lines(polish),
        "txt/0.txt": english[11]["text"].encode()[:-400] + b" Something else entirely stands at the end of this one.",
        "txt/1.txt": b"\xfe\xff not text",
        "parquet": bytes(broken),
        "held.jsonl": lines(
            [{"id": "q1", "text": QUESTION}, {"id": "q2", "text": "Nobody wrote this here before you."}]
        ),
        "titles.jsonl": lines([{"title": "0", "licence": "CC-BY-4.0", "evidence": "e", "decision": "admitted"}]),
    }
    for name in sorted(files, reverse=late_first):
        (folder / name).write_bytes(files[name])
    score = {"columns": [{"column": "score", "at_least": 3.0}], "min_chars": 50}
    columns = {"title": "title"}
    sources = [
        source("en", path="en", columns=columns, filters=score),
        source("pl", path="pl", columns=columns, language="pl"),
        source("rows", path="parquet", format="parquet", columns=columns),
        source("texts", path="txt", format="text", columns={}, licence={"records": "titles.jsonl"}),
    ]
    asked = description(
        sources,
        filters={"min_chars": 50},
        language={"identify": True, "at_least": 0.5},
        duplicates={"near": {"threshold": 0.75}},
        decontamination={"held_out": ["held.jsonl"]},
        validation={"fraction": 0.2},
        mix={"en": 0.6, "pl": 0.4},
    )
    return write(folder, asked, {})


QUESTION = (
    "Which of the seven rivers of the northern plain carries the most water in the month of May, and who measured it?"
)


def run(script: str, *arguments: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", script, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The corpus with everything, built in this process."""
    folder = tmp_path_factory.mktemp("corpora") / "corpus"
    build(load(everything(folder)), folder / "out")
    return folder


def test_every_planted_fault_leaves_by_name_and_the_sum_is_the_input(whole: Path) -> None:
    facts = json.loads((whole / "out" / "corpus.json").read_bytes())
    rows = left(whole / "out")
    by_name = {(row["source"], row["id"]): (row["stage"], row["reason"]) for row in rows}
    assert by_name["en", "again"] == ("duplicates", "exact_duplicate")
    assert by_name["en", "near"] == ("near duplicates", "near_duplicate")
    assert by_name["en", "polish"] == ("language", "language_differs")
    assert by_name["en", "low"] == ("filters", "column_too_low")
    assert by_name["en", "unscored"] == ("filters", "column_missing")
    assert by_name["en", "short"][0] == "filters" or by_name["en", "short"][0] == "language"
    assert by_name["en", "held"] == ("decontamination", "held_out_exact")
    assert by_name["en", "blank"] == ("normalise", "empty")
    assert by_name["texts", "1.txt"] == ("read", "not_utf8")
    reasons = Counter((row["source"], row["reason"]) for row in rows)
    for reason in ("malformed_json", "not_utf8", "blank_line", "broken_stream", "repeated_id"):
        assert reasons["en", reason] >= 1, reason
    assert reasons["rows", "broken_row_group"] == 4
    broken = [row for row in rows if row["reason"] == "broken_row_group"]
    assert [(row["file"], row["position"]) for row in broken] == [("parquet", n) for n in range(5, 9)]
    assert Counter(row["reason"] for row in rows) == facts["rejected"]
    assert facts["documents"] == facts["admitted"] + len(rows)
    assert facts["not_asked"] == []
    assert facts["stages"][-1]["out"] == facts["admitted"] == len(listed(whole / "out" / "admitted.jsonl"))
    order = [(("en", "pl", "rows", "texts").index(row["source"]), row["file"], row["position"]) for row in rows]
    assert order == sorted(order)
    assert QUESTION not in (whole / "out" / "contamination.jsonl").read_text(encoding="utf-8")
    report = {row["item"]: row["found"] for row in listed(whole / "out" / "contamination.jsonl")}
    assert report == {"q1": 1, "q2": 0}
    assert facts["held_out"] == {"items": 2, "found": 1, "not_checkable": 0, "documents": 1}


def test_the_mix_is_kept_in_tokens_and_shown_in_bytes(whole: Path) -> None:
    facts = json.loads((whole / "out" / "corpus.json").read_bytes())
    shown = facts["by_language"]
    for name in ("train-00", "train-01"):
        counts = Counter[str]()
        for each in open_shard(whole / "out" / name).sources:
            counts[each.language or ""] += each.stop - each.start
        longest = max(r["stop"] - r["start"] for r in listed(whole / "out" / "admitted.jsonl"))
        assert abs(counts["en"] * 0.4 - counts["pl"] * 0.6) <= longest
    assert sum(each["tokens"] for each in shown.values()) == sum(s["tokens"] for s in facts["shards"][:2])
    assert sum(each["text_bytes"] for each in shown.values()) == sum(s["text_bytes"] for s in facts["shards"][:2])
    assert shown["en"]["tokens_share"] != shown["en"]["text_bytes_share"]


def test_two_workers_and_another_order_of_listing_give_the_same_bytes(whole: Path, tmp_path: Path) -> None:
    path = everything(tmp_path / "corpus", late_first=True)
    done = run(KILLED, path, tmp_path / "out", "never", -1, 2)
    assert (done.returncode, done.stderr) == (0, "")
    assert tree(tmp_path / "out") == tree(whole / "out")
    assert not (tmp_path / "out.work").exists()


def test_a_build_killed_three_times_goes_on_with_what_was_done_and_gives_the_same_bytes(
    whole: Path, tmp_path: Path
) -> None:
    path, out, work = everything(tmp_path / "corpus"), tmp_path / "out", tmp_path / "out.work"
    done: dict[str, int] = {}
    for stage, after in (("read and admit", 2), ("near duplicates", 1), ("tokenize", 3)):
        killed = run(KILLED, path, out, stage, after, 1)
        assert killed.returncode == -signal.SIGKILL
        assert not out.exists()
        receipts = {str(p.relative_to(work)): p.stat().st_mtime_ns for p in sorted(work.rglob("*/*.json"))}
        assert {name: receipts[name] for name in done} == done
        assert len(receipts) > len(done)
        done = receipts
    [damaged] = work.glob("tokenize-*/000001.ids.bin")  # a file that is not what its receipt says is made again
    damaged.write_bytes(damaged.read_bytes()[:-2])
    (work / "clean-0" / "left.partial-1").mkdir(parents=True)  # what an older version left is nobody's input
    assert run(KILLED, path, out, "never", -1, 1).returncode == 0
    assert tree(out) == tree(whole / "out")
    assert not work.exists()


def test_a_piece_that_is_not_what_its_receipt_says_is_never_read(tmp_path: Path) -> None:
    stage = Stage(tmp_path / "stage")

    def write_piece(place: Any) -> dict[str, Any]:
        place("bin").write_bytes(b"whole")
        return {"count": 1}

    first = stage.make(0, write_piece)
    assert stage.make(0, lambda place: {}) == first  # what stands is not made again
    assert stage.opened(0, "bin").read_bytes() == b"whole"
    stage.path(0, "bin").write_bytes(b"whol")
    assert stage.receipt(0) is None
    with pytest.raises(DataError, match="is not what its stage made of it"):
        stage.opened(0, "bin")

    def fail(place: Any) -> dict[str, Any]:
        place("bin").write_bytes(b"half")
        raise DataError("stopped")

    with pytest.raises(DataError, match="stopped"):
        stage.make(1, fail)
    assert {p.name for p in stage.folder.iterdir()} == {"000000.bin", "000000.json"}


def test_a_full_disk_is_told_and_the_next_build_goes_on(tmp_path: Path) -> None:
    path = write(tmp_path, description([source("a")]), {"a": lines(records(400))})
    limited = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))\n" + KILLED
    full = run(limited, path, tmp_path / "out", "never", -1, 1)
    assert full.returncode == 1  # the script's own end; the command's code is 71
    assert "MachineError" in full.stderr.splitlines()[-1]
    assert "it goes on where it was" in full.stderr.splitlines()[-1]
    assert not (tmp_path / "out").exists()
    build(load(path), tmp_path / "out")
    build(load(path), tmp_path / "other")
    assert tree(tmp_path / "out") == tree(tmp_path / "other")


def test_two_builds_do_not_share_a_work_folder(tmp_path: Path) -> None:
    path = write(tmp_path, description([source("a")]), {"a": lines(records(40))})

    def again(stage: str, done: int, total: int | None, unit: str) -> None:
        if stage == "exact duplicates" and not met:
            with pytest.raises(Refused, match="in use by another build"):
                build(load(path), tmp_path / "out")
            met.append(stage)

    met: list[str] = []
    build(load(path), tmp_path / "out", again)
    assert met == ["exact duplicates"]


FAULTS: dict[str, bytes] = {
    "malformed_json": b'{"id": ',
    "not_utf8": b"\xc3\x28",
    "blank_line": b" ",
    "wrong_type": b"[]",
    "missing_text": b'{"id": "m", "title": "t", "page": "m"}',
    "too_short": b'{"id": "s", "title": "t", "page": "s", "text": "x"}',
    "empty": b'{"id": "e", "title": "t", "page": "e", "text": " "}',
    "repeated_id": lines([{**records(1)[0], "text": "other text of the same name"}]).rstrip(),
    "exact_duplicate": lines([{**records(2)[1], "id": "copy"}]).rstrip(),
}


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=8, deadline=None)
@given(st.lists(st.sampled_from(sorted(FAULTS)), max_size=12), st.randoms(use_true_random=False))
def test_whatever_is_planted_admitted_and_rejected_are_the_input(
    tmp_path_factory: pytest.TempPathFactory, planted: list[str], random: Any
) -> None:
    folder = tmp_path_factory.mktemp("planted")
    good = lines(records(30)).splitlines()
    rest = good[2:]
    for number, fault in enumerate(planted):
        line = FAULTS[fault].replace(b'"copy"', b'"copy %d"' % number)
        rest.insert(random.randrange(len(rest) + 1), line)
    whole = b"\n".join([*good[:2], *rest]) + b"\n"
    facts = built(folder, description([source("a")], shards=1, validation={"fraction": 0.2}), {"a": whole})
    assert facts["documents"] == 30 + len(planted)
    assert facts["admitted"] == 30 == len(listed(folder / "out" / "admitted.jsonl"))
    assert facts["rejected"] == Counter(planted)
    places = [row["position"] for row in left(folder / "out")]
    assert places == [n for n, line in enumerate(whole.splitlines(), 1) if line not in good]


@given(st.lists(st.integers(0, 9), max_size=60))
def test_the_first_of_equals_stays(values: list[int]) -> None:
    digests = np.array([[value % 3, value] for value in values], dtype=np.uint64).reshape(-1, 2)
    assert firsts(digests).tolist() == [values.index(value) for value in values]


def test_a_later_corpus_is_compared_with_what_an_earlier_one_admitted(tmp_path: Path) -> None:
    near = {"threshold": 0.75}
    half: dict[str, Any] = {"shards": 1, "validation": {"fraction": 0.5}}
    texts = [{**r, "text": r["text"] + f" {prose(n + 7)}"} for n, r in enumerate(pages("en"))]
    first = description([source("a")], duplicates={"near": near}, **half)
    built(tmp_path, first, {"a": lines(texts[:16])}, "first")
    changed = [{**r, "id": f"new {r['id']}", "text": "Now. " + r["text"]} for r in texts[12:]]
    later = description([source("a")], duplicates={"near": {**near, "against": "first/near-duplicates"}}, **half)
    facts = built(tmp_path, later, {"a": lines(changed)}, "later")
    assert facts["rejected"] == {"near_duplicate": 4}
    assert [row["id"] for row in left(tmp_path / "later")] == [r["id"] for r in changed[:4]]
    assert left(tmp_path / "later")[0]["evidence"].endswith(f"to small/a: {texts[12]['id']}")
    other = {**later, "duplicates": {"near": {"threshold": 0.9, "against": "first/near-duplicates"}}}
    with pytest.raises(InputError, match="give the same parameters"):
        built(tmp_path, other, {"a": lines(changed)}, "other")


def test_lossy_documents_are_counted_by_reason_and_byte_or_dropped_by_name(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = {chr(c): c - 31 for c in range(32, 127)}
    inner = Tokenizer(models.BPE(vocab=letters, merges=[]))  # no byte fallback: what it does not know is dropped
    inner.pre_tokenizer = pre_tokenizers.Split(" ", "isolated")
    inner.decoder = decoders.Fuse()
    inner.add_special_tokens(["<end>"])
    (tmp_path / "ascii.json").write_text(inner.to_str(), encoding="utf-8")
    plain = [{"id": str(n), "title": "t", "page": str(n), "text": f"plain text number {n} " * 3} for n in range(30)]
    given_records = [*plain, {"id": "x", "title": "t", "page": "2", "text": "plain text, then zażółć"}]
    asked = description([source("a")], tokenizer={"path": "ascii.json"}, end_of_text="<end>", shards=1)
    admitted = built(tmp_path, asked, {"a": lines(given_records)}, "admitted")
    assert admitted["lossy_by"] == [{"source": "a", "reason": "bytes_dropped", "byte": "0xc5", "documents": 1}]
    assert (admitted["lossy"], admitted["rejected"]) == (1, {})
    [record] = [r for r in listed(tmp_path / "admitted" / "admitted.jsonl") if r["lossy"]]
    assert (record["id"], record["lossy_at"]) == ("x", len("plain text, then za"))
    rejected = built(tmp_path, {**asked, "lossy": "reject"}, {"a": lines(given_records)}, "rejected")
    assert (rejected["lossy"], rejected["rejected"]) == (0, {"lossy": 1})
    [row] = left(tmp_path / "rejected")
    assert (row["id"], row["stage"]) == ("x", "tokenize")
    assert row["evidence"] == "bytes_dropped from byte 19 (0xc5) when decoded"


def test_a_target_takes_the_first_documents_and_says_what_is_missing(tmp_path: Path) -> None:
    files = {"a": lines(records(60))}
    everything_taken = built(tmp_path, description([source("a")], shards=1), files)
    training = everything_taken["shards"][0]["tokens"]
    less = built(tmp_path, description([source("a")], shards=1, target_tokens=training // 2), files, "less")
    assert training // 2 <= less["shards"][0]["tokens"] < training
    assert less["target"] == {"tokens": training // 2, "short": 0}
    kept = [r["id"] for r in listed(tmp_path / "less" / "admitted.jsonl") if r["shard"] == "train-00"]
    all_kept = [r["id"] for r in listed(tmp_path / "out" / "admitted.jsonl") if r["shard"] == "train-00"]
    assert kept == all_kept[: len(kept)]
    assert {row["id"] for row in left(tmp_path / "less")} == set(all_kept[len(kept) :])
    more = built(tmp_path, description([source("a")], shards=1, target_tokens=training + 9), files, "more")
    assert more["target"] == {"tokens": training + 9, "short": 9}
    assert more["shards"] == everything_taken["shards"]


def test_ten_times_the_text_does_not_need_half_as_much_memory_again(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    text = "\n".join(r["text"] for r in pages("en"))
    inner = Tokenizer(models.WordLevel({"<unk>": 0, "the": 1}, unk_token="<unk>"))  # fast: this is not about its work
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    inner.add_special_tokens(["<end>"])
    peaks = []
    for name, count in (("small", 70), ("large", 700)):
        folder = tmp_path / name
        folder.mkdir()
        inner.save(str(folder / "words.json"))
        given_records = [{"id": str(n), "title": "t", "page": str(n), "text": f"{n} {text}"} for n in range(count)]
        asked = description([source("a")], shards=1, tokenizer={"path": "words.json"}, end_of_text="<end>")
        path = write(folder, asked, {"a": lines(given_records)})
        done = run(KILLED, path, folder / "out", "never", -1, 1)
        assert done.returncode == 0, done.stderr
        peaks.append(int(done.stdout))
    assert (tmp_path / "large" / "a.jsonl").stat().st_size > 20_000_000
    assert peaks[1] < 1.5 * peaks[0]
