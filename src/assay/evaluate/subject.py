"""What is evaluated or exported: the weights of a run's checkpoint, a checkpoint folder or a Hugging Face folder.

Every byte is checked against its manifest, and the manifest against the run's receipt, before it is
used; a damaged checkpoint is passed over and named. It loads no optimizer and chooses no data.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from pydantic import ValidationError
from torch import Tensor

from assay.checkpoint import manifest as manifests
from assay.checkpoint.load import load_tensors
from assay.checkpoint.manifest import Manifest, problems, read_manifest, tensor_files
from assay.checkpoint.save import tensor_digests
from assay.checkpoint.tensors import state_digest
from assay.errors import DataError, InputError
from assay.evaluate.hugging_face import read_model
from assay.files.digest import digest_small
from assay.files.reading import read_object
from assay.model.decoder import Decoder
from assay.model.initial import empty
from assay.recipe.schema import Model
from assay.run.folder import RunFolder, require_run
from assay.run.history import Saved, history


@dataclass(frozen=True)
class Subject:
    """Weights in host memory under Assay's names, with their identity.

    `step` is None for a Hugging Face folder. `run` is the run whose ledger may state facts about these
    weights, None outside of one. `passed_over` says what was wrong with newer checkpoints.
    """

    folder: Path
    shape: Model
    tensors: dict[str, Tensor]
    weights_sha256: str
    step: int | None
    run: RunFolder | None = None
    passed_over: tuple[str, ...] = ()


def open_subject(path: Path, step: int | None = None) -> Subject:
    """The weights at `path`: a run (its newest checkpoint that holds, or that of `step`), a checkpoint, a model.

    Raises InputError when `path` is none of the three or `step` does not belong to it, DataError (exit 4)
    when the bytes are not those of the manifest.
    """
    if not path.is_dir():
        raise InputError(f"{path} is not a folder; a run, a checkpoint folder or a Hugging Face folder is expected")
    run = RunFolder(path)
    if (path / manifests.MANIFEST).is_file():  # before the run: a full checkpoint holds a recipe.json too
        subject = _of_checkpoint(path)
        if step not in (None, subject.step):
            raise InputError(f"--step is {step}, but {path} holds step {subject.step}; leave --step away")
        return replace(subject, run=_run_of(path))
    if run.exists():
        return _of_run(run, step)
    if (path / manifests.CONFIG).is_file():
        if step is not None:
            raise InputError(
                f"--step is {step}, but {path} is a Hugging Face folder, which knows no step; leave it away"
            )
        shape, tensors = read_model(path)
        return Subject(path, shape, tensors, weights_digest(tensors), None)
    raise InputError(
        f"{path} is neither a run ({run.ledger.name}), nor a checkpoint ({manifests.MANIFEST}), nor a Hugging Face "
        f"folder ({manifests.CONFIG}); name one of these"
    )


def decoder(
    shape: Model,
    tensors: Mapping[str, Tensor],
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> Decoder:
    """A decoder that computes in `dtype` with these weights; the tensors are those that the shape demands."""
    model = empty(shape, device, dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(tensors[name])
    return model.eval()


def weights_digest(tensors: Mapping[str, Tensor]) -> str:
    """The `weights_sha256` of tensors in memory, as manifests state it."""
    return state_digest(tensor_digests(tensors))


def load_weights(folder: Path) -> tuple[Manifest, Model, dict[str, Tensor]]:
    """Manifest, shape and weights of a checkpoint folder, every byte of them checked; DataError otherwise."""
    manifest = read_manifest(folder)
    if manifests.CONFIG not in manifest.files:
        raise DataError(
            f"{folder / manifests.MANIFEST} lists no {manifests.CONFIG}; the folder is not a whole checkpoint"
        )
    # The optimizer is not needed here, and twice the size of the weights: it is not read.
    mine = {name: manifest.files[name] for name in (*tensor_files(manifest, manifests.MODEL), manifests.CONFIG)}
    faults = problems(replace(manifest, files=mine), tensors=False)
    if faults:
        raise DataError("; ".join(faults))
    tensors = load_tensors(manifest, manifests.MODEL)
    if weights_digest(tensors) != manifest.weights_sha256:
        raise DataError(f"{folder}: the loaded tensors do not have the weights_sha256 that the manifest states")
    where = folder / manifests.CONFIG
    try:
        shape = Model.model_validate(read_object(where, "the config of a checkpoint"))
    except ValidationError as fault:
        raise DataError(f"{where}: it is not the model section of a recipe: {fault.errors()[0]['msg']}") from None
    return manifest, shape, tensors


def _of_checkpoint(folder: Path) -> Subject:
    manifest, shape, tensors = load_weights(folder)
    return Subject(folder, shape, tensors, manifest.weights_sha256, manifest.step)


def _of_run(run: RunFolder, step: int | None) -> Subject:
    require_run(run)
    told = history(run.ledger)
    standing = told.standing
    wanted = told.line if step is None else [item for item in standing if item.step == step]
    if not wanted:
        steps = ", ".join(str(one) for one in sorted({item.step for item in standing})) or "none"
        asked = "checkpoint" if step is None else f"checkpoint of step {step}"
        raise DataError(f"{run.path} has no {asked}; those that stand: {steps}")
    faults: list[str] = []
    for item in sorted(wanted, key=lambda one: (one.step, one.segment, one.seq), reverse=True):
        try:
            _as_received(run, item)
            return replace(_of_checkpoint(run.path / item.folder), run=run, passed_over=tuple(faults))
        except DataError as fault:
            faults.append(str(fault))
    raise DataError(f"no checkpoint of {run.path} that was asked for holds: {'; '.join(faults)}")


def _as_received(run: RunFolder, item: Saved) -> None:
    """DataError unless the folder's manifest is the one that the receipt names."""
    path = run.path / item.folder / manifests.MANIFEST
    if not path.is_file():
        raise DataError(f"{path} is missing")
    if digest_small(path) != item.manifest_sha256:
        raise DataError(f"{path} is not the one that receipt {item.seq} names")


def _run_of(folder: Path) -> RunFolder | None:
    """The run that a checkpoint folder lies in, when that run's ledger names it."""
    place = folder.resolve()
    run = RunFolder(place.parent.parent)
    if not run.exists():
        return None
    for item in history(run.ledger).standing:
        if item.folder == f"{place.parent.name}/{place.name}":
            _as_received(run, item)
            return run
    return None
