"""Remote files come whole and as stated whatever the network does, and what cannot be mended is said at once."""

from __future__ import annotations

import gzip
import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from corpus_samples import description, left, lines, records, source, tree, write
from faulty_server import ALWAYS, COMMIT, Fault, Server

from assay.corpus import hub, remote
from assay.corpus.build import build
from assay.corpus.description import Corpus, check, load
from assay.corpus.remote import Remote
from assay.errors import AssayError, DataError, InputError, Interrupted, MachineError, Refused
from assay.files.retry import Policy

README = b"""---
license: cc-by-4.0
configs:
- config_name: small
  data_files:
  - split: train
    path: small/train-*
  - split: test
    path: ["small/test-*.jsonl"]
- config_name: other
  data_dir: other
  data_files: "**"
---
# A data set
"""
ENGLISH, POLISH = records(60), records(20, "pl")
TRAIN = lines(ENGLISH[:30])
FILES = {
    "README.md": README,
    "small/train-0.jsonl": TRAIN,
    "small/train-1.jsonl.gz": gzip.compress(lines(ENGLISH[30:]), mtime=0),
    "small/test-0.jsonl": lines(records(3, "test")),
    "other/x/y.jsonl": b"",
}
OBJECTS = {"p/a.jsonl": lines(POLISH), "p/b/c.jsonl": b"", "p/notes.md": b"notes", "q.jsonl": b"{}\n"}
QUICK = Policy(deadline=30.0, first=0.01, most=0.05)
SHORT = Policy(deadline=0.4, first=0.01, most=0.05)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """A hub and a store, to which this process's clients are sent."""
    with Server({"owner/data": dict(FILES), "owner/model": {"tokenizer.json": b"{}"}}, {"bucket": dict(OBJECTS)}) as it:
        for name, value in it.environment.items():
            monkeypatch.setenv(name, value)
        # Read when the library was imported, perhaps after an export had switched the hub off for this process.
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        yield it


def hub_source(**changes: Any) -> dict[str, Any]:
    """The training files of the hub's data set."""
    given = {"path": "hf://datasets/owner/data", "config": "small", "split": "train", "revision": COMMIT}
    return source("hub", **{**given, **changes})


def store_source(**changes: Any) -> dict[str, Any]:
    """The objects of the bucket."""
    return source("store", **{"path": "s3://bucket/p", **changes})


def corpus(*sources: dict[str, Any], **changes: Any) -> Corpus:
    """A checked description."""
    return check(description(list(sources), **changes), "corpus.yaml")


def bring(given: Corpus, folder: Path, policy: Policy = QUICK) -> Remote:
    """What `build` does before it reads."""
    remote.expect_pinned(given)
    folder.mkdir(exist_ok=True)
    return remote.bring(given, folder, policy, lambda stage, done, total, unit: None)


def contents(found: Remote, name: str) -> dict[str, bytes]:
    """A source's files with their bytes."""
    return {each: path.read_bytes() for each, path in found.sources[name].files}


HUB = {name: FILES[name] for name in ("small/train-0.jsonl", "small/train-1.jsonl.gz")}
STORE = {"a.jsonl": OBJECTS["p/a.jsonl"], "b/c.jsonl": b""}


STATUSES = ("408", "429", "500", "503")


@pytest.mark.parametrize(
    ("word", "kind", "requests"),
    [
        *(("/tree/", kind, 3 + 2) for kind in (*STATUSES, "drop", "cut", "hang", "page")),
        *(("cursor=2", kind, 1 + 2) for kind in ("503", "drop", "cut", "page")),
        *(("README.md", kind, 1 + 2) for kind in ("503", "drop", "cut", "wrong")),
        *(("train-0", kind, 1 + 2) for kind in (*STATUSES, "drop", "cut", "wrong", "hang")),
        ("train-0", "page", 1 + 3),  # the page's bytes are taken for the file's first, until the digest tells
    ],
)
def test_a_fault_of_the_hub_costs_nothing_and_doubles_nothing(
    server: Server, word: str, kind: str, requests: int, tmp_path: Path
) -> None:
    fault = Fault(word, kind, times=2, after="0" if kind == "429" else None)
    server.faults.append(fault)
    found = bring(corpus(hub_source()), tmp_path / "work", Policy(3.0, 0.01, 0.05) if kind == "hang" else QUICK)
    assert contents(found, "hub") == HUB
    assert fault.taken == 2
    assert len([path for path in server.answered if word in path]) == requests  # the clients try nothing by themselves
    assert found.sources["hub"].checked == {"git": 1, "sha256": 1}


