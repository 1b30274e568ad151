"""The release bundle: a closed list of files with which an outside reader checks a run.

Made whole or not at all; nothing private enters (salt, origin, logs, inbox, rejected documents). Only what
verifies against its receipt is copied, and the approvals of every consumed slot where the queue demands them.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from assay.checkpoint import manifest as manifests
from assay.checkpoint import tensors
from assay.checkpoint.manifest import problems, read_manifest
from assay.data import approval
from assay.data import queue as queues
from assay.data.queue import Queue
from assay.errors import DataError, InputError, VerificationError
from assay.files.digest import PREFIX, digest_file, digest_small, is_digest
from assay.files.publish import publish_file, publish_folder
from assay.files.reading import inside
from assay.ledger.ledger import FILE as LEDGER_FILE
from assay.ledger.ledger import Receipt, read
from assay.recipe.schema import Recipe
from assay.release import signature
from assay.run.folder import RunFolder, require_run
from assay.run.history import History, Saved, gather
from assay.run.inputs import TOKENIZER, queue_path, tokenizer_file

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

FORMAT = "assay-bundle/1"
INDEX_FORMAT = "assay-checkpoint-index/1"
CODE_FORMAT = "assay-code/1"
BUNDLE, INDEX, CODE, SUMS = "bundle.json", "checkpoints.json", "code.json", "SHA256SUMS"
METRICS, QUEUE, EVALUATIONS, APPROVALS = "metrics.jsonl", "queue.jsonl", "evaluations", "approvals"
REQUIRED = (
    manifests.MODEL,
    manifests.CONFIG,
    manifests.MANIFEST,
    "recipe.yaml",
    "recipe.json",
    QUEUE,
    LEDGER_FILE,
    METRICS,
    INDEX,
    CODE,
    BUNDLE,
    SUMS,
)
OPTIONAL = (TOKENIZER, signature.FILE)
_APPROVAL = re.compile(rf"{APPROVALS}/[0-9a-f]{{64}}\.[0-9a-f]{{16}}\.json")
_PIECE = 8 << 20


@dataclass(frozen=True)
class Bundle:
    """What was bundled: the names of the files, the ledger's head, what this form leaves out."""

    path: Path
    step: int
    files: list[str]
    head: dict[str, Any]
    signed: bool
    unsupported: list[str]


def bundle(
    run: RunFolder,
    out: Path,
    step: int | None = None,
    tell: Callable[[str], None] = lambda _: None,
    key: Ed25519PrivateKey | None = None,
) -> Bundle:
    """Make the bundle of one checkpoint (default: the newest that stands) at `out`, which must not exist.

    `key`: the publisher's private key, which signs it. Raises VerificationError when ledger, recipe or metrics do
    not hold, DataError when the checkpoint is damaged or the queue is not at hand, InputError for a step without
    a checkpoint, Refused when a consumed slot lacks its approvals here or the key is none of the publishers.
    """
    require_run(run)
    receipts = list(read(run.ledger))
    told = gather(receipts)
    recipe = run.recipe()
    publisher = None if key is None else signature.expect_publisher(key, recipe.trust.publisher)
    saved = _chosen(run, told, step)
    _refuse_damage(run, told, saved)
    head = {"seq": receipts[-1].seq, "digest": receipts[-1].digest}
    sealed = max((int(receipt.body["stop"]) for receipt in told.sealed), default=0)
    queue = _queue(run, recipe, told)
    approved = _approvals(run, recipe, told, queues.load(queue))
    tokenizer, why = _tokenizer(run, recipe, queues.load(queue).tokenizer)
    results, absent = _results(run, told)
    unsupported = _unsupported(saved, why, absent, publisher)
    with publish_folder(out) as folder:
        tell(f"copying {saved.folder}")
        source = run.path / saved.folder
        for name in (manifests.CONFIG, manifests.MANIFEST):
            shutil.copyfile(source / name, folder / name)
        _model(source, folder / manifests.MODEL)
        for path in (run.recipe_yaml, run.recipe_json):
            shutil.copyfile(path, folder / path.name)
        _copy_beginning(run.ledger, folder / LEDGER_FILE, _lines_end(run.ledger, len(receipts)))
        _copy_beginning(run.metrics, folder / METRICS, sealed)
        _copy_beginning(queue, folder / QUEUE, _lines_end(queue, None))
        if tokenizer is not None:
            shutil.copyfile(tokenizer, folder / TOKENIZER)
        for name in results:
            (folder / EVALUATIONS).mkdir(exist_ok=True)
            shutil.copyfile(run.path / name, folder / name)
        for path in approved:
            (folder / APPROVALS).mkdir(exist_ok=True)
            shutil.copyfile(path, folder / APPROVALS / path.name)
        _json(folder / INDEX, checkpoint_index(told))
        _json(folder / CODE, code_index(told, receipts))
        here = (path for path in folder.rglob("*") if path.is_file())
        names = sorted({path.relative_to(folder).as_posix() for path in here} | {BUNDLE})
        extra = [SUMS] if key is None else [SUMS, signature.FILE]
        about = {
            "format": FORMAT,
            "run_id": told.run_id,
            "name": recipe.name,
            "step": saved.step,
            "checkpoint": {
                "kind": saved.kind,
                "segment": saved.segment,
                "receipt": saved.seq,
                "manifest_sha256": saved.manifest_sha256,
                "weights_sha256": saved.weights_sha256,
            },
            "head": head,
            "metrics": {"sealed_bytes": sealed, "left_out_bytes": run.metrics.stat().st_size - sealed},
            "signed": publisher is not None,
            "publisher": publisher,
            "files": names,
            "unsupported": unsupported,
        }
        _json(folder / BUNDLE, about)
        tell("hashing")
        publish_file(folder / SUMS, sums(folder, names))
        if key is not None:
            signed = signature.Signed(folder / SUMS, told.run_id, saved.step, head)
            publish_file(folder / signature.FILE, signature.sign(signed, key))
    return Bundle(out, saved.step, [*names, *extra], head, key is not None, unsupported)


