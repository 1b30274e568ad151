"""What another pool has reserved stays out by name, however it is spelled, and a list never quotes a text."""

from __future__ import annotations

import json
import unicodedata
from pathlib import Path
from typing import Any

import pytest
from corpus_samples import WORDS, built, description, left, lines, listed, prose, records, source, tree, write
from hypothesis import given
from hypothesis import strategies as st

from assay.cli.main import main
from assay.corpus.build import build
from assay.corpus.description import load
from assay.corpus.reserved import comparable, read, text_digest
from assay.corpus.reserving import reserve
from assay.errors import InputError

TEXT = st.text(alphabet="aąśŻ\u0301ﬁＡ \u00a0\n\t\u2003", max_size=30)


@given(TEXT, st.sampled_from(["NFC", "NFD", "NFKC", "NFKD"]), st.sampled_from([" ", "\n", "\t \u00a0", "\u2003"]))
def test_spelling_and_line_wraps_do_not_change_the_digest(text: str, form: Any, space: str) -> None:
    respelled = space + unicodedata.normalize(form, space.join(text.split())) + space
    assert text_digest(respelled) == text_digest(text)
    assert text_digest(text + "b") != text_digest(text)
    assert comparable(comparable(text)) == comparable(text)


def entries(*given: dict[str, Any]) -> bytes:
    return b"".join(json.dumps(entry, ensure_ascii=False).encode() + b"\n" for entry in given)


def corpus(folder: Path, *lists: bytes, **changes: Any) -> Path:
    """Forty documents in two files and a few respelled ones, under these reserved lists."""
    texts = records(40)
    nfd = {**texts[0], "id": "nfd", "text": unicodedata.normalize("NFD", f"  {prose(900)}".replace(" ", "\n"))}
    titled = {**texts[0], "id": "titled", "title": unicodedata.normalize("NFD", "Zażółć gęślą"), "text": prose(901)}
    folder.mkdir(exist_ok=True)
    for number, data in enumerate(lists):
        (folder / f"list-{number}.jsonl").write_bytes(data)
    names = [f"list-{number}.jsonl" for number in range(len(lists))]
    asked = description([source("a"), source("b")], admission={"licences": ["CC-BY-4.0"], "reserved": names}, **changes)
    return write(folder, asked, {"a": lines([*texts[:20], nfd, titled]), "b": lines(texts[20:])})


def test_reserved_documents_leave_by_id_title_and_text_and_the_sum_is_the_input(tmp_path: Path) -> None:
    first = entries(
        {"id": "en/3", "pool": "gold", "reason": "kept for the last stage"},
        {"title": "Zażółć  gęślą", "pool": "gold"},
        {"id": "en/4", "pool": "base"},  # the corpus's own pool: nothing to refuse
    )
    second = b"\n" + entries({"text_sha256": text_digest(prose(900)), "pool": "evaluation", "id": None})
    out = tmp_path / "out"
    facts = build(load(corpus(tmp_path, first, second)), out)
    rows = {row["id"]: (row["stage"], row["reason"], row["evidence"]) for row in left(out)}
    assert rows == {
        "en/3": (
            "admission",
            "reserved",
            "its id is reserved for pool gold by list-0.jsonl, line 1: kept for the last stage",
        ),
        "titled": ("admission", "reserved", "its title is reserved for pool gold by list-0.jsonl, line 2"),
        "nfd": ("admission", "reserved", "its text is reserved for pool evaluation by list-1.jsonl, line 2"),
    }
    assert facts["rejected"] == {"reserved": 3}
    assert (facts["documents"], facts["admitted"]) == (42, 39)
    told = facts["methods"]["admission"]["reserved"]
    assert [(one["path"], one["entries"], one["of_other_pools"]) for one in told] == [
        ("list-0.jsonl", 3, 2),
        ("list-1.jsonl", 1, 1),
    ]
    again = tmp_path / "again"
    assert build(load(corpus(tmp_path, first, second)), again, workers=2) == facts
    assert tree(again) == tree(out)
    # Another list is another build: nothing of the first is gone on with.
    other = build(load(corpus(tmp_path, first, entries({"id": "en/7", "pool": "gold"}))), tmp_path / "other")
    assert {row["id"] for row in left(tmp_path / "other")} == {"en/3", "titled", "en/7"}
    assert other["pieces"]["clean"] != facts["pieces"]["clean"]


