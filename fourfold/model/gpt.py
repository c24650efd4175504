"""GPT-2/GPT-3: pre-LayerNorm decoder, tanh GELU, learned positions, head tied to the embedding.

The whole network in one file, written for one device. `GPT(shape)(tokens)` returns logits; with
labels it returns the summed loss without ever holding all the logits (see loss.py).
`GPT(shape, layers)` is a part of it, with the parameter names of the whole.

Letters in shape comments: B batch, T positions, D hidden, H heads, K head size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fourfold.model import kernels
from fourfold.model.loss import TiedGradient, Vocabulary, compute_dtype, head_cross_entropy
from fourfold.model.params import ModelShape, ParamTable, gpt_parameters
from fourfold.model.seeds import seed_dropout

# Queries, keys and values (B, H, T, K) of new tokens -> what they attend to (B, H, T, K).
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


class Linear(nn.Linear):
    """A linear layer whose bias joins the matrix product (`fused`) or is added after it."""

    def __init__(self, in_features: int, out_features: int, fused: bool, bias: bool = True) -> None:
        super().__init__(in_features, out_features, bias=bias)
        self.fused = fused

    def reset_parameters(self) -> None:
        """Nothing: weights come from init.py or a checkpoint, never from torch's defaults."""

    def forward(self, x: Tensor) -> Tensor:
        if self.fused or self.bias is None:
            return F.linear(x, self.weight, self.bias)
        y = F.linear(x, self.weight)
        return y + self.bias.to(y.dtype)  # autocast's type, as the fused product gives


class LayerNorm(nn.LayerNorm):
    """In low precision a GPU's kernels take means and sums in fp32 inside, and x as it is.

    A CPU's add up the gradients of the weights in the type of x, and lose several percent of them
    over a few thousand tokens; so there the whole norm is computed in fp32.
    """

    def reset_parameters(self) -> None:
        """Nothing, as for `Linear`."""

    def forward(self, x: Tensor) -> Tensor:
        if not x.is_cpu or x.dtype.itemsize >= 4:
            # In autocast's type straight away: only products read it, which would cast it.
            return super().forward(x).to(compute_dtype(x.device, x.dtype))
        bias = None if self.bias is None else self.bias.float()
        wide = F.layer_norm(x.float(), self.normalized_shape, self.weight.float(), bias, self.eps)
        return wide.to(x.dtype)


class CoreAttention(nn.Module):
    """softmax(q k^T + mask) v; without a mask it is causal. For masks see `attention_mask`.

    A module of its own so that recomputation can wrap just this.
    """

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout
        self.first_head = 0  # of those here, in the whole model

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        dropout = self.dropout if self.training else 0.0
        if is_starts(mask) or (mask is None and kernels.usable(q.device, q.dtype)):
            return kernels.causal_attention(q, k, v, mask, dropout, self.first_head)
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=mask is None
        )


class Attention(nn.Module):
    """Causal self-attention.

    The rows of `qkv` are stored head by head, [q_j, k_j, v_j] for head j, so that contiguous slices
    of the weight are whole heads. The head count in `view` is -1: a module that holds a slice of
    the heads runs unchanged.
    """

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.head_size = shape.head_size
        self.qkv = Linear(shape.hidden_size, 3 * shape.hidden_size, shape.fused_linear)
        self.core = CoreAttention(shape.attention_probs_dropout_prob)
        self.out = Linear(shape.hidden_size, shape.hidden_size, shape.fused_linear)

    def forward(
        self, x: Tensor, mask: Tensor | None = None, attend: Attend | None = None
    ) -> Tensor:
        """`attend` replaces `core`, to attend to tokens of earlier calls too (the KV cache)."""
        qkv = self.qkv(x)  # (B, T, 3 D)
        B, T, _ = qkv.shape
        qkv = qkv.view(B, T, -1, 3, self.head_size)  # (B, T, H, 3, K)
        q, k, v = kernels.split_heads(qkv)  # (B, H, T, K) each
        mixed = self.core(q, k, v, mask) if attend is None else attend(q, k, v)  # (B, H, T, K)
        return self.out(mixed.transpose(1, 2).reshape(B, T, -1))  # (B, T, D)


class GELU(nn.Module):
    """The tanh form."""

    scratch: kernels.Scratch | None = None  # for its result, where nothing keeps that

    def forward(self, x: Tensor) -> Tensor:
        return kernels.gelu(x, self.scratch)


