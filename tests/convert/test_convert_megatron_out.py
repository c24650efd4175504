"""Megatron checkpoints, out: names, cuts, arguments and flags, and Megatron Core reading them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.foreign_files import (
    HEADS,
    HIDDEN,
    LAYERS,
    POSITIONS,
    VOCAB,
    assert_same,
    logits_of,
    megatron_tree,
    prompt,
    weights,
)
from helpers.peers import in_peers, needs_peers
from typer.testing import CliRunner

from fourfold.cli import command_line
from fourfold.convert import MegatronLayout, convert, load_foreign
from fourfold.errors import CheckpointError, UserError
from fourfold.tokenizer import train


def written(tmp_path: Path, **layout: Any) -> dict[str, dict[str, Any]]:
    """Directory of a rank -> what its file holds, of the model of `weights()`."""
    source = tmp_path / "source"
    if not source.exists():
        megatron_tree(source, weights())
    convert(source, tmp_path / "out", "megatron", megatron=MegatronLayout(**layout))
    files = sorted((tmp_path / "out" / "release").glob("*/model_optim_rng.pt"))
    return {file.parent.name: torch.load(file, weights_only=False) for file in files}


def test_core_names_are_the_default(tmp_path: Path) -> None:
    (content,) = written(tmp_path).values()
    ours, model = weights(), content["model"]
    assert len(model) == 4 + 12 * LAYERS and content["checkpoint_version"] == 3.0
    for name, mine in (
        ("embedding.word_embeddings.weight", "embeddings.word.weight"),
        ("decoder.layers.3.self_attention.linear_qkv.weight", "layers.3.attn.qkv.weight"),
        ("decoder.layers.3.self_attention.linear_qkv.layer_norm_bias", "layers.3.norm1.bias"),
        ("decoder.layers.0.mlp.linear_fc1.layer_norm_weight", "layers.0.norm2.weight"),
        ("decoder.final_layernorm.bias", "norm.bias"),
    ):
        assert torch.equal(model[name], ours[mine])
    assert (tmp_path / "out" / "latest_checkpointed_iteration.txt").read_text() == "release"
    assert_same(load_foreign(tmp_path / "out"), ours)


def test_classic_names_for_megatron_deepspeed(tmp_path: Path) -> None:
    contents = written(tmp_path, names="classic", pp=2)
    assert list(contents) == ["mp_rank_00_000", "mp_rank_00_001"]
    first, last = (content["model"] for content in contents.values())
    ours = weights()
    encoder = last["language_model"]["encoder"]
    name = "layers.1.self_attention.query_key_value.weight"
    assert torch.equal(encoder[name], ours["layers.3.attn.qkv.weight"])
    assert "final_layernorm.bias" in encoder
    assert "final_layernorm.bias" not in first["language_model"]["encoder"]
    assert set(first["language_model"]["embedding"]) == {"word_embeddings", "position_embeddings"}
    assert torch.equal(last["word_embeddings_for_head"]["weight"], ours["embeddings.word.weight"])
    assert_same(load_foreign(tmp_path / "out"), ours)


@pytest.mark.parametrize("names", ["core", "core-local", "classic"])
@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 4), (4, 2)])
def test_ranks_joined_again_are_the_model(tmp_path: Path, names: str, tp: int, pp: int) -> None:
    contents = written(tmp_path, names=names, tp=tp, pp=pp)
    assert len(contents) == tp * pp
    assert_same(load_foreign(tmp_path / "out"), weights())


def test_arguments_hold_what_both_megatrons_compare(tmp_path: Path) -> None:
    """`check_checkpoint_args` of Megatron-LM and Megatron-DeepSpeed; neither has a default for
    what it compares, so a missing one is an AttributeError there."""
    contents = written(tmp_path, tp=2, pp=2)
    for content in contents.values():
        args = vars(content["args"])
        expected = {
            "num_layers": LAYERS,
            "hidden_size": HIDDEN,
            "num_attention_heads": HEADS,
            "num_key_value_heads": HEADS,
            "add_position_embedding": True,
            "max_position_embeddings": POSITIONS,
            "make_vocab_size_divisible_by": 32,
            "padded_vocab_size": VOCAB,
            "tokenizer_type": "GPT2BPETokenizer",
            "data_parallel_random_init": False,
            "tensor_model_parallel_size": 2,
            "pipeline_model_parallel_size": 2,
        }
        assert {key: args[key] for key in expected} == expected
        # Taken over by --use-checkpoint-args in the place of Megatron's own defaults.
        assert args["normalization"] == "LayerNorm" and args["add_bias_linear"] is True
        assert args["swiglu"] is False and args["group_query_attention"] is False


def test_vocabulary_that_tensor_ranks_cannot_share_is_padded(tmp_path: Path) -> None:
    ours = weights()
    megatron_tree(tmp_path / "source", ours)
    layout = MegatronLayout(tp=4)
    done = convert(
        tmp_path / "source", tmp_path / "out", "megatron", vocab_size=61, megatron=layout
    )
    assert any("padded from 61 to 64 rows" in note for note in done.notes)
    assert "--make-vocab-size-divisible-by 16" in done.flags
    model = load_foreign(tmp_path / "out")
    word = dict(model.tensors())["embeddings.word.weight"]
    assert torch.equal(word[:61], ours["embeddings.word.weight"][:61])
    assert torch.equal(word[61:], word[60:61].expand(3, -1))
    model.trim_vocabulary(61)
    assert model.stored["embeddings.word.weight"].read().shape == (61, HIDDEN)


@pytest.mark.parametrize(("rows", "divisor"), [(384, 128), (320, 64), (299, 299)])
def test_the_rounding_rule_gives_the_rows_from_the_tokenizer(
    tmp_path: Path, rows: int, divisor: int
) -> None:
    """Megatron rounds up the size of the tokenizer it is given, here 280."""
    train(["one two three four five six seven eight nine ten " * 9], 280).save(tmp_path / "t.json")
    megatron_tree(tmp_path / "source", weights(vocabulary=rows))
    done = convert(tmp_path / "source", tmp_path / "out", "megatron", tokenizer=tmp_path / "t.json")
    assert f"--make-vocab-size-divisible-by {divisor}" in done.flags
    assert f"--vocab-file {tmp_path / 'out' / 'vocab.json'}" in done.flags
    assert (tmp_path / "out" / "merges.txt").is_file()


def test_layouts_that_do_not_divide_are_refused(tmp_path: Path) -> None:
    megatron_tree(tmp_path / "source", weights())
    for layout, message in (
        (MegatronLayout(pp=3), "--pp 3 does not divide the 4 layers"),
        (MegatronLayout(tp=3), "--tp 3 does not divide the 4 attention heads"),
    ):
        with pytest.raises(CheckpointError, match=message):
            convert(tmp_path / "source", tmp_path / "out", "megatron", megatron=layout)
    with pytest.raises(UserError, match="for --to megatron, not --to hf"):
        convert(tmp_path / "source", tmp_path / "out", "hf", megatron=MegatronLayout())
    assert not (tmp_path / "out").exists()


def test_the_command_prints_the_flags(tmp_path: Path) -> None:
    megatron_tree(tmp_path / "source", weights())
    target = tmp_path / "out"
    done = CliRunner().invoke(
        command_line(),
        ["convert", str(tmp_path / "source"), str(target), "--to", "megatron", "--tp", "2"],
    )
    assert done.exit_code == 0, done.output
    for flag in (
        f"--load {target}",
        "--tensor-model-parallel-size 2",
        "--position-embedding-type learned_absolute",
        "--transformer-impl transformer_engine",
        "--ckpt-format torch",
    ):
        assert f"  {flag}\n" in done.output


# --- Megatron Core itself ---------------------------------------------------------------------

# One process per rank, over gloo. What little asks for CUDA at this size is told that it has it.
MEGATRON = """
import argparse, contextlib, os, queue, tempfile, threading, traceback, types
import torch, torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
from megatron.core.transformer import TransformerConfig