def test_a_changed_list_makes_an_unfinished_build_clean_again(tmp_path: Path) -> None:
    class Stopped(Exception):
        pass

    def stop(stage: str, done: int, total: int | None, unit: str) -> None:
        if stage == "exact duplicates":
            raise Stopped

    for wanted in ("en/3", "en/5"):
        with pytest.raises(Stopped):
            build(load(corpus(tmp_path, entries({"id": wanted, "pool": "gold"}))), tmp_path / "out", stop)
    assert len(list((tmp_path / "out.work").glob("clean-*"))) == 2


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b'{"id": "x"}', "the key 'pool' is missing"),
        (b'{"pool": "gold"}', "none of id, title, text_sha256"),
        (b'{"pool": "gold", "id": ""}', "id is ''"),
        (b'{"pool": "gold", "id": 7}', "id is 7"),
        (b'{"pool": "gold", "text_sha256": "abc"}', "'sha256:' and 64 hex digits"),
        (b'{"pool": "gold", "ids": "x"}', "did you mean 'id'?"),
        (b"{", "is not valid JSON"),
        (b"[1]", "an entry is a JSON object"),
    ],
)
def test_a_bad_line_is_one_sentence_with_its_number(tmp_path: Path, line: bytes, said: str) -> None:
    data = entries({"id": "en/1", "pool": "gold"}) + line + b"\n"
    with pytest.raises(InputError) as fault:
        build(load(corpus(tmp_path, data)), tmp_path / "out")
    assert "list-0.jsonl, line 2" in str(fault.value)
    assert said in str(fault.value)
    assert not (tmp_path / "out").exists()


def test_lists_stay_inside_the_folder_and_must_be_there(tmp_path: Path) -> None:
    for name, said in (("../gold.jsonl", "leaves its folder"), ("gold.jsonl", "does not exist"), ("no", "is empty")):
        (tmp_path / "no").write_bytes(b"\n")
        with pytest.raises(InputError, match=said):
            read([name], "base", tmp_path)


def test_what_one_pool_was_built_of_another_pool_rejects(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gold = [{"id": f"gold/{n}", "page": str(n), "title": f"Gold {n}", "text": prose(n)} for n in range(12)]
    given = description([source("g")], pool="gold", shards=1, normalise="NFKC")
    folder = tmp_path / "gold"
    folder.mkdir()
    built(folder, given, {"g": lines(gold)})

    def reserved(*words: object) -> dict[str, Any]:
        monkeypatch.setattr("sys.argv", ["assay", "corpus", "reserve", *map(str, words), "--json"])
        with pytest.raises(SystemExit) as end:
            main()
        said: dict[str, Any] = json.loads(capsys.readouterr().out)
        assert (end.value.code or 0) == said.get("exit", 0)
        return said

    made = reserved(folder / "out", tmp_path / "list-0.jsonl", "--reason", "gold of 2026")
    assert (made["pool"], made["documents"], made["entries"]) == ("gold", 12, 12)
    content = (tmp_path / "list-0.jsonl").read_text(encoding="utf-8")
    assert not any(word in content for word in WORDS)
    held = [{"question": prose(30), "answers": [prose(31), ""]}]
    (tmp_path / "held.jsonl").write_bytes(lines(held))
    words = ("--field", "question", "--field", "answers")
    assert reserved(tmp_path / "held.jsonl", tmp_path / "l", *words)["exit"] == 2  # no pool
    made = reserved(tmp_path / "held.jsonl", tmp_path / "list-1.jsonl", "--pool", "evaluation", *words)
    assert (made["documents"], made["entries"]) == (1, 2)
    assert reserved(tmp_path / "held.jsonl", tmp_path / "list-1.jsonl", "--pool", "p", *words)["exit"] == 2  # taken

    lists = [(tmp_path / f"list-{number}.jsonl").read_bytes() for number in range(2)]
    path = corpus(tmp_path / "base", *lists)
    respelled = [{**one, "id": f"r{n}", "text": one["text"].replace(" ", "\r\n")} for n, one in enumerate(gold)]
    asked = [
        {"id": "q", "page": "1", "title": "t", "text": prose(31)},
        {**gold[0], "id": "more", "text": prose(0) + "!"},
    ]
    (tmp_path / "base" / "b.jsonl").write_bytes(lines([*respelled, *asked, *records(30)]))
    build(load(path), tmp_path / "base" / "out")
    gone = {row["id"]: row["evidence"] for row in left(tmp_path / "base" / "out") if row["reason"] == "reserved"}
    assert set(gone) == {*(f"r{n}" for n in range(12)), "q"}
    assert gone["q"] == "its text is reserved for pool evaluation by list-1.jsonl, line 2"
    assert gone["r5"].endswith(": gold of 2026")


def test_lossy_documents_are_named_by_their_id(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = ["<|endoftext|>", "?", *WORDS]
    inner = Tokenizer(models.WordLevel({word: n for n, word in enumerate(words)}, unk_token="?"))
    inner.add_special_tokens(["<|endoftext|>"])
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    inner.save(str(tmp_path / "tokenizer.json"))
    given = description([source("a")], tokenizer={"path": "tokenizer.json"}, shards=1)
    built(tmp_path, given, {"a": lines(records(20))})
    made = reserve(tmp_path / "out", tmp_path / "list")
    assert (made["documents"], made["by_id_as_lossy"]) == (20, 20)
    assert {entry["id"] for entry in listed(tmp_path / "list")} == {f"en/{n}" for n in range(20)}
    with pytest.raises(InputError, match="--by is 'name'; allowed: text, id, title"):
        reserve(tmp_path / "out", tmp_path / "wrong", by=("name",))
    both = reserve(tmp_path / "out", tmp_path / "named", by=("id", "title"), pool="other")
    assert (both["by_id_as_lossy"], both["entries"]) == (0, 20)
    assert all(set(entry) == {"id", "title", "pool"} for entry in listed(tmp_path / "named"))
