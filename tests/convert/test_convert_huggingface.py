"""Hugging Face directories: transformers reads what we write, and we read what it writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.foreign_files import HEADS, HIDDEN, LAYERS, POSITIONS, VOCAB, assert_same
from safetensors.torch import load_file, save_file

from fourfold import checkpoint
from fourfold.convert import convert, load_foreign
from fourfold.errors import CheckpointError
from fourfold.model import GPT
from fourfold.tokenizer import Tokenizer, train

transformers = pytest.importorskip("transformers")

TEXTS = ["the quick brown fox jumps over the lazy dog and the cat"] * 3


def network_of(place: Path) -> GPT:
    with load_foreign(place) as model:
        network = GPT(model.shape).eval()
        network.load_state_dict({name: t.float() for name, t in model.tensors()})
    return network


def theirs(place: Path) -> Any:
    found = transformers.AutoModelForCausalLM.from_pretrained(place, local_files_only=True)
    return found.eval()


def make(place: Path, **changes: Any) -> Any:
    """A model of transformers, saved by transformers."""
    torch.manual_seed(1)
    sizes = {
        "vocab_size": VOCAB,
        "n_positions": POSITIONS,
        "n_embd": HIDDEN,
        "n_layer": LAYERS,
        "n_head": HEADS,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "initializer_range": 0.2,
    }
    network = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes | changes))
    network.save_pretrained(place)
    return network.eval()


@pytest.fixture(scope="module")
def vocabulary() -> Tokenizer:
    return train(TEXTS, 270)


@pytest.fixture
def own(tmp_path: Path, vocabulary: Tokenizer) -> Path:
    """A Fourfold checkpoint with its tokenizer."""
    place = tmp_path / "first"
    make(place, vocab_size=272)
    vocabulary.save(place / "tokenizer.json")
    convert(place, tmp_path / "own", "fourfold")
    return tmp_path / "own"


@pytest.mark.parametrize("shard_bytes", [1 << 30, 40_000])
def test_exported_model_is_loaded_and_says_the_same(
    own: Path, tmp_path: Path, shard_bytes: int
) -> None:
    place = tmp_path / "hf"
    convert(own, place, "hf", shard_bytes=shard_bytes)
    shards = list(place.glob("model-*.safetensors"))
    assert (place / "model.safetensors.index.json").exists() == (len(shards) > 1)
    assert bool(shards) == (shard_bytes < 1 << 30)
    prompt = torch.arange(1, 9)[None]
    exported, network = theirs(place), network_of(own)
    with torch.no_grad():
        difference = exported(prompt).logits - network(prompt)
        assert difference.abs().max() < 1e-5
        tokens = prompt
        for _ in range(POSITIONS - prompt.shape[1]):
            tokens = torch.cat([tokens, network(tokens)[:, -1:].argmax(-1)], 1)
        length = tokens.shape[1]
        generated = exported.generate(
            prompt, do_sample=False, min_length=length, max_length=length, eos_token_id=None
        )
    assert generated.tolist() == tokens.tolist()


def test_greedy_32_tokens_are_equal(tmp_path: Path) -> None:
    network = make(tmp_path / "hf", n_positions=48)
    ours, prompt = network_of(tmp_path / "hf"), torch.arange(8)[None]
    tokens = prompt
    with torch.no_grad():
        for _ in range(32):
            tokens = torch.cat([tokens, ours(tokens)[:, -1:].argmax(-1)], 1)
        generated = network.generate(prompt, do_sample=False, max_new_tokens=32, eos_token_id=None)
    assert generated.tolist() == tokens.tolist()


def test_pipeline_writes_text_with_our_tokenizer(
    own: Path, tmp_path: Path, vocabulary: Tokenizer
) -> None:
    convert(own, tmp_path / "hf", "hf")
    loaded = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf", local_files_only=True)
    text = "the lazy brown 42 ünïcode"
    assert loaded(text)["input_ids"] == vocabulary.encode(text)
    assert loaded.eos_token_id == vocabulary.eos_id
    pipe = transformers.pipeline("text-generation", model=str(tmp_path / "hf"))
    written = pipe("the quick", max_new_tokens=4, do_sample=False)[0]["generated_text"]
    assert written.startswith("the quick")
    pair = Tokenizer.load((tmp_path / "hf" / "vocab.json", tmp_path / "hf" / "merges.txt"))
    assert pair.encode(text) == vocabulary.encode(text)


def test_round_trip_is_bit_equal(own: Path, tmp_path: Path, vocabulary: Tokenizer) -> None:
    convert(own, tmp_path / "hf", "hf", shard_bytes=40_000)
    convert(tmp_path / "hf", tmp_path / "again", "fourfold")
    with load_foreign(own) as first, load_foreign(tmp_path / "again") as second:
        assert_same(second, dict(first.tensors()))
        assert second.model == first.model
    for place in (own, tmp_path / "again"):
        identity = checkpoint.read_state(place / "step_0")["tokenizer"]
        assert identity == vocabulary.identity
        assert identity == Tokenizer.load(place / "tokenizer.json").identity


def test_pickled_weights_of_both_layouts(tmp_path: Path) -> None:
    network = make(tmp_path / "hf")
    (tmp_path / "hf" / "model.safetensors").unlink()
    for new_layout in (True, False):
        torch.save(
            network.state_dict(),
            tmp_path / "hf" / "pytorch_model.bin",
            _use_new_zipfile_serialization=new_layout,
        )
        ours, prompt = network_of(tmp_path / "hf"), torch.arange(8)[None]
        with torch.no_grad():
            assert (ours(prompt) - network(prompt).logits).abs().max() < 1e-5


def test_names_without_prefix_and_with_masks(tmp_path: Path) -> None:
    """The files of GPT-2 itself: a bare transformer, with its attention masks stored."""
    make(tmp_path / "hf")
    file = tmp_path / "hf" / "model.safetensors"
    expected = dict(load_foreign(tmp_path / "hf").tensors())
    bare = {name.removeprefix("transformer."): tensor for name, tensor in load_file(file).items()}
    bare.pop("lm_head.weight", None)
    bare["h.0.attn.bias"] = torch.ones(1, 1, POSITIONS, POSITIONS).tril()
    save_file(bare, file, metadata={"format": "pt"})
    assert_same(load_foreign(tmp_path / "hf"), expected)
    bare["lm_head.weight"] = bare["wte.weight"] + 1
    save_file(bare, file, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match="tied"):
        load_foreign(tmp_path / "hf")


@pytest.mark.parametrize(
    "changes",
    [
        {"n_inner": 48},
        {"activation_function": "gelu_pytorch_tanh"},
        {"activation_function": "gelu"},
        {"activation_function": "relu2"},
        {"layer_norm_epsilon": 1e-3},
        {"tie_word_embeddings": False},
        {"scale_attn_by_inverse_layer_idx": True},
        {"scale_attn_weights": False},
        {"reorder_and_upcast_attn": True},
    ],
    ids=str,
)
def test_variants_that_are_mapped(tmp_path: Path, changes: dict[str, Any]) -> None:
    network = make(tmp_path / "hf", **changes)
    ours, prompt = network_of(tmp_path / "hf"), torch.arange(POSITIONS)[None]
    with torch.no_grad():
        assert (ours(prompt) - network(prompt).logits).abs().max() < 1e-5


@pytest.mark.parametrize(
    "changes",
    [
        {"activation_function": "relu"},
        {"layer_norm_epsilon": -1e-6},
        {"add_cross_attention": True},
        {"model_type": "mamba"},
        {"auto_map": {"AutoModel": "code.Model"}},
        {"quantization_config": {"bits": 8}},
    ],
    ids=str,
)
def test_variants_that_are_refused_by_name(tmp_path: Path, changes: dict[str, Any]) -> None:
    make(tmp_path / "hf")
    file = tmp_path / "hf" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    with pytest.raises(CheckpointError, match=f"{next(iter(changes))}="):
        load_foreign(tmp_path / "hf")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("n_layer", 10**9),
        ("n_layer", "many"),
        ("n_head", 0),
        ("n_head", None),
        ("vocab_size", 50257),
    ],
)
def test_description_that_is_not_the_weights(tmp_path: Path, key: str, value: Any) -> None:
    make(tmp_path / "hf")
    file = tmp_path / "hf" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {key: value}))
    with pytest.raises(CheckpointError):
        load_foreign(tmp_path / "hf")


def test_shard_missing_or_cut_off(own: Path, tmp_path: Path) -> None:
    place = tmp_path / "hf"
    convert(own, place, "hf", shard_bytes=40_000)
    shard = sorted(place.glob("model-*.safetensors"))[1]
    data = shard.read_bytes()
    shard.write_bytes(data[:-100])
    with pytest.raises(CheckpointError, match=shard.name):
        load_foreign(place)
    shard.unlink()
    with pytest.raises(CheckpointError, match=f"{shard.name} is missing"):
        load_foreign(place)
    index = place / "model.safetensors.index.json"
    index.write_text(index.read_text().replace(shard.name, "../../secret"))
    with pytest.raises(CheckpointError, match="beside it"):
        load_foreign(place)


def test_vocabulary_is_cut_on_demand(tmp_path: Path) -> None:
    make(tmp_path / "hf")
    done = convert(tmp_path / "hf", tmp_path / "cut", "hf", vocab_size=50)
    assert any("64 to 50" in note for note in done.notes)
    assert theirs(tmp_path / "cut").config.vocab_size == 50
    with pytest.raises(CheckpointError, match="not added"):
        convert(tmp_path / "hf", tmp_path / "more", "hf", vocab_size=100)
    assert not (tmp_path / "more").exists()


def test_half_precision_stays_half(tmp_path: Path) -> None:
    make(tmp_path / "hf").half().save_pretrained(tmp_path / "half")
    convert(tmp_path / "half", tmp_path / "again", "hf")
    assert theirs(tmp_path / "again").dtype == torch.float16
    assert load_foreign(tmp_path / "again").dtype == torch.float16
