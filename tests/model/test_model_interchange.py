"""What leaves for Hugging Face computes the same logits there, and what comes in computes them here."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from assay.errors import InputError
from assay.model.decoder import Decoder
from assay.model.initial import build, empty
from assay.model.interchange import MODELLING_FILE, architecture, from_hugging_face, to_hugging_face
from assay.plan.parameters import shapes
from assay.recipe.schema import Model

TOKENS = torch.randint(0, 61, (2, 24), generator=torch.Generator().manual_seed(1))

LLAMA = {
    "plain": {"kv_heads": 4, "tie_embeddings": False},
    "grouped and tied": {"rope_theta": 500_000.0},
    "one key head, bias": {"kv_heads": 1, "attention_bias": True, "tie_embeddings": False},
}
QWEN = {
    "grouped and tied": {"qk_norm": True},
    "bias": {"qk_norm": True, "attention_bias": True, "tie_embeddings": False, "norm_eps": 1e-5},
}
OWN = {
    "value residual": {"value_residual": True},
    "capped": {"logit_cap": 2.5, "kv_heads": 4, "tie_embeddings": False},
    "masked": {"document_mask": True, "qk_norm": True},
    "everything": {
        "qk_norm": True, "value_residual": True, "logit_cap": 3.0, "attention_bias": True, "tie_embeddings": False
    },
}  # fmt: skip
PRECISIONS = [(torch.float64, 1e-9), (torch.float32, 1e-4)]


def small(**changes: Any) -> Model:
    fields = {"layers": 3, "width": 48, "heads": 4, "kv_heads": 2, "vocabulary": 61, "block": 32, "ffn": 72}
    return Model.model_validate(fields | changes)


def loud(config: Model, dtype: torch.dtype) -> Decoder:
    """A decoder with weights far from their initial values, so that each term matters."""
    model = build(config, seed=5, dtype=dtype)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    return model


def tensors_of(model: torch.nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def export(model: Decoder, folder: Path) -> None:
    config, tensors = to_hugging_face(model.config, tensors_of(model))
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    if "auto_map" in config:
        shutil.copy(MODELLING_FILE, folder)


def reload(folder: Path, **options: Any) -> Any:
    """The model as transformers reads it, having complained of nothing."""
    model, info = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", output_loading_info=True, **options)
    assert not any(info.values()), info
    return model.eval()


@pytest.fixture
def modules_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Transformers copies modelling files into a cache and imports them from there: into this test's folder."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in [name for name in sys.modules if name.startswith("transformers_modules")]:
        monkeypatch.delitem(sys.modules, name)


@pytest.mark.parametrize(("dtype", "tolerance"), PRECISIONS, ids=["float64", "float32"])
@pytest.mark.parametrize(
    ("changes", "expected"),
    [(c, LlamaForCausalLM) for c in LLAMA.values()] + [(c, Qwen3ForCausalLM) for c in QWEN.values()],
    ids=[f"Llama, {name}" for name in LLAMA] + [f"Qwen3, {name}" for name in QWEN],
)
def test_logits_equal_those_of_transformers(
    tmp_path: Path, changes: dict[str, Any], expected: type, dtype: torch.dtype, tolerance: float
) -> None:
    ours = loud(small(**changes), dtype)
    export(ours, tmp_path)
    theirs = reload(tmp_path)
    assert type(theirs) is expected
    assert theirs.dtype == dtype
    with torch.no_grad():
        here, there = ours.logits(ours(TOKENS)), theirs(TOKENS).logits
    assert here.std() > 0.3
    assert (here - there).abs().max() <= tolerance


@pytest.mark.usefixtures("modules_folder")
@pytest.mark.parametrize(("dtype", "tolerance"), PRECISIONS, ids=["float64", "float32"])
@pytest.mark.parametrize("changes", OWN.values(), ids=OWN)
def test_the_own_modelling_file_computes_the_same(
    tmp_path: Path, changes: dict[str, Any], dtype: torch.dtype, tolerance: float
) -> None:
    config = small(**changes)
    ours = loud(config, dtype)
    export(ours, tmp_path)
    theirs = reload(tmp_path, trust_remote_code=True)
    assert type(theirs).__module__.startswith("transformers_modules")
    for documents in [TOKENS.cumsum(1) // 300, torch.zeros_like(TOKENS)] if config.document_mask else [None]:
        with torch.no_grad():
            here, there = ours.logits(ours(TOKENS, documents)), theirs(TOKENS, documents=documents).logits
        assert here.std() > 0.3
        assert (here - there).abs().max() <= tolerance
    with torch.no_grad():  # without ids a row is one document, which is the last case above
        assert (here - theirs(TOKENS).logits).abs().max() <= tolerance


@pytest.mark.usefixtures("modules_folder")
def test_the_own_modelling_file_generates_pads_and_saves(tmp_path: Path) -> None:
    ours = loud(small(**OWN["everything"]), torch.float32)
    export(ours, tmp_path)
    theirs = reload(tmp_path, trust_remote_code=True)
    expected = TOKENS[:1, :5]
    with torch.no_grad():
        for _ in range(6):
            expected = torch.cat((expected, ours.logits(ours(expected))[:, -1:].argmax(-1)), dim=1)
    assert torch.equal(theirs.generate(TOKENS[:1, :5], max_new_tokens=6, do_sample=False), expected)

    padded = torch.cat((torch.zeros(1, 3, dtype=torch.int64), TOKENS[:1, :5]), dim=1)
    seen = torch.tensor([[0] * 3 + [1] * 5])
    generated = theirs.generate(padded, attention_mask=seen, max_new_tokens=6, do_sample=False)
    assert torch.equal(generated[:, 3:], expected)

    with torch.no_grad():
        loss = theirs(TOKENS, labels=TOKENS).loss
        logits = ours.logits(ours(TOKENS))[:, :-1]
    picked = logits.log_softmax(-1).gather(-1, TOKENS[:, 1:, None])
    torch.testing.assert_close(loss, -picked.mean())

    theirs.save_pretrained(tmp_path / "again")
    again = reload(tmp_path / "again", trust_remote_code=True)
    assert all(torch.equal(a, b) for a, b in zip(theirs.parameters(), again.parameters(), strict=True))


def test_the_modelling_file_stands_alone() -> None:
    text = MODELLING_FILE.read_text()
    imports = [line for line in text.splitlines() if line.startswith(("import ", "from "))]
    assert imports
    assert not any("assay" in line for line in imports)


@pytest.mark.parametrize("changes", [*LLAMA.values(), *QWEN.values(), *OWN.values()])
def test_out_and_in_again_changes_nothing(changes: dict[str, Any]) -> None:
    config = small(**changes)
    tensors = tensors_of(loud(config, torch.float32))
    fields, back = from_hugging_face(*to_hugging_face(config, tensors))
    assert Model.model_validate(fields) == config
    assert list(back) == list(shapes(config))
    assert all(torch.equal(back[name], tensor) for name, tensor in tensors.items())


SHAPE = {
    "vocab_size": 61, "hidden_size": 48, "intermediate_size": 72, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32,
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "shape"),
    [
        (LlamaForCausalLM, LlamaConfig(**SHAPE, tie_word_embeddings=True)),
        (LlamaForCausalLM, LlamaConfig(**SHAPE, attention_bias=True, rope_theta=77_000.0)),
        (Qwen3ForCausalLM, Qwen3Config(**SHAPE, head_dim=12, rms_norm_eps=1e-5)),
    ],
    ids=["Llama, tied", "Llama, bias", "Qwen3"],
)
@pytest.mark.parametrize("whole", [True, False], ids=["every key", "what differs from the defaults"])
def test_a_model_that_transformers_made_computes_the_same_here(kind: Any, shape: Any, whole: bool) -> None:
    theirs = kind(shape).double().eval()
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    config = theirs.config.to_dict() if whole else theirs.config.to_diff_dict()
    fields, tensors = from_hugging_face(config, theirs.state_dict())
    ours = empty(Model.model_validate(fields), dtype=torch.float64)
    ours.load_state_dict(tensors)
    with torch.no_grad():
        assert (ours.logits(ours(TOKENS)) - theirs(TOKENS).logits).abs().max() <= 1e-9


def test_the_keys_of_older_config_files_are_understood() -> None:
    config, tensors = to_hugging_face(small(rope_theta=1234.5), tensors_of(loud(small(), torch.float32)))
    config["torch_dtype"] = config.pop("dtype")
    del config["rope_parameters"], config["head_dim"], config["attention_bias"], config["mlp_bias"]
    config["rope_scaling"] = None
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(6)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()  # tied, but written twice
    fields, back = from_hugging_face(config, tensors)
    assert fields["rope_theta"] == 1234.5
    assert back.keys() == shapes(small()).keys()


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("model_type", "mistral", "model_type is 'mistral'"),
        ("model_type", None, "model_type is None"),
        ("model_type", ["llama"], "model_type is"),
        ("hidden_act", "gelu", "hidden_act is 'gelu'"),
        ("mlp_bias", True, "mlp_bias is True"),
        ("attention_dropout", 0.1, "attention_dropout is 0.1"),
        ("head_dim", 16, "head_dim is 16.* here 12"),
        ("rope_scaling", {"type": "linear", "factor": 2.0}, "rope_scaling is"),
        ("rope_parameters", {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}, "rope_parameters is"),
        ("rope_parameters", {"rope_type": "default", "partial_rotary_factor": 0.5}, "rope_parameters is"),
        ("rope_parameters", "plain", "an object is expected"),
        ("use_sliding_window", True, "use_sliding_window is True"),
        ("layer_types", ["full_attention", "sliding_attention"], "layer_types is"),
        ("quantization_config", {"bits": 4}, "quantization_config is"),
        ("vocab_size", None, "'vocab_size' is missing"),
        ("vocab_size", "61", "vocab_size is not valid"),
        ("num_hidden_layers", -3, "num_hidden_layers is not valid"),
        ("num_key_value_heads", 3, "not valid.*kv_heads"),
        ("rope_theta", "big", "rope_theta"),
    ],
)
def test_a_config_that_cannot_be_represented_is_refused_in_one_sentence(key: str, value: Any, said: str) -> None:
    config, tensors = to_hugging_face(small(), tensors_of(loud(small(), torch.float32)))
    if key == "rope_theta":
        del config["rope_parameters"]
    with pytest.raises(InputError, match=said) as refusal:
        from_hugging_face(config | {key: value}, tensors, where="folder/config.json")
    assert str(refusal.value).startswith("folder/config.json: ")
    assert "\n" not in str(refusal.value)


def test_tensors_that_do_not_fit_the_config_are_refused() -> None:
    config, tensors = to_hugging_face(small(), tensors_of(loud(small(), torch.float32)))
    up = "model.layers.1.mlp.up_proj.weight"
    cases: list[tuple[dict[str, Tensor], str]] = [
        ({name: tensor for name, tensor in tensors.items() if name != up}, f"lack the tensor '{up}'"),
        (tensors | {"model.layers.3.mlp.up_proj.weight": tensors[up]}, r"hold the tensor 'model\.layers\.3"),
        (tensors | {up: tensors[up].T}, r"\[48, 72\].*\[72, 48\]"),
        (tensors | {up: tensors[up].to(torch.int8)}, "int8"),
        (tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"] + 1}, "is not the embedding"),
    ]
    for given, said in cases:
        with pytest.raises(InputError, match=said):
            from_hugging_face(config, given)


def test_only_shapes_that_a_library_class_computes_go_by_its_name() -> None:
    assert architecture(small()) == "LlamaForCausalLM"
    assert architecture(small(qk_norm=True)) == "Qwen3ForCausalLM"
    for changes in OWN.values():
        assert architecture(small(**changes)) == "AssayForCausalLM"
