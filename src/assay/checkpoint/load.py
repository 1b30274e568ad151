"""Loading checkpoints: the newest that holds, every byte checked against its manifest first.

A damaged checkpoint is never used and never removed; the older one is taken and the caller is
told, so that a receipt can say so. No pickle is read on any path.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from assay.checkpoint import manifest as manifests
from assay.checkpoint.manifest import Manifest, problems, read_manifest
from assay.errors import DataError, InputError
from assay.files.digest import digest_file, is_digest
from assay.files.reading import read_object
from assay.run.history import Saved


@dataclass(frozen=True)
class Loaded:
    """A checkpoint in host memory; `optimizer` and `state` are empty for a weights checkpoint."""

    manifest: Manifest
    model: dict[str, Tensor]
    optimizer: dict[str, Tensor]
    state: dict[str, Any]


def load(folder: Path) -> Loaded:
    """Load one checkpoint folder; DataError (exit 4) naming whatever does not hold."""
    manifest = read_manifest(folder)
    faults = problems(manifest, tensors=False)
    if faults:
        raise DataError("; ".join(faults))
    full = manifest.kind == "full"
    for name in (manifests.STATE, manifests.RECIPE) if full else ():
        if name not in manifest.files:
            raise DataError(f"{folder / manifests.MANIFEST} lists no {name}, which a {manifest.kind} checkpoint has")
    model = load_tensors(manifest, manifests.MODEL)
    optimizer = load_tensors(manifest, manifests.OPTIMIZER) if full else {}
    absent = sorted(manifest.tensors.keys() - model.keys() - optimizer.keys())
    if absent:
        raise DataError(f"{folder}: no file holds {absent[0]!r}, which the manifest lists ({len(absent)} such)")
    return Loaded(manifest, model, optimizer, _state(manifest) if full else {})


def load_tensors(manifest: Manifest, name: str) -> dict[str, Tensor]:
    """The model's or the optimizer's tensors in host memory, from one file or from all shards; DataError otherwise."""
    result: dict[str, Tensor] = {}
    for file in manifests.tensor_files(manifest, name):
        path = manifest.folder / file
        try:
            found = load_file(path)
        except OSError as fault:
            raise DataError(f"{path} cannot be read: {fault}") from None
        except SafetensorError as fault:
            raise DataError(f"{path} is not safetensors ({fault}), though its digest is right") from None
        for one in found:
            if one in result or one not in manifest.tensors:
                why = "another shard holds too" if one in result else "the manifest does not list"
                raise DataError(f"{path} holds {one!r}, which {why}; it is of another checkpoint")
        result |= found
    return result


def _state(manifest: Manifest) -> dict[str, Any]:
    """The state of a full checkpoint, checked: whoever wrote manifest and file together may have been anybody."""
    path = manifest.folder / manifests.STATE
    try:
        state = read_object(path, "the state of a checkpoint")
    except InputError as fault:
        raise DataError(str(fault)) from None
    rng, recent = state.get("rng"), state.get("recent")
    good = (
        state.get("step") == manifest.step
        and state.get("order_digest") == manifest.order_digest
        and is_digest(manifest.order_digest)
        and isinstance(rng, dict)
        and isinstance(rng.get("cpu"), str)
        and _of_a_generator(rng["cpu"])
        and isinstance(recent, list)
        and all(
            isinstance(item, dict)
            and type(item.get("update")) is int
            and 0 <= item["update"] < manifest.step
            and is_digest(item.get("before"))
            and is_digest(item.get("batch"))
            for item in recent
        )
        and _window(state.get("spikes"))
    )
    if not good:
        raise DataError(f"{path} is damaged: a key is missing, of the wrong type, or not what the manifest states")
    return state


def _of_a_generator(text: str) -> bool:
    """Whether torch's generator can be in this state: the right bytes of it, and sound ones."""
    try:
        torch.Generator().set_state(torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8))
    except (ValueError, RuntimeError):
        return False
    return True


def _window(spikes: Any) -> bool:
    """Whether this is what the policy for spikes goes by; None: from before there was one."""
    return spikes is None or (
        isinstance(spikes, dict)
        and isinstance(spikes.get("norms"), list)
        and all(type(norm) in (int, float) and 0 <= norm <= sys.float_info.max for norm in spikes["norms"])
        and type(spikes.get("skipped")) is int
        and spikes["skipped"] >= 0
    )


def newest(run_path: Path, saved: list[Saved], step: int | None) -> tuple[Loaded, list[str]]:
    """The newest full checkpoint that holds, and what was wrong with newer ones.

    `saved` are the receipts of checkpoints that stand. With `step`, only that step is tried. A folder
    whose manifest is not the one that the receipt names is treated as damaged. DataError (exit 4)
    when none holds: nothing is ever started anew instead.
    """
    full = [item for item in saved if item.kind == "full" and step in (None, item.step)]
    if not full:
        wanted = "no full checkpoint" if step is None else f"no full checkpoint of step {step}"
        raise DataError(f"{run_path} has {wanted}; those that stand: {_steps(saved)}")
    faults: list[str] = []
    for item in sorted(full, key=lambda one: (one.step, one.segment), reverse=True):
        folder = run_path / item.folder
        try:
            if not (folder / manifests.MANIFEST).is_file():
                raise DataError(f"{folder / manifests.MANIFEST} is missing")
            read_manifest(folder)  # its size is bounded before it is hashed
            if digest_file(folder / manifests.MANIFEST) != item.manifest_sha256:
                raise DataError(f"{folder / manifests.MANIFEST} is not the one that receipt {item.seq} names")
            return load(folder), faults
        except DataError as fault:
            faults.append(str(fault))
    raise DataError(f"no full checkpoint of {run_path} holds: {'; '.join(faults)}; fetch a copy, then resume")


def _steps(saved: list[Saved]) -> str:
    steps = sorted({item.step for item in saved if item.kind == "full"})
    return ", ".join(str(step) for step in steps) or "none"
