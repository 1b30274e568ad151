"""What a machine wrote that had lost the run by then: kept on the mirror, taken up by the run's owner, never merged.

The loser leaves its whole ledger and metrics, create-only. The owner reads them back, finds where they part from its
own, keeps them in `orphaned/` and states it: what the loser trained after its last copy is lost work.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from assay.errors import DataError, VerificationError
from assay.files.digest import digest_file
from assay.files.publish import publish_folder
from assay.ledger import chain
from assay.ledger.ledger import FILE as LEDGER_FILE
from assay.ledger.ledger import Ledger, Receipt, first_previous, now, read
from assay.mirror import records
from assay.mirror.leases import holder_of, trained_here
from assay.mirror.place import READBACK, Place
from assay.mirror.records import ORPHAN, PIECE_BYTES
from assay.mirror.transfer import Pace, Sender, receive, whole_lines
from assay.run import metrics
from assay.run.folder import RunFolder

METRICS = "metrics.jsonl"
# What a folder writes without having trained: such a one leaves nothing behind.
_IDLE = (
    "checkpoint.fetched", "checkpoint.removed", "preflight", "hold", "released", "lease", "slot.checked", "recovered",
)  # fmt: skip


def leave(where: Place, run: RunFolder, lease: int, piece: int = PIECE_BYTES) -> int | None:
    """Leave ledger and metrics of a folder that lost the run on the mirror; the record's number, or None: nothing to.

    `lease`: the folder's own. What was left before is not left again.
    """
    if not trained_here(read(run.ledger)):
        return None
    holder, run_id = holder_of(run), run.run_id()
    head = chain.head(run.ledger, first_previous(run_id))
    last = where.newest(records.orphan_name)
    for number in range(last, -1, -1):
        body = _record(where, number).body
        if (body.get("holder"), body["ledger"]["digest"]) == (holder, head.digest):
            return number
    sender = Sender(where, READBACK, piece, Pace(None, where.policy))
    with run.ledger.open("rb") as source:
        files = {LEDGER_FILE: sender.file(source, head.size)}
    if run.metrics.is_file():
        with run.metrics.open("rb") as source:
            files[METRICS] = sender.file(source, whole_lines(source))
    data = records.encode({
        "format": ORPHAN, "run_id": run_id, "time": now(), "piece": piece, "lease": lease, "holder": holder,
        "ledger": {"seq": head.lines - 1, "digest": head.digest}, "files": records.files_body(files),
    })  # fmt: skip
    number = last + 1
    while where.create(records.orphan_name(number), data) != data:
        number += 1  # another machine left its own at the same moment
    return number


def take_up(where: Place, run: RunFolder, ledger: Ledger, identity: str, number: int) -> Receipt | None:
    """Keep what lies under that number, and state it; None when it is this history's own, or was taken up before.

    DataError when what was left is damaged or is no ledger of this run.
    """
    found = _record(where, number)
    what = f"{where.url}/{records.orphan_name(number)}"
    mine = list(read(run.ledger))
    if any(one.kind == "orphaned" and one.body.get("record") == found.sha256 for one in mine):
        return None
    seq, sha256 = found.head
    if seq < len(mine) and mine[seq].digest == sha256:
        return None
    if found.body["run_id"] != ledger.run_id or not {LEDGER_FILE} <= found.files.keys() <= {LEDGER_FILE, METRICS}:
        raise DataError(f"{what} is not what a machine that lost this run leaves: another run, or other files")
    folder = run.path / "orphaned" / f"{number:08d}"
    with tempfile.TemporaryDirectory(prefix="assay-orphaned-") as temporary:
        there = Path(temporary)
        for name, copy in found.files.items():
            receive(where, copy, found.piece, there / name, f"{what}: {name}", lambda count, fetched: None)
        body = _body(mine, there, found, what)
        if body is None:
            return None
        if not folder.exists():  # a kill before the receipt leaves it
            with publish_folder(folder) as draft:
                for name in found.files:
                    (draft / name).write_bytes((there / name).read_bytes())
        for name, copy in found.files.items():
            if digest_file(folder / name) != copy.sha256:
                raise DataError(f"{folder / name} is not what {what} names; move the folder away")
    return ledger.append("orphaned", {
        "lease": found.lease, "mirror": identity, "record": found.sha256, "folder": f"orphaned/{number:08d}",
        "files": {name: copy.sha256 for name, copy in found.files.items()}, **body,
    } | _metrics(run, folder))  # fmt: skip


def _body(mine: list[Receipt], there: Path, found: records.Record, what: str) -> dict[str, Any] | None:
    """Where the two ledgers part, and how many receipts follow; None when the other one did nothing there."""
    try:
        theirs = list(read(there / LEDGER_FILE, str(found.body["run_id"])))
    except VerificationError as fault:
        raise DataError(f"{what}: {fault}") from None
    if not theirs or (theirs[-1].seq, theirs[-1].digest) != found.head:
        raise DataError(f"{what} does not carry the head of the ledger that it lists")
    shared = 0
    while shared < min(len(mine), len(theirs)) and mine[shared].digest == theirs[shared].digest:
        shared += 1
    rest = theirs[shared:]
    if not shared or all(one.kind in _IDLE for one in rest):
        return None
    return {
        "after": {"seq": shared - 1, "digest": mine[shared - 1].digest},
        "ledger": {"seq": found.head[0], "digest": found.head[1]},
        "receipts": len(rest),
    }


def _metrics(run: RunFolder, folder: Path) -> dict[str, Any]:
    """`updates`: the stretches [start, stop) that the other machine's metrics have beyond those of this run; `seconds`
    of them in all, null when some line has none."""
    own = {(line["update"], line["segment"], line["time"]) for line in metrics.updates(run.metrics)}
    stretches: list[list[int]] = []
    seconds: list[float | None] = []
    for line in metrics.updates(folder / METRICS):
        if (line["update"], line["segment"], line["time"]) in own:
            continue
        seconds.append(line.get("seconds"))
        if stretches and stretches[-1][1] == line["update"]:
            stretches[-1][1] += 1
        else:
            stretches.append([line["update"], line["update"] + 1])
    timed = [value for value in seconds if isinstance(value, float)]
    total = None if len(timed) < len(seconds) else f"{sum(timed):.6f}"
    return {"updates": stretches, "seconds": total}


def _record(where: Place, number: int) -> records.Record:
    name = records.orphan_name(number)
    data = where.read(name)
    if data is None:
        raise DataError(f"{where.url}/{name} was there and is gone; somebody removes records of this mirror")
    return records.parse(data, f"{where.url}/{name}", ORPHAN)