def sums(folder: Path, names: list[str]) -> bytes:
    """The lines that `sha256sum -c` reads, one for each name."""
    lines = (f"{digest_file(folder / name).removeprefix(PREFIX)}  {name}\n" for name in sorted(names))
    return "".join(lines).encode()


def checkpoint_index(told: History) -> dict[str, Any]:
    """Every checkpoint that was ever saved, with its digests, as the ledger states it."""
    keys = ("step", "kind", "segment", "manifest_sha256", "weights_sha256", "state_sha256", "order_digest")
    return {
        "format": INDEX_FORMAT,
        "run_id": told.run_id,
        "checkpoints": [
            {key: getattr(item, key) for key in keys}
            | {"receipt": item.seq, "removed": item.manifest_sha256 in told.removed}
            for item in told.saved
        ],
    }


def code_index(told: History, receipts: Sequence[Receipt]) -> dict[str, Any]:
    """Three things: the training source of every segment, the modelling file and the converter of the last export."""
    keys = ("sha256", "files", "commit", "dirty")
    exports = [receipt.body for receipt in receipts if receipt.kind == "export"]
    modelling: dict[str, Any] = {"sha256": None, "reason": "not exported"}
    converter = modelling
    if exports:
        last = exports[-1]
        converter = {"sha256": last.get("converter"), "reason": None}
        modelling = {"sha256": last.get("modelling_file"), "reason": None}
        if modelling["sha256"] is None:
            modelling["reason"] = f"exported as {last.get('architecture')}, which needs none"
    return {
        "format": CODE_FORMAT,
        "training_source": [
            {"segment": segment.number} | {key: segment.body["code"].get(key) for key in keys}
            for segment in told.segments
        ],
        "modelling_file": modelling,
        "converter": converter,
    }


def _chosen(run: RunFolder, told: History, step: int | None) -> Saved:
    """The newest checkpoint of the line, or that of a step; a weights checkpoint before a full one of the same step."""
    found = told.line if step is None else [item for item in told.standing if item.step == step]
    if not found:
        steps = ", ".join(str(one) for one in sorted({item.step for item in told.standing})) or "none"
        wanted = "no checkpoint stands" if step is None else f"no checkpoint of step {step} stands"
        raise InputError(f"{run.path}: {wanted}; steps that can be bundled: {steps}")
    return max(found, key=lambda item: (item.step, item.segment, item.kind == "weights"))


def _model(source: Path, out: Path) -> None:
    """The weights as one file, whatever the checkpoint has; the tensors keep their digests."""
    names = manifests.tensor_files(read_manifest(source), manifests.MODEL)
    if names == [manifests.MODEL]:
        shutil.copyfile(source / manifests.MODEL, out)
    else:
        tensors.write(out, {name: one for file in names for name, one in tensors.read(source / file)})


def _refuse_damage(run: RunFolder, told: History, saved: Saved) -> None:
    stated = told.created.body["files"]
    for path in (run.recipe_yaml, run.recipe_json):
        if not path.is_file() or digest_small(path) != stated.get(path.name):
            raise VerificationError(f"{path} has not the bytes that receipt 0 states; see assay verify {run.path}")
    sealed = max((int(receipt.body["stop"]) for receipt in told.sealed), default=0)
    if sealed and (not run.metrics.is_file() or run.metrics.stat().st_size < sealed):
        raise VerificationError(f"{run.metrics} is shorter than the {sealed:,} bytes that receipts seal")
    folder = run.path / saved.folder
    manifest = read_manifest(folder)
    if digest_small(folder / manifests.MANIFEST) != saved.manifest_sha256:
        raise DataError(f"{folder / manifests.MANIFEST} is not the one that receipt {saved.seq} names")
    faults = problems(manifest)
    if faults:
        raise DataError(f"{faults[0]}; bundle another step, or fetch a copy")


