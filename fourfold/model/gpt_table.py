"""The table of `GPT`'s parameters: what each option of the `Model` section adds to it.

    gpt_parameters(shape)["layers.7.attn.qkv.weight"].split_dim      0: its rows are cut

GPT-2's and GPT-3's rows name themselves in other programs too; the names of the other families are
in fourfold/convert/families.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import cache

from fourfold.model.params import (
    ForeignNames,
    ModelShape,
    Param,
    ParamTable,
    linear_rows,
    norm_rows,
)

# Of Megatron's layers.
_QKV, _PROJ = "self_attention.linear_qkv.", "self_attention.linear_proj."
_FC1, _FC2 = "mlp.linear_fc1.", "mlp.linear_fc2."
_INPUT, _POST, _OLD = "input_layernorm.", "post_attention_layernorm.", "self_attention."


@cache
def gpt_parameters(shape: ModelShape) -> ParamTable:
    """The table of `GPT`.

    Biases and norms do not decay, embeddings do, as in the originals. FleetX draws all matrices
    alike; GPT-2's scaling of the matrices that end in the residual stream is an option.
    """
    width, std = shape.hidden_size, shape.initializer_range
    word = Param(
        name="embeddings.word.weight",
        shape=(shape.vocab_size, width),
        kind="embedding",
        init="normal",
        init_std=std,
        split_dim=0,
        end="first",
        tied_to_head=shape.tie_word_embeddings,
        foreign=ForeignNames(
            huggingface="transformer.wte.weight",
            fleetx="gpt.embeddings.word_embeddings.weight",
            core="embedding.word_embeddings.weight",
            core_local="embedding.word_embeddings.weight",
            classic="language_model.embedding.word_embeddings.weight",
        ),
    )
    position = Param(
        name="embeddings.position.weight",
        shape=(shape.max_position_embeddings, width),
        kind="embedding",
        init="normal",
        init_std=std,
        partial_gradient="positions",
        end="first",
        foreign=ForeignNames(
            huggingface="transformer.wpe.weight",
            fleetx="gpt.embeddings.position_embeddings.weight",
            core="embedding.position_embeddings.weight",
            core_local="embedding.position_embeddings.weight",
            classic="language_model.embedding.position_embeddings.weight",
        ),
    )
    final = ForeignNames(
        huggingface="transformer.ln_f.",
        fleetx="gpt.decoder.norm.",
        core="decoder.final_layernorm.",
        core_local="decoder.final_layernorm.",
        classic="language_model.encoder.final_layernorm.",
    )
    head = replace(word, name="head.weight", kind="linear", end="last", foreign=None)
    norm_bias = shape.normalization == "LayerNorm" and shape.bias == "all"
    norm1 = _in_layer("ln_1.", "norm1.", _QKV + "layer_norm_", _INPUT, _INPUT)
    norm2 = _in_layer("ln_2.", "norm2.", _FC1 + "layer_norm_", "pre_mlp_layernorm.", _POST)
    rows = [
        word,
        *([position] if shape.position_embedding == "learned" else []),
        *norm_rows("layers.*.norm1.", width, bias=norm_bias, foreign=norm1),
        *_attention_rows(shape),
        *norm_rows("layers.*.norm2.", width, bias=norm_bias, foreign=norm2),
        *_mlp_rows(shape),
        *norm_rows("norm.", width, bias=norm_bias, end="last", foreign=final),
        *([] if shape.tie_word_embeddings else [head]),
    ]
    return ParamTable([_by_width(row, shape.width_ratio) for row in rows], shape.num_layers)


def _by_width(row: Param, ratio: float) -> Param:
    """muP (Tensor Programs V, Table 8): a matrix of a layer sums over `ratio` times more numbers,
    so it begins smaller, and learns slower, since Adam's updates all point one way.

    Embeddings, norms, biases and the head have one side at most that grows, and stay; the head's
    logits are divided instead (`output_scale`), which holds for a tied one too.
    """
    if ratio == 1.0 or not (row.is_matrix and row.in_every_layer):
        return row
    return replace(row, init_std=row.init_std / math.sqrt(ratio), lr_scale=1 / ratio)


def _to_residual(shape: ModelShape) -> float:
    """The deviation of what writes to the residual stream."""
    std = shape.initializer_range
    return std / math.sqrt(2 * shape.num_layers) if shape.depth_scaled_init else std


def _attention_rows(shape: ModelShape) -> Iterator[Param]:
    """Queries, keys and values in one matrix, or in three where heads share keys and values."""
    width, size, std = shape.hidden_size, shape.head_size, shape.initializer_range
    heads, shared = shape.num_attention_heads, shape.key_value_heads
    bias = shape.bias in ("all", "qkv")
    if shared == heads:
        qkv = _in_layer(
            "attn.c_attn.", "self_attn.qkv_proj.", _QKV, _QKV, _OLD + "query_key_value."
        )
        yield from linear_rows(
            "layers.*.attn.qkv.", 3 * heads * size, width, std, 0, bias=bias, foreign=qkv,
            in_attention=True, rows_by_head=True,
        )  # fmt: skip
    else:
        for name, count in (("q", heads), ("k", shared), ("v", shared)):
            rows = linear_rows(
                f"layers.*.attn.in_proj.{name}.", count * size, width, std, 0, bias=bias,
                in_attention=True,
            )  # fmt: skip
            yield from (row if name == "q" else replace(row, most_pieces=shared) for row in rows)
    if shape.qk_norm != "none":
        norm_bias = shape.normalization == "LayerNorm" and shape.bias == "all"
        for name, count in (("q", heads), ("k", shared)):
            of_all = shape.qk_norm == "all_heads"
            rows = norm_rows(
                f"layers.*.attn.{name}_norm.", count * size if of_all else size, bias=norm_bias
            )
            for row in rows:
                if of_all:
                    pieces = shared if name == "k" else None
                    yield replace(row, split_dim=0, most_pieces=pieces, partial_gradient=None)
                else:
                    yield replace(row, partial_gradient="heads")
    out = _in_layer("attn.c_proj.", "self_attn.out_proj.", _PROJ, _PROJ, _OLD + "dense.")
    yield from linear_rows(
        "layers.*.attn.out.", width, heads * size, _to_residual(shape), 1,
        bias=shape.bias == "all", foreign=out, in_attention=True,
    )  # fmt: skip


def _mlp_rows(shape: ModelShape) -> Iterator[Param]:
    width, wide, std = shape.hidden_size, shape.ffn_hidden_size, shape.initializer_range
    bias = shape.bias == "all"
    if shape.is_gated:
        for name in ("gate", "up"):
            yield from linear_rows(f"layers.*.mlp.in_proj.{name}.", wide, width, std, 0, bias=bias)
    else:
        up = _in_layer("mlp.c_fc.", "linear1.", _FC1, _FC1, "mlp.dense_h_to_4h.")
        yield from linear_rows("layers.*.mlp.up.", wide, width, std, 0, bias=bias, foreign=up)
    down = _in_layer("mlp.c_proj.", "linear2.", _FC2, _FC2, "mlp.dense_4h_to_h.")
    yield from linear_rows(
        "layers.*.mlp.down.", width, wide, _to_residual(shape), 1, bias=bias, foreign=down
    )


def _in_layer(
    huggingface: str, fleetx: str, core: str, core_local: str, classic: str
) -> ForeignNames:
    """Of a module of every layer, up to the dot (or what core has for it) before `weight`."""
    return ForeignNames(
        huggingface=f"transformer.h.*.{huggingface}",
        fleetx=f"gpt.decoder.layers.*.{fleetx}",
        core=f"decoder.layers.*.{core}",
        core_local=f"decoder.layers.*.{core_local}",
        classic=f"language_model.encoder.layers.*.{classic}",
    )
