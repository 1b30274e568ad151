"""A local Hugging Face folder as a weights checkpoint, which `start: {init_from: {path: …}}` takes.

Only what this decoder computes with the same logits comes in; the rest is refused in one sentence and
leaves nothing behind. No code of the folder is run and no pickle is read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from assay.checkpoint import manifest as manifests
from assay.checkpoint.manifest import Manifest
from assay.checkpoint.save import document, raw
from assay.checkpoint.tensors import state_digest, write
from assay.corpus import tokenizer as tokenizers
from assay.errors import InputError, MachineError
from assay.evaluate.hugging_face import (
    CONFIG,
    INDEX,
    expect_equal,
    load_foreign,
    logit_difference,
    read_model,
    weight_files,
)
from assay.evaluate.subject import Subject, decoder, load_weights
from assay.files.digest import digest, digest_file
from assay.files.publish import publish_file, publish_folder, refuse_existing
from assay.ledger.ledger import now
from assay.model.interchange import architecture
from assay.recipe.schema import Model
from assay.release.export import windows

FORMAT = "assay-import/1"
SOURCE = "source.json"


@dataclass(frozen=True)
class Imported:
    """What was written: the manifest, the shape for the recipe, the class it came from, the logit differences."""

    manifest: Manifest
    shape: Model
    architecture: str
    difference: float
    difference_float64: float


def import_hugging_face(
    path: Path, out: Path, block: int | None = None, tell: Callable[[str], None] = lambda text: None
) -> Imported:
    """Write the model in the folder `path` to the new weights checkpoint `out`, with context length `block`.

    Weights are float32 in `out` (16-bit ones exactly so). Logits are compared between transformers on `path`
    and this decoder on what was written; `tell` hears what is being done. Raises InputError for what cannot be
    represented and for `out` taken, VerificationError (exit 6) when the logits differ, MachineError (71) when
    the disk is full.
    """
    if not path.is_dir():
        raise InputError(f"{path} is not a folder; a local Hugging Face folder is expected")
    if (path / manifests.MANIFEST).is_file():
        raise InputError(f"{path} is a checkpoint of Assay already; name it in start.init_from as it is")
    refuse_existing(out)
    shape, tensors = read_model(path)
    if block is not None and not 1 <= block <= shape.block:
        raise InputError(
            f"--block is {block}; 1 to {shape.block:,} (the model's own) is possible here; "
            "a recipe that starts from it may set a longer model.block"
        )
    kind = architecture(shape)
    source = {
        "format": FORMAT,
        "architecture": kind,
        "files": {name: digest_file(path / name) for name in _sources(path)},
        "block": shape.block,
    }
    # The comparison uses the model's own block; the one in `out` changes no weight.
    written = shape if block is None else shape.model_copy(update={"block": block})
    try:
        with publish_folder(out) as folder:
            model = write(folder / manifests.MODEL, {name: raw(tensor) for name, tensor in tensors.items()})
            files = {manifests.MODEL: {"bytes": model.bytes, "sha256": model.sha256}}
            for name, content in ((CONFIG, written.model_dump(mode="json")), (SOURCE, source)):
                data = document(content)
                publish_file(folder / name, data)
                files[name] = {"bytes": len(data), "sha256": digest(data)}
            manifest = Manifest(
                folder,
                run_id="imported",
                kind="weights",
                step=0,
                segment=0,
                phase="imported",
                time=now(),
                recipe="none",
                order_digest="none",
                weights_sha256=state_digest(model.tensors),
                state_sha256=None,
                ledger={},
                files=files,
                tensors=model.tensors,
            )
            publish_file(folder / manifests.MANIFEST, manifests.encode(manifest))
            del tensors
            single, double = _compare(path, folder, shape, kind, tell)
    except OSError as fault:
        raise MachineError(f"{out} could not be written: {fault}; nothing is left of it") from None
    return Imported(replace(manifest, folder=out), written, kind, single, double)


def _compare(path: Path, folder: Path, shape: Model, kind: str, tell: Callable[[str], None]) -> tuple[float, float]:
    """The largest logit differences between transformers on `path` and this decoder on what was written."""
    manifest, _, tensors = load_weights(folder)
    compared = windows(Subject(folder, shape, tensors, manifest.weights_sha256, 0))
    seen = []
    for dtype in (torch.float32, torch.float64):
        tell(f"comparing logits with transformers in {str(dtype).removeprefix('torch.')}")
        theirs = load_foreign(path, kind, dtype)
        difference = logit_difference(decoder(shape, tensors, dtype), theirs, compared.tokens, compared.documents)
        expect_equal(difference, dtype, f"{path}, imported as {kind}")
        seen.append(difference)
    return seen[0], seen[1]


def _sources(path: Path) -> list[str]:
    names = [CONFIG, *(one.relative_to(path).as_posix() for one in weight_files(path))]
    return sorted([*names, *(name for name in (INDEX, tokenizers.FILE) if (path / name).is_file())])
