"""Families of networks: transformers' models become ours and come back, with equal numbers."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from fourfold.config import load_config
from fourfold.convert import convert, load_foreign
from fourfold.convert.families import FAMILIES, family_of
from fourfold.errors import CheckpointError
from fourfold.model import GPT, ModelShape, count_parameters, table_of
from fourfold.model.positions import rotation
from fourfold.tokenizer import Tokenizer, train

transformers = pytest.importorskip("transformers")

SIZES = {
    "vocab_size": 272,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": None,
}
SHARED = {"num_key_value_heads": 2}
LINEAR = {"rope_type": "linear", "rope_theta": 1000.0, "factor": 4.0}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 100.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 4.0,
    "beta_slow": 0.5,
}
LAYERED = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}
GPT2 = {
    "vocab_size": 272,
    "n_embd": 32,
    "n_inner": 48,
    "n_layer": 3,
    "n_head": 4,
    "n_positions": 64,
    "initializer_range": 0.2,
}

# A model_type, its settings, and the family that it is written as where that is another.
CASES: dict[str, tuple[str, dict[str, Any], str | None]] = {
    "gpt2": ("gpt2", GPT2, None),
    "gpt2 untied": (
        "gpt2",
        GPT2
        | {
            "tie_word_embeddings": False,
            "layer_norm_epsilon": 1e-3,
            "activation_function": "gelu",
        },
        None,
    ),
    "llama 2": ("llama", SIZES | {"rms_norm_eps": 1e-3}, None),
    "llama 3": (
        "llama",
        SIZES | SHARED | {"tie_word_embeddings": True, "rope_parameters": LLAMA3},
        None,
    ),
    "llama linear": (
        "llama",
        SIZES | {"num_key_value_heads": 1, "head_dim": 16, "rope_parameters": LINEAR},
        None,
    ),
    "llama with biases": ("llama", SIZES | {"attention_bias": True, "mlp_bias": True}, None),
    "llama geglu": ("llama", SIZES | {"hidden_act": "gelu_pytorch_tanh"}, None),
    "mistral": ("mistral", SIZES | SHARED | {"sliding_window": 5, "head_dim": 16}, None),
    "mistral without window": ("mistral", SIZES | SHARED | {"sliding_window": None}, "llama"),
    "qwen2": ("qwen2", SIZES | SHARED | {"tie_word_embeddings": True}, None),
    "qwen2 windows": ("qwen2", SIZES | {"num_key_value_heads": 4} | LAYERED, None),
    "qwen2 yarn": (
        "qwen2",
        SIZES | SHARED | {"rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 0.9}},
        None,
    ),
    "qwen3": ("qwen3", SIZES | SHARED | {"head_dim": 16, "rope_parameters": YARN}, None),
    "qwen3 windows": (
        "qwen3",
        SIZES | {"num_key_value_heads": 4, "head_dim": 8} | LAYERED,
        None,
    ),
    "olmo2": ("olmo2", SIZES | SHARED, None),
    "olmo2 own keys": ("olmo2", SIZES | {"rope_parameters": LINEAR}, None),
    "pythia": ("gpt_neox", SIZES, None),
    "gpt_neox sequential": (
        "gpt_neox",
        SIZES
        | {
            "use_parallel_residual": False,
            "tie_word_embeddings": True,
            "hidden_act": "gelu_new",
            "rope_parameters": YARN | {"partial_rotary_factor": 0.5},
        },
        None,
    ),
}


def make(place: Path, model_type: str, settings: dict[str, Any]) -> Any:
    """A model of transformers with no weight at its usual first value, saved by transformers."""
    torch.manual_seed(1)
    config = transformers.AutoConfig.for_model(model_type, **settings)
    network = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in network.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.2 * torch.randn_like(parameter))
    network.save_pretrained(place)
    return network


def ours(place: Path) -> GPT:
    with load_foreign(place) as model:
        network = GPT(model.shape).eval()
        network.load_state_dict({name: tensor.float() for name, tensor in model.tensors()})
    return network


def prompt() -> Tensor:
    return torch.randint(272, (2, 48), generator=torch.Generator().manual_seed(3))


def tensors(place: Path) -> dict[str, Tensor]:
    """Every tensor of a directory's safetensors files."""
    found = {}
    for file in place.glob("*.safetensors"):
        with safe_open(file, framework="pt") as opened:
            found |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    return found


def deviation(logits: Tensor, expected: Tensor) -> float:
    """The largest, of the largest logit: either side is about that far from double precision."""
    return float((logits - expected).abs().max() / expected.abs().max())


def greedy(network: GPT, tokens: Tensor, length: int) -> Tensor:
    for _ in range(length):
        tokens = torch.cat([tokens, network(tokens)[:, -1:].argmax(-1)], 1)
    return tokens


