"""Saving checkpoints: full (everything to go on) and weights (model and config alone).

The folder appears whole or not at all; digests are taken from the bytes as they are written. The
caller writes the receipt. Nothing is pickled.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from assay.checkpoint import manifest as manifests
from assay.checkpoint.manifest import Manifest
from assay.checkpoint.tensors import Raw, describe, state_digest, write
from assay.errors import MachineError, VerificationError
from assay.files.digest import digest, digest_file
from assay.files.publish import publish_file, publish_folder

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


def tensor_digests(tensors: Mapping[str, Tensor]) -> dict[str, dict[str, Any]]:
    """Dtype, shape and digest of live tensors; `state_digest` of it is the proof of a load."""
    described = {}
    for name, tensor in tensors.items():
        one = raw(tensor)
        described[name] = describe(one.dtype, one.shape, digest(one.data))
    return described


def save(
    parent: Path,
    facts: Facts,
    model: Mapping[str, Tensor],
    optimizer: Mapping[str, Tensor] | None,
    documents: Mapping[str, bytes],
    weights_steps: Mapping[str, int],
) -> Manifest:
    """Write one checkpoint below `parent` and return its manifest.

    `optimizer` None makes a weights checkpoint. `documents` are further small files (state, recipe,
    queue prefix, config). `weights_steps` maps weights digests that were saved before to their step:
    one digest never stands under two steps (VerificationError). A step that was saved before, by an
    earlier segment, keeps its folder; this one gets a name with the segment. MachineError (71) when
    the disk is full.
    """
    kind = "weights" if optimizer is None else "full"
    folder = parent / manifests.folder_name(facts.step)
    if folder.exists():
        folder = parent / manifests.folder_name(facts.step, facts.segment)
    try:
        with publish_folder(folder) as temporary:
            written = write(temporary / manifests.MODEL, {name: raw(tensor) for name, tensor in model.items()})
            weights = state_digest(written.tensors)
            other = weights_steps.get(weights)
            if other is not None and other != facts.step:
                raise VerificationError(
                    f"the weights at step {facts.step} have the digest of step {other}; "
                    "one digest never stands under two steps, so this checkpoint is not saved"
                )
            files = {manifests.MODEL: {"bytes": written.bytes, "sha256": written.sha256}}
            tensors = dict(written.tensors)
            if optimizer is not None:
                written = write(
                    temporary / manifests.OPTIMIZER, {name: raw(tensor) for name, tensor in optimizer.items()}
                )
                files[manifests.OPTIMIZER] = {"bytes": written.bytes, "sha256": written.sha256}
                tensors |= written.tensors
            for name, content in documents.items():
                publish_file(temporary / name, content)
                files[name] = {"bytes": len(content), "sha256": digest(content)}
            manifest = Manifest(
                folder,
                kind=kind,
                weights_sha256=weights,
                state_sha256=state_digest(tensors) if kind == "full" else None,
                files=files,
                tensors=tensors,
                **vars(facts),
            )
            publish_file(temporary / manifests.MANIFEST, manifests.encode(manifest))
        _append_sums(parent, manifest)
    except OSError as fault:
        raise MachineError(
            f"{folder} could not be written: {fault.strerror or fault}; what was saved before stands"
        ) from None
    return manifest


def _append_sums(parent: Path, manifest: Manifest) -> None:
    """One line per file into SHA256SUMS, in the form that `sha256sum -c` reads, at the moment of saving."""
    sums = {name: item["sha256"] for name, item in manifest.files.items()}
    sums[manifests.MANIFEST] = digest_file(manifest.folder / manifests.MANIFEST)
    lines = "".join(
        f"{value.removeprefix('sha256:')}  {manifest.folder.name}/{name}\n" for name, value in sorted(sums.items())
    )
    path = parent / "SHA256SUMS"
    publish_file(path, (path.read_bytes() if path.exists() else b"") + lines.encode("ascii"))


def document(value: Mapping[str, Any]) -> bytes:
    """A small JSON file of a checkpoint."""
    return (json.dumps(value, indent=1, sort_keys=True, allow_nan=False) + "\n").encode()