def _queue(run: RunFolder, recipe: Recipe, told: History) -> Path:
    """The recipe's queue when it is here and begins with what was consumed, else the longest copy in a checkpoint."""
    copies = [run.path / item.folder / manifests.QUEUE for item in told.standing if item.kind == "full"]
    copies = sorted((path for path in copies if path.is_file()), key=lambda path: path.stat().st_size)
    path = queue_path(run, recipe)
    if path.is_file():
        queues.load(path)
        if copies and not path.read_bytes().startswith(copies[-1].read_bytes()):
            raise DataError(f"{path} does not begin with the queue that {copies[-1].parent.name} was trained on")
        return path
    if not copies:
        raise DataError(f"{path} is not here and no checkpoint holds a copy of the queue; bring the queue back")
    queues.load(copies[-1])
    return copies[-1]


def _tokenizer(run: RunFolder, recipe: Recipe, name: str) -> tuple[Path | None, str]:
    """The file that the queue's header names by digest, or why there is none."""
    if not is_digest(name):
        return None, f"the queue names it {name!r}, not by a digest"
    path = tokenizer_file(run, recipe, name)
    return path, "" if path else f"no {TOKENIZER} with {name} lies under the recipe's data roots"


def _approvals(run: RunFolder, recipe: Recipe, told: History, queue: Queue) -> list[Path]:
    """The envelopes that count for the slots that the run entered; Refused when one lacks what the queue demands."""
    if queue.trust is None:
        return []
    place, entered = approval.folder(queue_path(run, recipe)), {receipt.body["slot"] for receipt in told.slots}
    found = []
    for slot in queue.slots:
        if slot.number in entered:
            approval.demand(queue, slot, place)
            found += [one.path for one in approval.approvals(queue, slot, place) if one.why is None]
    return found


def is_approval(name: str) -> bool:
    """Whether a file's name is one that an approval has in a bundle: `approvals/<line>.<key id>.json`."""
    return _APPROVAL.fullmatch(name) is not None


def is_result(name: str) -> bool:
    """Whether a file's name is one that an evaluation result has in a bundle, as in the run: `evaluations/X.json`."""
    folder, _, file = name.partition("/")
    return folder == EVALUATIONS and file.endswith(".json") and "/" not in file


def _results(run: RunFolder, told: History) -> tuple[list[str], str]:
    """The aggregate scores: result files that receipts name and that are here, and why one is not or none is.

    VerificationError for a file that is not the one that its receipt names.
    """
    found = set()
    missing = []
    for receipt in told.evaluations:
        name = receipt.body.get("file")
        if not isinstance(name, str) or not is_result(name):
            continue  # its claim says that the receipt names no file that can be checked
        path = inside(run.path, name, f"receipt {receipt.seq}")
        if not path.is_file():
            missing.append(name)
        elif digest_small(path) != receipt.body.get("sha256"):
            raise VerificationError(f"{path} is not the file that receipt {receipt.seq} names; bring the original back")
        else:
            found.add(name)
    absent = f"aggregate scores: {', '.join(missing)} not here" if missing else ""
    return sorted(found), absent or ("" if found else "aggregate scores: no result is recorded; see assay evaluate")


def _unsupported(saved: Saved, tokenizer: str, results: str, publisher: str | None) -> list[str]:
    result = ["modelling file: see assay export", "cards"]
    if publisher is None:
        result.insert(0, "signature: name the publisher's key with --key")
    if results:
        result.append(results)
    if tokenizer:
        result.append(f"tokenizer: {tokenizer}")
    if saved.kind == "full":
        result.append("resuming: the optimizer, state and other files that manifest.json lists are not in the bundle")
    return [*result, "replay: no windows of training data are in the bundle"]


def _lines_end(path: Path, lines: int | None) -> int:
    """Bytes of the first `lines` lines, or of all that are whole."""
    end = seen = 0
    with path.open("rb") as file:
        for line in file:
            if not line.endswith(b"\n") or seen == lines:
                break
            end += len(line)
            seen += 1
    return end


def _copy_beginning(source: Path, target: Path, size: int) -> None:
    """The first `size` bytes: what others append meanwhile stays out."""
    with target.open("xb") as out:
        if not size:
            return
        with source.open("rb") as file:
            while size and (piece := file.read(min(size, _PIECE))):
                out.write(piece)
                size -= len(piece)


def _json(path: Path, value: Mapping[str, Any]) -> None:
    publish_file(path, (json.dumps(value, indent=1, sort_keys=True, allow_nan=False) + "\n").encode())
