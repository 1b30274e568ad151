"""A project with one sound file of every kind that Assay reads, the ways to spoil one, and the command called here."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from small import Project, drive
from tokenizers import Tokenizer, models

from assay.cli.main import STOPS, main

HUGE = 1 << 41


def rewrite(change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    def act(path: Path) -> None:
        path.write_bytes(change(path.read_bytes()))

    return act


def empty_first(make: Callable[[Path], object]) -> Callable[[Path], None]:
    def act(path: Path) -> None:
        path.unlink()
        make(path)

    return act


def sparse(path: Path) -> None:
    with path.open("r+b") as file:
        file.truncate(HUGE)


# Nothing is unreadable for the user root, under whom tests often run; a link to itself cannot be opened by anybody.
FAULTS: dict[str, Callable[[Path], None]] = {
    "missing": Path.unlink,
    "empty": rewrite(lambda data: b""),
    "truncated": rewrite(lambda data: data[: len(data) // 2 + 1]),
    "wrong type": rewrite(lambda data: b"[1]\n"),
    "huge": sparse,
    "not UTF-8": rewrite(lambda data: b"\xff\xfe" + data),
    "CRLF": rewrite(lambda data: data.replace(b"\n", b"\r\n")),
    "folder": empty_first(Path.mkdir),
    "pipe": empty_first(os.mkfifo),
    "dangling link": empty_first(lambda path: path.symlink_to("nowhere")),
    "link to itself": empty_first(lambda path: path.symlink_to(path.name)),
}


def version(old: str) -> Callable[[Path], None]:
    """The same file of a later format."""

    def act(path: Path) -> None:
        data = path.read_bytes()
        assert old.encode() in data, path
        path.write_bytes(data.replace(old.encode(), old[:-1].encode() + b"9", 1))

    return act


def make(path: Path) -> Project:
    """A project with a run of six updates, a corpus, expected batches and a Hugging Face folder."""
    project = Project(path, slots=((7, 2),))
    recipe = project.recipe(
        model={"layers": 1, "width": 16, "heads": 2, "kv_heads": 2, "vocabulary": 61, "block": 16, "ffn": 24},
        schedule={"kind": "constant", "updates": 6, "warmup": 1},
        checkpoint={"every": 3, "keep": "all"},
        evaluate={"every": None},
    )
    assert drive(recipe, path / "run") == 0
    texts = "".join(
        json.dumps({"id": str(n), "page": str(n), "title": f"t{n}", "text": f"Page {n} of prose."}) + "\n"
        for n in range(9)
    )
    (path / "texts.jsonl").write_text(texts)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.add_special_tokens(["<|end|>"])
    tokenizer.save(str(path / "tokenizer.json"))
    licence = {"spdx": "CC-BY-4.0", "evidence": "title page", "decision": "admitted"}
    source = {"name": "texts", "path": "texts.jsonl", "columns": {"title": "title"}, "language": "en",
              "licence": licence, "revision": "1", "retrieved": "2026-11-30"}  # fmt: skip
    corpus = {"name": "small", "sources": [source], "admission": {"licences": ["CC-BY-4.0"]}, "shards": 1,
              "filters": {"min_chars": 1}, "validation": {"fraction": 0.2, "key": "page"},
              "tokenizer": {"train": {"vocabulary": 260}}}  # fmt: skip
    (path / "corpus.yaml").write_text(json.dumps(corpus) + "\n")
    given = {**corpus, "tokenizer": {"path": "tokenizer.json"}}
    (path / "given.yaml").write_text(json.dumps(given) + "\n")
    (path / "reserved.jsonl").write_text('{"pool": "gold", "id": "8", "title": "t8"}\n')
    kept = {**corpus, "admission": {"licences": ["CC-BY-4.0"], "reserved": ["reserved.jsonl"]}}
    (path / "reserving.yaml").write_text(json.dumps(kept) + "\n")
    (path / "evidence.md").write_text("The card of 1.07 states 14,520,680,448 positions.\n")
    part, queue = path / "data/train-0", path / "data/queue.jsonl"
    code, out, _ = call("data", "propose", queue, part, "--updates", 2, "--global-batch", 8, "--json")
    assert code == 0
    (path / "line.json").write_text(json.loads(out)["line"])
    code, _, err = call("data", "overlap", part, "--queue", queue, "--exact", "--out", path / "overlap.json")
    assert code == 0, err
    code, out, _ = call("data", "batches", path / "data/queue.jsonl", "--seed", 7, "--global-batch", 8, "--json")
    assert code == 0
    (path / "expected.json").write_text(out)
    code, _, err = call("export", path / "run", path / "hf")
    assert code == 0, err
    return project


class Streams:
    """Standard output and error of one command."""

    def __init__(self) -> None:
        self.text = ""

    def write(self, text: str) -> int:
        self.text += text
        return len(text)

    def flush(self) -> None:
        pass

    def isatty(self) -> bool:
        return False


def call(*words: Any) -> tuple[int, str, str]:
    """The command's code, standard output and standard error, run in this process."""
    before = sys.argv, sys.stdout, sys.stderr
    handlers = {number: signal.getsignal(number) for number in STOPS}  # `train` keeps them to its end
    out, err = Streams(), Streams()
    sys.argv, sys.stdout, sys.stderr = ["assay", *map(str, words)], out, err  # type: ignore[assignment]
    code = 0
    try:
        main()
    except SystemExit as left:
        code = left.code if isinstance(left.code, int) else 0 if left.code is None else 1
    finally:
        sys.argv, sys.stdout, sys.stderr = before
        for number, handler in handlers.items():
            signal.signal(number, handler)
    return code, out.text, err.text


def fingerprint(folder: Path) -> dict[str, tuple[Any, ...]]:
    """What stands below a folder: kind, size and time of every entry, none of them read."""
    found = {}
    for place, folders, files in os.walk(folder):
        for name in [*folders, *files]:
            path = Path(place) / name
            state = path.lstat()
            found[str(path.relative_to(folder))] = (state.st_mode, state.st_size, state.st_mtime_ns, state.st_ino)
    return {name: value[:1] if value[0] & 0o170000 == 0o040000 else value for name, value in found.items()}


def spoilt(path: Path, spoil: Callable[[Path], None]) -> Callable[[], None]:
    """Spoil a file; the result puts the sound one back."""
    aside = path.with_name(path.name + ".sound")
    shutil.copy2(path, aside)
    spoil(path)

    def back() -> None:
        if path.is_dir() and not path.is_symlink():
            path.rmdir()
        else:
            with suppress(FileNotFoundError):
                path.unlink()
        os.replace(aside, path)

    return back
