"""No document stands for another that must not be there itself: neither in a build nor in the index that it leaves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from corpus_samples import built, description, left, lines, listed, source
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

NEAR = {"near": {"threshold": 0.75}}
QUESTION = "Which of the seven rivers of the northern plain carries the most water in the month of May and who saw it"


def document(number: int, after: str = "") -> dict[str, Any]:
    """A text that is like no other one."""
    text = " ".join(f"page{number}word{place}" for place in range(120))
    return {"id": f"d{number}", "text": f"{text} {after}".strip()}


def asked(**changes: Any) -> dict[str, Any]:
    given = {"duplicates": NEAR, "validation": {"fraction": 0.3}, "shards": 1, "tokenizer": {"path": "ascii.json"}}
    return description([source("a", columns={})], end_of_text="<end>", **{**given, **changes})


def ascii_tokenizer(folder: Path) -> None:
    """A tokenizer that drops what is not ASCII."""
    inner = Tokenizer(models.BPE(vocab={chr(c): c - 31 for c in range(32, 127)}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.Split(" ", "isolated")
    inner.decoder = decoders.Fuse()
    inner.add_special_tokens(["<end>"])
    (folder / "ascii.json").write_text(inner.to_str(), encoding="utf-8")


def named(out: Path) -> list[str]:
    """The documents of the index that a corpus kept, in its order."""
    text = (out / "near-duplicates" / "identities.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def test_a_clean_document_is_not_lost_to_one_that_leaves_as_held_out_itself(tmp_path: Path) -> None:
    ascii_tokenizer(tmp_path)
    (tmp_path / "held-out.txt").write_text(QUESTION, encoding="utf-8")
    tainted, clean = document(0, QUESTION), {**document(0), "id": "clean"}
    rest = [document(number) for number in range(1, 16)]
    given = asked(decontamination={"held_out": ["held-out.txt"]})
    facts = built(tmp_path, given, {"a": lines([tainted, clean, *rest])})
    assert [(row["id"], row["reason"]) for row in left(tmp_path / "out")] == [("d0", "held_out_exact")]
    assert "clean" in {row["id"] for row in listed(tmp_path / "out" / "admitted.jsonl")}
    order = [stage["stage"] for stage in facts["stages"]]
    assert order[-3:] == ["decontamination", "near duplicates", "tokenize"]


def test_the_index_that_is_kept_names_what_entered_and_nothing_else(tmp_path: Path) -> None:
    ascii_tokenizer(tmp_path)
    (tmp_path / "held-out.txt").write_text(QUESTION, encoding="utf-8")
    given = asked(decontamination={"held_out": ["held-out.txt"]}, lossy="reject", target_tokens=9_000)
    texts = [document(0, QUESTION), document(1, "zażółć"), document(2), {**document(2, "x"), "id": "e2"}]
    facts = built(tmp_path, given, {"a": lines([*texts, *(document(number) for number in range(3, 30))])}, "first")
    assert set(facts["rejected"]) == {"held_out_exact", "lossy", "near_duplicate", "quota_reached"}
    first = {row["id"] for row in listed(tmp_path / "first" / "admitted.jsonl")}
    assert {name.removeprefix("small/a: ") for name in named(tmp_path / "first")} == first
    assert len(named(tmp_path / "first")) == len(first) == facts["admitted"]

    # What the first corpus had to let go is fresh for the second one, and all that either holds is known to a third.
    again = [{**document(number), "id": f"again{number}"} for number in range(30)]
    against = {"near": {**NEAR["near"], "against": "first/near-duplicates"}}
    later = asked(duplicates=against)
    facts = built(tmp_path, later, {"a": lines([*again, *(document(number) for number in range(100, 110))])}, "second")
    assert facts["rejected"] == {"near_duplicate": len(first)}
    fresh = {f"again{number}" for number in range(30) if f"d{number}" not in first}
    second = [row["id"] for row in listed(tmp_path / "second" / "admitted.jsonl")]
    assert fresh < set(second)
    assert named(tmp_path / "second")[: len(first)] == named(tmp_path / "first")
    assert {name.removeprefix("small/a: ") for name in named(tmp_path / "second")} == first | set(second)
