"""How far a long command is, on standard error: a bar with percent and remaining time, or plain lines off a terminal.

What is done within two seconds shows nothing. A stage whose end is not known shows that it lives, and no percent.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator

from assay.cli.show import note

Tell = Callable[[str, int, int | None, str], None]  # stage, done, in all when known, of what
SHOW_AFTER = 2.0  # seconds: what is done before that needs no progress display
LONGEST_SILENCE = 60.0  # seconds between plain lines; two at first


@contextlib.contextmanager
def progress() -> Iterator[Tell]:
    """Gives the function to tell with; the display goes when the block ends, the times of long stages stay."""
    with _bars() if sys.stderr.isatty() else _lines() as tell:
        yield tell


def amount(done: int, total: int | None, unit: str) -> str:
    """What is done, in words: `12,345 of 20,000 documents`, `1.5 of 3.0 MB`; nothing when nothing was counted."""
    if unit == "bytes":
        size, name = (1e6, "MB") if (total or done) >= 100_000 else (1e3, "kB")
        return f"{done / size:,.1f}{'' if total is None else f' of {total / size:,.1f}'} {name}"
    if total is None:
        return f"{done:,} {unit}" if done else ""
    return f"{done:,} of {total:,} {unit}"


def clock(seconds: float) -> str:
    """Hours, minutes, seconds: `1:02:03`, `0:07`."""
    minutes, rest = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


@contextlib.contextmanager
def _lines() -> Iterator[Tell]:
    """A plain line every two seconds, later more rarely, whether or not anything was done since."""
    told: tuple[str, int, int | None, str] | None = None
    began = time.monotonic()  # of the stage
    over = threading.Event()

    def tell(stage: str, done: int, total: int | None, unit: str) -> None:
        nonlocal told, began
        if told is None or stage != told[0]:
            began = time.monotonic()
        told = stage, done, total, unit

    def watch() -> None:
        start = time.monotonic()
        while not over.wait(min(LONGEST_SILENCE, max(SHOW_AFTER, (time.monotonic() - start) / 20))):
            if told is not None:
                note(_line(*told, time.monotonic() - began))

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield tell
    finally:
        over.set()
        watcher.join()


def _line(stage: str, done: int, total: int | None, unit: str, seconds: float) -> str:
    """One plain line: `sign: 50 % (1,500 of 3,000 documents), 0:07, about 0:07 left`."""
    share = f" {100 * done // total} %" if total else ""
    counted = amount(done, total, unit)
    left = f", about {clock(seconds * (total - done) / done)} left" if total and 0 < done < total else ""
    return f"{stage}:{share}{f' ({counted}),' if share else f' {counted},' if counted else ''} {clock(seconds)}{left}"


@contextlib.contextmanager
def _bars() -> Iterator[Tell]:
    """One bar for the stage that runs; a stage that took long leaves a line with its time."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn
    from rich.text import Text

    class Times(ProgressColumn):
        """Elapsed time, and what remains once that can be told."""

        def render(self, task: Task) -> Text:
            left = task.time_remaining
            return Text(clock(task.elapsed or 0) + ("" if left is None else f", {clock(left)} left"))

    display = Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=30),
        TextColumn("{task.fields[share]}"),
        TextColumn("{task.fields[counted]}"),
        Times(),
        console=Console(stderr=True, highlight=False),
        transient=True,
    )
    task = display.add_task("start", total=None, share="", counted="")
    timer = threading.Timer(SHOW_AFTER, display.start)
    timer.daemon = True
    current, reached, began = "start", "", time.monotonic()

    def finish() -> None:
        took = time.monotonic() - began
        if took > SHOW_AFTER and current != "start":
            display.console.print("  ".join(part for part in (current, reached, clock(took)) if part), style="dim")

    def tell(stage: str, done: int, total: int | None, unit: str) -> None:
        nonlocal current, reached, began
        if stage != current:
            finish()
            current, began = stage, time.monotonic()
            display.reset(task, total=None, description=stage, share="", counted="")
        reached = amount(total or done, None, unit)
        share = f"{100 * done // total:3} %" if total else ""
        # The bar moves to and fro until something is done: one that stands at nothing looks dead.
        display.update(
            task, total=total if done else None, completed=done, share=share, counted=amount(done, total, unit)
        )

    timer.start()
    try:
        yield tell
        finish()
    finally:
        timer.cancel()
        timer.join()
        display.stop()