@pytest.mark.parametrize(
    ("word", "kind"),
    [
        *(("list-type", kind) for kind in (*STATUSES, "drop", "cut", "hang")),
        ("continuation-token", "503"),
        *(("a.jsonl", kind) for kind in (*STATUSES, "drop", "cut", "wrong", "hang")),
    ],
)
def test_a_fault_of_the_store_costs_nothing_and_doubles_nothing(
    server: Server, word: str, kind: str, tmp_path: Path
) -> None:
    fault = Fault(word, kind, times=2)
    server.faults.append(fault)
    found = bring(corpus(store_source()), tmp_path / "work", Policy(3.0, 0.01, 0.05) if kind == "hang" else QUICK)
    assert contents(found, "store") == STORE
    assert fault.taken == 2
    assert (found.sources["store"].passed_over, found.sources["store"].checked) == (1, {"md5": 2})


def test_a_cut_file_is_gone_on_with_by_range_and_no_byte_comes_twice(server: Server, tmp_path: Path) -> None:
    large = server.buckets["bucket"]["p/a.jsonl"] = lines(records(3000))
    server.faults += [Fault("train-0", "cut", times=3), Fault("a.jsonl", "cut", times=2)]
    found = bring(corpus(hub_source(), store_source()), tmp_path / "work")
    assert (contents(found, "hub"), contents(found, "store")) == (HUB, {**STORE, "a.jsonl": large})
    for word, size, cuts in (("train-0", len(TRAIN), 3), ("a.jsonl", len(large), 2)):
        asked = [line.partition(" ")[2] for line in server.answered if word in line]
        marks = [int(each.removeprefix("bytes=").removesuffix("-")) for each in asked[1:]]
        assert (asked[0], len(marks), marks) == ("", cuts, sorted(set(marks)))
        assert size // 4 < marks[0] <= size // 2


def test_a_listing_that_came_short_without_a_word_is_noticed(server: Server, tmp_path: Path) -> None:
    server.faults.append(Fault("continuation-token", "page"))
    with pytest.raises(DataError, match=r"s3://bucket/p changed after this build listed it"):
        bring(corpus(store_source()), tmp_path / "work")


def test_a_server_without_ranges_begins_anew_and_the_bytes_are_the_same(server: Server, tmp_path: Path) -> None:
    server.ranges = False
    server.faults.append(Fault("train-0", "cut", times=2))
    assert contents(bring(corpus(hub_source()), tmp_path / "work"), "hub") == HUB
    assert len([path for path in server.answered if "train-0" in path]) == 3


def test_the_deadline_counts_while_nothing_comes_and_not_while_something_does(server: Server, tmp_path: Path) -> None:
    server.faults.append(Fault("train-0", "cut", times=12))  # the last bytes come one by one, long after the deadline
    policy = Policy(deadline=0.2, first=0.15, most=0.15, chance=lambda a, b: b)
    assert contents(bring(corpus(hub_source()), tmp_path / "work", policy), "hub") == HUB


@pytest.mark.parametrize(
    ("word", "kind", "told"),
    [
        ("/tree/", "503", "the list of files of hf://datasets/owner/data at 0123456789.*: HTTP 503"),
        ("README", "drop", "README.md: the connection broke off"),
        ("train-1", "429", "train-1.jsonl.gz: HTTP 429"),
        ("train-0", "wrong", "do not have the stated SHA-256"),
        ("list-type", "hang", "the list of s3://bucket/p: timed out"),
        ("a.jsonl", "cut", r"s3://bucket/p: a.jsonl: the body ends|broke off"),
        ("a.jsonl", "wrong", "do not have the stated MD5 of its ETag"),
    ],
)
def test_what_outlasts_the_deadline_ends_saved_and_goes_on_where_it_was(
    server: Server, word: str, kind: str, told: str, tmp_path: Path
) -> None:
    given = corpus(hub_source(), store_source())
    server.faults.append(Fault(word, kind, times=ALWAYS))
    with pytest.raises(Interrupted, match=told) as end:
        bring(given, tmp_path / "work", SHORT)
    assert end.value.cause == "network"
    assert "run the same command again" in str(end.value)
    assert "\n" not in str(end.value)
    whole = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "work").rglob("0*") if path.suffix != ".part"}
    server.faults.clear()
    found = bring(given, tmp_path / "work")
    assert (contents(found, "hub"), contents(found, "store")) == (HUB, STORE)
    after = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "work").rglob("0*")}
    assert {name: after[name] for name in whole} == whole  # nothing that was there came again


