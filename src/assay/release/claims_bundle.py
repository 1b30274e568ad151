"""Claims about a bundle itself: its sums, its closed list, and the indexes that it computes from the ledger.

What a bundle leaves out on purpose is unverifiable and named; what it holds must agree with its ledger.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from assay.errors import AssayError, VerificationError
from assay.files.digest import digest_file
from assay.files.reading import read_object
from assay.ledger.public import check_public
from assay.recipe.schema import Recipe
from assay.release import bundle as bundles
from assay.release import signature
from assay.release.claims import Case, Claim, counted, differ, judge, steps_text
from assay.release.claims_checkpoints import read_sums
from assay.run.inputs import TOKENIZER

BUNDLE = "bundle"


def sums_claim(case: Case) -> Claim:
    """SHA256SUMS covers every file but itself and the signature, once, and every digest holds."""
    root = case.root
    faults = []
    try:
        stated = read_sums(root / bundles.SUMS)
    except AssayError as fault:
        return judge(BUNDLE, bundles.SUMS, [str(fault)], "")
    here = _files(root)
    for name in sorted(here - stated.keys() - {bundles.SUMS, signature.FILE}):
        faults.append(f"{name} is not covered by {bundles.SUMS}")
    size = 0
    for name, digests in sorted(stated.items()):
        path = root / name
        case.progress(f"hashing {name}")
        if len(digests) > 1:
            faults.append(f"{bundles.SUMS} names {name} {len(digests)} times")
        if name not in here or path.is_symlink() or not path.is_file():
            faults.append(f"{name} is missing, or no regular file")
        elif (found := digest_file(path)) != digests[0]:
            faults.append(differ(name, "the digest", f"{digests[0]} by {bundles.SUMS}", found))
        else:
            size += path.stat().st_size
    return judge(BUNDLE, bundles.SUMS, faults, f"{counted(len(stated), 'file')}, {size:,} bytes")


def list_claim(root: Path) -> Claim:
    """The files are those of the closed list, and bundle.json names them."""
    here = _files(root)
    faults = [f"{name} is missing" for name in bundles.REQUIRED if name not in here]
    more = sorted(here - {*bundles.REQUIRED, *bundles.OPTIONAL})
    faults += [f"{name} does not belong to a bundle" for name in more if not _listed(name)]
    path = root / bundles.BUNDLE
    try:
        about = read_object(path, "the description of a bundle")
    except AssayError as fault:
        return judge(BUNDLE, "closed list", [*faults, str(fault)], "")
    if about.get("format") != bundles.FORMAT:
        faults.append(differ(str(path), "format", bundles.FORMAT, about.get("format")))
    named = about.get("files")
    if not isinstance(named, list) or set(map(str, named)) != here - {bundles.SUMS, signature.FILE}:
        faults.append(f"{path}: files are not those of the folder")
    if about.get("signed") is not (signature.FILE in here):
        there = "there" if signature.FILE in here else "not there"
        faults.append(f"{path}: signed is {about.get('signed')!r}, but {signature.FILE} is {there}")
    return judge(BUNDLE, "closed list", faults, f"{counted(len(here), 'file')}, nothing else")


def _listed(name: str) -> bool:
    """Whether a file that not every bundle has is of a kind that the closed list knows."""
    return bundles.is_result(name) or bundles.is_approval(name)


def _files(root: Path) -> set[str]:
    found = set()
    for folder, folders, names in os.walk(root):
        links = [name for name in folders if (Path(folder) / name).is_symlink()]
        found |= {(Path(folder) / name).relative_to(root).as_posix() for name in [*names, *links]}
    return found


def description_claim(case: Case) -> Claim:
    """bundle.json names this run and a checkpoint that its ledger saved; sets `case.bundled`."""
    told = case.history
    path = case.root / bundles.BUNDLE
    try:
        about = read_object(path, "the description of a bundle")
    except AssayError as fault:
        return judge(BUNDLE, "description", [str(fault)], "")
    faults = []
    if about.get("run_id") != told.run_id:
        faults.append(differ(str(path), "run_id", told.run_id, about.get("run_id")))
    head = {"seq": case.receipts[-1].seq, "digest": case.receipts[-1].digest}
    if about.get("head") != head:
        faults.append(differ(str(path), "head", head, about.get("head")))
    chosen = about.get("checkpoint")
    chosen = chosen if isinstance(chosen, dict) else {}
    found = [item for item in told.saved if item.seq == chosen.get("receipt")]
    if not found:
        faults.append(f"{path}: checkpoint.receipt {chosen.get('receipt')!r} is no receipt of a saved checkpoint")
    else:
        item = case.bundled = found[0]
        pairs = [("step", about.get("step"), item.step)]
        pairs += [
            (key, chosen.get(key), getattr(item, key))
            for key in ("kind", "segment", "manifest_sha256", "weights_sha256")
        ]
        faults += [differ(str(path), key, expected, stated) for key, stated, expected in pairs if stated != expected]
    step = case.bundled.step if case.bundled else None
    return judge(BUNDLE, "description", faults, f"step {step} of run {told.run_id}, ledger head {head['seq']}")


def signature_claims(case: Case, recipe: Recipe | None) -> Iterator[Claim]:
    """The signature fits this bundle and this ledger; apart from that, whether the reader accepts its key."""
    trusted = "signed by a key that the reader trusts"
    path = case.root / signature.FILE
    if not path.is_file() or case.bundled is None:
        if case.trust:
            why = "the bundle is not signed" if not path.is_file() else "bundle.json does not say what was signed"
            yield judge(BUNDLE, trusted, [], "", why)
        return
    head = {"seq": case.receipts[-1].seq, "digest": case.receipts[-1].digest}
    about = signature.Signed(case.root / bundles.SUMS, case.history.run_id, case.bundled.step, head)
    try:
        if path.is_symlink() or not about.sums.is_file():
            raise VerificationError(f"{signature.FILE} or {bundles.SUMS}, which it signs, is no regular file")
        stated = read_object(case.root / bundles.BUNDLE, "the description of a bundle").get("publisher")
        publisher = check_public(stated, f"{bundles.BUNDLE}: publisher")
        _, faults = signature.check(path, about, [publisher])
    except AssayError as fault:
        yield judge(BUNDLE, "signature", [str(fault)], "")
        yield judge(BUNDLE, trusted, [], "", "rests on what failed: the signature does not hold")
        return
    allowed = recipe.trust.publisher if recipe is not None else ()
    if allowed and publisher not in allowed:
        faults.append(differ(bundles.BUNDLE, "publisher", f"one of the recipe's, {', '.join(allowed)}", publisher))
    yield judge(BUNDLE, "signature", faults, f"{bundles.SUMS} and ledger head {head['seq']} signed by {publisher}")
    if not case.trust:
        yield judge(BUNDLE, trusted, [], "", f"name the keys that you accept with --trust; it is signed by {publisher}")
        return
    wrong = [] if publisher in case.trust else [f"{signature.FILE} is by {publisher}, which the reader does not name"]
    yield judge(BUNDLE, trusted, [*faults, *wrong], publisher)


def indexes_claim(case: Case) -> Claim:
    """checkpoints.json and code.json are what the ledger gives, and each result has its receipt."""
    named = {receipt.body.get("file") for receipt in case.history.evaluations}
    results = sorted(filter(bundles.is_result, _files(case.root)))
    faults = [f"{case.root / name}: no receipt names this result" for name in results if name not in named]
    for name, wanted in (
        (bundles.INDEX, bundles.checkpoint_index(case.history)),
        (bundles.CODE, bundles.code_index(case.history, case.receipts)),
    ):
        try:
            if odd := _difference("", wanted, read_object(case.root / name, "an index of a bundle")):
                faults.append(f"{case.root / name} is not what the ledger gives: {odd}")
        except AssayError as fault:
            faults.append(str(fault))
    evidence = f"{bundles.INDEX} and {bundles.CODE} follow from the ledger"
    if results:
        evidence += f", {counted(len(results), 'result')} named by it"
    return judge(BUNDLE, "indexes", faults, evidence)


def _difference(key: str, wanted: Any, found: Any) -> str | None:
    """The first key at which two JSON values differ, with both values; None when they are equal."""
    if isinstance(wanted, dict) and isinstance(found, dict):
        for name in sorted(wanted.keys() | found.keys()):
            at = f"{key}.{name}" if key else name
            if name not in found or name not in wanted:
                return f"{at} is missing" if name in wanted else f"{at} does not belong there"
            if odd := _difference(at, wanted[name], found[name]):
                return odd
        return None
    if isinstance(wanted, list) and isinstance(found, list):
        for number, (one, other) in enumerate(zip(wanted, found, strict=False)):
            if odd := _difference(f"{key}[{number}]", one, other):
                return odd
        if len(wanted) != len(found):
            return f"{key} has {counted(len(found), 'entry', 'entries')}, expected {len(wanted):,}"
        return None
    if type(wanted) is type(found) and wanted == found:
        return None
    return f"{key} is {json.dumps(found)}, expected {json.dumps(wanted)}"


def tokenizer_claim(case: Case) -> Claim:
    """The tokenizer's file has the digest that the queue's header names."""
    path = case.root / TOKENIZER
    if case.queue is None:
        return judge(BUNDLE, "tokenizer", [], "", "the queue that names it does not hold")
    name = case.queue.tokenizer
    if not path.is_file():
        return judge(BUNDLE, "tokenizer", [], "", f"not in the bundle; the queue names {name}")
    found = digest_file(path)
    faults = [] if found == name else [differ(str(path), "the digest", f"{name} by the queue", found)]
    return judge(BUNDLE, "tokenizer", faults, found)


def absent_claim(case: Case) -> Claim:
    """Checkpoints of the run whose bytes are not in the bundle."""
    rest = sorted({item.step for item in case.history.saved if item != case.bundled})
    text = f"not in the bundle: checkpoints of steps {steps_text(rest)}; their digests are in {bundles.INDEX}"
    full = case.bundled is not None and case.bundled.kind == "full"
    more = f"; of step {case.bundled.step} the optimizer and state" if full and case.bundled else ""
    if not rest and not full:
        return judge("checkpoints", "other checkpoints", [], "the run has no other")
    return judge("checkpoints", "other checkpoints", [], "", text + more)
