"""Local Hugging Face folders: their weights under Assay's names, and the same folder as transformers computes it.

Safetensors only, in one file or several; pickle is refused. Nothing is downloaded, and no code is run but that
of a folder which Assay itself has just written.
"""

from __future__ import annotations

import atexit
import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from assay.errors import InputError, VerificationError
from assay.files.reading import inside, read_object
from assay.model.decoder import Decoder
from assay.model.interchange import from_hugging_face
from assay.recipe.schema import Model

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
# The tolerances of the contract for "the same logits".
TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-9}


def read_model(folder: Path) -> tuple[Model, dict[str, Tensor]]:
    """The recipe's `model` section and the float32 tensors under Assay's names.

    Raises InputError naming file and key for whatever this decoder would compute differently, for pickled
    weights, and for numbers that float32 cannot hold exactly.
    """
    config = read_object(folder / CONFIG, "the config of a Hugging Face model")
    fields, tensors = from_hugging_face(config, _read_tensors(folder), str(folder / CONFIG))
    return Model.model_validate(fields), {name: _float32(folder, name, one) for name, one in tensors.items()}


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a model, one or those of its index; InputError when there are none."""
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS]
    if (folder / INDEX).is_file():
        names = sorted(set(_index(folder).values()))
        return [inside(folder, name, f"{folder / INDEX}, weight_map") for name in names]
    pickled = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in folder.glob(pattern))
    if pickled:
        raise InputError(
            f"{folder / pickled[0]} is a pickle, which can run any code when it is read; "
            f"convert the model to {WEIGHTS} first"
        )
    raise InputError(f"{folder} holds neither {WEIGHTS} nor {INDEX}; get the whole model")


def load_exported(folder: Path, architecture: str, dtype: torch.dtype) -> Any:
    """An export of ours as a stranger loads it: `AutoModelForCausalLM`, its own modelling file included.

    For folders that this process has just written: the code in them is run. VerificationError when
    transformers cannot read it or finds parameters missing, left over or of another shape.
    """
    ours = architecture == "AssayForCausalLM"
    return _load(_transformers().AutoModelForCausalLM, folder, architecture, dtype, trust_remote_code=ours)


def load_foreign(folder: Path, architecture: str, dtype: torch.dtype) -> Any:
    """Somebody's model as transformers, or our own modelling file in this package, computes it in `dtype`.

    No code of the folder is run. Raises as `load_exported`.
    """
    library: Any = _transformers()
    if architecture == "AssayForCausalLM":
        from assay.model import modeling_assay as library
    return _load(getattr(library, architecture), folder, architecture, dtype)


def _load(kind: Any, folder: Path, architecture: str, dtype: torch.dtype, **more: bool) -> Any:
    try:
        model, told = kind.from_pretrained(
            str(folder), dtype=dtype, local_files_only=True, use_safetensors=True, output_loading_info=True, **more
        )
    except Exception as fault:  # noqa: BLE001  a config can provoke any exception there, bare assertions included
        raise VerificationError(f"{folder} cannot be loaded by transformers: {_short(fault)}") from None
    odd = {name: value for name, value in told.items() if value}
    if odd or type(model).__name__ != architecture:
        what = f"{', '.join(odd)}: {next(iter(odd.values()))}" if odd else f"a {type(model).__name__}"
        raise VerificationError(f"{folder}: transformers does not find the whole model there ({what})")
    return model.eval()


@torch.no_grad()
def logit_difference(ours: Decoder, theirs: Any, tokens: Tensor, documents: Tensor | None) -> float:
    """The largest absolute difference of the logits over tokens [B, T], one sequence at a time."""
    largest = 0.0
    for row in range(len(tokens)):
        ids = tokens[row : row + 1]
        numbers = None if documents is None else documents[row : row + 1]
        more = {} if numbers is None else {"documents": numbers}
        there = theirs(ids, use_cache=False, return_dict=True, **more).logits
        here = ours.logits(ours(ids, numbers))
        difference = float((here - there).abs().max())
        if not difference <= largest:  # NaN as well
            largest = difference
    return largest


def expect_equal(difference: float, dtype: torch.dtype, what: str) -> None:
    """VerificationError (exit 6) when the logits differ by more than the contract allows for `dtype`."""
    if not difference <= TOLERANCE[dtype]:
        name = str(dtype).removeprefix("torch.")
        raise VerificationError(
            f"{what}: the logits differ by {difference:.3g} in {name}, {TOLERANCE[dtype]:g} is allowed; "
            "nothing was written"
        )


def load_tokenizer(folder: Path) -> Any:
    """The tokenizer in `folder` as transformers reads it; VerificationError when it cannot."""
    try:
        # False, not left open: our own config would otherwise make it ask on the terminal whether code may be run.
        return _transformers().AutoTokenizer.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=False
        )
    except Exception as fault:  # noqa: BLE001  tokenizers raises bare Exception for every fault of the file
        raise VerificationError(f"{folder}: transformers cannot read the tokenizer: {_short(fault)}") from None


def _short(fault: Exception) -> str:
    text = " ".join(str(fault).split()) or type(fault).__name__
    return text if len(text) <= 200 else text[:199] + "…"


def _transformers() -> Any:
    """Transformers, kept off the network, off the terminal and, when we load it first, out of the user's cache."""
    if "transformers" not in sys.modules and "HF_MODULES_CACHE" not in os.environ:
        # It copies modelling files into a cache and imports them from there: into a folder that goes with us.
        folder = tempfile.TemporaryDirectory(prefix="assay-modules-")
        atexit.register(folder.cleanup)
        os.environ["HF_MODULES_CACHE"] = folder.name
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    return transformers


