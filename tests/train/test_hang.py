"""A hang ends the process with code 71, whatever becomes of its last words, and nothing else does."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

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
