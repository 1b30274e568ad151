"""A recipe loads exactly, is identified by its learning choices, and every fault is one clear sentence."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import suppress
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from assay.errors import InputError
from assay.files.digest import canonical
from assay.recipe.fields import Part
from assay.recipe.load import digest, from_resolved, from_yaml, learning, load, resolved
from assay.recipe.schema import Recipe

RECIPES = Path(__file__).parents[2] / "recipes"
TINY = (RECIPES / "tiny.yaml").read_text(encoding="utf-8")
PLAIN = resolved(from_yaml(TINY, "tiny.yaml"))
SHA = "sha256:" + "0" * 64
KEY = "ed25519:" + "5a" * 32


def plain(**sections: dict[str, Any]) -> dict[str, Any]:
    """The tiny recipe as plain data, with keys of its sections replaced."""
    value = deepcopy(PLAIN)
    for section, keys in sections.items():
        value[section] = value[section] | keys
    return value


def fault(value: object) -> str:
    with pytest.raises(InputError) as caught:
        from_resolved(value, "a.yaml")
    return str(caught.value)


def changed(old: str, new: str) -> str:
    assert old in TINY
    return TINY.replace(old, new, 1)


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*.yaml")), ids=lambda path: path.stem)
def test_the_repositorys_recipes_load_and_come_back_from_their_resolved_form(path: Path) -> None:
    recipe = load(path)
    again = from_resolved(json.loads(canonical(resolved(recipe))), "recipe.json")
    assert again == recipe
    assert digest(again) == digest(recipe)


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*.yaml")), ids=lambda path: path.stem)
def test_the_repositorys_recipes_write_every_key_that_has_a_meaning_in_them(path: Path) -> None:
    recipe = load(path)
    text = path.read_text(encoding="utf-8")
    for section in Recipe.model_fields:
        assert f"\n{section}:" in f"\n{text}"
        part = getattr(recipe, section)
        if not isinstance(part, Part) or section in ("trust", "start"):
            continue
        begin = text.index(f"\n{section}:")
        body = text[begin : text.find("\n", begin + 1)] if "{" in text[begin:].split("\n")[1] else text[begin:]
        for key, value in part:
            meant = value is not None or section in ("pins", "runtime") or (section, key) == ("checkpoint", "mirror")
            if meant:
                assert f"{key}:" in body or f"{key}_multiple:" in body, f"{path.name}: {section}.{key}"


def test_only_learning_choices_change_the_digest() -> None:
    base = digest(from_resolved(plain(), "a"))
    same: list[dict[str, Any]] = [
        {**plain(), "name": "other"},
        plain(pins={"weights": SHA}),
        plain(data={"queue": "elsewhere.jsonl", "roots": ["x"], "validation": None, "when_missing": "wait"})
        | {"evaluate": {"every": None}},
        plain(checkpoint={"every": 7}),
        plain(runtime={"compile": True, "device": "cuda:1"}),
    ]
    assert {digest(from_resolved(value, "a")) for value in same} == {base}
    other: list[dict[str, Any]] = [
        {**plain(), "seed": 2},
        {**plain(), "reduction": "fast"},
        {**plain(), "start": {"init_from": {"path": "x"}}},
        plain(data={"seed": 2}),
        plain(model={"ffn": 342}),
        plain(optimizer={"eps": 1e-9}),
        plain(schedule={"updates": 2001}),
        plain(loss={"z": 1e-4}),
        plain(precision={"compute": "bfloat16"}),
        plain(batch={"micro": 16, "accumulation": 2}),
    ]
    digests = {digest(from_resolved(value, "a")) for value in other}
    assert len(digests | {base}) == len(other) + 1


def test_the_digest_knows_the_starts_bytes_and_not_its_place() -> None:
    def start(**keys: object) -> str:
        return digest(from_resolved({**plain(), "start": {"continue_from": {"step": 3, **keys}}}, "a"))

    assert start(path="here", sha256=SHA) == start(path="there", sha256=SHA)
    assert start(path="here", sha256=SHA) != start(path="here")
    assert start(path="here", sha256=SHA) != start(path="here", sha256=SHA, step=4)


def test_a_size_and_its_multiple_are_one_recipe() -> None:
    multiple = from_yaml(changed("ffn: 341", "ffn_multiple: 2.667"), "a.yaml")
    assert multiple.model.ffn == 341
    assert digest(multiple) == digest(from_yaml(TINY, "a.yaml"))
    assert learning(multiple)["data"] == {"seed": 1}


def test_defaults_follow_from_other_keys() -> None:
    value = plain()
    del value["model"]["kv_heads"], value["optimizer"]["muon_lr"], value["runtime"]
    recipe = from_resolved(value, "a")
    assert (recipe.model.kv_heads, recipe.optimizer.muon_lr, recipe.runtime.deterministic) == (4, 0.02, True)


def test_yaml_is_version_1_2() -> None:
    assert from_yaml(changed("lr: 6.0e-4", "lr: 4e-4"), "a").optimizer.lr == 0.0004
    with pytest.raises(InputError, match="qk_norm is 'no'; true or false is expected"):
        from_yaml(changed("qk_norm: true", "qk_norm: no"), "a")
    assert from_yaml(TINY.replace("\n", "\r\n"), "a") == from_yaml("\ufeff" + TINY, "a") == from_yaml(TINY, "a")


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("  width: 128", "  wdith: 128", "'model.wdith' is not a known key; the nearest known key is model.width"),
        ("log: {", "lgo: {", "the nearest known key is log;"),
        ("seed: 1\n#", "seed: 1\nseed: 2\n#", 'duplicate key "seed"'),
        ("layers: 4", "layers: '4'", "model.layers is '4'; an integer is expected"),
        ("layers: 4", "layers: true", "model.layers is true; an integer is expected"),
        ("layers: 4", "layers: 4.0", "model.layers is 4.0; an integer is expected"),
        ("layers: 4", "layers: 0", "model.layers is 0; a number of at least 1 is expected"),
        ("layers: 4", f"layers: {'9' * 5000}", "cannot be read as YAML 1.2"),
        ("layers: 4", f"layers: 0x{'9' * 9000}", "model.layers is a value too long to print"),
        ("lr: 6.0e-4", "lr: .nan", "optimizer.lr is nan; a finite number is expected"),
        ("lr: 6.0e-4", "lr: 1e999", "optimizer.lr is inf; a finite number is expected"),
        ("seed: 1\n#", "seed: &a 1\n#", "anchors and aliases are not allowed"),
        ("seed: 1\n#", "<<: {seed: 1}\n#", "'<<' is not allowed"),
        ("seed: 1\n#", "seed: !!python/object:os.system 1\n#", "could not determine a constructor"),
        ("seed: 1\n#", "seed: 2001-99-99\n#", "cannot be read as YAML 1.2"),
        ("name: tiny", "name: ../up", "name is '../up'; a name has"),
        ("loss: {chunk: 1024, z: 0.0}", "loss:", "loss is null; a mapping of keys is expected"),
        ("chunk: 1024", "chunk: 0", "loss.chunk is 0"),
        ("{every: 10, norms", "{every: 0, norms", "log.every is 0"),
        (
            "compute: float32",
            "compute: float8",
            "precision.compute is 'float8'; allowed are float32 or bfloat16",
        ),
        ("device: null", "device: tpu", "runtime.device is 'tpu'; allowed are null"),
        ('"0.001"', "0.001", "control.tolerance is 0.001; text is expected"),
        ('"0.001"', '"-1"', "control.tolerance is '-1'; a decimal number"),
        ("trust: {}", "trust: {reviwer: [a]}", "the nearest known key is trust.reviewer"),
        (
            "trust: {}",
            "trust: {reviewer: [abc]}",
            "trust.reviewer[0]: 'abc' is not a public key; 'ed25519:' and 64 hex",
        ),
        ("trust: {}", f"trust: {{operator: [{KEY}, ed25519:{'5A' * 32}]}}", "trust.operator[1]: 'ed25519:5A"),
        ("trust: {}", f"trust: {{publisher: [ed25519:{'00' * 32}]}}", "trust.publisher[0]: ed25519:00"),
        ("log: {every: 10, norms_every: 100}", "log: {every: 0, norms_every: 0}", "(and 1 more fault)"),
    ],
)
def test_a_wrong_value_is_named_with_its_key_and_what_is_allowed(old: str, new: str, says: str) -> None:
    with pytest.raises(InputError) as caught:
        from_yaml(changed(old, new), "a.yaml")
    assert str(caught.value).startswith("a.yaml: ")
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("sections", "says"),
    [
        ({"model": {"heads": 5}}, "model.heads is 5; heads must divide model.width (128)"),
        ({"model": {"heads": 128, "kv_heads": 128}}, "(1) must be even for rotary positions"),
        ({"model": {"kv_heads": 3}}, "model.kv_heads is 3; kv_heads must divide model.heads (4)"),
        ({"model": {"ffn_multiple": 2}}, "exactly one of ffn and ffn_multiple"),
        ({"model": {"ffn": None}}, "model.ffn is missing; exactly one of ffn and ffn_multiple"),
        ({"batch": {"lanes": 6}}, "batch.lanes is 6; lanes must be a power of two"),
        ({"schedule": {"warmup": 2000}}, "schedule.warmup is 2000; it must be below schedule.updates (2000)"),
        ({"schedule": {"decay_fraction": 0.0004}}, "decay shorter than one update"),
        ({"schedule": {"decay_fraction": None}}, "needs decay_fraction or decay_start"),
        ({"schedule": {"decay_start": 1700}}, "exactly one of the two is expected"),
        ({"schedule": {"decay_fraction": None, "decay_start": 2000}}, "schedule.decay_start is 2000; it must be below"),
        ({"schedule": {"decay_fraction": None, "decay_start": 99}}, "inside the warm-up of 100 updates"),
        ({"schedule": {"decay_fraction": 0.96}}, "would start at update 80, inside the warm-up"),
        ({"schedule": {"kind": "cosine", "decay_fraction": None}}, "schedule.decay is linear; it belongs to kind wsd"),
        (
            {"schedule": {"kind": "constant", "decay": None, "decay_fraction": None, "intent": "no-decay"}},
            "schedule.intent is no-decay; it belongs to kind wsd",
        ),
        ({"schedule": {"min_lr": 7e-4}}, "schedule.min_lr is 0.0007; it may be optimizer.lr (0.0006) at most"),
        ({"schedule": {"rewarm": 5}}, "schedule.rewarm is 5; it is allowed only after init_from or continue_from"),
        ({"optimizer": {"kind": "adamw"}}, "optimizer.muon_lr is 0.02; it has a meaning only with optimizer.kind muon"),
        ({"optimizer": {"betas": [0.9, 1.0]}}, "optimizer.betas.1 is 1.0; a number below 1"),
        ({"optimizer": {"betas": [0.9]}}, "optimizer.betas"),
        ({"optimizer": {"grad_clip": 0}}, "optimizer.grad_clip is 0; a number above 0 is expected"),
        ({"checkpoint": {"every": "always"}}, "checkpoint.every is 'always'; allowed are auto and integers"),
        ({"checkpoint": {"keep": 0}}, "checkpoint.keep is 0; allowed are all and integers"),
        ({"checkpoint": {"keep": True}}, "checkpoint.keep is true; allowed are all and integers"),
        ({"checkpoint": {"extra": [2001]}}, "checkpoint.extra is 2001; this run's steps go from 1 to 2000"),
        ({"checkpoint": {"extra": [5, 5]}}, "a step is named twice"),
        ({"data": {"validation": None}}, "evaluate.every is 200; it needs data.validation"),
        ({"data": {"queue": "/data/queue.jsonl"}}, "a path is relative to the recipe's folder"),
        ({"data": {"roots": ["a/../../b"]}}, "data.roots.0 is 'a/../../b'; a path is relative"),
        ({"control": {"required": True}}, "control.required is true; it needs control.path"),
    ],
)
def test_keys_that_do_not_fit_together_are_refused(sections: dict[str, dict[str, Any]], says: str) -> None:
    assert says in fault(plain(**sections))


@pytest.mark.parametrize(
    ("start", "says"),
    [
        ("resume", "start is 'resume'; allowed are scratch, {init_from"),
        ({}, "start is {}; allowed are scratch"),
        (None, "start is null; allowed are scratch"),
        ({"init_form": {"path": "x"}}, "the nearest known key is start.init_from"),
        (
            {"init_from": {"path": "x"}, "continue_from": {"path": "x", "step": 1}},
            "start is {init_from, continue_from}",
        ),
        ({"init_from": {"path": "../x"}}, "start.init_from.path is '../x'; a path is relative"),
        ({"init_from": {"path": "x", "sha256": "abc"}}, "start.init_from.sha256 is 'abc'; a digest is"),
        ({"continue_from": {"path": "x"}}, "start.continue_from.step is missing"),
        ({"continue_from": {"path": "x", "step": 2000}}, "nothing is left to do: schedule.updates is 2000"),
    ],
)
def test_a_start_is_never_guessed(start: object, says: str) -> None:
    assert says in fault({**plain(), "start": start})


def test_a_continued_run_counts_from_its_step() -> None:
    value = {**plain(schedule={"rewarm": 500}), "start": {"continue_from": {"path": "x", "step": 1500}}}
    assert from_resolved(value, "a").start.first_update == 1500
    value["schedule"]["rewarm"] = 501
    assert "this run does only 500 updates itself" in fault(value)
    value["schedule"]["rewarm"] = 0
    value["checkpoint"]["extra"] = [1500]
    assert "steps go from 1501 to 2000" in fault(value)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "is empty; a recipe is expected there"),
        (b"\xff\xfe\x00", "is not UTF-8 text"),
        (b"# only a comment\n", "a recipe is a mapping of keys, not nothing"),
        (b"- a\n", "not a list"),
        (b"text\n", "not text"),
        (b"[" * 5000, "nested too deeply"),
        (b"a: {" * 3000, "nested too deeply"),
        (b"a: 1\n---\nb: 2\n", "another document"),
        (b"%YAML 1.1\n---\na: 1\n", "without directives"),
        (b"a: b: c\n", "it is not valid YAML"),
        (b"a: \x01\n", "special characters are not allowed"),
        (b"a: &x [1]\nb: [*x, *x, *x]\n", "anchors and aliases are not allowed"),
        (b"#" * ((1 << 18) + 1), "may have 262,144 at most"),
    ],
)
def test_a_file_that_is_no_recipe_is_refused_by_name(tmp_path: Path, content: bytes, says: str) -> None:
    path = tmp_path / "r.yaml"
    path.write_bytes(content)
    with pytest.raises(InputError) as caught:
        load(path)
    assert str(path) in str(caught.value)
    assert says in str(caught.value)


def test_a_missing_file_and_a_folder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="does not exist"):
        load(tmp_path / "none.yaml")
    with pytest.raises(InputError, match="is a folder"):
        load(tmp_path)


words = st.text("abc:{}[]&*!%<>|-'\"#,\n 0159.~\u00e9\x00", max_size=40)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, len(TINY)), st.integers(0, 30), words)
def test_no_damage_to_the_text_ends_in_a_traceback(place: int, removed: int, added: str) -> None:
    text = TINY[:place] + added + TINY[place + removed :]
    with suppress(InputError):  # one clear sentence; anything else fails the test
        from_yaml(text, "a.yaml")


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(1, 9).map(lambda n: n * 10**5000)
    | st.floats()
    | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
places = [(section, None) for section in plain()] + [
    (section, key) for section, part in plain().items() if isinstance(part, dict) for key in part
]


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(places), values)
def test_no_value_ends_in_a_traceback(place: tuple[str, str | None], value: object) -> None:
    section, key = place
    whole = plain()
    if key is None:
        whole[section] = value
    else:
        whole[section][key] = value
    try:
        recipe = from_resolved(whole, "a.yaml")
    except InputError:
        return  # one clear sentence; anything else fails the test
    assert digest(recipe).startswith("sha256:")


def test_keys_of_trust_are_checked_without_cryptography() -> None:
    value = plain(trust={"reviewer": [KEY], "operator": [KEY]})
    assert from_resolved(value, "a.yaml").trust.reviewer == (KEY,)
    code = "import sys; import assay.recipe.load; print('cryptography' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
