"""The same weights give the same logits, loss and gradients as the GPT-2 of `transformers`."""

from __future__ import annotations

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from fourfold.model import GPT, ModelShape, initialize

SHAPE = ModelShape(
    vocab_size=1000,
    hidden_size=64,
    num_layers=3,
    num_attention_heads=4,
    ffn_hidden_size=256,
    max_position_embeddings=48,
    initializer_range=0.2,  # ten times the usual: large logits make differences show
    loss_chunk_tokens=50,
)


def per_head_rows(fused: torch.Tensor, heads: int) -> torch.Tensor:
    """GPT-2's columns [q | k | v] become our rows, head by head."""
    size = fused.shape[-1] // (3 * heads)
    rows = fused.t() if fused.ndim == 2 else fused  # (3 H K, ...)
    return rows.view(3, heads, size, -1).transpose(0, 1).reshape(rows.shape)


def to_ours(peer: dict[str, torch.Tensor], heads: int) -> dict[str, torch.Tensor]:
    """A dictionary keyed by transformers' names, in our names and orientation."""
    ours = {
        "embeddings.word.weight": peer["transformer.wte.weight"],
        "embeddings.position.weight": peer["transformer.wpe.weight"],
        "norm.weight": peer["transformer.ln_f.weight"],
        "norm.bias": peer["transformer.ln_f.bias"],
    }
    names = {"ln_1": "norm1", "ln_2": "norm2", "attn.c_attn": "attn.qkv"}
    names |= {"attn.c_proj": "attn.out", "mlp.c_fc": "mlp.up", "mlp.c_proj": "mlp.down"}
    for key, tensor in peer.items():
        if not key.startswith("transformer.h."):
            continue
        _, _, layer, rest = key.split(".", 3)
        stem, kind = rest.rsplit(".", 1)
        if stem == "attn.c_attn":
            tensor = per_head_rows(tensor, heads)
        elif kind == "weight" and not stem.startswith("ln"):
            tensor = tensor.t()  # their Conv1D stores (in, out)
        ours[f"layers.{layer}.{names[stem]}.{kind}"] = tensor
    return ours


@pytest.fixture(scope="module")
def pair() -> tuple[GPT, GPT2LMHeadModel]:
    peer = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=SHAPE.vocab_size,
            n_positions=SHAPE.max_position_embeddings,
            n_embd=SHAPE.hidden_size,
            n_layer=SHAPE.num_layers,
            n_head=SHAPE.num_attention_heads,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            use_cache=False,
        )
    )
    generator = torch.Generator().manual_seed(0)
    for parameter in peer.parameters():
        # Biases and norms must differ from 0 and 1, or a forgotten one would go unseen.
        parameter.data += torch.randn(parameter.shape, generator=generator) * 0.1
    ours = GPT(SHAPE)
    initialize(ours, seed=0)
    ours.load_state_dict(to_ours(dict(peer.named_parameters()), SHAPE.num_attention_heads))
    return ours, peer


def test_logits_and_gradients_equal_transformers(pair: tuple[GPT, GPT2LMHeadModel]) -> None:
    ours, peer = pair
    tokens = torch.randint(0, SHAPE.vocab_size, (3, 33), generator=torch.Generator().manual_seed(1))
    inputs, labels = tokens[:, :-1], tokens[:, 1:]

    logits = ours(inputs)
    torch.testing.assert_close(logits, peer(inputs).logits, rtol=1e-5, atol=1e-5)

    loss = ours(inputs, labels, loss_scale=1 / labels.numel())
    peer_logits = peer(inputs).logits
    peer_loss = torch.nn.functional.cross_entropy(peer_logits.flatten(0, 1), labels.flatten())
    torch.testing.assert_close(loss, peer_loss, rtol=1e-6, atol=1e-6)

    loss.backward()
    peer_loss.backward()
    gradients = {name: p.grad for name, p in peer.named_parameters()}
    expected = to_ours(gradients, SHAPE.num_attention_heads)
    for name, parameter in ours.named_parameters():
        scale = expected[name].norm()
        assert (parameter.grad - expected[name]).norm() <= 1e-4 * scale, name