@pytest.mark.parametrize("name", CASES)
@torch.no_grad()
def test_there_and_back(name: str, tmp_path: Path) -> None:
    model_type, settings, other = CASES[name]
    first, own, back = (tmp_path / place for place in ("first", "own", "back"))
    network, tokens = make(first, model_type, settings), prompt()
    expected = network(tokens).logits
    assert expected.std() > 0.1
    assert deviation(ours(first)(tokens), expected) < 1e-5

    convert(first, own, "fourfold")
    convert(own, back, "hf", shard_bytes=20_000)
    assert (back / "model.safetensors.index.json").is_file()
    again = transformers.AutoModelForCausalLM.from_pretrained(back, local_files_only=True).eval()
    assert again.config.model_type == (other or model_type)
    assert torch.equal(again(tokens).logits, expected)

    before, after = tensors(first), tensors(back)
    untied = [name for name in before if name in ("lm_head.weight", "embed_out.weight")]
    if other is None and model_type == "gpt_neox" and untied:
        before["embed_out.weight"] = before.pop(untied[0])  # the name that every version reads
    assert sorted(before) == sorted(after)
    for key, tensor in before.items():
        assert torch.equal(tensor, after[key]), key

    start = tokens[:, :8]
    written = network.generate(start, do_sample=False, max_new_tokens=24, eos_token_id=None)
    assert greedy(ours(own), start, 24).tolist() == written.tolist()


@pytest.mark.parametrize(
    "name", ["llama 2", "llama 3", "mistral", "qwen2", "qwen3", "olmo2", "pythia"]
)
def test_tokenizer_and_pipeline(name: str, tmp_path: Path) -> None:
    words = train(["the quick brown fox jumps over the lazy dog and the cat"] * 3, 270)
    make(tmp_path / "first", *CASES[name][:2])
    words.save(tmp_path / "first" / "tokenizer.json")
    convert(tmp_path / "first", tmp_path / "own", "fourfold")
    convert(tmp_path / "own", tmp_path / "back", "hf", dtype=torch.bfloat16)
    loaded = transformers.AutoTokenizer.from_pretrained(tmp_path / "back", local_files_only=True)
    text = "the lazy brown 42 ünïcode"
    assert loaded(text)["input_ids"] == words.encode(text)
    pipe = transformers.pipeline("text-generation", model=str(tmp_path / "back"))
    assert pipe.model.dtype == torch.bfloat16
    written = pipe("the quick", max_new_tokens=4, do_sample=False)[0]["generated_text"]
    assert written.startswith("the quick")
    assert Tokenizer.load(tmp_path / "back").identity == words.identity


def test_transformers_4_spells_rotary_positions_apart(tmp_path: Path) -> None:
    expected = make(tmp_path / "hf", *CASES["llama 3"][:2])(prompt()).logits
    file = tmp_path / "hf" / "config.json"
    config = json.loads(file.read_text())
    scaling = config.pop("rope_parameters")
    config["rope_theta"] = scaling.pop("rope_theta")
    for key in ("rope_type", "type"):
        kind = scaling.pop("rope_type")
        file.write_text(json.dumps(config | {"rope_scaling": scaling | {key: kind}}))
        scaling["rope_type"] = kind
        with torch.no_grad():
            assert deviation(ours(tmp_path / "hf")(prompt()), expected) < 1e-5


def test_what_a_file_does_not_say_is_as_in_transformers(tmp_path: Path) -> None:
    for model_type, family in FAMILIES.items():
        theirs = transformers.AutoConfig.for_model(model_type)
        said = theirs.to_dict()
        for key, value in family.defaults.items():
            # Those of a family's own: what it has no key for is never asked for.
            if key in said and key not in ("sliding_window", "rotary_pct"):
                assert said[key] == value, (model_type, key)


