"""The control: known weights, known batches, known losses, computed again on the present machine before real training.

It trains K updates of a reduced batch with the very pieces of the loop, over all ranks, and compares: bit for bit
where device kind, versions and settings are those of the recording, within a tolerance elsewhere.
"""

from __future__ import annotations

import gc
import json
import math
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file
from torch import Tensor

from assay.checkpoint.save import raw, tensor_digests
from assay.checkpoint.tensors import state_digest, write
from assay.data.batches import row_digests
from assay.errors import DataError, InputError, Refused
from assay.files.digest import digest_file
from assay.files.publish import publish_file, publish_folder, refuse_existing
from assay.ledger.ledger import Ledger, now
from assay.model import initial
from assay.recipe import load as recipes
from assay.recipe.operational import Runtime
from assay.recipe.schema import Recipe
from assay.run.control import (
    DTYPE,
    FILE,
    FORMAT,
    MODEL,
    SUMS,
    WINDOWS,
    Control,
    Update,
    passed,
    place,
    read_control,
    sums,
)
from assay.run.folder import RunFolder, salted
from assay.run.history import history
from assay.train import numerics
from assay.train.agreement import agree
from assay.train.batch import to_device
from assay.train.loss import arithmetic, window_loss
from assay.train.optimizers import build_optimizers, scale_gradients, set_rates, tensor_norms
from assay.train.owned import proof
from assay.train.ranks import Ranks
from assay.train.reduction import share, tree
from assay.train.start import exchange_for


@dataclass(frozen=True)
class Outcome:
    """A control that was computed again; `same` says that bits were expected, `max_difference` may be infinite."""

    updates: tuple[Update, ...]
    state_sha256: str
    max_difference: float
    tolerance: str
    same: bool
    identical: bool

    @property
    def passed(self) -> bool:
        """Equal bits where they are promised, otherwise every difference within the tolerance."""
        return self.identical if self.same else Decimal(repr(self.max_difference)) <= Decimal(self.tolerance)

    def facts(self) -> dict[str, Any]:
        """The contract's keys; the difference is null where a value was not finite."""
        finite = math.isfinite(self.max_difference)
        return {
            "updates": len(self.updates),
            "max_difference": self.max_difference if finite else None,
            "tolerance": self.tolerance,
            "identical": self.identical,
            "passed": self.passed,
            "bits_expected": self.same,
        }


def reduced(recipe: Recipe, model: Mapping[str, Any] | None = None) -> Recipe:
    """The recipe of a control: one micro-batch a lane, no masks, its start and data without a part in it."""
    whole = recipes.resolved(recipe)
    whole["batch"]["accumulation"] = 1
    whole["start"], whole["control"] = "scratch", {}
    whole["schedule"]["rewarm"] = 0
    whole["model"] |= dict(model or {})
    whole["model"]["document_mask"] = False
    whole["checkpoint"], whole["pins"], whole["trust"], whole["spikes"] = {}, {}, {}, {}
    return recipes.from_resolved(whole, "the recipe of the control")


