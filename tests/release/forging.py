"""What a forger would do: change records and make every digest around them agree again."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from assay.files.digest import canonical, digest
from assay.ledger.ledger import first_previous

Record = dict[str, Any]


def records(path: Path) -> list[Record]:
    """The lines of a JSON Lines file."""
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def rechain(run: Path, change: Callable[[list[Record]], object]) -> None:
    """Change the ledger's receipts and chain them anew, so that the ledger alone holds again."""
    path = run / "ledger.jsonl"
    receipts = records(path)
    change(receipts)
    previous = first_previous(str(receipts[0]["body"]["run_id"]))
    lines = []
    for seq, receipt in enumerate(receipts):
        lines.append(canonical({**receipt, "seq": seq, "previous": previous}))
        previous = digest(lines[-1])
    path.write_bytes(b"".join(line + b"\n" for line in lines))


def set_receipt(run: Path, kind: str, number: int, **values: Any) -> None:
    """Change the body of the number-th receipt of a kind, and chain the ledger anew."""

    def change(receipts: list[Record]) -> None:
        [one for one in receipts if one["kind"] == kind][number]["body"].update(values)

    rechain(run, change)


def reseal(run: Path, change: Callable[[list[Record]], object]) -> None:
    """Change lines of the metrics (not their number) and seal the same stretches anew, chain included."""
    path = run / "metrics.jsonl"
    before = path.read_bytes()
    lines = records(path)
    change(lines)
    encoded = [json.dumps(line, separators=(",", ":")).encode() + b"\n" for line in lines]
    path.write_bytes(b"".join(encoded))

    def seal(receipts: list[Record]) -> None:
        for receipt in receipts:
            if receipt["kind"] == "metrics.sealed":
                body = receipt["body"]
                first, last = (before[: body[key]].count(b"\n") for key in ("start", "stop"))
                data = b"".join(encoded[first:last])
                start = len(b"".join(encoded[:first]))
                body.update(start=start, stop=start + len(data), sha256=digest(data))

    rechain(run, seal)


def remanifest(run: Path, folder: str, change: Callable[[Record], object]) -> None:
    """Change a checkpoint's manifest, and its receipt and sums with it."""
    path = run / folder / "manifest.json"
    manifest = json.loads(path.read_bytes())
    change(manifest)
    for name, item in manifest["files"].items():
        data = (run / folder / name).read_bytes()
        item.update(bytes=len(data), sha256=digest(data))
    path.write_text(json.dumps(manifest, indent=1, sort_keys=True) + "\n")

    def receipt(receipts: list[Record]) -> None:
        for one in receipts:
            if one["kind"] == "checkpoint.saved" and one["body"]["folder"] == folder:
                one["body"]["manifest_sha256"] = digest(path.read_bytes())
                for key in ("step", "weights_sha256", "state_sha256", "order_digest"):
                    one["body"][key] = manifest[key]

    rechain(run, receipt)


def flip(path: Path, place: int = -1) -> None:
    """Change one bit of one byte; by default of the middle byte."""
    data = bytearray(path.read_bytes())
    data[place if place >= 0 else len(data) // 2] ^= 1
    path.write_bytes(data)


def edit(path: Path, old: str, new: str) -> None:
    """Replace text that occurs in a file."""
    text = path.read_text()
    assert old in text, f"{old!r} is not in {path}"
    path.write_text(text.replace(old, new, 1))


def lines_of(path: Path, change: Callable[[list[bytes]], list[bytes]]) -> None:
    """Change the lines of a file."""
    path.write_bytes(b"".join(change(path.read_bytes().splitlines(keepends=True))))
