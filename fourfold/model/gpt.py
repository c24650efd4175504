"""GPT: a decoder of blocks, each attention and a feed-forward network.

With the options as they stand it is GPT-2 and GPT-3: LayerNorm before each block, tanh GELU,
learned positions, a head tied to the embedding. Others make it Llama, Qwen, OLMo or GPT-NeoX; their
parameters are in gpt_table.py, their layers in layers.py, rotary positions in positions.py.

The whole network in one file, written for one device. `GPT(shape)(tokens)` returns logits; with
labels it returns the summed loss without ever holding all the logits (see loss.py).
`GPT(shape, layers)` is a part of it, with the parameter names of the whole.

Letters in shape comments: B batch, T positions, D hidden, H heads, G heads of keys and values,
K head size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fourfold.model import kernels
from fourfold.model.attention_kernel import causal_attention, split_heads
from fourfold.model.gpt_table import gpt_parameters
from fourfold.model.layers import Linear, Linears, RMSNorm, activation_of, norm_of
from fourfold.model.loss import TiedGradient, Vocabulary, head_cross_entropy
from fourfold.model.params import ModelShape, ParamTable
from fourfold.model.positions import attention_mask, is_starts, rotate, rotation
from fourfold.model.seeds import seed_dropout

# Queries (B, H, T, K), keys and values (B, G, T, K) of new tokens -> what they attend to.
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


class CoreAttention(nn.Module):
    """softmax(q k^T + mask) v; without a mask it is causal. For masks see `attention_mask`.

    A module of its own so that recomputation can wrap just this.
    """

    def __init__(self, dropout: float, scale: float | None = None) -> None:
        """`scale` is what scores are multiplied by, where that is not 1 / sqrt(K)."""
        super().__init__()
        self.dropout = dropout
        self.scale = scale
        self.first_head = 0  # of those here, in the whole model

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None = None,
        turns: Tensor | None = None,
    ) -> Tensor:
        """With the `turns` of rotary positions q and k are rotated first."""
        dropout = self.dropout if self.training else 0.0
        if is_starts(mask) or (mask is None and kernels.usable(q.device, q.dtype)):
            return causal_attention(q, k, v, mask, dropout, self.first_head, turns, self.scale)
        if turns is not None:
            q, k = rotate(q, turns), rotate(k, turns)
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=mask is None, scale=self.scale,
            enable_gqa=k.shape[1] != q.shape[1],
        )  # fmt: skip


class HeadNorm(nn.Module):
    """The norm of queries or of keys: of each head by itself, or of all heads of a token."""

    def __init__(self, shape: ModelShape, heads: int) -> None:
        super().__init__()
        self.of_all = shape.qk_norm == "all_heads"
        width = shape.head_size * heads if self.of_all else shape.head_size
        kind = norm_of(shape, width)
        self.weight, self.eps = kind.weight, shape.norm_epsilon
        self.bias = getattr(kind, "bias", None)
        self.is_rms = isinstance(kind, RMSNorm)

    def forward(self, x: Tensor) -> Tensor:
        """Of (B, H, T, K)."""
        if self.is_rms and not self.of_all and kernels.usable(x.device, x.dtype):
            rows = x.transpose(1, 2)  # as a product made them
            return kernels.rms_norm(rows, self.weight, self.eps, x.dtype).transpose(1, 2)
        wide = x if x.dtype.itemsize >= 4 else x.float()
        weight = self.weight.to(wide.dtype)
        if self.of_all:
            unit = wide * torch.rsqrt(self.mean_square(wide) + self.eps)
            made = unit * weight.view(x.shape[1], 1, x.shape[3])
        elif self.is_rms:
            made = F.rms_norm(wide, weight.shape, weight, self.eps)
        else:
            bias = None if self.bias is None else self.bias.to(wide.dtype)
            made = F.layer_norm(wide, weight.shape, weight, bias, self.eps)
        return made.to(x.dtype)

    def mean_square(self, x: Tensor) -> Tensor:
        """Over all heads of each token of (B, H, T, K): (B, 1, T, 1)."""
        return x.square().mean(dim=(1, 3), keepdim=True)


class Attention(nn.Module):
    """Causal self-attention, in which heads of queries may share keys and values.

    Where each has its own, all three are one matrix. The rows of `qkv` are stored head by head,
    [q_j, k_j, v_j] for head j, so that contiguous slices of the weight are whole heads. Counts of
    heads in `view` are -1: a module that holds a slice of the heads runs unchanged.
    """

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.head_size = size = shape.head_size
        width, fused, bias = shape.hidden_size, shape.fused_linear, shape.bias != "none"
        heads, shared = shape.num_attention_heads, shape.key_value_heads
        self.is_grouped = shared != heads
        if self.is_grouped:
            counts = {"q": heads, "k": shared, "v": shared}
            self.in_proj = Linears(
                {name: Linear(width, n * size, fused, bias) for name, n in counts.items()}
            )
        else:
            self.qkv = Linear(width, 3 * heads * size, fused, bias)
        if shape.qk_norm != "none":
            self.q_norm, self.k_norm = HeadNorm(shape, heads), HeadNorm(shape, shared)
        self.normalizes = shape.qk_norm != "none"
        self.core = CoreAttention(shape.attention_probs_dropout_prob, shape.attention_scale)
        self.out = Linear(heads * size, width, fused, shape.bias == "all")

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        turns: Tensor | None = None,
        attend: Attend | None = None,
    ) -> Tensor:
        """`turns` are those of rotary positions. `attend` replaces `core`, to attend to tokens of
        earlier calls too (the KV cache)."""
        q, k, v = self.project(x)  # (B, H, T, K), (B, G, T, K), (B, G, T, K)
        if self.normalizes:
            q, k = self.q_norm(q), self.k_norm(k)
        if attend is None:
            mixed = self.core(q, k, v, mask, turns)  # (B, H, T, K)
        else:
            if turns is not None:
                q, k = rotate(q, turns), rotate(k, turns)
            mixed = attend(q, k, v)
        return self.out(mixed.transpose(1, 2).flatten(2))  # (B, T, D)

    def project(self, x: Tensor) -> Sequence[Tensor]:
        if self.is_grouped:
            made = self.in_proj(x)
            return [one.unflatten(2, (-1, self.head_size)).transpose(1, 2) for one in made]
        qkv = self.qkv(x)  # (B, T, 3 H K)
        return split_heads(qkv.unflatten(2, (-1, 3, self.head_size)))


class MLP(nn.Module):
    """The feed-forward network: down(act(up x)), or gated, down(act(gate x) * up x)."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        width, wide, fused = shape.hidden_size, shape.ffn_hidden_size, shape.fused_linear
        bias, self.is_gated = shape.bias == "all", shape.is_gated
        self.act = activation_of(shape)
        if self.is_gated:
            names = ("gate", "up")
            self.in_proj = Linears({name: Linear(width, wide, fused, bias) for name in names})
        else:
            self.up = Linear(width, wide, fused, bias)
        self.down = Linear(wide, width, fused, bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(*self.in_proj(x)) if self.is_gated else self.act(self.up(x)))