def test_a_retry_after_beyond_the_deadline_ends_at_once(server: Server, tmp_path: Path) -> None:
    server.faults.append(Fault("train-0", "503", times=ALWAYS, after="3600"))
    with pytest.raises(Interrupted, match="HTTP 503"):
        bring(corpus(hub_source()), tmp_path / "work")
    assert len([path for path in server.answered if "train-0" in path]) == 1


@pytest.mark.parametrize(
    ("change", "kind", "error", "told"),
    [
        ({}, "401", Refused, "needs a token; correct the name, or set HF_TOKEN"),
        ({}, "403", Refused, "terms are not accepted"),
        ({}, "404", DataError, "is not there at"),
        ({}, "400", DataError, "answers HTTP 400"),
        ({"revision": "a" * 40}, None, DataError, f"has no commit {'a' * 40}"),
        ({"path": "hf://datasets/owner/none"}, None, Refused, "not there, or needs a token"),
        ({"path": "hf://owner/data"}, None, InputError, "names no data set; hf://datasets/OWNER/NAME"),
        ({"config": "large"}, None, InputError, "config is 'large'; .* has small, other"),
        ({"config": None}, None, InputError, "config is null, and there are several; .* has small, other"),
        ({"split": "validation"}, None, InputError, "split is 'validation'; .* has train, test"),
        ({"split": None}, None, InputError, "split is null, and there are several; .* has train, test"),
        ({"format": "parquet"}, None, DataError, "holds no file that ends with .parquet"),
    ],
)
def test_what_no_try_can_mend_is_one_sentence_at_once(
    server: Server, change: dict[str, Any], kind: str | None, error: type[AssayError], told: str, tmp_path: Path
) -> None:
    if kind is not None:
        server.faults.append(Fault("/tree/", kind, times=ALWAYS))
    with pytest.raises(error, match=told) as end:
        bring(corpus(hub_source(**change)), tmp_path / "work")
    assert "\n" not in str(end.value)
    assert len(server.answered) == len(set(server.answered))


def test_the_token_goes_to_no_other_server_that_a_listing_names(server: Server, tmp_path: Path) -> None:
    with Server() as other:
        for number, host in enumerate((other.address, other.address.replace("//", "//127.0.0.1@"), "http://[", "x:")):
            server.following = f"{host}/api/datasets/owner/data/tree/{COMMIT}"
            with pytest.raises(DataError, match="goes on at another server"):
                bring(corpus(hub_source()), tmp_path / f"work{number}")
        assert other.answered == []


def test_a_listing_without_an_end_ends(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "_PAGES", 20)
    server.following = f"/api/datasets/owner/data/tree/{COMMIT}?recursive=true"  # a relative address is lawful
    with pytest.raises(DataError, match="or after 20 pages"):
        bring(corpus(hub_source()), tmp_path / "work")
    assert len(server.answered) == 20


def test_an_endpoint_that_is_none_is_not_repeated(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "hub://user:verysecret@host")
    with pytest.raises(InputError, match="HF_ENDPOINT is no address") as fault:
        bring(corpus(hub_source()), tmp_path / "work")
    assert "secret" not in str(fault.value)


@pytest.mark.parametrize(
    ("path", "kind", "error", "told"),
    [
        (
            "s3://bucket/p",
            "403",
            Refused,
            r"s3://bucket/p may not be read with these credentials \(HTTP 403 SlowDown\)",
        ),
        ("s3://bucket/p", "400", None, ""),  # SlowDown is worth a try, whatever its status
        ("s3://none/p", None, DataError, r"s3://none/p is not there \(HTTP 404 NoSuchBucket\)"),
        ("s3://bucket/none", None, DataError, "s3://bucket/none holds no object"),
        ("s3://bucket/p/notes.md/x", None, DataError, "holds no object"),
    ],
)
def test_what_no_try_can_mend_of_a_store_is_one_sentence_at_once(
    server: Server, path: str, kind: str | None, error: type[AssayError] | None, told: str, tmp_path: Path
) -> None:
    if kind is not None:
        server.faults.append(Fault("list-type", kind, times=ALWAYS if error is not None else 1))
    given = corpus(store_source(path=path))
    if error is None:
        assert contents(bring(given, tmp_path / "work"), "store") == STORE
        return
    with pytest.raises(error, match=told) as end:
        bring(given, tmp_path / "work")
    assert "\n" not in str(end.value)
    assert len(server.answered) == len(set(server.answered))


