"""What forbids training a run at all: closed, held, another recipe or code, or a ledger that lost lines.

Asked by pre-flight before anything is written, and by the rank once it owns the run, since a hold may
have come in between. It does not ask who owns the run.
"""

from __future__ import annotations

from assay.checkpoint.manifest import lost_lines
from assay.errors import Refused
from assay.recipe import load as recipes
from assay.recipe.schema import Recipe
from assay.run.amendments import code_fault, permitted_digests
from assay.run.folder import RunFolder
from assay.run.history import History
from assay.run.provenance import code_identity


def permit(run: RunFolder, recipe: Recipe, told: History) -> None:
    """Refused (exit 3), with the way out, when `run` may not be trained with `recipe`."""
    refuse_held(run, told)
    refuse_other_recipe(run, recipe, told)
    refuse_lost_lines(run, told)


def refuse_held(run: RunFolder, told: History) -> None:
    """Refused when the run was closed for ever or somebody holds it."""
    if told.abandoned is not None:
        raise Refused(f"{run.path} was abandoned on {told.abandoned.time}; start a new run instead")
    if told.hold is not None:
        raise Refused(
            f"{run.path} is held ({told.hold.body['cause']}, since {told.hold.time}); "
            f"lift the hold with: assay release {run.path}"
        )


def refuse_other_recipe(run: RunFolder, recipe: Recipe, told: History) -> None:
    """Refused when a learning choice or, where the run holds to its code, the code changed without an amendment."""
    stated, given = told.created.body["recipe"], recipes.digest(recipe)
    if stated != given and given not in permitted_digests(run.recipe(), told):
        raise Refused(
            f"the recipe has digest {given}, but {run.path} was created with {stated}; a learning choice changed: "
            "use the run's own recipe, install the change as an amendment (assay amend), or take a new run folder"
        )
    fault = code_fault(run.recipe(), told, lambda: str(code_identity()["sha256"]))
    if fault is not None:
        raise Refused(fault)


def refuse_lost_lines(run: RunFolder, told: History) -> None:
    """Refused when something of the run was written after receipts that the ledger does not have."""
    lost = lost_lines(run.path, told.run_id)
    if lost is not None:
        raise Refused(f"{lost}; restore the ledger from a copy before going on")
