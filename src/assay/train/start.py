"""The four starts: scratch, init-from, continue-from, resume; each proved against the loaded tensors.

Which one it is was decided before (recipe and command), never here. The evidence goes into the
receipt `start` or `recovery`: digests of the tensors as they lie in the model and optimizer after
loading. Rank 0 reads and checks; the others get their tensors from it. Nothing is started anew because
something could not be read.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from assay.checkpoint import manifest as manifests
from assay.checkpoint.load import Loaded, load, newest
from assay.checkpoint.place import checkpoint_folder
from assay.data.batches import Batches, order_next
from assay.data.queue import Queue, order_start
from assay.errors import DataError, Refused
from assay.files.digest import digest_file, raw
from assay.files.reading import read_object
from assay.model import initial
from assay.model.decoder import Decoder
from assay.recipe import load as recipes
from assay.recipe.schema import Recipe
from assay.run.folder import RunFolder
from assay.run.history import History, history
from assay.train.optimizers import build_optimizers, state_tensors
from assay.train.owned import hand_out_state, proof
from assay.train.ranks import Ranks
from assay.train.reduction import Exchange, share
from assay.train.sharding import ShardedExchange

RECENT = 10  # batches whose digests a checkpoint carries, recomputed on a resume


@dataclass
class Position:
    """Where a run is: completed steps, order digest, and the newest batch digests with what preceded them.

    `norms` and `skipped` are what the policy for spikes goes by: the newest gradient norms that were no spikes, and
    how many updates were skipped right before this one.
    """

    step: int
    order: bytes
    recent: list[dict[str, Any]] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    skipped: int = 0

    def advance(self, batch_digest: str) -> None:
        """Take up one consumed batch."""
        before = "sha256:" + self.order.hex()
        self.recent = [*self.recent, {"update": self.step, "before": before, "batch": batch_digest}][-RECENT:]
        self.order = order_next(self.order, batch_digest)
        self.step += 1

    @property
    def order_digest(self) -> str:
        """The order digest after the last completed update."""
        return "sha256:" + self.order.hex()


@dataclass
class Started:
    """A model and optimizers ready for the update `position.step`, with the evidence for the receipt."""

    mode: str
    model: Decoder
    exchange: Exchange | ShardedExchange
    optimizers: list[torch.optim.Optimizer]
    position: Position
    evidence: dict[str, Any]
    notes: list[str]  # what the operator should know about this start


@dataclass
class _Source:
    """What rank 0 found: the model, the optimizer's tensors unless it is fresh, the position, and the evidence."""

    mode: str
    model: Decoder
    optimizer: dict[str, Tensor] | None
    position: Position
    evidence: dict[str, Any]
    expected: dict[str, Any] = field(default_factory=dict)  # digests that the loaded tensors must have
    folder: Path = Path()
    notes: list[str] = field(default_factory=list)


def begin(
    run: RunFolder,
    recipe: Recipe,
    recipe_folder: Path,
    queue: Queue,
    batches: Batches,
    device: torch.device,
    resume: bool,
    from_step: int | None,
    ranks: Ranks,
) -> Started:
    """Build, load and prove; see the module. DataError (4) or Refused (3) when the evidence does not hold.

    Every rank calls it; rank 0 alone looks at the run and at checkpoints.
    """
    found: list[_Source] = []

    def look() -> dict[str, Any]:
        found.append(_source(run, recipe, recipe_folder, queue, batches, device, resume, from_step))
        return {
            "mode": found[0].mode,
            "fresh": found[0].optimizer is None,
            "position": {**vars(found[0].position), "order": found[0].position.order.hex()},
        }

    told = ranks.lead(look)
    source = found[0] if ranks.first else None
    model = source.model if source else initial.empty(recipe.model, device, recompute=recipe.runtime.recompute)
    if ranks.size > 1:
        for parameter in model.parameters():
            ranks.spread(parameter.detach(), 0)
    exchange = exchange_for(recipe, model, ranks)
    owned = exchange.owned
    optimizers = build_optimizers(owned, recipe.optimizer)
    if told["fresh"]:
        if any(bool(tensor.any()) for tensor in state_tensors(owned, optimizers).values()):
            raise Refused(f"{told['mode']}: the optimizer is not empty; a {told['mode']} start has a fresh optimizer")
    else:
        hand_out_state(ranks, owned, optimizers, (source.optimizer if source else None) or {})
    proved = proof(ranks, owned, optimizers)
    if source is None:
        place = told["position"]
        position = Position(**place | {"order": bytes.fromhex(place["order"])})
        ranks.lead(lambda: None)
        return Started(told["mode"], model, exchange, optimizers, position, {}, [])
    ranks.lead(lambda: _expect(proved, source.expected, source.folder))
    evidence = {"optimizer": "fresh" if told["fresh"] else "restored", **source.evidence, **proved}
    return Started(source.mode, model, exchange, optimizers, source.position, evidence, source.notes)


