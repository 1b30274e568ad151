"""Ranks that were given another recipe are refused, and ranks on another kind of device promise no bits."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from small import Project

from assay.run.bits import keeps
from assay.train.numerics import of_all
from assay.train.ranks import Ranks

# One rank: it joins, and tells what the others' promises, and their recipe, make of its own.
RANK = """
import json, sys
from pathlib import Path
import torch
from assay.errors import Refused
from assay.recipe import load as recipes
from assay.train import numerics
from assay.train.ranks import join
place, kind, recipe = int(sys.argv[1]), sys.argv[2], recipes.load(Path(sys.argv[3]))
ranks = join(place, 3, place, torch.device("cpu"), Path(sys.argv[4]))
promise = {"device_kind": kind, "deterministic": True, "reduction": "canonical"}
try:
    numerics.refuse_strangers(ranks, recipe)
    said = ""
except Refused as fault:
    said = str(fault)
print(json.dumps([numerics.of_all(ranks, promise), said]), flush=True)
"""


def test_one_rank_alone_is_like_itself() -> None:
    promise = {"device_kind": "a", "deterministic": True, "reduction": "canonical"}
    assert of_all(Ranks(), promise) == promise
    assert keeps(promise)


def test_another_recipe_is_refused_on_every_rank_and_another_device_promises_no_bits(tmp_path: Path) -> None:
    project = Project(tmp_path / "project")
    one, other = project.recipe(), project.recipe("other", seed=8)
    (tmp_path / "meeting").mkdir()
    started = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(rank), kind, str(recipe), str(tmp_path / "meeting")],
            stdout=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        for rank, (kind, recipe) in enumerate((("a", one), ("b", one), ("b", other)))
    ]  # fmt: skip
    told = [json.loads(process.communicate(timeout=120)[0]) for process in started]
    for promise, said in told:
        assert (promise["device_kind"], [each["device_kind"] for each in promise["others"]]) == ("a", ["b"])
        assert not keeps(promise)
        assert said.startswith("the recipe of rank 2 has digest")
