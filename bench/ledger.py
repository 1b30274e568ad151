"""CPU seconds to verify 100,000 receipts, beside a bare loop of json.loads and SHA-256 over the same lines.

Both are measured in turn, several rounds in one run, and the medians are shown. The promise is under
three seconds; the bare loop says what of it the machine itself takes.
"""

from __future__ import annotations

import hashlib
import json
import statistics
import tempfile
import time
from pathlib import Path

from assay.cli.show import console, table
from assay.files.digest import canonical_exact, digest
from assay.ledger.ledger import first_previous, read

COUNT, ROUNDS, LIMIT = 100_000, 5, 3.0


def write(path: Path) -> None:
    """A chain of receipts of the size that a seal of metrics has."""
    previous = first_previous("bench")
    with path.open("wb") as file:
        for number in range(COUNT):
            body = {"run_id": "bench"} if number == 0 else {
                "start": number * 4096, "stop": (number + 1) * 4096, "sha256": previous, "at": f"step {number}"
            }  # fmt: skip
            content = canonical_exact(
                {"seq": number, "time": "2026-11-30T10:00:00.000Z", "kind": "metrics.sealed", "body": body,
                 "previous": previous}
            )  # fmt: skip
            file.write(content + b"\n")
            previous = digest(content)


def verify(path: Path) -> int:
    """Assay's own reading: every line parsed, checked and chained."""
    return sum(1 for _ in read(path))


def bare(path: Path) -> int:
    """The least that any reader does: parse and hash, check nothing."""
    count = 0
    with path.open("rb") as file:
        for line in file:
            json.loads(line)
            hashlib.sha256(line[:-1]).hexdigest()
            count += 1
    return count


def main() -> None:
    """Measure and print; exit 1 when the promise is not kept."""
    seconds: dict[str, list[float]] = {"assay": [], "bare": []}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "ledger.jsonl"
        write(path)
        for _ in range(ROUNDS):
            for name, act in (("assay", verify), ("bare", bare)):
                began = time.process_time()
                assert act(path) == COUNT
                seconds[name].append(time.process_time() - began)
        size = path.stat().st_size
    median = {name: statistics.median(values) for name, values in seconds.items()}
    rows = [
        ("assay verifies the chain", f"{median['assay']:.2f}", f"{median['assay'] / median['bare']:.2f}"),
        ("json.loads and SHA-256 alone", f"{median['bare']:.2f}", "1.00"),
    ]
    out = console()
    out.print(
        table(
            f"{COUNT:,} receipts, {size / 1e6:.0f} MB, median of {ROUNDS}",
            ("what", "CPU seconds", "against bare"),
            rows,
        )
    )
    raise SystemExit(0 if median["assay"] < LIMIT else 1)


if __name__ == "__main__":
    main()