def exchange_for(recipe: Recipe, model: Decoder, ranks: Ranks) -> Exchange | ShardedExchange:
    """What carries gradients and weights: of whole models, or of sharded ones where the recipe says so."""
    lanes = share(recipe, ranks).lanes
    if recipe.runtime.engine == "fsdp" and ranks.size > 1:
        return ShardedExchange(model, ranks, lanes)
    return Exchange(dict(model.named_parameters()), ranks, lanes, recipe.reduction == "canonical")


def _source(
    run: RunFolder,
    recipe: Recipe,
    recipe_folder: Path,
    queue: Queue,
    batches: Batches,
    device: torch.device,
    resume: bool,
    from_step: int | None,
) -> _Source:
    told = history(run.ledger)
    if resume and any(item.kind == "full" for item in told.saved):
        return _resume(run, recipe, queue, batches, device, told, from_step)
    if from_step is not None:
        raise DataError(f"{run.path} has no full checkpoint of step {from_step}; none was saved: leave --from-step out")
    source = _own_start(recipe, recipe_folder, queue, batches, device)
    if resume:
        source.notes.append("no full checkpoint was saved before the interruption: the run begins again at its start")
    return source


def _own_start(recipe: Recipe, folder: Path, queue: Queue, batches: Batches, device: torch.device) -> _Source:
    """The start that the recipe names."""
    if recipe.start.init_from is not None:
        return _init_from(recipe, folder, queue, device)
    if recipe.start.continue_from is not None:
        return _continue_from(recipe, folder, queue, batches, device)
    model = initial.build(recipe.model, recipe.seed, device, recompute=recipe.runtime.recompute)
    position = Position(0, order_start(queue, recipe.data.seed))
    return _Source("scratch", model, None, position, {"seed": recipe.seed})


def _init_from(recipe: Recipe, folder: Path, queue: Queue, device: torch.device) -> _Source:
    source = recipe.start.init_from
    assert source is not None
    place = folder / source.path
    loaded = load(place)
    weights_file = manifests.weights_pin(loaded.manifest)
    if source.sha256 not in (None, weights_file):
        raise Refused(f"start.init_from.sha256 is {source.sha256}, but the weights of {place} have {weights_file}")
    config = read_object(place / manifests.CONFIG, "the config of a weights checkpoint")
    _same_shape(config, recipe, place)
    model = _model(recipe, loaded.model, device)
    evidence = {
        "weights_file": weights_file,
        "config_file": digest_file(place / manifests.CONFIG),
        "source_step": loaded.manifest.step,
        "source_run": loaded.manifest.run_id,
    }
    position = Position(0, order_start(queue, recipe.data.seed))
    expected = {"weights_sha256": loaded.manifest.weights_sha256}
    return _Source("init-from", model, None, position, evidence, expected, place)


def _continue_from(recipe: Recipe, folder: Path, queue: Queue, batches: Batches, device: torch.device) -> _Source:
    source = recipe.start.continue_from
    assert source is not None
    place = checkpoint_folder(folder / source.path, source.step)
    loaded = load(place)
    manifest = loaded.manifest
    if manifest.kind != "full":
        raise Refused(f"{place} is a weights checkpoint; continue_from needs a full one (use init_from for weights)")
    if manifest.step != source.step:
        raise Refused(f"{place} holds step {manifest.step}, but start.continue_from.step is {source.step}")
    if source.sha256 not in (None, manifest.state_sha256):
        raise Refused(f"start.continue_from.sha256 is {source.sha256}, but {place} has {manifest.state_sha256}")
    parent = recipes.from_resolved(
        read_object(place / manifests.RECIPE, "the recipe of a checkpoint"), str(place / manifests.RECIPE)
    )
    for key, mine, theirs in (
        ("data.seed", recipe.data.seed, parent.data.seed),
        ("batch (global)", recipe.global_batch, parent.global_batch),
        ("optimizer.kind", recipe.optimizer.kind, parent.optimizer.kind),
    ):
        if mine != theirs:
            raise Refused(f"{key} is {mine}, but the run that is continued has {theirs}; its state does not fit")
    _same_shape(parent.model.model_dump(mode="json"), recipe, place, block_too=True)
    evidence = {"parent": {"run_id": manifest.run_id, "step": manifest.step, "state_sha256": manifest.state_sha256}}
    return _restored("continue-from", recipe, queue, batches, device, loaded, evidence, [])


