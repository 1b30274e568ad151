"""`assay verify`: every claim of a run or bundle re-derived, offline, without torch and without trust.

The ledger's chain is judged first; what rests on something that does not hold is unverifiable, what is
contradicted is failed. Damage of any kind is a failed claim that names what, where, expected and
found. Nothing is written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from assay.errors import InputError
from assay.ledger.ledger import FILE as LEDGER_FILE
from assay.release import bundle as bundles
from assay.release import claims_amendments as of_amendments
from assay.release import claims_approvals as of_approvals
from assay.release import claims_bundle as of_bundle
from assay.release import claims_checkpoints as of_checkpoints
from assay.release import claims_control as of_control
from assay.release import claims_data as of_data
from assay.release import claims_ledger as of_ledger
from assay.release import claims_metrics as of_metrics
from assay.release import claims_orphans as of_orphans
from assay.release import claims_spikes as of_spikes
from assay.release.claims import FAILED, UNVERIFIABLE, VERIFIED, Case, Claim

# Any of these makes a folder a run, so that a missing one of the others is damage and not a wrong argument.
_RUN_MARKS = (LEDGER_FILE, "recipe.json", "metrics.jsonl", "checkpoints")
_BUNDLE_MARKS = (bundles.BUNDLE, bundles.SUMS)
_AFTER_LEDGER = (
    (of_ledger.RECIPE, "recipe"),
    (of_ledger.START, "start"),
    (of_metrics.METRICS, "metrics, rates and updates"),
    (of_data.DATA, "queue, approvals, order digest and exposure"),
    (of_checkpoints.CHECKPOINTS, "checkpoints"),
    (of_checkpoints.EVALUATIONS, "evaluations"),
)
_AFTER_RECIPE = (
    (of_ledger.START, "start"),
    (of_metrics.METRICS, "learning rates"),
    (of_metrics.METRICS, "updates"),
    (of_data.DATA, "queue, approvals, order digest and exposure"),
)


@dataclass(frozen=True)
class Report:
    """All claims, in order of what rests on what."""

    path: Path
    kind: str
    run_id: str | None
    claims: list[Claim]

    def count(self, result: str) -> int:
        """How many claims came out so."""
        return sum(claim.result == result for claim in self.claims)

    @property
    def summary(self) -> str:
        """The last line for people."""
        return f"{self.count(VERIFIED)} verified, {self.count(UNVERIFIABLE)} unverifiable, {self.count(FAILED)} failed"

    def holds(self, strict: bool) -> bool:
        """No claim failed; with `strict` none is unverifiable either."""
        return not self.count(FAILED) and not (strict and self.count(UNVERIFIABLE))

    def facts(self) -> dict[str, Any]:
        """The contract's JSON keys of `verify`."""
        return {
            "kind": self.kind,
            "run_id": self.run_id,
            "claims": [vars(claim) for claim in self.claims],
            "verified": self.count(VERIFIED),
            "unverifiable": self.count(UNVERIFIABLE),
            "failed": self.count(FAILED),
        }


def verify(
    path: Path,
    roots: Sequence[Path] = (),
    tell: Callable[[str], None] = lambda _: None,
    trust: Sequence[str] = (),
) -> Report:
    """Re-derive every claim of the run or bundle at `path`.

    `roots` are folders in which shards are looked for besides those of the recipe; `tell` gets progress; `trust`
    are the public keys (`ed25519:…`) of reviewers and publishers that the reader accepts.
    Raises InputError when `path` is neither a run nor a bundle, or a root is no folder; everything else
    is a claim's result.
    """
    for root in roots:
        if not root.is_dir():
            raise InputError(f"--data {root} is not a folder; a folder in which shards lie is expected")
    if not path.is_dir():
        raise InputError(f"{path} is not a folder; a run folder or a bundle is expected")
    bundle = any((path / name).is_file() for name in _BUNDLE_MARKS)
    if not bundle and not any((path / name).exists() for name in _RUN_MARKS):
        raise InputError(
            f"{path} is neither a run folder nor a bundle: it holds no {LEDGER_FILE} and no {bundles.SUMS}"
        )
    case = Case(path, bundle, tuple(roots), tell, tuple(trust))
    claims = list(_claims(case))
    return Report(path, "bundle" if bundle else "run", case.told.run_id if case.told else None, claims)


def _claims(case: Case) -> Iterator[Claim]:
    if case.bundle:
        yield of_bundle.sums_claim(case)
        yield of_bundle.list_claim(case.root)
    chain = of_ledger.chain_claim(case)
    yield chain
    if chain.result == FAILED:
        yield from _resting(_AFTER_LEDGER, "the ledger does not chain")
        return
    yield of_ledger.receipts_claim(case)
    if case.told is None:
        yield from _resting(_AFTER_LEDGER, "receipts of the ledger do not hold")
        return
    yield of_ledger.lost_claim(case)
    yield of_ledger.recipe_files_claim(case)
    yield of_ledger.recipe_digest_claim(case)
    yield of_ledger.recipe_yaml_claim(case)
    yield of_metrics.seals_claim(case)
    yield of_metrics.lines_claim(case)
    yield of_metrics.recomputed_claim(case)
    for claim in (of_spikes.skipped_claim(case), of_control.control_claim(case), of_orphans.orphaned_claim(case)):
        if claim is not None:
            yield claim
    yield from _by_recipe(case)
    yield from _checkpoints(case)
    for receipt in case.history.evaluations:
        yield of_checkpoints.evaluation_claim(case, receipt)
    for receipt in case.receipts:
        if receipt.kind == "export":
            yield of_checkpoints.export_claim(case, receipt)


def _by_recipe(case: Case) -> Iterator[Claim]:
    """Claims that need the recipe."""
    recipe = case.recipe
    if recipe is None:
        yield from _resting(_AFTER_RECIPE, "the recipe does not hold")
        return
    yield of_ledger.segments_recipe_claim(case, recipe)
    yield of_ledger.start_claim(case, recipe)
    recoveries = of_ledger.resume_claim(case)
    if recoveries is not None:
        yield recoveries
    for claim in (of_amendments.amendments_claim(case, recipe), of_amendments.code_claim(case, recipe)):
        if claim is not None:
            yield claim
    yield of_metrics.rates_claim(case, recipe)
    yield of_metrics.updates_claim(case, recipe)
    yield of_metrics.positions_claim(case, recipe)
    yield of_data.queue_claim(case, recipe)
    yield from of_approvals.claims(case, recipe)
    pins = of_ledger.pins_claim(case, recipe)
    if pins is not None:
        yield pins
    yield of_data.agreement_claim(case, recipe)
    yield of_data.order_claim(case, recipe)
    yield of_data.exposure_claim(case, recipe)


def _checkpoints(case: Case) -> Iterator[Claim]:
    yield of_checkpoints.list_claim(case)
    yield of_checkpoints.one_step_claim(case)
    if case.bundle:
        yield of_bundle.description_claim(case)
        if case.bundled is not None:
            yield of_checkpoints.bundled_claim(case, case.bundled)
        yield from of_bundle.signature_claims(case, case.recipe)
        yield of_bundle.absent_claim(case)
        yield of_bundle.indexes_claim(case)
        yield of_bundle.tokenizer_claim(case)
        return
    yield of_checkpoints.sums_claim(case)
    for item in case.history.standing:
        yield of_checkpoints.checkpoint_claim(case, item)


def _resting(names: Sequence[tuple[str, str]], why: str) -> Iterator[Claim]:
    for group, name in names:
        yield Claim(group, name, UNVERIFIABLE, f"rests on what failed: {why}")
