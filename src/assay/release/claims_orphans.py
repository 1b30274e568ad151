"""What machines wrote that had lost the run: it chains, parts from the ledger where the receipt says, and is no more.

It is no part of the history; the claim is that nothing of it was changed or left out.
"""

from __future__ import annotations

from assay.errors import AssayError
from assay.files.digest import digest_file
from assay.files.reading import inside
from assay.ledger.ledger import FILE as LEDGER_FILE
from assay.ledger.ledger import Receipt, read
from assay.release.claims import Case, Claim, counted, differ, judge
from assay.release.claims_ledger import LEDGER


def orphaned_claim(case: Case) -> Claim | None:
    """Every receipt `orphaned` against the ledger that it is about; None without any."""
    if not case.history.orphaned:
        return None
    faults = [] if case.bundle else [fault for receipt in case.history.orphaned for fault in _faults(case, receipt)]
    total = sum(receipt.body["receipts"] for receipt in case.history.orphaned)
    return judge(
        LEDGER,
        "orphaned receipts",
        faults,
        f"{counted(total, 'receipt')} of {counted(len(case.history.orphaned), 'lease')} that lost the run, kept apart",
        "what machines wrote that had lost the run is not in a bundle" if case.bundle else None,
    )


def _faults(case: Case, receipt: Receipt) -> list[str]:
    body = receipt.body
    where = f"receipt {receipt.seq} (orphaned)"
    try:
        folder = inside(case.root, str(body.get("folder")), where)
        for name, sha256 in body.get("files", {}).items():
            found = digest_file(inside(folder, str(name), where))
            if found != sha256:
                return [differ(f"{body['folder']}/{name}", "the digest", sha256, found)]
        theirs = list(read(folder / LEDGER_FILE, case.history.run_id))
    except (AssayError, OSError) as fault:
        return [f"{where}: {fault}"]
    after, head = body.get("after", {}).get("seq"), body.get("ledger", {})
    if not isinstance(after, int) or not 0 <= after < min(len(theirs), receipt.seq):
        return [f"{where} does not say after which receipt the two ledgers part"]
    faults = []
    if not case.receipts[after].digest == theirs[after].digest == body["after"].get("digest"):
        faults.append(f"{where}: receipt {after} is not shared by the two ledgers")
    if (theirs[-1].seq, theirs[-1].digest) != (head.get("seq"), head.get("digest")):
        faults.append(differ(where, "the head", f"{head}", f"{theirs[-1].seq}, {theirs[-1].digest}"))
    if len(theirs) - after - 1 != body["receipts"]:
        faults.append(differ(where, "the number of receipts", str(body["receipts"]), str(len(theirs) - after - 1)))
    return faults