class Block(nn.Module):
    """One decoder layer: x + dropout(attn(norm1 x)), then x + dropout(mlp(norm2 x)).

    With `norm_placement` post, x + dropout(norm1(attn x)) and so on; with `parallel_residual` the
    feed-forward network reads the layer's input too.
    """

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.norm1 = norm_of(shape, shape.hidden_size)
        self.attn = Attention(shape)
        self.norm2 = norm_of(shape, shape.hidden_size)
        self.mlp = MLP(shape)
        self.dropout = shape.hidden_dropout_prob
        self.is_post = shape.norm_placement == "post"
        self.is_parallel = shape.parallel_residual

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        turns: Tensor | None = None,
        attend: Attend | None = None,
    ) -> Tensor:
        if self.is_post:
            x = x + self.drop(self.norm1(self.attn(x, mask, turns, attend)))
            return x + self.drop(self.norm2(self.mlp(x)))
        seen = x + self.drop(self.attn(self.norm1(x), mask, turns, attend))
        return seen + self.drop(self.mlp(self.norm2(x if self.is_parallel else seen)))

    def drop(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.dropout, self.training)


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
        self.scale = shape.embedding_scale
        self.dropout = shape.hidden_dropout_prob

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        x = self.word(tokens)  # (B, T, D)
        if self.scale != 1.0:
            x = x * self.scale
        if self.position is not None:
            x = x + self.position(positions)
        return F.dropout(x, self.dropout, self.training)


class Head(nn.Module):
    """The last step: logits, or the loss straight from the hidden states.

    The weight is given: that of the word embedding, or the head's own where it is not tied.
    """

    def __init__(self, shape: ModelShape, owns_weight: bool = False) -> None:
        super().__init__()
        self.chunk_tokens = shape.loss_chunk_tokens
        self.vocabulary = Vocabulary(shape.logit_softcap, shape.z_loss)
        self.scale = shape.output_scale
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
        if self.scale != 1.0:
            x = x * self.scale
        if labels is None:
            return self.vocabulary.cap(F.linear(x.to(weight.dtype), weight))  # (B, T, V)
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
        lambda shape: norm_of(shape, shape.hidden_size)
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
        # Of all positions, also where sequence parallelism leaves x with some of them.
        size = (x.shape[0], x.shape[1] if position_ids is None else position_ids.shape[-1])
        turns = None
        if self.shape.rotary_size > 0:
            if position_ids is None:
                position_ids = torch.arange(size[1], device=x.device)
            turns = rotation(self.shape, position_ids)
        windows = {number: self.shape.window_of(int(number)) for number in self.layers}
        kinds = {
            window: attention_mask(document_ids, window, size, x)
            for window in (set(windows.values()) if attends is None else ())
        }
        masks = {number: kinds.get(window) for number, window in windows.items()}
        for numbers in self.chunks:
            x = self.run_layers(numbers, x, masks, turns, seed if reseed else None, attends)
        return x

    def run_layers(
        self,
        numbers: Sequence[str],
        x: Tensor,
        masks: Mapping[str, Tensor | None],
        turns: Tensor | None,
        seed: int | None,
        attends: Mapping[str, Attend] | None,
    ) -> Tensor:
        """These layers, one after the other; `seed` where dropout is to be seeded."""
        for number in numbers:
            layer = self.layers[number]
            if seed is not None:
                seed_dropout(x.device, seed, number)
            given = (x, masks[number], turns)
            x = layer(*given) if attends is None else layer(*given, attends[number])
        return x
