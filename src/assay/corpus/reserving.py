"""Making a list of reserved documents, from a built corpus or from held-out items; see `reserved` for its use.

Names and digests are written, never a text. Nothing that exists is replaced.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from assay.corpus import looking
from assay.corpus.held_out import read_sets
from assay.corpus.receipt import ADMITTED, TOKENIZER
from assay.corpus.reserved import FORM, comparable, text_digest
from assay.corpus.tokenizer import FILE, decode, load
from assay.data.shard import Shard, open_shard
from assay.errors import InputError
from assay.files.digest import digest
from assay.files.publish import publish_new, refuse_existing
from assay.files.reading import inside

KINDS = ("text", "id", "title")


def reserve(
    origin: Path,
    out: Path,
    *,
    by: Sequence[str] = ("text",),
    pool: str | None = None,
    reason: str | None = None,
    text_fields: Sequence[str] = ("text",),
) -> dict[str, Any]:
    """Write the list of all documents of `origin` to the new file `out`; what is in it, by kind.

    `origin`: a folder that `corpus build` made (training and validation, `pool` the corpus's unless given), or a file
    of held-out items, .jsonl or .txt, for the stated `pool`; a text of an item is an entry. Texts of a corpus are
    decoded from its shards; a lossy document is named by its id in place of its text. Raises InputError for a faulty
    origin, a held-out file without pool, ids or titles asked of held-out items, and `out` taken.
    """
    refuse_existing(out)
    for kind in by:
        if kind not in KINDS:
            raise InputError(f"--by is {kind!r}; allowed: {', '.join(KINDS)}")
    counts = Counter[str]()
    if origin.is_dir():
        facts = looking.receipt(origin)
        pool = pool or str(facts["pool"])
        entries = _of_corpus(origin, facts, by, counts)
    else:
        if pool is None:
            raise InputError(f"{origin} is a file of held-out items, which state no pool; give --pool evaluation, say")
        if tuple(by) != ("text",):
            raise InputError(f"{origin} is a file of held-out items, which are known by their text; leave --by out")
        entries = _of_items(origin, text_fields, counts)
    why = {} if reason is None else {"reason": reason}
    lines = {json.dumps({**entry, "pool": pool, **why}, ensure_ascii=False, sort_keys=True): None for entry in entries}
    if not lines:
        raise InputError(f"{origin} holds nothing to reserve; a list names at least one document")
    data = "".join(f"{line}\n" for line in lines).encode("utf-8")
    publish_new(out, data)
    return {
        "list": str(out),
        "sha256": digest(data),
        "pool": pool,
        "documents": counts["documents"],
        "entries": len(lines),
        "by_id_as_lossy": counts["lossy"],
        "form": FORM,
    }


def _of_corpus(out: Path, facts: dict[str, Any], by: Sequence[str], counts: Counter[str]) -> Iterator[dict[str, str]]:
    """An entry for each admitted document of a built corpus."""
    tokenizer = load(out / TOKENIZER / FILE, facts["tokenizer"]["end_of_text"])
    shards: dict[str, Shard] = {}
    for record in looking.records(out / ADMITTED):
        counts["documents"] += 1
        entry: dict[str, str] = {}
        if "text" in by and not record["lossy"]:
            if record["shard"] not in shards:
                shards[record["shard"]] = open_shard(inside(out, record["shard"], "shard"))
            ids = shards[record["shard"]].ids[record["start"] : record["stop"]]
            entry["text_sha256"] = text_digest(decode(tokenizer, ids.tolist()))
        elif "text" in by:  # decoding does not give its text back
            counts["lossy"] += 1
            entry["id"] = record["id"]
        if "id" in by:
            entry["id"] = record["id"]
        if "title" in by and record["title"] is not None:
            entry["title"] = record["title"]
        if entry:
            yield entry


def _of_items(path: Path, text_fields: Sequence[str], counts: Counter[str]) -> Iterator[dict[str, str]]:
    """An entry for each text of the held-out items."""
    _, items = read_sets([path], text_fields)
    for item in items:
        counts["documents"] += 1
        for text in item.texts:
            if comparable(text):
                yield {"text_sha256": text_digest(text)}
