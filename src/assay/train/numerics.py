"""What decides the bits: determinism switches, device, versions, threads.

Switched on before the device starts and recorded in the receipt of every segment; two segments
with the same `promise` compute the same bits. It does not measure speed.
"""

from __future__ import annotations

import os
import re
import warnings
from pathlib import Path
from typing import Any

import torch

from assay.errors import InputError, Refused
from assay.files.digest import canonical, digest
from assay.plan.peaks import SOURCE, peak
from assay.recipe import load as recipes
from assay.recipe.schema import Recipe
from assay.run.folder import RunFolder, salted
from assay.run.provenance import code_identity
from assay.train.ranks import Ranks


def switch_on(recipe: Recipe, local_rank: int = 0) -> torch.device:
    """Choose the device and set the switches; InputError when the recipe names a device that is not here.

    Several ranks take the GPUs of their machine in turn; there may be more ranks than GPUs. A device with an index
    is that of all ranks.
    """
    wanted = recipe.runtime.device
    if wanted is not None and wanted.startswith("cuda") and not torch.cuda.is_available():
        raise InputError(f"runtime.device is {wanted!r}, but this machine has no CUDA device; set it to cpu or null")
    if recipe.runtime.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        # No bit depends on memory that nobody wrote; filling it costs a pass over every new tensor.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        torch.backends.cudnn.benchmark = False
        torch.backends.cuda.enable_cudnn_sdp(False)
    torch.set_float32_matmul_precision("highest")
    # FSDP and compile print advice that no user of the command can act on.
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch")
    device = torch.device(wanted or ("cuda" if torch.cuda.is_available() else "cpu"))
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", local_rank % torch.cuda.device_count())
    if device.type == "cuda":
        if device.index >= torch.cuda.device_count():
            raise InputError(
                f"runtime.device is {wanted!r}, but this machine has {torch.cuda.device_count()} CUDA devices"
            )
        torch.cuda.set_device(device)
    return device


def keep_threads(device: torch.device, ranks: int, before: int | None) -> int:
    """Set and return the number of CPU threads, on which the bits depend on a CPU.

    The user's OMP_NUM_THREADS is kept; otherwise a run that goes on keeps the number that it had (`before`),
    and a new run shares the cores out among its ranks.
    """
    if "OMP_NUM_THREADS" not in os.environ:
        if before is not None and device.type == "cpu":
            torch.set_num_threads(before)
        elif ranks > 1:
            torch.set_num_threads(max(1, (os.cpu_count() or 1) // ranks))
    return torch.get_num_threads()


def identity(run: RunFolder, device: torch.device) -> str:
    """The device as receipts name it."""
    return salted(run, uuid(device) or "cpu")


def uuid(device: torch.device) -> str | None:
    """The GPU's UUID as CUDA states it; None of a CPU."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else None


def describe(
    run: RunFolder, recipe: Recipe, device: torch.device, devices: list[str] | None = None, backend: str | None = None
) -> dict[str, Any]:
    """Device, driver, switches and versions, as the start receipt holds them; `devices` are those of all ranks."""
    cuda = device.type == "cuda"
    kind = torch.cuda.get_device_name(device) if cuda else f"cpu {torch.backends.cpu.get_cpu_capability()}"
    devices = devices or [identity(run, device)]
    promise: dict[str, Any] = {
        "device_kind": kind,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "compile": recipe.runtime.compile,
        "recompute": recipe.runtime.recompute,
        "compute": recipe.precision.compute,
        "threads": torch.get_num_threads() if not cuda else None,
        "reduction": recipe.reduction,
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }
    if recipe.spikes.policy != "none":  # an update that is left out leaves other weights
        promise["spikes"] = recipe.spikes.model_dump(mode="json") | {"deviations": repr(recipe.spikes.deviations)}
    return {
        "promise": promise,
        "bits": "promised" if recipe.runtime.deterministic and recipe.reduction == "canonical" else "not promised",
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "cublas_workspace": os.environ.get("CUBLAS_WORKSPACE_CONFIG") if cuda else None,
        "cudnn": torch.backends.cudnn.version() if cuda else None,  # type: ignore[no-untyped-call]
        "float32_matmul": torch.get_float32_matmul_precision(),
        "engine": recipe.runtime.engine,
        "driver": _driver() if cuda else None,
        "devices": devices,
        "backend": backend,
        "world": len(devices),
    }


def refuse_strangers(ranks: Ranks, recipe: Recipe) -> None:
    """Refused (exit 3), on every rank, when the ranks were given other recipes or run other code."""
    if ranks.size == 1:
        return
    # What all must do at the same update is more than the recipe's identity covers.
    whole = recipes.resolved(recipe)
    alike = recipes.learning(recipe) | {key: whole[key] for key in ("checkpoint", "evaluate", "spikes", "log")}
    told = ranks.collect({"recipe": digest(canonical(alike)), "code": code_identity()["sha256"]})
    for key, way_out in (("recipe", "give all the same"), ("code", "install the same version for all")):
        for rank, one in enumerate(told):
            if one[key] != told[0][key]:
                first = told[0][key]
                raise Refused(f"the {key} of rank {rank} has digest {one[key]}, that of rank 0 {first}; {way_out}")


def of_all(ranks: Ranks, promise: dict[str, Any]) -> dict[str, Any]:
    """The promise of rank 0; with what other ranks have in its place as `others`, and then no bits are promised."""
    told: list[dict[str, Any]] = ranks.collect(promise)
    first, *rest = told
    others = [one for number, one in enumerate(rest) if one != first and one not in rest[:number]]
    return first | ({"others": others} if others else {})


def peak_of_all(ranks: Ranks, recipe: Recipe, device: torch.device, devices: list[str]) -> dict[str, Any]:
    """The dense peak of all GPUs together in the recipe's arithmetic, FLOP/s, by the datasheet; None: unknown."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    kinds = dict(zip(devices, ranks.collect(name), strict=True))  # ranks may share a device
    found = [peak(kind, recipe.precision.compute) for kind in kinds.values()]
    known = None if None in found else sum(one for one in found if one is not None)
    return {
        "flops_per_second": known,
        "devices": len(kinds),
        "kinds": sorted(set(kinds.values())),
        "source": "unknown" if known is None else SOURCE,
    }


def _driver() -> str | None:
    """The NVIDIA kernel driver's version as the kernel states it, or None where it states none."""
    path = Path("/proc/driver/nvidia/version")
    found = re.search(r"\b\d+\.\d+(\.\d+)?\b", path.read_text(encoding="ascii")) if path.is_file() else None
    return found.group() if found else None


def memory(device: torch.device) -> tuple[int | None, int | None]:
    """Peak and present bytes of this process's tensors on the device; the CPU's peak is the process's peak RSS."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device), torch.cuda.memory_allocated(device)
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, None
