"""Weights and config to and from the names and shapes of Hugging Face.

Promises that what comes out computes the same logits, or is refused in one sentence: Llama and Qwen3
shapes natively, everything else through `modeling_assay.py`. It reads and writes no files.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from pydantic import ValidationError
from torch import Tensor

from assay.errors import InputError
from assay.plan.parameters import shapes
from assay.recipe.schema import Model

MODELLING_FILE = Path(__file__).with_name("modeling_assay.py")
"""What an export of the third kind carries beside its weights; it imports nothing of Assay."""

_MODEL_TYPES = {"LlamaForCausalLM": "llama", "Qwen3ForCausalLM": "qwen3", "AssayForCausalLM": "assay"}
_PARTS = {
    "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attention": "self_attn",
    "ffn": "mlp",
    **{matrix: f"{matrix}_proj" for matrix in ("q", "k", "v", "o", "gate", "up", "down")},
}
_WHOLE = {"embedding.weight": "model.embed_tokens.weight", "norm.weight": "model.norm.weight"}
_HEAD = ("head.weight", "lm_head.weight")

# Recipe key → config key, where the value is the same.
_KEYS = {
    "layers": "num_hidden_layers",
    "width": "hidden_size",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "vocabulary": "vocab_size",
    "block": "max_position_embeddings",
    "ffn": "intermediate_size",
    "norm_eps": "rms_norm_eps",
    "attention_bias": "attention_bias",
    "tie_embeddings": "tie_word_embeddings",
}
_OWN_KEYS = ("qk_norm", "value_residual", "logit_cap", "document_mask")
# What a config of that type means by leaving a key out (transformers' defaults, the same for all three).
_DEFAULTS: dict[str, Any] = {"rms_norm_eps": 1e-6, "attention_bias": False, "tie_word_embeddings": False}


def architecture(config: Model) -> str:
    """The class that computes this model: `LlamaForCausalLM`, `Qwen3ForCausalLM` or `AssayForCausalLM`."""
    if config.value_residual or config.logit_cap or config.document_mask:
        return "AssayForCausalLM"
    return "Qwen3ForCausalLM" if config.qk_norm else "LlamaForCausalLM"


def names(config: Model) -> dict[str, str]:
    """Assay's name of every parameter → its name in the Hugging Face file. Own models keep Assay's names."""
    if architecture(config) == "AssayForCausalLM":
        return {name: name for name in shapes(config)}
    return {name: _foreign_name(name) for name in shapes(config)}


def _foreign_name(name: str) -> str:
    if name == _HEAD[0]:
        return _HEAD[1]
    if name in _WHOLE:
        return _WHOLE[name]
    _, layer, *rest = name.split(".")
    return ".".join(("model.layers", layer, *(_PARTS.get(part, part) for part in rest)))


def to_hugging_face(config: Model, tensors: Mapping[str, Tensor]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The contents of config.json and the tensors of the safetensors file, of one dtype; nothing is copied.

    Ids of special tokens are null: whoever knows the tokenizer fills them in. Tied embeddings appear
    once. A config of the third kind needs `MODELLING_FILE` beside it.
    """
    assert tensors.keys() == shapes(config).keys(), "the tensors are not those of this model"
    dtypes = {tensor.dtype for tensor in tensors.values()}
    assert len(dtypes) == 1, f"an export has one dtype, not {dtypes}"
    kind = architecture(config)
    result: dict[str, Any] = {
        "architectures": [kind],
        "model_type": _MODEL_TYPES[kind],
        "dtype": str(dtypes.pop()).removeprefix("torch."),
        **{theirs: getattr(config, ours) for ours, theirs in _KEYS.items()},
        "head_dim": config.head_size,
        "hidden_act": "silu",
        "attention_dropout": 0.0,
        "rope_theta": config.rope_theta,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        "use_cache": kind != "AssayForCausalLM",
    }
    if kind == "AssayForCausalLM":
        result |= {key: getattr(config, key) for key in _OWN_KEYS}
        module = MODELLING_FILE.stem
        result["auto_map"] = {"AutoConfig": f"{module}.AssayConfig", "AutoModelForCausalLM": f"{module}.{kind}"}
    else:
        # Transformers 5 reads this form, older ones the key `rope_theta` above.
        result["rope_parameters"] = {"rope_type": "default", "rope_theta": config.rope_theta}
    if kind == "LlamaForCausalLM":
        result["mlp_bias"] = False
    if kind == "Qwen3ForCausalLM":
        result |= {"use_sliding_window": False, "sliding_window": None}
    renamed = names(config)
    return result, {renamed[name]: tensor for name, tensor in tensors.items()}


