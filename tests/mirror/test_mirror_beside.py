"""What a mirror means to the rest: pre-flight proves it, retention waits for it, status tells of it and warns."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from faulty_proxy import ALWAYS, Fault, Proxy
from mirror_runs import Clock
from small import Project, drive

from assay.launch.preflight import Check, preflight, refusals
from assay.ledger.ledger import now
from assay.mirror.copying import Report, claim, verified_by
from assay.mirror.place import place
from assay.recipe import load as recipes
from assay.run.folder import RunFolder
from assay.run.history import AWAITED, SAFE, Saved, history
from assay.run.status import late_copies, status


def checked(recipe: Path, run: RunFolder) -> Check:
    """The outcome of the check `mirror`, the only one that may refuse."""
    checks = preflight(recipes.load(recipe), recipe.parent, run)
    assert {one.name for one in refusals(checks)} <= {"mirror"}
    return next(one for one in checks if one.name == "mirror")


def test_pre_flight_proves_the_mirror(trained: Path, run: RunFolder, store: Proxy, url: str, clock: Clock) -> None:
    project = run.path.parent
    values = json.loads((project / "recipe.yaml").read_text())
    recipe = project / "mirrored.yaml"
    recipe.write_text(json.dumps(values | {"checkpoint": values["checkpoint"] | {"mirror": {"url": url}}}))
    fresh = RunFolder(project / "fresh")
    found = checked(recipe, fresh)
    assert found.result == "passed"
    assert f"run beside training: assay mirror {fresh.path} {url}" in found.detail
    assert checked(recipe, run).result == "passed"
    claim(place(url, clock.policy()), "another")
    assert "holds run another already: go on with it" in checked(recipe, fresh).detail
    assert "holds run another, but" in checked(recipe, run).detail
    store.faults = [Fault("PUT", "unconditional", ALWAYS)]
    assert "does not honour create-only puts" in checked(recipe, fresh).detail
    store.faults = [Fault("", "403", ALWAYS)]
    found = checked(recipe, fresh)
    assert (found.result, found.code) == ("refused", 3)


def test_retention_waits_for_the_copy(tmp_path: Path, copy: Callable[..., Report]) -> None:
    """With a mirror in the recipe: nothing newer than the newest verified copy goes, and that one stays as well."""
    copies = tmp_path / "copies"
    copies.mkdir()
    project = Project(tmp_path / "own")
    recipe = project.recipe(
        checkpoint={"every": 3, "keep": 1, "slot_ends": False, "mirror": {"url": str(copies)}}, evaluate={"every": None}
    )
    run = RunFolder(project.path / "run")

    def standing() -> list[str]:
        return sorted(path.name for path in run.checkpoints.glob("step-*"))

    assert drive(recipe, run.path, until="9") == 0
    assert standing() == ["step-000003", "step-000006", "step-000009"], "nothing has a copy yet, so nothing goes"
    copy(run, str(copies))
    assert drive(recipe, run.path, resume=True, until="15") == 0
    assert standing() == ["step-000009", "step-000012", "step-000015"], "the newest copy, and what waits for one"
    assert status(run)["mirrored"] == 9
    copy(run, str(copies))
    assert drive(recipe, run.path, resume=True, until="18") == 0
    assert standing() == ["step-000015", "step-000018"]


def test_copies_are_proved_as_the_newest_segment_s_recipe_says(run: RunFolder) -> None:
    """By that one retention goes; the recipe may say otherwise than when the run was made."""
    assert verified_by(run) == "readback"
    [*_, last] = history(run.ledger).segments
    for mirror, how in (({"url": "x", "verify": "stored"}, "stored"), (None, "readback")):
        said = {"resolved": {"checkpoint": {"mirror": mirror}}, "segment": last.number + 1, "mode": "resume"}
        body = last.body | said
        run.open_ledger().append("recovery", body)
        assert verified_by(run) == how


def test_status_warns_of_copies_that_do_not_come() -> None:
    def full(step: int, time: str, copy: str | None = AWAITED) -> Saved:
        return Saved(step, 1, step, "full", f"checkpoints/step-{step:06d}", f"m{step}", None, "w", "o", time, copy)

    old = "2026-01-01T00:00:00.000Z"
    assert late_copies([]) == []
    assert late_copies([full(6, now())]) == [], "a copy takes its time"
    [warning] = late_copies([full(6, old), full(12, now())])
    assert "the full checkpoint of step 6, saved at 2026-01-01T00:00:00.000Z, has no verified copy" in warning
    assert late_copies([full(6, old), full(12, now(), SAFE)]) == [], "a newer copy is as good"
    [warning] = late_copies([full(6, old, SAFE), full(12, old), full(18, now())])
    assert "step 12" in warning
    assert late_copies([replace(full(6, old), copy=None)]) == [], "a recipe without a mirror waits for none"


def test_status_warns_of_a_copy_beyond_the_limit_that_is_asked_for(
    run: RunFolder, copy: Callable[..., Report], tmp_path: Path
) -> None:
    def warned(limit: float | None) -> list[str]:
        return [one for one in status(run, limit)["warnings"] if "on this machine alone" in one]

    assert warned(None) == []
    assert warned(3600) == []
    assert "no full checkpoint has a verified copy, and training began at" in warned(0)[0]
    (tmp_path / "copies").mkdir()
    copy(address=str(tmp_path / "copies"))
    assert "the newest verified copy is of step 12" in warned(0)[0]
    assert warned(3600) == []


def test_status_tells_the_age_of_the_newest_copy(
    run: RunFolder, copy: Callable[..., Report], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from assay.cli.train import status_command

    status_command(run.path, copy_hours=None)
    assert "no verified copy" in capsys.readouterr().out
    (tmp_path / "copies").mkdir()
    copy(address=str(tmp_path / "copies"))
    status_command(run.path, copy_hours=None)
    assert re.search(r"12 \(saved \d+:\d\d", capsys.readouterr().out)
