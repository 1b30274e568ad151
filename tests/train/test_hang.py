"""A hang ends the process with code 71, whatever becomes of its last words, and nothing else does."""

from __future__ import annotations

import dis
import json
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any

from assay.train.hang import Bounds, HangWatch

# Each case is a fork, so that torch is imported once; a watch that died instead of ending it answers 1.
SCRIPT = """
import json, os, sys, threading
from contextlib import suppress
from pathlib import Path
from assay.train.hang import Bounds, HangWatch

def tell(words): print(words, file=sys.stderr, flush=True)
def broken(words): raise BrokenPipeError("nobody listens")
def wrong(words): raise ValueError("a bug in what is told")

codes = {}
for folder, how in ((sys.argv[1], tell), (sys.argv[1] + "/missing", tell), (__file__, tell), (sys.argv[1], broken),
                    (sys.argv[1], wrong)):
    child = os.fork()
    if not child:
        watch = HangWatch(Bounds(0, 0), Path(folder), 3, lambda: False, how)
        watch.begin(compiling=False)
        with suppress(KeyError), watch.pause():
            raise KeyError("what has no bound may fail: the watch goes on")
        threading.Event().wait(20)
        os._exit(1)
    codes[f"{folder} {how.__name__}"] = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
print(json.dumps(codes))
"""


def test_a_hang_is_code_71_also_where_nothing_can_be_written_or_told(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    logs = tmp_path / "logs"
    logs.mkdir()
    done = subprocess.run([sys.executable, str(script), str(logs)], check=False, capture_output=True, text=True)
    codes = json.loads(done.stdout)
    assert set(codes.values()) == {71}, codes
    assert len(codes) == 5
    assert "most recent call first" in (logs / "rank-3.hang").read_text()
    assert done.stderr.count("tracebacks of all threads are in rank-3.hang of the segment's logs") == 1
    assert done.stderr.count("tracebacks of all threads are in rank-3.log of the segment's logs") == 2
    assert done.stderr.count("in _tracebacks") == 2, "where no file can be written they are in the log"


def test_a_long_save_is_never_measured_by_the_bound_of_the_update_behind_it(tmp_path: Path) -> None:
    """The watch may look between any two instructions of the loop's word that an update begins."""
    parked, asked = threading.Event(), list[str | None]()

    def park() -> bool:
        parked.set()
        return threading.Event().wait()  # its own looks would end this process

    watch = HangWatch(Bounds(update=0, compile=1e9), tmp_path, 0, park, lambda words: None)
    assert parked.wait(30)
    watch.begin(compiling=True)  # a save, under the long bound
    began = time.monotonic()
    while (now := time.monotonic()) == began:  # the save takes longer than an update may
        pass
    assert watch.overdue(now) is None

    def look(frame: FrameType, event: str, value: Any) -> Any:
        if frame.f_code is not HangWatch.begin.__code__:
            return None
        frame.f_trace_opcodes = True
        asked.append(watch.overdue(now))
        return look

    before = sys.gettrace()
    sys.settrace(look)
    try:
        watch.begin(compiling=False)
    finally:
        sys.settrace(before)
    assert len(asked) > len(list(dis.get_instructions(HangWatch.begin))) / 2, "not everything of it is run"
    assert set(asked) == {None}
    assert watch.overdue(time.monotonic()) is not None, "the short bound holds from there on"