def compute(
    recipe: Recipe, tensors: Mapping[str, Tensor], windows: NDArray[Any], ranks: Ranks, device: torch.device
) -> tuple[tuple[Update, ...], str]:
    """Losses, gradient norms and the `state_sha256` after the updates, at peak rates from a fresh optimizer.

    `windows` are ids [updates, global batch, block + 1]. Every rank calls it with the same arguments. What torch
    draws at random later is not touched.
    """
    generator = torch.get_rng_state()
    model = initial.empty(recipe.model, device, recompute=recipe.runtime.recompute)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(tensors[name])
    if recipe.runtime.compile:
        model.compile_blocks()
    exchange = exchange_for(recipe, model, ranks)
    optimizers = build_optimizers(exchange.owned, recipe.optimizer)
    peaks = {"lr": recipe.optimizer.lr} | ({"muon_lr": recipe.optimizer.muon_lr} if recipe.optimizer.muon_lr else {})
    set_rates(optimizers, peaks)
    mine, micro, divisor = share(recipe, ranks), recipe.batch.micro, recipe.positions_per_update
    found = []
    for update, batch in enumerate(windows):
        ids = batch[mine.first * micro : (mine.first + mine.micro_batches) * micro].astype(np.int64)
        tokens = to_device(ids, device)
        exchange.clear()
        model.take_up(arithmetic(recipe))
        lane_sums = []
        for lane in range(mine.lanes):
            sums = torch.zeros(2, dtype=torch.float64, device=device)
            for index in range(lane * mine.accumulation, (lane + 1) * mine.accumulation):
                exchange.before_backward(ends_lane=index + 1 == (lane + 1) * mine.accumulation)
                nll, z = window_loss(model, recipe, tokens[index * micro : (index + 1) * micro], None)
                torch.autograd.backward((nll + recipe.loss.z * z) / divisor)
                sums += torch.stack((nll.detach(), z.detach())).double()
            exchange.close_lane()
            lane_sums.append(sums)
        model.let_go()
        gradients = exchange.reduce()
        norms = tensor_norms(gradients)
        told = agree(ranks, update, tree(lane_sums), norms, exchange.owner, None, row_digests(ids))
        found.append(Update(told.nll_sum / divisor, told.grad_norm))
        scale_gradients(gradients, torch.tensor(told.grad_norm, dtype=torch.float64), recipe.optimizer.grad_clip)
        for optimizer in optimizers:
            optimizer.step()
        exchange.spread()
    state = str(proof(ranks, exchange.owned, optimizers)["state_sha256"])
    torch.set_rng_state(generator)
    return tuple(found), state


def record(
    out: Path, recipe: Recipe, tensors: Mapping[str, Tensor], windows: NDArray[Any], source: Mapping[str, Any]
) -> Control:
    """Compute a control on one rank and keep it at `out`, which must not exist; `recipe` is a `reduced` one.

    NumPy windows as in `compute`. InputError when a value is not finite: such a machine records nothing.
    """
    refuse_existing(out)  # before the work, not after it
    device = numerics.switch_on(recipe)
    numerics.keep_threads(device, 1, None)
    updates, state = compute(recipe, tensors, windows, Ranks(), device)
    if not all(math.isfinite(one.loss) and math.isfinite(one.grad_norm) for one in updates):
        raise InputError("the control's losses are not finite; record it with other weights, or on a sound machine")
    with publish_folder(out) as folder:
        write(folder / MODEL, {name: raw(tensor) for name, tensor in tensors.items()})
        publish_file(folder / WINDOWS, np.ascontiguousarray(windows, dtype=DTYPE).tobytes())
        body: dict[str, Any] = {
            "format": FORMAT,
            "source": dict(source),
            "time": now(),
            "weights_sha256": state_digest(tensor_digests(tensors)),
            "recipe": recipes.resolved(recipe),
            "expected": [one.record() for one in updates],
            "state_sha256": state,
            "promise": promise(recipe, device),
            "files": {name: digest_file(folder / name) for name in (MODEL, WINDOWS)},
        }
        publish_file(folder / FILE, (json.dumps(body, indent=1, sort_keys=True, allow_nan=False) + "\n").encode())
        publish_file(folder / SUMS, sums(digest_file(folder / FILE), body["files"]))
    return read_control(out)


def promise(recipe: Recipe, device: torch.device) -> dict[str, Any]:
    """What equal bits rest on: device kind, versions, arithmetic, settings."""
    found: dict[str, Any] = numerics.describe(RunFolder(Path()), recipe, device, [""])["promise"]
    return found


