"""What a receipt says about the machine holds no path, no host name and no secret."""

from __future__ import annotations

import json
import platform

import pytest
from small import Project

from assay.recipe import load as recipes
from assay.run.folder import create
from assay.run.provenance import code_identity, environment, provenance


def test_planted_secrets_paths_and_names_do_not_reach_a_receipt(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = platform.node()
    for name, value in {
        "CUDA_SECRET_TOKEN": "hush-1",
        "TORCH_my_password": "hush-2",
        "NCCL_AUTH": "hush-3",
        "TORCH_PROXY": "http://user:hush-4@proxy:3128",
        "AWS_SECRET_ACCESS_KEY": "hush-5",
        "HOME_OF_NOBODY": "/home/hush-6",
        "NCCL_TOPO_FILE": "/opt/hush-7/topo.xml",
        "NCCL_DEBUG_FILE": "file:///var/hush-8/nccl.log",
        "TORCH_LOGS": "+dynamo,/tmp/hush-9/a:/tmp/hush-10/b",
        "CUDA_CACHE_PATH": "/home/hush-11/my cache",
        "NCCL_HOSTID": node,
        "NCCL_COMM_ID": f"{node}:4242",
        "NCCL_DEBUG": "INFO",
        "CUDA_VISIBLE_DEVICES": "0,1",
    }.items():
        monkeypatch.setenv(name, value)
    recipe = project.recipe()
    run = create(project.path / "run", recipe, recipes.load(recipe))
    command = ["assay", "train", str(recipe), f"--run={run.path}", "--run", "runs/a", "@/etc/hush-12/x"]
    facts = provenance(run, command)
    text = json.dumps(facts)
    assert "hush" not in text
    assert str(project.path) not in text
    assert node not in text
    assert facts["command"] == ["assay", "train", "…/recipe.yaml", "--run=…/run", "--run", "runs/a", "@…/x"]
    told = facts["environment"]
    assert told["NCCL_DEBUG"] == "INFO"
    assert told["CUDA_VISIBLE_DEVICES"] == "0,1"
    assert told["NCCL_TOPO_FILE"] == "…/topo.xml"
    assert told["TORCH_LOGS"] == "+dynamo,…/a:…/b"
    assert told["CUDA_CACHE_PATH"] == "…/my cache"
    assert told["NCCL_HOSTID"] == facts["host"]
    assert {"CUDA_SECRET_TOKEN", "TORCH_my_password", "NCCL_AUTH", "TORCH_PROXY"}.isdisjoint(environment())


def test_the_same_host_has_another_name_in_another_run(project: Project) -> None:
    recipe = project.recipe()
    loaded = recipes.load(recipe)
    hosts = {provenance(create(project.path / name, recipe, loaded), [])["host"] for name in "ab"}
    assert len(hosts) == 2, "a digest of a host's name cannot be looked up or joined across runs"


def test_the_code_is_named_by_its_bytes(project: Project) -> None:
    first, second = code_identity(), code_identity.__wrapped__()  # as a process that starts now would say
    assert first == second
    assert first["files"] > 50
