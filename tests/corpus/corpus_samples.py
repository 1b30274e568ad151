"""Small corpora to build: a folder with sources, and the description that fits them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from assay.corpus.build import build
from assay.corpus.description import load

WORDS = ("system", "file", "okno", "wybierz", "press", "button", "zażółć", "gęślą", "folder", "network")


def prose(number: int, words: int = 40) -> str:
    """Text that differs from number to number and has word pairs to learn."""
    return f"Page {number}. " + " ".join(WORDS[(number * k + k * k) % len(WORDS)] for k in range(1, words))


def records(count: int, language: str = "en") -> list[dict[str, Any]]:
    """Well-formed documents; the same page number in another language is another text."""
    return [
        {"id": f"{language}/{n}", "page": str(n), "title": f"Page {n}", "text": f"{language}: {prose(n)}"}
        for n in range(count)
    ]


def lines(documents: list[dict[str, Any]]) -> bytes:
    """Documents as JSON Lines."""
    return b"".join(json.dumps(document, ensure_ascii=False).encode() + b"\n" for document in documents)


def source(name: str, **changes: Any) -> dict[str, Any]:
    """A source as a description states it."""
    licence = {"spdx": "CC-BY-4.0", "evidence": "title page", "decision": "admitted"}
    given = {"name": name, "path": f"{name}.jsonl", "columns": {"title": "title"}, "language": "en"}
    return {**given, "licence": licence, "revision": "1", "retrieved": "2026-11-30", **changes}


def description(sources: list[dict[str, Any]], **changes: Any) -> dict[str, Any]:
    """A description of these sources."""
    given: dict[str, Any] = {
        "name": "small",
        "sources": sources,
        "admission": {"licences": ["CC-BY-4.0"]},
        "filters": {"min_chars": 10},
        "tokenizer": {"train": {"vocabulary": 300}},
        "validation": {"fraction": 0.2, "key": "page"},
        "shards": 2,
    }
    return {**given, **changes}


def write(folder: Path, given: dict[str, Any], files: dict[str, bytes]) -> Path:
    """Write the sources (name → bytes) and the description; its path. JSON is YAML 1.2 as well."""
    for name, data in files.items():
        (folder / f"{name}.jsonl").write_bytes(data)
    path = folder / "corpus.yaml"
    path.write_text(json.dumps(given, ensure_ascii=False), encoding="utf-8")
    return path


def built(folder: Path, given: dict[str, Any], files: dict[str, bytes], out: str = "out") -> dict[str, Any]:
    """Write, load and build; the receipt."""
    return build(load(write(folder, given, files)), folder / out)


def listed(path: Path) -> list[dict[str, Any]]:
    """The objects of a JSON Lines file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]


def left(out: Path) -> list[dict[str, Any]]:
    """The rejected documents of a built corpus, in corpus order."""
    rows: list[dict[str, Any]] = pq.read_table(out / "rejected.parquet").to_pylist()
    return rows


def tree(folder: Path) -> dict[str, bytes]:
    """Every file below a folder with its bytes."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}
