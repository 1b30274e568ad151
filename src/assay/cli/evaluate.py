"""`assay evaluate`, `export`, `import hf`: measuring weights, and taking them out and in.

Parses, calls one function of a room, shows what it returned.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from assay.cli.options import JsonOption, StepOption

if TYPE_CHECKING:
    from assay.data.shard import Shard
    from assay.evaluate.perplexity import Measured
    from assay.evaluate.record import Recorded
    from assay.evaluate.subject import Subject

import_app = typer.Typer(help="Take in the models of others", no_args_is_help=True, rich_markup_mode=None)


def evaluate_command(
    model: Annotated[Path, typer.Argument(metavar="RUN-OR-MODEL", help="A run, a checkpoint or a Hugging Face folder")],
    step: StepOption = None,
    data: Annotated[
        Path | None, typer.Option(metavar="SHARD", help="The shard to measure on; default: the run's validation")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Measure loss, perplexity and bits per byte

    The result is pinned to step and weights digest; a run keeps it and states it in its ledger.
    """
    from assay.cli.show import as_json, console, pairs

    subject, shard, measured, found, kept = evaluate_validation(model, step, data)
    facts: dict[str, Any] = {
        "step": subject.step,
        "weights_sha256": subject.weights_sha256,
        "results": {found["suite"]: {**found["results"], **{k: found[k] for k in ("shard", "windows", "positions")}}},
        "file": None if kept is None else kept.file,
        "receipt": None if kept is None else kept.receipt,
        "added": kept is not None and kept.added,
    }
    if json:
        as_json(facts)
        return
    whole = measured.whole
    bits = f"{whole.bits_per_byte:.4f} over {whole.text_bytes:,} bytes of whole documents" if whole else None
    shown: dict[str, object] = {
        "step": subject.step if subject.step is not None else "none: not a checkpoint of Assay",
        "weights": subject.weights_sha256,
        "shard": shard.sha256,
        "windows": measured.windows,
        "positions": measured.positions,
        "loss, nats per position": f"{measured.loss:.4f}",
        "perplexity": f"{measured.perplexity:,.2f}" if measured.perplexity is not None else "beyond measure",
        "bits per byte": bits or measured.unmeasured,
        "result": "not kept: outside a run" if kept is None else _kept(kept.file, kept.receipt, kept.added),
    }
    console().print(pairs("", shown))


def evaluate_validation(
    model: Path, step: int | None = None, data: Path | None = None
) -> tuple[Subject, Shard, Measured, dict[str, Any], Recorded | None]:
    """Measure the weights at `model` on `data`, or on the run's validation shard; a run keeps the result."""
    import torch

    from assay.data.shard import open_shard
    from assay.errors import InputError
    from assay.evaluate.material import tokenizer_digest, validation_shard
    from assay.evaluate.perplexity import measure
    from assay.evaluate.record import record, result
    from assay.evaluate.subject import decoder, open_subject

    subject = open_subject(model, step)
    _tell_passed_over(subject.passed_over)
    shard = open_shard(data) if data else None if subject.run is None else validation_shard(subject.run)
    if shard is None:
        raise InputError(f"{model} names no validation shard; name one with --data")
    own = None if subject.run is None else tokenizer_digest(subject.run)
    if own is not None and shard.tokenizer != own:
        raise InputError(f"{shard.path} holds ids of tokenizer {shard.tokenizer}, but the run's is {own}")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    kind = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    measured = measure(
        decoder(subject.shape, subject.tensors, device=device),
        shard,
        lambda done, total: print(f"window {done:,} of {total:,}", file=sys.stderr, flush=True),
    )
    found = result(subject, shard, measured, kind)
    kept = None if subject.run is None else record(subject.run, found)
    return subject, shard, measured, found, kept


def export_command(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run or a checkpoint folder")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The folder to make; it must not exist")],
    step: StepOption = None,
    dtype: Annotated[str, typer.Option(metavar="DTYPE", help="Either float32 or bfloat16")] = "float32",
    json: JsonOption = False,
) -> None:
    """Write a Hugging Face folder

    It is done only after a reload in transformers gave the same logits.
    """
    from assay.cli.show import as_json, console, note, pairs
    from assay.errors import InputError
    from assay.evaluate.subject import open_subject
    from assay.release.export import export

    subject = open_subject(run, step)
    if subject.step is None:
        raise InputError(f"{run} is a Hugging Face folder already; a run or a checkpoint folder is expected")
    _tell_passed_over(subject.passed_over)
    done = export(subject, out, dtype, note)
    if json:
        as_json(
            {
                "architecture": done.architecture,
                "max_logit_difference": done.difference,
                "max_logit_difference_float64": done.difference_float64,
                "compared": done.compared,
                "files": done.files,
                "step": subject.step,
                "weights_sha256": subject.weights_sha256,
                "dtype": done.dtype,
                "tokenizer": done.tokenizer,
                "receipt": done.receipt,
            }
        )
        return
    shown: dict[str, object] = {
        "folder": out,
        "architecture": done.architecture,
        "step": subject.step,
        "weights": subject.weights_sha256,
        "largest logit difference": f"{done.difference:.2e} in float32, {done.difference_float64:.2e} in float64, "
        f"on {done.compared}",
        "tokenizer": done.tokenizer or "not exported: the run's tokenizer.json is not under the data roots here",
        "files": ", ".join(done.files),
        "receipt": done.receipt if done.receipt is not None else "none: outside a run",
    }
    console().print(pairs("", shown))


@import_app.command("hf")
def import_hf(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="A local Hugging Face folder")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The folder to make; it must not exist")],
    block: Annotated[int | None, typer.Option(metavar="N", help="Context length; default: the model's own")] = None,
    json: JsonOption = False,
) -> None:
    """Take in a local Hugging Face model

    It becomes a weights checkpoint that a recipe's start.init_from takes, after a reload gave the same logits.
    """
    from assay.checkpoint.manifest import MODEL
    from assay.cli.show import as_json, console, note, pairs
    from assay.release.importing import import_hugging_face

    done = import_hugging_face(path, out, block, note)
    files = {name: item["sha256"] for name, item in sorted(done.manifest.files.items())}
    if json:
        as_json(
            {
                "architecture": done.architecture,
                "max_logit_difference": done.difference,
                "max_logit_difference_float64": done.difference_float64,
                "files": files,
                "weights_sha256": done.manifest.weights_sha256,
                "model": done.shape.model_dump(mode="json"),
            }
        )
        return
    model = done.shape.model_dump(mode="json")
    shown: dict[str, object] = {
        "folder": out,
        "architecture": done.architecture,
        "largest logit difference": f"{done.difference:.2e} in float32, {done.difference_float64:.2e} in float64",
        "weights": done.manifest.weights_sha256,
        "start.init_from.sha256": files[MODEL],
        "recipe's model": ", ".join(f"{key}: {value}" for key, value in model.items()),
    }
    console().print(pairs("", shown))


def _tell_passed_over(faults: tuple[str, ...]) -> None:
    for fault in faults:
        print(f"a newer checkpoint was not used: {fault}", file=sys.stderr)


def _kept(file: str, receipt: int, added: bool) -> str:
    return f"{file} (receipt {receipt})" if added else f"{file} (receipt {receipt}) stands already and agrees"