@pytest.mark.parametrize(
    ("revision", "told"),
    [
        (None, f"has the revision null, which may move; pin the commit, 40 hex digits .main is {COMMIT} now"),
        ("main", f"has the revision 'main', which may move; .*main is {COMMIT} now"),
        ("v1.0", "has the revision 'v1.0', which may move; .*the hub did not say which commit v1.0 is"),
        (COMMIT[:7], f"has the revision '{COMMIT[:7]}', which may move; pin the commit"),
    ],
)
def test_a_revision_that_may_move_is_refused_and_the_sentence_names_the_commit(
    server: Server, revision: str | None, told: str, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=told):
        bring(corpus(hub_source(revision=revision)), tmp_path / "work")
    given = corpus(store_source(), tokenizer={"path": "hf://owner/model", "revision": revision})
    with pytest.raises(InputError, match=f"tokenizer: hf://owner/model has the tokenizer.{told[8:]}"):
        bring(given, tmp_path / "work")


def test_a_folder_of_a_data_set_and_one_without_configs_are_all_their_files(server: Server, tmp_path: Path) -> None:
    folder = hub_source(path="hf://datasets/owner/data/small", config=None, split=None)
    found = bring(corpus(folder), tmp_path / "work")
    assert set(contents(found, "hub")) == {"train-0.jsonl", "train-1.jsonl.gz", "test-0.jsonl"}
    with pytest.raises(InputError, match="give one or the other"):
        bring(corpus({**folder, "split": "train"}), tmp_path / "work")
    server.repositories["owner/data"]["README.md"] = b"# no front matter\n---\nconfigs: no\n"
    whole = hub_source(config=None, split=None)
    assert set(contents(bring(corpus(whole), tmp_path / "work"), "hub")) == set(FILES) - {"README.md"}
    with pytest.raises(InputError, match=r"states no `configs:` in its README\.md"):
        bring(corpus(hub_source()), tmp_path / "fresh")


@pytest.mark.parametrize("when", ["before its files came", "while they came", "after they came"])
def test_a_prefix_that_changes_is_noticed(server: Server, when: str, tmp_path: Path) -> None:
    given, objects = corpus(store_source()), server.buckets["bucket"]

    def change(stage: str, done: int, total: int | None, unit: str) -> None:
        if when == "while they came":
            objects["p/z.jsonl"] = b"{}\n"

    if when == "before its files came":
        server.faults.append(Fault("a.jsonl", "503", times=ALWAYS))
        with pytest.raises(Interrupted):
            bring(given, tmp_path / "work", SHORT)
        server.faults.clear()
        objects["p/a.jsonl"] = OBJECTS["p/a.jsonl"].replace(b"Page", b"page")
    elif when == "after they came":
        bring(given, tmp_path / "work")
        del objects["p/b/c.jsonl"]
    (tmp_path / "work").mkdir(exist_ok=True)
    with pytest.raises(DataError, match=r"s3://bucket/p changed after this build listed it; .* delete"):
        remote.bring(given, tmp_path / "work", QUICK, change)


def test_an_object_that_changes_between_listing_and_reading_is_noticed(server: Server, tmp_path: Path) -> None:
    from assay.files import stores

    store, prefix = stores.opened("s3://bucket/p", 1.0)
    [first, *_] = stores.objects(store, prefix)
    server.buckets["bucket"]["p/a.jsonl"] += b"{}\n"
    with pytest.raises(DataError, match=r"s3://bucket/p/a.jsonl changed after it was listed"):
        list(stores.chunks(store, first))