def from_hugging_face(
    hf_config: Mapping[str, Any], hf_tensors: Mapping[str, Tensor], where: str = "config.json"
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The recipe's `model` fields and the tensors under Assay's names, not copied.

    Raises InputError, naming `where`, for anything that this decoder would compute differently and for
    tensors that are missing, foreign or of another shape.
    """
    model = _read_config(hf_config, where)
    expected = names(model)
    tensors = {name: tensor for name, tensor in hf_tensors.items() if not name.endswith(".rotary_emb.inv_freq")}
    if model.tie_embeddings:
        _take_tied_head(tensors, expected["embedding.weight"], where)
    for missing in sorted(expected.values() - tensors.keys()):
        raise InputError(
            f"{where}: the weights lack the tensor {missing!r} that this config demands; get the whole model"
        )
    for foreign in sorted(tensors.keys() - expected.values()):
        raise InputError(f"{where}: the weights hold the tensor {foreign!r}, for which this decoder has no place")
    for name, shape in shapes(model).items():
        tensor = tensors[expected[name]]
        if tuple(tensor.shape) != shape or not tensor.is_floating_point():
            raise InputError(
                f"{where}: the tensor {expected[name]!r} is {tensor.dtype} {list(tensor.shape)}, "
                f"but the config demands floating-point numbers of shape {list(shape)}"
            )
    return model.model_dump(), {name: tensors[theirs] for name, theirs in expected.items()}


def _read_config(config: Mapping[str, Any], where: str) -> Model:
    """The recipe's model section that computes the same; InputError when there is none."""

    def refuse(key: str, value: object, allowed: str) -> NoReturn:
        raise InputError(f"{where}: {key} is {value!r}, which this decoder cannot compute; {allowed}")

    model_type = config.get("model_type")
    if model_type not in _MODEL_TYPES.values():
        refuse("model_type", model_type, f"allowed are {', '.join(_MODEL_TYPES.values())}")
    for key, allowed in (
        ("hidden_act", "silu"),
        ("mlp_bias", False),
        ("attention_dropout", 0),
        ("use_sliding_window", False),
        ("partial_rotary_factor", 1),
        ("quantization_config", None),
        ("per_layer_config", None),
    ):
        value = config.get(key)
        if value is not None and value != allowed:
            refuse(key, value, f"only {allowed!r} is")
    layer_types = config.get("layer_types") or []
    if not isinstance(layer_types, list) or any(each != "full_attention" for each in layer_types):
        refuse("layer_types", layer_types, "only full_attention is")
    theta = config.get("rope_theta", 10_000.0)
    for key in ("rope_scaling", "rope_parameters"):
        rope = config.get(key) or {}
        if not isinstance(rope, Mapping):
            refuse(key, rope, "an object is expected")
        plain = rope.get("rope_type", rope.get("type", "default")) == "default"
        if not plain or rope.get("partial_rotary_factor", 1) != 1:
            refuse(key, dict(rope), "only the plain rotary positions are (rope_type default)")
        theta = rope.get("rope_theta", theta)

    defaults = {**_DEFAULTS, "num_key_value_heads": config.get("num_attention_heads")}
    if model_type == "qwen3":
        defaults |= {"num_key_value_heads": 32, "head_dim": 128}
    given = {**defaults, **{key: value for key, value in config.items() if value is not None}}
    fields: dict[str, Any] = {"rope_theta": theta, "qk_norm": model_type == "qwen3"}
    for ours, theirs in _KEYS.items():
        if given.get(theirs) is None:
            raise InputError(f"{where}: the key {theirs!r} is missing; a whole config.json is expected")
        fields[ours] = given[theirs]
    if model_type == "assay":
        fields |= {key: given[key] for key in _OWN_KEYS if key in given}
    try:
        model = Model.model_validate(fields)
    except ValidationError as error:
        fault = error.errors(include_url=False, include_input=False)[0]
        ours = str(fault["loc"][0]) if fault["loc"] else ""
        raise InputError(f"{where}: {_KEYS.get(ours, ours) or 'the model'} is not valid: {fault['msg']}") from None
    if given.get("head_dim", model.head_size) != model.head_size:
        refuse("head_dim", given["head_dim"], f"only hidden_size ÷ num_attention_heads, here {model.head_size}, is")
    return model


def _take_tied_head(tensors: dict[str, Tensor], embedding: str, where: str) -> None:
    """Remove the second copy of a tied embedding that some files carry, if it is one."""
    head = tensors.pop(_HEAD[1], tensors.pop(_HEAD[0], None))
    if head is None or embedding not in tensors:
        return
    if head.shape != tensors[embedding].shape or not bool((head == tensors[embedding]).all()):
        raise InputError(
            f"{where}: tie_word_embeddings is true, but the output matrix is not the embedding; "
            "set it to false if the weights are right"
        )
