"""What a start asks of the run's mirror: whether another machine has the run, and, on a fresh node, the run itself.

It comes before pre-flight, since pre-flight looks at the folder that it brings; the lease is taken after it. Nothing
is started anew while the mirror cannot be reached.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from assay.errors import Interrupted, Refused
from assay.files.retry import Policy
from assay.files.stores import folder_of
from assay.launch.child import start
from assay.launch.machine import nearest
from assay.mirror import copying, leases, records
from assay.mirror.fetching import Fetched, fetch
from assay.mirror.place import Place, place
from assay.mirror.transfer import Tell
from assay.recipe.schema import Recipe
from assay.run.duties import DUE, MIRROR, duties
from assay.run.folder import RunFolder

DUTIES_SECONDS = 3600.0  # that they may keep the machine from training
ASK_SECONDS = 30.0  # that a mirror may take to answer before it is called unreachable


def arrive(
    recipe: Recipe, folder: Path, run: RunFolder, auto: bool, tell: Tell, policy: Policy | None = None
) -> Fetched | None:
    """Ask the recipe's mirror, if it names one, before a start of `run`; the recipe's paths count from `folder`.

    With `auto` and no run here, the mirror's is brought, and its next lease taken; returns what was brought. Raises
    Interrupted (75) when the mirror cannot be reached, Refused (3) when another machine took the run from this folder:
    what only this folder has is then left on the mirror as orphaned, and a hold stands.
    """
    wanted = recipe.checkpoint.mirror
    if wanted is None or not (auto or run.exists()):
        return None
    where = _reached(wanted.url, auto, policy or Policy(ASK_SECONDS))
    held = where.read(records.PLACE_FILE)
    if held is None:
        _refuse_unmounted(where, run, auto)
        return None  # nobody's yet: a run may begin
    theirs, identity = records.parse_place(held, f"{where.url}/{records.PLACE_FILE}")
    if not run.exists():
        return fetch(wanted.url, run.path, policy=Policy(), project=folder, own=True, tell=tell)
    if run.run_id() == theirs:  # pre-flight refuses the mirror of another run
        copying.stand(run, where, identity)
    return None


def take_over(recipe: Recipe, run: RunFolder) -> int | None:
    """The lease of a start that pre-flight let through, or None where the recipe has no mirror."""
    wanted = recipe.checkpoint.mirror
    return None if wanted is None else copying.own(run, wanted.url, Policy(ASK_SECONDS), wanted.verify)


def catch_up(run: RunFolder, seconds: float = DUTIES_SECONDS) -> None:
    """Do the evaluations and exports that were due when the run last stood, in a process of their own, before training.

    They need the device and its memory, which training takes next. What fails, or takes longer than `seconds` in all,
    is told, and stays due. A signal to this process ends it too.
    """
    due = [one for one in duties(run) if one.state == DUE and one.act != MIRROR]
    if not due:
        return
    child = start(["duties", str(run.path), "--do"])
    try:
        code: int | None = child.wait(seconds)
    except subprocess.TimeoutExpired:
        code = None
    finally:
        if child.poll() is None:  # what it was writing is made anew by the next one
            child.kill()
            child.wait()
    if code != 0:
        why = f"not done after {seconds:,.0f} s" if code is None else f"not done (exit {code})"
        print(f"what was due is {why}; training goes on: assay duties {run.path} --do", file=sys.stderr)


def _refuse_unmounted(where: Place, run: RunFolder, auto: bool) -> None:
    """A place without a mirror is none to begin in where the run has its copies there, or where nobody can tell.

    An empty folder on the disk of the run, or of the system, looks as the mount point of a missing disk does; copies
    there would not outlive this machine either. Whoever means it says so by `--start new`.
    """
    if run.exists():
        why = leases.emptied(where, run)
        if why is not None:
            raise Interrupted(why, "network") if auto else Refused(why)
        return
    folder = folder_of(where.url)
    if folder is None or any(folder.iterdir()):
        return
    if folder.stat().st_dev in (nearest(run).stat().st_dev, Path("/").stat().st_dev):
        raise Refused(
            f"{where.url} is empty and on a disk of this machine's own, as the mount point of a disk that is not "
            "mounted is: mount it; or, should the mirror be new, run assay preflight or begin with --start new"
        )


def _reached(url: str, auto: bool, policy: Policy) -> Place:
    """A folder that is not mounted is a mirror that cannot be reached: `--start auto` waits for it."""
    folder = folder_of(url)
    if auto and folder is not None and not folder.is_dir():
        raise Interrupted(f"the mirror {url} cannot be reached: it is not a folder here; mount it, then start again",
                          "network")  # fmt: skip
    return place(url, policy)
