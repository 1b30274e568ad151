"""A checkpoint as a Hugging Face folder, loaded again and compared before anybody can see it.

Llama and Qwen3 shapes are written natively, any other with its own modelling file. After any fault nothing is
left. It changes no run but for the receipt `export`, and uploads nothing.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from assay.corpus import tokenizer as tokenizers
from assay.corpus.tokenizer import Tokenizer
from assay.data.batches import validation_windows
from assay.data.order import windows_available
from assay.data.shard import Shard
from assay.errors import AssayError, InputError, MachineError, VerificationError
from assay.evaluate.hugging_face import (
    CONFIG,
    WEIGHTS,
    expect_equal,
    load_exported,
    load_tokenizer,
    logit_difference,
)
from assay.evaluate.material import find_tokenizer, validation_shard
from assay.evaluate.record import decimal
from assay.evaluate.subject import Subject, decoder
from assay.files.digest import digest_file
from assay.files.publish import publish_file, publish_folder, refuse_existing
from assay.model import interchange
from assay.recipe.schema import Model
from assay.run.folder import RunFolder
from assay.train.batch import numbered

GENERATION = "generation_config.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
WINDOWS, POSITIONS = 2, 512  # compared at most; float64 on a CPU takes a minute for a 0.1B model


@dataclass(frozen=True)
class Compared:
    """Token ids [B, T] on which logits are compared, their document numbers if the model needs them, their origin."""

    tokens: Tensor
    documents: Tensor | None
    origin: str


@dataclass(frozen=True)
class Exported:
    """What was written: digests by file name, the largest logit differences in float32 and float64, the receipt."""

    architecture: str
    dtype: str
    files: dict[str, str]
    difference: float
    difference_float64: float
    compared: str
    tokenizer: str | None
    receipt: int | None


def export(
    subject: Subject, out: Path, dtype: str = "float32", tell: Callable[[str], None] = lambda text: None
) -> Exported:
    """Write `subject` to the new folder `out`; its weights rounded to `dtype`, its logits compared after a reload.

    `tell` hears what is being done. Raises InputError when `out` stands or `dtype` is unknown, VerificationError
    (exit 6) when transformers computes other logits (float32: 1e-4, float64: 1e-9) or another tokenization, or
    when the run's ledger does not hold, MachineError (71) when the disk is full.
    """
    if dtype not in DTYPES:
        raise InputError(f"--dtype is {dtype!r}; {' or '.join(DTYPES)} is expected")
    refuse_existing(out)
    ledger = None if subject.run is None else subject.run.open_ledger()
    tokenizer = None if subject.run is None else find_tokenizer(subject.run)
    architecture = interchange.architecture(subject.shape)
    tensors = {name: tensor.to(DTYPES[dtype]).contiguous() for name, tensor in subject.tensors.items()}
    compared = windows(subject)
    try:
        with publish_folder(out) as folder:
            _write(folder, subject.shape, tensors, tokenizer)
            single, double = _compare(folder, architecture, subject.shape, tensors, compared, tell)
            if tokenizer is not None:
                compare_tokenizer(folder, tokenizer, compared)
            files = {path.name: digest_file(path) for path in sorted(folder.iterdir())}
    except (OSError, SafetensorError) as fault:
        raise MachineError(f"{out} could not be written: {fault}; nothing is left of it") from None
    receipt = None
    if ledger is not None:
        body: dict[str, Any] = {
            "step": subject.step,
            "weights_sha256": subject.weights_sha256,
            "architecture": architecture,
            "dtype": dtype,
            "files": files,
            "max_logit_difference": decimal(single),
            "max_logit_difference_float64": decimal(double),
            "compared": {"windows": len(compared.tokens), "positions": compared.tokens.numel(), "of": compared.origin},
            "tokenizer": None if tokenizer is None else tokenizer.digest,
            "modelling_file": files.get(interchange.MODELLING_FILE.name),
            "converter": converter_digest(),
        }
        receipt = ledger.append("export", body).seq
    name = None if tokenizer is None else tokenizer.digest
    return Exported(architecture, dtype, files, single, double, compared.origin, name, receipt)


def converter_digest() -> str:
    """Digest of the source file that renames weights and config."""
    return digest_file(Path(interchange.__file__))


def windows(subject: Subject) -> Compared:
    """Real windows of the run's validation shard, or random ids where there is none on this machine."""
    shape = subject.shape
    length = min(shape.block, POSITIONS)
    shard = None if subject.run is None else _shard(subject.run, shape)
    if shard is None:
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(0, shape.vocabulary, (WINDOWS, length), generator=generator)
        documents = torch.arange(length).div(max(1, length // 3), rounding_mode="floor").expand(WINDOWS, -1)
        return Compared(tokens, documents if shape.document_mask else None, "random ids")
    count = min(WINDOWS, windows_available(shard.tokens, shape.block, 0))
    ids = validation_windows(shard, shape.block, 0, count)[:, :length]
    rows = [numbered(shard, row * shape.block, length) for row in range(count)] if shape.document_mask else None
    return Compared(
        torch.from_numpy(ids.astype("int64")), None if rows is None else torch.stack(rows), "the validation shard"
    )


def _shard(run: RunFolder, shape: Model) -> Shard | None:
    """The run's validation shard, if it is here and has a window; an export does not fail for want of it."""
    try:
        shard = validation_shard(run)
    except AssayError:
        return None
    if shard is None or shard.vocabulary > shape.vocabulary or windows_available(shard.tokens, shape.block, 0) < 1:
        return None
    return shard


def _write(folder: Path, shape: Model, tensors: dict[str, Tensor], tokenizer: Tokenizer | None) -> None:
    config, named = interchange.to_hugging_face(shape, tensors)
    end = None if tokenizer is None else tokenizer.end_of_text
    # Every document in training but the first follows an end of text, so that is how a text begins as well.
    special = {"bos_token_id": end, "eos_token_id": end, "pad_token_id": end}
    _json(folder / CONFIG, config | special)
    _json(folder / GENERATION, special | {"use_cache": config["use_cache"]})
    save_file(named, folder / WEIGHTS, metadata={"format": "pt"})
    (folder / WEIGHTS).chmod(0o644)  # the library makes it the owner's alone
    if "auto_map" in config:
        shutil.copyfile(interchange.MODELLING_FILE, folder / interchange.MODELLING_FILE.name)
    if tokenizer is None:
        return
    publish_file(folder / tokenizers.FILE, tokenizer.data)
    text = tokenizer.inner.id_to_token(tokenizer.end_of_text)
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": shape.block,
        "clean_up_tokenization_spaces": False,
        "bos_token": text,
        "eos_token": text,
        "pad_token": text,
    }
    _json(folder / TOKENIZER_CONFIG, settings)


def _compare(
    folder: Path,
    architecture: str,
    shape: Model,
    tensors: dict[str, Tensor],
    compared: Compared,
    tell: Callable[[str], None],
) -> tuple[float, float]:
    """The largest logit differences in float32 and float64; VerificationError beyond the contract's."""
    seen = []
    for dtype in (torch.float32, torch.float64):  # one after the other: two pairs would not fit beside each other
        tell(f"loading {folder.name} again and comparing logits in {str(dtype).removeprefix('torch.')}")
        theirs = load_exported(folder, architecture, dtype)
        difference = logit_difference(decoder(shape, tensors, dtype), theirs, compared.tokens, compared.documents)
        expect_equal(difference, dtype, f"the export, reloaded as {architecture}")
        seen.append(difference)
    return seen[0], seen[1]


def compare_tokenizer(folder: Path, tokenizer: Tokenizer, compared: Compared) -> None:
    """VerificationError (exit 6) unless transformers reads from `folder` a tokenizer that gives the run's ids.

    Special tokens that the tokenizer would put around a text are not compared: the run's documents have none.
    """
    text = tokenizers.decode(
        tokenizer, (one for one in compared.tokens.flatten().tolist() if one < tokenizer.vocabulary)
    )
    here = tokenizer.inner.encode(text, add_special_tokens=False).ids
    there = load_tokenizer(folder)(text, add_special_tokens=False)["input_ids"]
    if here != list(there):
        raise VerificationError(
            f"the tokenizer, reloaded by transformers, turns a text into {len(there)} ids that are not the {len(here)} "
            "of the run; nothing was written"
        )


def _json(path: Path, value: dict[str, Any]) -> None:
    publish_file(path, (json.dumps(value, indent=2, sort_keys=True, allow_nan=False) + "\n").encode())