CudaRNGStatesTracker.fork = lambda *_: contextlib.nullcontext()
# The processes that write a checkpoint are threads here: ranks that were forked cannot fork safely.
filesystem_async.mp = types.SimpleNamespace(
    get_context=lambda _: types.SimpleNamespace(
        Queue=queue.Queue, JoinableQueue=queue.Queue, Process=threading.Thread,
        Manager=lambda: types.SimpleNamespace(Queue=queue.Queue),
    )
)
torch.cuda.current_device = lambda: "cpu"
torch.cuda.synchronize = lambda *_: None
torch.Tensor.cuda = lambda tensor, *_: tensor
torch.set_num_threads(1)


def stage(rank, tp, pp):
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=tp * pp)
    parallel_state.initialize_model_parallel(tp, pp, create_gloo_process_groups=False)
    config = TransformerConfig(
        num_layers=given["layers"], hidden_size=given["hidden"],
        ffn_hidden_size=4 * given["hidden"],
        num_attention_heads=given["heads"], hidden_dropout=0.0, attention_dropout=0.0,
        bias_activation_fusion=True, use_cpu_initialization=True, pipeline_dtype=torch.float32,
        tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp,
    )
    model = GPTModel(
        config, get_gpt_layer_local_spec(), vocab_size=given["vocab"],
        max_sequence_length=given["positions"], position_embedding_type="learned_absolute",
        share_embeddings_and_output_weights=True, parallel_output=False,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
    ).eval()
    leaf = f"mp_rank_{parallel_state.get_tensor_model_parallel_rank():02d}"
    if pp > 1:
        leaf += f"_{parallel_state.get_pipeline_model_parallel_rank():03d}"
    file = os.path.join(given["release"], leaf, "model_optim_rng.pt")
    stored = torch.load(file, weights_only=False)["model"]
    if given["names"] == "core":
        # The names of Transformer Engine, by Megatron Core's own table of them.
        sharded = model.sharded_state_dict(metadata={"non_homogeneous_layers": True})
        theirs = {
            name: sharded[name].key for name in model.state_dict() if "_extra_state" not in name
        }
        first = parallel_state.get_pipeline_model_parallel_rank() * given["layers"] // pp
        local = {}
        for name, key in theirs.items():
            parts = key.split(".")
            if parts[1] == "layers":  # there numbered through the whole model
                parts[2] = str(int(parts[2]) - first)
            local[name] = ".".join(parts)
        if "output_layer.weight" in local:
            local["output_layer.weight"] = "output_layer.weight"
        assert sorted(local.values()) == sorted(stored), (local, sorted(stored))
        stored = {name: stored[key] for name, key in local.items()}
    model.load_state_dict(stored, strict=True)
    ids = torch.tensor(given["ids"])
    places = torch.arange(ids.shape[1]).expand_as(ids)
    mask = torch.ones(1, 1, ids.shape[1], ids.shape[1]).triu(1).bool()
    with torch.no_grad():
        if pp > 1 and not parallel_state.is_pipeline_first_stage():
            hidden = torch.empty(ids.shape[1], ids.shape[0], given["hidden"])
            dist.recv(hidden, parallel_state.get_pipeline_model_parallel_prev_rank())
            model.set_input_tensor(hidden)
        out = model(ids, places, mask)
        if not parallel_state.is_pipeline_last_stage():
            dist.send(out.contiguous(), parallel_state.get_pipeline_model_parallel_next_rank())
    if rank == tp * pp - 1:
        torch.save(out, given["logits"])
    args = argparse.Namespace(num_layers=given["layers"], num_attention_heads=given["heads"])
    content = {"model": model.sharded_state_dict(), "args": args, "checkpoint_version": 3.0}
    dist_checkpointing.save(content, given["again"])
    dist.barrier()