class MLP(nn.Module):
    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.act = GELU()
        self.up = Linear(shape.hidden_size, shape.ffn_hidden_size, shape.fused_linear)
        self.down = Linear(shape.ffn_hidden_size, shape.hidden_size, shape.fused_linear)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.up(x)))


class Block(nn.Module):
    """One decoder layer: x + dropout(attn(norm1 x)), then x + dropout(mlp(norm2 x))."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.norm1 = LayerNorm(shape.hidden_size, eps=1e-5)
        self.attn = Attention(shape)
        self.norm2 = LayerNorm(shape.hidden_size, eps=1e-5)
        self.mlp = MLP(shape)
        self.dropout = shape.hidden_dropout_prob

    def forward(
        self, x: Tensor, mask: Tensor | None = None, attend: Attend | None = None
    ) -> Tensor:
        x = x + F.dropout(self.attn(self.norm1(x), mask, attend), self.dropout, self.training)
        return x + F.dropout(self.mlp(self.norm2(x)), self.dropout, self.training)


class Embedding(nn.Embedding):
    tied: TiedGradient | None = None  # where the head of this very module has the same weight

    def reset_parameters(self) -> None:
        """Nothing, as for `Linear`."""

    def forward(self, tokens: Tensor) -> Tensor:
        if self.tied is None:
            return super().forward(tokens)
        return self.tied.look_up(tokens, self.weight)


class Embeddings(nn.Module):
    def __init__(self, shape: ModelShape, with_positions: bool = True) -> None:
        super().__init__()
        self.word = Embedding(shape.vocab_size, shape.hidden_size)
        self.position = None
        if with_positions:
            self.position = Embedding(shape.max_position_embeddings, shape.hidden_size)
        self.dropout = shape.hidden_dropout_prob

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        x = self.word(tokens)  # (B, T, D)
        if self.position is not None:
            x = x + self.position(positions)
        return F.dropout(x, self.dropout, self.training)


def attention_mask(document_ids: Tensor, like: Tensor) -> Tensor:
    """What keeps tokens of hidden states `like` within their documents: for our kernel the position
    at which each one's document begins, for torch's a table."""
    dtype = compute_dtype(like.device, like.dtype)
    if kernels.usable(like.device, dtype):
        return kernels.document_starts(document_ids)
    return document_mask(document_ids, dtype)


def is_starts(mask: Tensor | None) -> bool:
    return mask is not None and not mask.is_floating_point()


def document_mask(document_ids: Tensor, dtype: torch.dtype) -> Tensor:
    """The mask (B, 1, T, T): 0 where a token may attend, which is to itself and to earlier tokens
    of its own document, and minus infinity elsewhere.

    It is added to the scores and not a table of booleans, because attention would turn those
    into numbers in every layer, and each layer would keep its own until the backward pass.
    """
    allowed = document_ids.unsqueeze(2) == document_ids.unsqueeze(1)  # (B, T, T)
    mask = torch.full(allowed.shape, -torch.inf, dtype=dtype, device=document_ids.device)
    return mask.masked_fill_(allowed.tril_(), 0.0).unsqueeze(1)


class Head(nn.Module):
    """The last step: logits, or the loss straight from the hidden states.

    The weight is given: that of the word embedding, or the head's own where it is not tied.
    """

    def __init__(self, shape: ModelShape, owns_weight: bool = False) -> None:
        super().__init__()
        self.chunk_tokens = shape.loss_chunk_tokens
        self.vocabulary = Vocabulary()
        self.tied: TiedGradient | None = None
        if owns_weight:
            self.weight = nn.Parameter(torch.empty(shape.vocab_size, shape.hidden_size))

    def forward(
        self,
        x: Tensor,
        weight: Tensor,
        labels: Tensor | None,
        loss_mask: Tensor | None,
        loss_scale: float | Tensor,
    ) -> Tensor:
        if labels is None:
            return F.linear(x.to(weight.dtype), weight)  # (B, T, V)
        if loss_mask is None:
            loss_mask = torch.ones_like(labels, dtype=torch.float32)
        return head_cross_entropy(
            x.flatten(0, 1),
            weight,
            labels.flatten(),
            loss_mask.flatten(),
            loss_scale,
            self.chunk_tokens,
            self.vocabulary,
            self.tied,
        )


class GPT(nn.Module):
    """The model. Layers are keyed by their number, so names survive a cut into parts.

    Another network of this kind is a subclass with a table and a block of its own.
    """

    parameter_table: Callable[[ModelShape], ParamTable] = staticmethod(gpt_parameters)
    block: Callable[[ModelShape], nn.Module] = Block
    final_norm: Callable[[ModelShape], nn.Module] = staticmethod(
        lambda shape: LayerNorm(shape.hidden_size, eps=1e-5)
    )

    def __init__(self, shape: ModelShape, layers: range | None = None) -> None:
        """With `layers` a part of the network: just these, and the embeddings and the head where
        they are next to them. The part that ends the network has the word embedding as its head,
        unless the head has a weight of its own.
        """
        super().__init__()
        self.shape = shape
        self.table = type(self).parameter_table(shape)
        layers = range(shape.num_layers) if layers is None else layers
        self.is_first = layers.start == 0
        self.is_last = layers.stop == shape.num_layers
        is_tied = self.table.tied is not None
        if self.is_first or (self.is_last and is_tied):
            has_positions = "embeddings.position.weight" in self.table
            self.embeddings = Embeddings(shape, self.is_first and has_positions)
        self.layers = nn.ModuleDict({str(i): type(self).block(shape) for i in layers})
        self.chunks = [tuple(self.layers)]  # numbers of layers that run one after the other
        if self.is_last:
            self.norm = type(self).final_norm(shape)
        self.head = Head(shape, owns_weight=self.is_last and not is_tied)
        if self.is_first and self.is_last and is_tied:
            self.head.tied = self.embeddings.word.tied = TiedGradient()
        self.has_dropout = shape.hidden_dropout_prob > 0 or shape.attention_probs_dropout_prob > 0

    @property
    def head_weight(self) -> Tensor:
        """What the head multiplies with, where the network ends."""
        return self.embeddings.word.weight if self.table.tied is not None else self.head.weight

    def forward(
        self,
        inputs: Tensor,
        labels: Tensor | None = None,
        loss_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        document_ids: Tensor | None = None,
        *,
        loss_scale: float | Tensor = 1.0,
        dropout_seed: int | Tensor = 0,
        attends: Mapping[str, Attend] | None = None,
        ends: Tensor | None = None,
    ) -> Tensor:
        """Logits (B, T, V) or, with labels, `loss_scale` times the sum of the token losses.

        `inputs` are the tokens (B, T); where a part of the network is not its first, the hidden
        states (B, T, D) from the part before. With `document_ids` (B, T) tokens attend only to
        those with the same id before them.

        The caller puts the division by the number of valid tokens of the global batch into
        `loss_scale`: then micro-batches simply add up (gradient accumulation), however the batch is
        cut.

        For generation, `attends` as in `hidden`, and with `ends` (B,) the logits (B, V) of one
        position of each row.
        """
        x = self.hidden(inputs, position_ids, document_ids, dropout_seed, attends)
        if not self.is_last:
            return x
        if ends is not None:
            x = x[torch.arange(x.shape[0], device=x.device), ends]
        return self.head(self.norm(x), self.head_weight, labels, loss_mask, loss_scale)

    def hidden(
        self,
        inputs: Tensor,
        position_ids: Tensor | None,
        document_ids: Tensor | None,
        dropout_seed: int | Tensor,
        attends: Mapping[str, Attend] | None = None,
    ) -> Tensor:
        """The hidden states (B, T, D) after the last layer here.

        `attends` maps a layer's number to the attention to use in place of its own.

        With dropout the generator is reseeded before every layer, from the caller's seed and the
        layer's number: a mask depends on its position in the network, not on what ran before.
        """
        reseed = self.training and self.has_dropout
        seed = int(dropout_seed) if reseed else 0
        x = inputs
        if self.is_first:
            if position_ids is None:
                position_ids = torch.arange(inputs.shape[1], device=inputs.device)
            if reseed:
                seed_dropout(inputs.device, seed, "embeddings")
            x = self.embeddings(inputs, position_ids)
        mask = None if document_ids is None else attention_mask(document_ids, x)
        for numbers in self.chunks:
            x = self.run_layers(numbers, x, mask, seed if reseed else None, attends)
        return x

    def run_layers(
        self,
        numbers: Sequence[str],
        x: Tensor,
        mask: Tensor | None,
        seed: int | None,
        attends: Mapping[str, Attend] | None,
    ) -> Tensor:
        """These layers, one after the other; `seed` where dropout is to be seeded."""
        for number in numbers:
            layer = self.layers[number]
            if seed is not None:
                seed_dropout(x.device, seed, number)
            x = layer(x, mask) if attends is None else layer(x, mask, attends[number])
        return x