def _resume(
    run: RunFolder,
    recipe: Recipe,
    queue: Queue,
    batches: Batches,
    device: torch.device,
    told: History,
    from_step: int | None,
) -> _Source:
    loaded, faults = newest(run.path, told.line if from_step is None else told.standing, from_step)
    manifest = loaded.manifest
    if manifest.run_id != told.run_id:
        raise Refused(f"{manifest.folder} belongs to run {manifest.run_id}, not to {told.run_id}; it is not resumed")
    evidence = {
        "checkpoint": str(manifest.folder.relative_to(run.path).as_posix()),
        "manifest_sha256": digest_file(manifest.folder / manifests.MANIFEST),
        "skipped": faults and [_without_path(fault, run.path) for fault in faults],
    }
    return _restored("resume", recipe, queue, batches, device, loaded, evidence, faults)


def _restored(
    mode: str,
    recipe: Recipe,
    queue: Queue,
    batches: Batches,
    device: torch.device,
    loaded: Loaded,
    evidence: dict[str, Any],
    faults: list[str],
) -> _Source:
    model = _model(recipe, loaded.model, device)
    position = _position(loaded, recipe, queue, batches)
    torch.set_rng_state(torch.frombuffer(bytearray.fromhex(loaded.state["rng"]["cpu"]), dtype=torch.uint8))
    evidence["batches_recomputed"] = len(position.recent)
    expected = {"state_sha256": loaded.manifest.state_sha256}
    notes = [f"a newer checkpoint was not used: {fault}" for fault in faults]
    return _Source(mode, model, loaded.optimizer, position, evidence, expected, loaded.manifest.folder, notes)


def _position(loaded: Loaded, recipe: Recipe, queue: Queue, batches: Batches) -> Position:
    """The data position of a checkpoint, after the consumed prefix and the last batches were proved again."""
    folder, state = loaded.manifest.folder, loaded.state
    consumed = (folder / manifests.QUEUE).read_bytes().splitlines()
    present = queue.path.read_bytes().splitlines()[: len(consumed)]
    if consumed != present:
        raise DataError(
            f"{queue.path} is not the queue that step {state['step']} was trained on: the consumed prefix of "
            f"{len(consumed)} lines has other bytes; point data.queue at the queue of this run"
        )
    if queue.prefix(max(len(consumed) - 1, 0)) != state.get("queue_prefix"):
        raise DataError(f"{folder}: its copy of the queue is not the prefix that its state names; it is damaged")
    position = Position(int(state["step"]), raw(state["order_digest"]), list(state["recent"]))
    if spikes := state.get("spikes"):
        position.norms, position.skipped = [float(norm) for norm in spikes["norms"]], spikes["skipped"]
    for item in position.recent:
        if batches.digest(item["update"]) != item["batch"]:
            raise DataError(
                f"the batch of update {item['update']} is not the one that was trained on; "
                "the shards' bytes or the order have changed"
            )
    for item, after in zip(position.recent, [*position.recent, None][1:], strict=True):
        order = order_next(raw(item["before"]), item["batch"])
        if order != (raw(after["before"]) if after else position.order):
            raise DataError(f"{folder}: the order digest does not continue at update {item['update']}")
    if position.step == 0 and position.order != order_start(queue, recipe.data.seed):
        raise DataError(f"{folder}: the order digest of step 0 is not that of this queue and data seed")
    return position


def _model(recipe: Recipe, tensors: dict[str, Tensor], device: torch.device) -> Decoder:
    model = initial.empty(recipe.model, device, recompute=recipe.runtime.recompute)
    parameters = dict(model.named_parameters())
    if parameters.keys() != tensors.keys():
        odd = sorted(parameters.keys() ^ tensors.keys())
        raise Refused(f"the weights do not fit the recipe's model: {odd[0]!r} is on one side only ({len(odd)} such)")
    with torch.no_grad():
        for name, parameter in parameters.items():
            if parameter.shape != tensors[name].shape or parameter.dtype != tensors[name].dtype:
                raise Refused(
                    f"the weights do not fit the recipe's model: {name} is {tensors[name].dtype} "
                    f"{list(tensors[name].shape)}, {parameter.dtype} {list(parameter.shape)} is needed"
                )
            parameter.copy_(tensors[name])
    return model


def _expect(found: dict[str, Any], stated: dict[str, Any], folder: Path) -> None:
    for name, digest in stated.items():
        if found[name] != digest:
            raise DataError(f"{folder}: the loaded tensors have {found[name]}, but the manifest states {digest}")


def _same_shape(config: dict[str, Any], recipe: Recipe, place: Path, block_too: bool = False) -> None:
    """The model section must be the source's; its context length may differ, since no weight depends on it."""
    mine = recipe.model.model_dump(mode="json")
    for key, value in mine.items():
        if key in config and config[key] != value and (block_too or key != "block"):
            raise Refused(f"model.{key} is {value!r} in the recipe, but {config[key]!r} at {place}; they must agree")


def _without_path(text: str, folder: Path) -> str:
    return text.replace(f"{folder}/", "")