def _read_tensors(folder: Path) -> dict[str, Tensor]:
    result: dict[str, Tensor] = {}
    origin: dict[str, str] = {}
    for path in weight_files(folder):
        if not path.is_file():
            raise InputError(f"{path} is missing, but {INDEX} names it; get the whole model")
        try:
            part = load_file(path)
        except (SafetensorError, OSError) as fault:
            raise InputError(f"{path} is not a whole safetensors file: {fault}") from None
        for name in part:
            if name in origin:
                raise InputError(f"{path} holds the tensor {name!r}, which {origin[name]} holds too; keep one")
            origin[name] = path.name
        result |= part
    if not (folder / WEIGHTS).is_file():
        _expect_index(_index(folder), origin, folder / INDEX)
    return result


def _index(folder: Path) -> dict[str, str]:
    mapping = read_object(folder / INDEX, "the index of a sharded model").get("weight_map")
    good = isinstance(mapping, dict) and mapping and all(isinstance(value, str) for value in mapping.values())
    if not good:
        raise InputError(
            f"{folder / INDEX}: weight_map is {mapping!r:.60}; an object of tensor and file names is expected"
        )
    assert isinstance(mapping, dict)
    return mapping


def _expect_index(index: Mapping[str, str], origin: Mapping[str, str], path: Path) -> None:
    for name in sorted(index.keys() | origin.keys()):
        if index.get(name) != origin.get(name):
            raise InputError(
                f"{path}: the tensor {name!r} is in {origin.get(name) or 'no file'}, "
                f"but the index says {index.get(name) or 'nothing'}; get the model again"
            )


def _float32(folder: Path, name: str, tensor: Tensor) -> Tensor:
    result = tensor.to(torch.float32)
    if not bool(torch.isfinite(result).all()):
        raise InputError(f"{folder}: the tensor {name!r} holds a value that is not finite in float32")
    if tensor.dtype == torch.float64 and not torch.equal(result.double(), tensor):
        raise InputError(
            f"{folder}: the tensor {name!r} is float64 and float32 cannot hold it exactly; convert the model to float32"
        )
    return result
