"""The task file that we write is what SkyPilot's own loader reads."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from assay.launch import skypilot
from assay.launch.description import task

PYTHON = Path(__file__).parents[2] / "build" / "skypilot" / "bin" / "python"  # .ci/run makes it

LOAD = """
import json, sys, sky
task = sky.Task.from_yaml(sys.argv[1])
resources = [{"infra": str(one.infra.to_str()), "accelerators": one.accelerators, "spot": one.use_spot,
              "disk": one.disk_size, "idle": one.autostop_config.idle_minutes, "down": one.autostop_config.down}
             for one in task.resources]
print(json.dumps({"name": task.name, "run": task.run, "setup": task.setup, "nodes": task.num_nodes,
                  "ordered": isinstance(task.resources, list), "resources": resources}))
"""


@pytest.mark.root
def test_skypilots_loader_reads_our_task_as_it_is_meant(tmp_path: Path) -> None:
    places = ["gcp/us-central1/us-central1-a", "aws/us-east-2"]
    asked = {"cluster": "small", "infra": places, "accelerators": "H100:8", "disk_gb": 512, "idle_minutes": 20,
             "setup": ["pip install 'assay[train]'"]}  # fmt: skip
    path = tmp_path / "launch.yaml"
    path.write_text(
        json.dumps({"recipe": "recipe.yaml", "run": "run", "ranks": 8, "on": "skypilot", "skypilot": asked})
    )
    (tmp_path / "task.yaml").write_text(skypilot.task_file(task(path, None, None, None)))
    done = subprocess.run(
        [PYTHON, "-c", LOAD, tmp_path / "task.yaml"],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        env={**os.environ, "SKYPILOT_DISABLE_USAGE_COLLECTION": "1"},
    )
    assert done.returncode == 0, done.stderr
    common = {"accelerators": {"H100": 8}, "spot": True, "disk": 512, "idle": 20, "down": False}
    assert json.loads(done.stdout) == {
        "name": "small", "nodes": 1, "ordered": True, "setup": "set -e\npip install 'assay[train]'",
        "run": "assay launch launch.yaml --on local --ranks 8",
        "resources": [{"infra": place, **common} for place in places],
    }  # fmt: skip