@pytest.mark.parametrize(
    ("name", "changes", "key"),
    [
        ("llama 2", {"attention_bias": True}, "attention_bias=True with mlp_bias=False"),
        ("llama 2", {"mlp_bias": True}, "mlp_bias=True"),
        ("llama 2", {"hidden_act": "relu"}, "hidden_act='relu'"),
        ("llama 2", {"num_local_experts": 8}, "num_local_experts=8"),
        ("llama 2", {"sliding_window": 5}, "sliding_window=5"),
        ("llama 2", {"model_type": "gemma"}, "model_type='gemma'"),
        ("llama 2", {"quantization_config": {"bits": 4}}, "quantization_config="),
        ("llama 2", {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        ("llama 2", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_type='dynamic'"),
        ("llama 2", {"rope_scaling": {"rope_type": "longrope"}}, "rope_type='longrope'"),
        ("llama 2", {"rope_scaling": {"type": "mrope", "mrope_section": [1]}}, "rope_type='mrope'"),
        ("llama 2", {"rope_scaling": LLAMA3 | {"mrope_section": [1]}}, "mrope_section="),
        ("qwen3", {"attention_bias": True}, "attention_bias=True"),
        ("qwen3", {"layer_types": ["chunked_attention"] * 3}, "layer_types='chunked_attention'"),
        ("olmo2", {"attention_bias": True}, "attention_bias=True"),
        ("pythia", {"attention_bias": False}, "attention_bias=False"),
        ("pythia", {"hidden_act": "relu"}, "hidden_act='relu'"),
    ],
    ids=str,
)
def test_other_networks_are_refused_by_key(
    name: str, changes: dict[str, Any], key: str, tmp_path: Path
) -> None:
    make(tmp_path / "hf", *CASES[name][:2])
    file = tmp_path / "hf" / "config.json"
    config = json.loads(file.read_text())
    if "rope_scaling" in changes:
        del config["rope_parameters"]
    file.write_text(json.dumps(config | changes))
    with pytest.raises(CheckpointError) as raised:
        load_foreign(tmp_path / "hf")
    assert key in str(raised.value)


HOSTILE = (
    None,
    True,
    False,
    0,
    -1,
    1,
    3,
    2**31,
    10**400,
    -0.5,
    0.5,
    1e300,
    float("inf"),
    float("nan"),
    "",
    "silu",
    "yarn",
    "full_attention",
    [],
    ["sliding_attention"] * 3,
    [[]],
    {},
    {"rope_type": "yarn", "factor": 0},
    {"type": []},
    {"full_attention": {"rope_type": "linear", "factor": 2}, "sliding_attention": {}},
)


@pytest.mark.parametrize("name", ["gpt2", "llama 3", "mistral", "qwen2 windows", "qwen3", "pythia"])
def test_hostile_settings_are_refused_or_make_a_network(name: str, tmp_path: Path) -> None:
    """Whatever config.json says: a `CheckpointError`, or a shape that fits the tensors."""
    make(tmp_path / "hf", *CASES[name][:2])
    file = tmp_path / "hf" / "config.json"
    sound = json.loads(file.read_text())
    rope = dict(sound.get("rope_parameters") or {})
    keys = {*sound, "rope_scaling", "rope_theta", "layer_types", "head_dim", "sliding_window"}
    rng, read = random.Random(7), 0
    wanted = [(key, value, None) for key in sorted(keys) for value in HOSTILE]
    wanted += [("rope_parameters", value, key) for key in rope for value in HOSTILE]
    for key, value, inner in rng.sample(wanted, 200):
        changed = {key: value if inner is None else rope | {inner: value}}
        file.write_text(json.dumps(sound | changed))
        try:
            with load_foreign(tmp_path / "hf") as model:
                shapes = table_of(model.shape).shapes
                assert {name: source.shape for name, source in model.stored.items()} == shapes
                if model.shape.rotary_size:
                    assert rotation(model.shape, torch.arange(100)).isfinite().all(), changed
                read += 1
        except CheckpointError:
            pass
    assert 0 < read < 200


@pytest.mark.parametrize(
    ("file", "parameters"),
    [
        ("llama/llama_1B.yaml", 1_235_814_400),
        ("llama/llama_3B.yaml", 3_212_749_824),
        ("llama/llama_8B.yaml", 8_030_261_248),
        ("qwen3/qwen3_0.6B.yaml", 596_049_920),
        ("qwen3/qwen3_4B.yaml", 4_022_468_096),
        ("gpt/modern_124M.yaml", 123_587_328),
    ],
)
def test_shipped_configuration_is_the_real_network(file: str, parameters: int) -> None:
    """Its count is the published one, and that of the network its description makes."""
    path = Path(__file__).parents[2] / "configs" / file
    sharded = "sharding_degree: 8" in path.read_text()
    shape = ModelShape.of(load_config(path, world_size=8 if sharded else 1).Model)
    family = family_of(shape, path)
    assert family.model_type == ("qwen3" if "qwen3" in file else "llama")
    described = family.describe(shape)
    assert family.read(path, described).options["rope_theta"] == shape.rope_theta
    config = transformers.AutoConfig.for_model(**described)
    with torch.device("meta"):
        theirs = transformers.AutoModelForCausalLM.from_config(config)
    assert count_parameters(shape) == parameters
    assert sum(one.numel() for one in theirs.parameters()) == parameters


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"activation": "relu_squared"}, "Model.activation=relu_squared"),
        ({"logit_softcap": 30.0}, "Model.logit_softcap=30.0"),
        ({"embedding_scale": 8.0}, "Model.embedding_scale=8.0"),
        ({"parallel_residual": True}, "Model.parallel_residual=True"),
        ({"norm_placement": "post"}, "Model.qk_norm=none"),
        ({"position_embedding": "none"}, "Model.position_embedding=none"),
        ({"sliding_window": 4, "sliding_window_layers": (0,)}, "Model.sliding_window_layers=[0]"),
        ({"bias": "all", "sliding_window": 4}, "Model.bias=all"),
        ({"normalization": "LayerNorm"}, "Model.activation=swiglu"),
        ({"partial_rotary_factor": 0.5}, "Model.partial_rotary_factor=0.5"),
        ({"num_attention_heads": 3, "head_dim": 8}, "Model.num_attention_heads=3"),
    ],
    ids=str,
)
def test_what_no_family_has_is_refused_by_key(changes: dict[str, Any], key: str) -> None:
    llama = ModelShape(
        64, 32, 2, 4, 64, 32, activation="swiglu", normalization="RMSNorm", bias="none",
        position_embedding="rotary",
    )  # fmt: skip
    assert family_of(llama, Path("here")).model_type == "llama"
    with pytest.raises(CheckpointError) as raised:
        family_of(replace(llama, **changes), Path("here"))
    assert str(raised.value).startswith(f"here: {key}")
