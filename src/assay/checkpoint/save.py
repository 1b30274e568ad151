"""Saving checkpoints: full (everything to go on) and weights (model and config alone).

The folder appears whole or not at all; digests are taken from the bytes as they are written. The
caller writes the receipt. Nothing is pickled.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from assay.checkpoint import manifest as manifests
from assay.checkpoint.manifest import Manifest
from assay.checkpoint.tensors import Raw, Waiting, describe, state_digest, write
from assay.errors import MachineError, VerificationError
from assay.files.digest import digest, digest_file
from assay.files.publish import begin_folder, finish_folder, publish_file

_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


@dataclass(frozen=True)
class Facts:
    """What a checkpoint says about itself besides its bytes."""

    run_id: str
    step: int
    segment: int
    phase: str
    time: str
    recipe: str
    order_digest: str
    ledger: dict[str, Any]


def raw(tensor: Tensor) -> Raw:
    """A tensor as little-endian bytes on the host (a copy only where it lies on a device)."""
    host = tensor.detach().cpu().contiguous()
    return Raw(_NAMES[host.dtype], tuple(host.shape), host.reshape(-1).view(torch.uint8).numpy().data)


def _waiting(tensor: Tensor) -> Waiting:
    return Waiting(_NAMES[tensor.dtype], tuple(tensor.shape), lambda: raw(tensor).data)


def tensor_digests(tensors: Mapping[str, Tensor]) -> dict[str, dict[str, Any]]:
    """Dtype, shape and digest of live tensors; `state_digest` of it is the proof of a load."""
    described = {}
    for name, tensor in tensors.items():
        one = raw(tensor)
        described[name] = describe(one.dtype, one.shape, digest(one.data))
    return described


@dataclass(frozen=True)
class Place:
    """Where a checkpoint is written, and the folder that it becomes."""

    temporary: Path
    folder: Path


@dataclass(frozen=True)
class Part:
    """What one rank wrote: file → bytes and sha256; the tensors of model and optimizer, as manifests list them."""

    files: dict[str, dict[str, Any]]
    model: dict[str, dict[str, Any]]
    optimizer: dict[str, dict[str, Any]]


def save(
    parent: Path,
    facts: Facts,
    model: Mapping[str, Tensor],
    optimizer: Mapping[str, Tensor] | None,
    documents: Mapping[str, bytes],
    weights_steps: Mapping[str, int],
) -> Manifest:
    """Write one checkpoint below `parent` and return its manifest: `begin`, `write_part`, `publish` by one rank.

    `optimizer` None makes a weights checkpoint. MachineError (71) when the disk is full; see the three.
    """
    place = begin(parent, facts)
    try:
        part = write_part(place, model, optimizer, documents)
        return publish(place, "weights" if optimizer is None else "full", facts, [part], weights_steps)
    except BaseException:
        give_up(place)
        raise


def begin(parent: Path, facts: Facts) -> Place:
    """A temporary folder for every rank's part.

    A step that was saved before, by an earlier segment, keeps its folder; this one gets a name with the segment.
    """
    folder = parent / manifests.folder_name(facts.step)
    if folder.exists():
        folder = parent / manifests.folder_name(facts.step, facts.segment)
    with as_machine_fault(folder):
        return Place(begin_folder(folder), folder)


def write_part(
    place: Place,
    model: Mapping[str, Tensor],
    optimizer: Mapping[str, Tensor] | None,
    documents: Mapping[str, bytes],
    rank: int = 0,
    ranks: int = 1,
) -> Part:
    """Write the tensors that one rank owns, hashed as they go out, and the small `documents` (state, recipe)."""
    files: dict[str, dict[str, Any]] = {}
    written: list[dict[str, dict[str, Any]]] = []
    with as_machine_fault(place.folder):
        for name, tensors in ((manifests.MODEL, model), (manifests.OPTIMIZER, optimizer)):
            if tensors is None:
                written.append({})
                continue
            file = manifests.shard_name(name, rank, ranks)
            one = write(place.temporary / file, {key: _waiting(tensor) for key, tensor in tensors.items()})
            files[file] = {"bytes": one.bytes, "sha256": one.sha256}
            written.append(one.tensors)
        for name, content in documents.items():
            publish_file(place.temporary / name, content)
            files[name] = {"bytes": len(content), "sha256": digest(content)}
    return Part(files, *written)


def publish(place: Place, kind: str, facts: Facts, parts: Sequence[Part], weights_steps: Mapping[str, int]) -> Manifest:
    """Write the manifest over the parts of all ranks and let the folder appear, whole.

    `weights_steps` maps weights digests that were saved before to their step: one digest never stands under two steps
    (VerificationError).
    """
    model = {name: item for part in parts for name, item in part.model.items()}
    tensors = model | {name: item for part in parts for name, item in part.optimizer.items()}
    weights = state_digest(model)
    other = weights_steps.get(weights)
    if other is not None and other != facts.step:
        raise VerificationError(
            f"the weights at step {facts.step} have the digest of step {other}; "
            "one digest never stands under two steps, so this checkpoint is not saved"
        )
    manifest = Manifest(
        place.folder,
        kind=kind,
        weights_sha256=weights,
        state_sha256=state_digest(tensors) if kind == "full" else None,
        files={name: item for part in parts for name, item in part.files.items()},
        tensors=tensors,
        **vars(facts),
    )
    with as_machine_fault(place.folder):
        publish_file(place.temporary / manifests.MANIFEST, manifests.encode(manifest))
        finish_folder(place.temporary, place.folder)
        _append_sums(place.folder.parent, manifest)
    return manifest


def give_up(place: Place) -> None:
    """Remove what was written of a checkpoint that will not be; what cannot be removed is ignored by every reader."""
    shutil.rmtree(place.temporary, ignore_errors=True)


@contextmanager
def as_machine_fault(what: Path | str) -> Iterator[None]:
    """What the operating system refuses inside is a MachineError: `what` could not be written."""
    try:
        yield
    except OSError as fault:
        raise MachineError(
            f"{what} could not be written: {fault.strerror or fault}; what was saved before stands"
        ) from None


def _append_sums(parent: Path, manifest: Manifest) -> None:
    """One line per file into SHA256SUMS, in the form that `sha256sum -c` reads, at the moment of saving."""
    sums = {name: item["sha256"] for name, item in manifest.files.items()}
    sums[manifests.MANIFEST] = digest_file(manifest.folder / manifests.MANIFEST)
    lines = "".join(
        f"{value.removeprefix('sha256:')}  {manifest.folder.name}/{name}\n" for name, value in sorted(sums.items())
    )
    path = parent / manifests.SUMS
    publish_file(path, (path.read_bytes() if path.exists() else b"") + lines.encode("ascii"))


def document(value: Mapping[str, Any]) -> bytes:
    """A small JSON file of a checkpoint."""
    return (json.dumps(value, indent=1, sort_keys=True, allow_nan=False) + "\n").encode()