def test_an_object_in_several_parts_is_checked_by_its_size_alone_and_the_receipt_says_so(
    server: Server, tmp_path: Path
) -> None:
    server.etag = f"{'0' * 32}-2"
    found = bring(corpus(store_source()), tmp_path / "work")
    assert contents(found, "store") == STORE
    assert found.sources["store"].checked == {"size": 2}


def test_an_etag_that_is_no_md5_needs_a_pin_and_the_pin_judges(server: Server, tmp_path: Path) -> None:
    plain = bring(corpus(store_source()), tmp_path / "plain").sources["store"]
    server.etag = "0" * 32
    with pytest.raises(Interrupted, match="pin `sha256`"):
        bring(corpus(store_source()), tmp_path / "work", SHORT)
    found = bring(corpus(store_source(sha256=plain.digest)), tmp_path / "work")
    assert contents(found, "store") == STORE
    assert found.sources["store"].checked == {"pinned": 2}
    server.faults.append(Fault("a.jsonl", "wrong", times=2))  # twice alike, as a bad copy in between would serve it
    with pytest.raises(DataError, match="is pinned"):
        bring(corpus(store_source(sha256=plain.digest)), tmp_path / "other")
    assert contents(bring(corpus(store_source(sha256=plain.digest)), tmp_path / "other"), "store") == STORE


def test_one_object_is_a_source_whose_digest_is_that_of_its_bytes(server: Server, tmp_path: Path) -> None:
    pin = f"sha256:{hashlib.sha256(OBJECTS['q.jsonl']).hexdigest()}"
    found = bring(corpus(store_source(path="s3://bucket/q.jsonl", sha256=pin)), tmp_path / "work")
    assert contents(found, "store") == {"q.jsonl": b"{}\n"}


def test_a_disk_without_room_is_named_before_anything_is_fetched(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from collections import namedtuple

    usage = namedtuple("usage", ["total", "used", "free"])
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage(100, 90, 10))
    missing = sum(map(len, HUB.values()))
    with pytest.raises(MachineError, match=f"room for 10 bytes, but {missing:,} of remote files"):
        bring(corpus(hub_source()), tmp_path / "work")
    assert not any("train" in path for path in server.answered)


def test_a_build_over_a_bad_network_has_the_bytes_of_an_undisturbed_one(server: Server, tmp_path: Path) -> None:
    local = tmp_path / "local"
    local.mkdir()
    given = description([hub_source(), store_source(language="pl")])
    undisturbed = build(load(write(tmp_path, given, {})), tmp_path / "out")
    server.faults += [
        Fault("train-0", "cut"),
        Fault("train-0", "wrong"),
        Fault("train-1", "429"),
        Fault("a.js", "drop"),
    ]
    server.faults += [Fault("cursor=2", "503"), Fault("list-type", "cut")]
    disturbed = build(load(write(local, given, {})), local / "out", deadline=60.0)
    assert all(fault.taken == fault.times for fault in server.faults)
    assert disturbed == undisturbed
    assert tree(local / "out") == tree(tmp_path / "out")
    assert {name: facts["documents"] for name, facts in disturbed["by_source"].items()} == {"hub": 60, "store": 20}
    assert disturbed["by_source"]["hub"]["fetched_and_checked_by"] == {"git": 1, "sha256": 1}


def test_a_file_that_is_broken_on_the_far_side_is_a_counted_rejection(server: Server, tmp_path: Path) -> None:
    whole = FILES["small/train-1.jsonl.gz"]
    server.repositories["owner/data"]["small/train-1.jsonl.gz"] = whole[: len(whole) // 2]
    facts = build(load(write(tmp_path, description([hub_source()]), {})), tmp_path / "out")
    assert facts["rejected"] == {"broken_stream": 1}
    [row] = left(tmp_path / "out")
    assert (row["file"], row["stage"]) == ("small/train-1.jsonl.gz", "read")
    assert facts["documents"] == 30 + row["position"]


def test_a_file_that_was_changed_after_it_was_fetched_is_noticed(server: Server, tmp_path: Path) -> None:
    given = load(write(tmp_path, description([hub_source()]), {}))
    found = bring(given.corpus, tmp_path / "out.work")
    place = found.sources["hub"].files[0][1]
    place.write_bytes(place.read_bytes().replace(b"Page", b"page"))
    with pytest.raises(DataError, match="are not what was fetched; delete that folder and build again"):
        build(given, tmp_path / "out")
