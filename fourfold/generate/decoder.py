"""Decoding with a KV cache: the network as generation runs it, one row per sequence.

    read(prompts)      takes in whole prompts, a new row for each         -> logits (new rows, V)
    advance(tokens)    takes in one more token of every row               -> logits (rows, V)
    arrange(rows)      row i becomes a copy of row rows[i]; the rest are forgotten
    wipe(rows)         zeros in place of what these rows stored
    broadcast_choices  the choice of the first of the ranks that run the network together

Logits are those after the last token of a row, in float32. The cache is allocated once, by
`reserve`; a row's place in it is its number, so rows stay dense and attention reads it in place.
Prompts of different lengths are padded after their end, where a causal network does not look, and
rows of different lengths are masked, so a row is never affected by its neighbours.

Letters: N rows, T positions, H heads, G heads of keys and values, K head size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from fourfold.errors import UserError
from fourfold.generate.packed import FusedGPT, PackedLinear, is_known
from fourfold.generate.sharing import RowPart
from fourfold.generate.weights import Format, set_format
from fourfold.model.gpt import GPT, Attend
from fourfold.model.positions import document_mask


class SequenceModel(Protocol):
    """The network as sessions and beam search use it; `Decoder` is the one on a single device."""

    max_positions: int
    lengths: list[int]  # tokens taken in, of each row

    def reserve(self, rows: int, positions: int) -> None:
        """Allocate the cache for `rows` rows of `positions` tokens, and forget all rows."""

    def read(self, prompts: Sequence[Sequence[int]]) -> Tensor: ...

    def advance(self, tokens: Sequence[int]) -> Tensor: ...

    def arrange(self, rows: Sequence[int]) -> None: ...

    def wipe(self, rows: Sequence[int]) -> None: ...

    def broadcast_choices(self, choices: list[float]) -> list[float]:
        """The chosen tokens, the same on all ranks that run this network together."""
        ...


class Decoder:
    """A `GPT` with a KV cache. It takes over the model: `weights` changes it in place.

    Where the compiled kernels know the network it runs in one call of them, on a cache of its own
    layout; else layer by layer through torch.
    """

    fused: FusedGPT | None = None

    def __init__(self, model: GPT, weights: Format = "float32") -> None:
        self.model = model.eval().requires_grad_(False)
        self.head = set_format(model, weights)
        if isinstance(self.head, PackedLinear) and is_known(model):
            self.fused = FusedGPT(model, self.head)
        token = torch.zeros((1, 1), dtype=torch.long, device=next(model.norm.parameters()).device)
        # Keys and values have the type of what goes into the layers.
        self._begin([model], model.embeddings(token, token), model.shape.key_value_heads)

    def _begin(self, parts: Sequence[GPT], like: Tensor, heads: int) -> None:
        """Without rows yet; caches will be of `like`'s type and device, for `heads` heads of keys
        and values."""
        self.device = like.device
        self.max_positions = parts[0].shape.max_position_embeddings
        self.lengths: list[int] = []
        self._layers = [number for part in parts for number in part.layers]
        self._like, self._heads, self._shape = like, heads, parts[0].shape
        self._caches: dict[str, LayerCache] = {}
        self._rows = self._positions = 0

    def reserve(self, rows: int, positions: int) -> None:
        if positions > self.max_positions:
            raise UserError(
                f"{positions} tokens of prompt and continuation are more than the "
                f"{self.max_positions} positions of the model; shorten the prompt or lower "
                "max_dec_len"
            )
        self.lengths = []
        if rows <= self._rows and positions <= self._positions:
            return
        self._rows, self._positions = max(rows, self._rows), max(positions, self._positions)
        if self.fused is not None:
            self.fused.reserve(self._rows, self._positions)
            return
        size = (self._rows, self._heads, self._positions, self._shape.head_size)
        self._caches = {}
        for number in self._layers:
            # Zeros, because a masked place still counts, with weight zero, and must be a number.
            keys, values = self._like.new_zeros(size), self._like.new_zeros(size)
            window = self._shape.window_of(int(number))
            self._caches[number] = LayerCache(keys, values, window, self._shape.attention_scale)

    @torch.inference_mode()
    def read(self, prompts: Sequence[Sequence[int]]) -> Tensor:
        first, lengths = len(self.lengths), [len(prompt) for prompt in prompts]
        width = max(lengths)
        assert min(lengths) > 0 and width <= self._positions, (lengths, self._positions)
        assert first + len(prompts) <= self._rows, (first, len(prompts), self._rows)
        if self.fused is not None:
            self.lengths += lengths
            rows_of = enumerate(prompts, start=first)
            return self.fused.run(
                [(token, row, place) for row, one in rows_of for place, token in enumerate(one)],
                [end - 1 for end in accumulate(lengths)],
            )
        padded = [[*prompt, *[0] * (width - len(prompt))] for prompt in prompts]
        tokens = torch.tensor(padded, device=self.device)  # (N, T)
        rows = slice(first, first + len(prompts))
        positions = torch.arange(width, device=self.device)
        ends = torch.tensor(lengths, device=self.device) - 1
        padding = None if min(lengths) == width else positions > ends.unsqueeze(1)  # (N, T)
        windows = {cache.window for cache in self._caches.values()}
        masks = {window: window_mask(window, width, self._like) for window in windows}
        attends = {
            number: cache.reader(rows, padding, masks[cache.window])
            for number, cache in self._caches.items()
        }
        logits = self._run(tokens, positions, attends, ends)
        self.lengths += lengths
        return logits

    @torch.inference_mode()
    def advance(self, tokens: Sequence[int]) -> Tensor:
        assert len(tokens) == len(self.lengths), (len(tokens), len(self.lengths))
        assert max(self.lengths) < self._positions, (self.lengths, self._positions)
        if self.fused is not None:
            places = zip(tokens, range(len(tokens)), self.lengths)
            logits = self.fused.run(list(places), range(len(tokens)))
            self.lengths = [length + 1 for length in self.lengths]
            return logits
        place = Place(self.lengths, self._like)
        attends = {number: cache.writer(place) for number, cache in self._caches.items()}
        inputs = torch.tensor(tokens, device=self.device).unsqueeze(1)  # (N, 1)
        logits = self._run(inputs, place.positions, attends, torch.zeros_like(inputs[:, 0]))
        self.lengths = [length + 1 for length in self.lengths]
        return logits

    @torch.inference_mode()
    def arrange(self, rows: Sequence[int]) -> None:
        assert len(rows) <= self._rows, (len(rows), self._rows)
        moved = [(source, row) for row, source in enumerate(rows) if source != row]
        self.lengths = [self.lengths[row] for row in rows]
        if not moved:
            return
        width = max(self.lengths[row] for _, row in moved)
        if self.fused is not None:
            self.fused.copy(moved, width)
            return
        sources = torch.tensor([source for source, _ in moved], device=self.device)
        targets = torch.tensor([row for _, row in moved], device=self.device)
        for cache in self._caches.values():
            for stored in (cache.keys, cache.values):
                stored[targets, :, :width] = stored[sources, :, :width]

    @torch.inference_mode()
    def wipe(self, rows: Sequence[int]) -> None:
        """For rows that are not finite: the next rows in their place would inherit that."""
        if self.fused is not None:
            self.fused.wipe(rows)
        for cache in self._caches.values():
            cache.keys[list(rows)] = cache.values[list(rows)] = 0.0

    def broadcast_choices(self, choices: list[float]) -> list[float]:
        return choices

    # What a session uses where the network is fused (fourfold/generate/sharing.py)

    def take_in(self, parts: Sequence[RowPart]) -> Tensor:
        assert self.fused is not None
        return self.fused.take_in(parts)

    def copy_prefix(self, source: int, target: int, length: int) -> None:
        assert self.fused is not None
        self.fused.copy([(source, target)], length)

    def _run(
        self, tokens: Tensor, positions: Tensor, attends: Mapping[str, Attend], ends: Tensor
    ) -> Tensor:
        """Logits (N, V) of position `ends` of each row of tokens (N, T)."""
        x = self.model.hidden(tokens, positions, None, 0, attends)  # (N, T, D)
        return self.logits(x[torch.arange(x.shape[0], device=x.device), ends])

    def logits(self, x: Tensor) -> Tensor:
        """The last step: hidden states (N, D) -> logits (N, V)."""
        head, x = self.model.head, self.model.norm(x)
        if head.scale != 1.0:
            x = x * head.scale
        return head.vocabulary.cap(self.head(x).float())


def window_mask(window: int | None, length: int, like: Tensor) -> Tensor | None:
    """Of prompts, which begin at the first position; None where no window is shorter than them."""
    if window is None or window >= length:
        return None
    one_document = torch.zeros(1, length, dtype=torch.long, device=like.device)
    return document_mask(one_document, like.dtype, window)


class Place:
    """Where the next token of each row goes, and which positions it may attend to."""

    def __init__(self, lengths: Sequence[int], like: Tensor) -> None:
        """Masks are of the type of `like`: kernels on GPUs want that of the queries."""
        self.positions = torch.tensor(lengths, device=like.device).unsqueeze(1)  # (N, 1)
        self.shortest, self.longest = min(lengths), max(lengths)
        # The one position, where all rows are of one length.
        self.at = self.longest if self.shortest == self.longest else None
        self._like = like
        self._masks: dict[int | None, Tensor | None] = {}

    def seen(self, window: int | None) -> slice:
        """The positions any row may attend to."""
        first = 0 if window is None else max(self.shortest + 1 - window, 0)
        return slice(first, self.longest + 1)

    def mask(self, window: int | None) -> Tensor | None:
        """(N, 1, 1, T) over those positions, where rows are of different lengths."""
        if self.at is None and window not in self._masks:
            seen = self.seen(window)
            columns = torch.arange(seen.start, seen.stop, device=self._like.device)
            hidden = columns > self.positions
            if window is not None:
                hidden |= columns <= self.positions - window
            mask = self._like.new_zeros(hidden.shape).masked_fill_(hidden, -torch.inf)
            self._masks[window] = mask[:, None, None]
        return self._masks.get(window)


class LayerCache:
    """Keys and values of one layer, each (rows, G, positions, K), and how they are attended to:
    by how many of the last tokens, and with what scores are multiplied by."""

    def __init__(
        self, keys: Tensor, values: Tensor, window: int | None, scale: float | None
    ) -> None:
        self.keys, self.values = keys, values
        self.window, self.scale = window, scale

    def reader(self, rows: slice, padding: Tensor | None, mask: Tensor | None) -> Attend:
        """Attention of prompts to themselves; their keys and values go to the start of `rows`.

        Positions in `padding` (N, T) become zeros: nobody checks that they are finite. `mask` is
        the window's, where it is shorter than the prompts.
        """

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            if padding is not None:
                k, v = (given.masked_fill(padding[:, None, :, None], 0) for given in (k, v))
            self.keys[rows, :, : q.shape[2]] = k
            self.values[rows, :, : q.shape[2]] = v
            return self._attend(q, k, v, mask, is_causal=mask is None)

        return attend

    def writer(self, place: Place) -> Attend:
        """Attention of one token of each row to the tokens of the row, itself included."""

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            rows = q.shape[0]
            if place.at is not None:
                self.keys[:rows, :, place.at] = k[:, :, 0]
                self.values[:rows, :, place.at] = v[:, :, 0]
            else:
                each = torch.arange(rows, device=q.device)
                self.keys[each, :, place.positions[:, 0]] = k[:, :, 0]
                self.values[each, :, place.positions[:, 0]] = v[:, :, 0]
            seen = place.seen(self.window)
            keys, values = self.keys[:rows, :, seen], self.values[:rows, :, seen]
            return self._attend(q, keys, values, place.mask(self.window))

        return attend

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool = False
    ) -> Tensor:
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=is_causal, scale=self.scale,
            enable_gqa=k.shape[1] != q.shape[1],
        )  # fmt: skip
