"""The run's inbox: what other machines have to say, as files that the owner of the ledger appends with their names.

Each file is one receipt of another machine's chain, whose place and digest it states. Taking up is done once, in
order, by any process that may write the ledger; what is no such file is put aside and said. It decides nothing.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from assay.errors import AssayError, InputError
from assay.files.digest import digest, is_digest
from assay.files.lock import take
from assay.files.publish import publish_file
from assay.files.reading import parse_json, read_bytes
from assay.ledger.ledger import Ledger, Receipt, read
from assay.run.folder import RunFolder

FORMAT = "assay-inbox/1"
FOLDER = "inbox"
KINDS = ("guard", "alarm", "price", "spend", "hold", "released")  # what another machine may say
LIMIT = 1 << 20
HEARTBEAT = "heartbeat"  # no receipt: see `beat`


def folder(run: RunFolder) -> Path:
    """Where the files lie; there may be no such folder."""
    return run.path / FOLDER


def put(run: RunFolder, receipt: Receipt, chain: str) -> None:
    """Leave a receipt of the chain named `chain` for the owner; a file that is there already stays."""
    value = {
        "format": FORMAT, "kind": receipt.kind, "time": receipt.time, "body": receipt.body,
        "chain": {"name": chain, "seq": receipt.seq, "digest": receipt.digest},
    }  # fmt: skip
    place = folder(run)
    place.mkdir(exist_ok=True)
    publish_file(place / f"{chain}-{receipt.seq:08d}.json", (json.dumps(value, sort_keys=True) + "\n").encode())


def taken_up(run: RunFolder, chain: str) -> int:
    """The highest place of that chain that the ledger has taken up; -1 for none."""
    marks = (receipt.body.get("inbox") for receipt in read(run.ledger))
    return max((mark["seq"] for mark in marks if isinstance(mark, dict) and mark["chain"] == chain), default=-1)


def waiting(run: RunFolder) -> list[Path]:
    """Files that nobody has taken up, in order; costs one look at a folder."""
    try:
        names = os.listdir(folder(run))
    except FileNotFoundError:
        return []
    return [folder(run) / name for name in sorted(names) if name.endswith(".json") and not name.startswith(".")]


def take_up(run: RunFolder, ledger: Ledger) -> list[Receipt]:
    """Append what waits, each once even when an earlier call was killed; the receipts, in order.

    A receipt's body gains `inbox`: the file's name and digest, and the chain's name, seq and digest. What another
    machine may not say, or says wrongly, becomes a receipt `inbox` with the reason, and the file `….refused`.
    """
    if not waiting(run):
        return []
    with (folder(run) / ".lock").open("ab") as lock:
        # Nobody waits for somebody else who does it: what is not taken up now is at the next look.
        return _take_up(run, ledger) if take(lock, 0.0) else []


def _take_up(run: RunFolder, ledger: Ledger) -> list[Receipt]:
    new: list[Receipt] = []
    highest: dict[str, int] = {}
    for path in waiting(run):
        try:
            raw = read_bytes(path, "a file of the inbox", LIMIT)
            kind, body, mark = _said(raw, path)
        except AssayError as fault:
            if not path.exists():  # another process took it up
                continue
            reason = str(fault).replace(f"{path.parent}{os.sep}", "")
            new.append(ledger.append("inbox", {"file": path.name, "refused": reason}))
            path.rename(path.with_name(f"{path.name}.refused"))
            continue
        known = highest.setdefault(mark["chain"], taken_up(run, mark["chain"]))
        if mark["seq"] > known:
            new.append(ledger.append(kind, {**body, "inbox": mark}))
            highest[mark["chain"]] = mark["seq"]
        path.unlink(missing_ok=True)
    return new


def _said(raw: bytes, path: Path) -> tuple[str, dict[str, Any], dict[str, Any]]:
    said = parse_json(raw, str(path))
    chain = said.get("chain") if isinstance(said, dict) else None
    if not isinstance(said, dict) or said.get("format") != FORMAT or not isinstance(chain, dict):
        raise InputError(f"{path} is not a file of {FORMAT}")
    kind, body = said.get("kind"), said.get("body")
    if kind not in KINDS or not isinstance(body, dict):
        raise InputError(f"{path} is of the kind {kind!r}; another machine may say {', '.join(KINDS)}")
    name, seq = chain.get("name"), chain.get("seq")
    if not isinstance(name, str) or type(seq) is not int or path.name != f"{name}-{seq:08d}.json":
        raise InputError(f"{path} does not bear the name of its chain and its place in it")
    if kind == "hold" and body.get("cause") != "guard":
        raise InputError(f"{path} holds the run with the cause {body.get('cause')!r}; guard is what it may say")
    if not is_digest(chain.get("digest")):
        raise InputError(f"{path} states no digest of its receipt")
    mark = {"file": path.name, "sha256": digest(raw), "chain": name, "seq": seq, "digest": chain["digest"]}
    return kind, body, mark


def beat(run: RunFolder, facts: dict[str, Any]) -> None:
    """The guard's sign of life; what counts is that the file changes, by the reader's own clock."""
    folder(run).mkdir(exist_ok=True)
    publish_file(folder(run) / HEARTBEAT, (json.dumps(facts, sort_keys=True) + "\n").encode())


def last_beat(run: RunFolder) -> bytes | None:
    """What the newest sign of life says, byte for byte; None before the first."""
    try:
        return (folder(run) / HEARTBEAT).read_bytes()
    except FileNotFoundError:
        return None