store = tempfile.mktemp()
children = []
for rank in range(given["tp"] * given["pp"]):
    pid = os.fork()
    if pid == 0:
        try:
            stage(rank, given["tp"], given["pp"])
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    children.append(pid)
answer = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children]
assert not any(answer), answer
"""


@needs_peers
@pytest.mark.parametrize(
    ("names", "tp", "pp"),
    [("core-local", 1, 1), ("core", 1, 1), ("core-local", 2, 2), ("core", 2, 2)],
)
def test_megatron_core_loads_every_rank_gives_our_logits_and_saves_them_again(
    tmp_path: Path, names: str, tp: int, pp: int
) -> None:
    written(tmp_path, names=names, tp=tp, pp=pp)
    again = tmp_path / "again"
    again.mkdir()
    ids = prompt()
    in_peers(
        MEGATRON,
        release=tmp_path / "out" / "release",
        logits=tmp_path / "logits.pt",
        again=again,
        names=names,
        tp=tp,
        pp=pp,
        ids=ids.tolist(),
        layers=LAYERS,
        hidden=HIDDEN,
        heads=HEADS,
        vocab=VOCAB,
        positions=POSITIONS,
    )
    ours = logits_of(weights(), ids)
    theirs = torch.load(tmp_path / "logits.pt")
    assert (theirs - ours).abs().max() <= 1e-5 * ours.abs().max()
    # What Megatron Core then saves, in its own format, is what it was given.
    assert_same(load_foreign(again), weights())