def check(
    control: Control, runtime: Runtime, tolerance: str, ranks: Ranks, device: torch.device,
    tensors: Mapping[str, Tensor] | None = None,
) -> Outcome:  # fmt: skip
    """Compute the control again under `runtime` and compare; `tensors` replace its weights in tests of the control.

    DataError when the loaded weights are not those that were recorded.
    """
    recipe = control.recipe.model_copy(update={"runtime": runtime})
    if ranks.size not in recipe.rank_counts:
        raise Refused(
            f"{control.folder}: a control of {recipe.batch.lanes} lane(s) cannot run on {ranks.size} ranks; allowed "
            f"are {', '.join(map(str, recipe.rank_counts))}: record one with this recipe's lanes"
        )
    if tensors is None:
        tensors = load_file(control.folder / MODEL)
        if state_digest(tensor_digests(tensors)) != control.weights_sha256:
            raise DataError(f"{control.folder / MODEL}: the loaded weights are not {control.weights_sha256}")
    shape = (len(control.expected), recipe.global_batch, recipe.model.block + 1)
    windows = np.fromfile(control.folder / WINDOWS, dtype=DTYPE).reshape(shape)
    updates, state = compute(recipe, tensors, windows, ranks, device)
    same = numerics.of_all(ranks, promise(recipe, device)) == control.promise
    kept = bool(control.promise.get("deterministic")) and recipe.reduction == "canonical"
    identical = updates == control.expected and state == control.state_sha256
    worst = max(_difference(one, other) for one, other in zip(updates, control.expected, strict=True))
    return Outcome(updates, state, worst, tolerance, same and kept, identical)


def _difference(found: Update, expected: Update) -> float:
    """The larger of the loss's difference in nats and the gradient norm's relative one; infinite if not finite."""
    if not (math.isfinite(found.loss) and math.isfinite(found.grad_norm)):
        return math.inf
    norm = abs(found.grad_norm - expected.grad_norm) / max(expected.grad_norm, 1e-12)
    return max(abs(found.loss - expected.loss), norm)


def allocation(run: RunFolder, recipe: Recipe, ranks: Ranks, device: torch.device) -> dict[str, Any]:
    """What makes an allocation this one and no other: hosts and devices, salted, driver, versions and arithmetic.

    `recipe` is the one that is trained with: what another compile, recomputation, determinism, number of threads or
    engine computes was not tried by a control under these.
    """
    described = numerics.describe(run, recipe, device, [""])
    return {
        "promise": numerics.of_all(ranks, described["promise"]),
        "engine": described["engine"],
        "hosts": sorted(set(ranks.collect(salted(run, platform.node())))),
        "devices": sorted(ranks.collect(numerics.identity(run, device))),
        "device_kind": described["promise"]["device_kind"],
        "driver": described["driver"],
        "cuda": described["promise"]["cuda"],
        "cudnn": described["cudnn"],
        "torch": described["promise"]["torch"],
        "python": platform.python_version(),
    }


def demand(
    run: RunFolder, recipe: Recipe, folder: Path, ranks: Ranks, device: torch.device, ledger: Ledger | None
) -> None:
    """Run the recipe's control where this allocation has not passed it yet; Refused (exit 3) when it fails.

    Every rank calls it, before anything of the run is loaded; rank 0, which has the `ledger`, writes the receipt.
    """
    where = place(recipe, folder)
    if where is None:
        return
    control, here = read_control(where), allocation(run, recipe, ranks, device)
    if ranks.lead(lambda: passed(history(run.ledger), control.sha256, here)):
        return
    outcome = check(control, recipe.runtime, recipe.control.tolerance, ranks, device)
    gc.collect()  # nothing of it stays where the run will lie, nor in what the run's memory is said to be
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    body = {
        "control": control.sha256,
        "allocation": here,
        "updates": len(outcome.updates),
        "expected": [one.record() for one in control.expected],
        "found": [one.record() for one in outcome.updates],
        "max_difference": repr(outcome.max_difference),
        "tolerance": outcome.tolerance,
        "bits_expected": outcome.same,
        "identical": outcome.identical,
        "passed": outcome.passed,
    }
    if ledger is not None:
        ledger.append("control", body)
    if not outcome.passed:
        wanted = "equal bits are" if outcome.same else f"{outcome.tolerance} at most is"
        raise Refused(
            f"the control {where} failed on this allocation: it differs by {outcome.max_difference:.6g} where {wanted} "
            "demanded; this machine computes wrong numbers: do not train here, or record a control that fits it"
        )
