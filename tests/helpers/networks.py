"""Stand-ins for a network: any function of whole sequences, without a cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fourfold.generate import Decoder
from fourfold.model import GPT, ModelShape, initialize
from fourfold.tokenizer import Tokenizer

VOCAB, EOS = 12, 11


class Recomputing:
    """A network that remembers tokens and runs `model` (tokens (1, T) -> logits (1, T, V)) on the
    whole of each row, every time: what a cache must be indistinguishable from."""

    def __init__(self, model: Callable[[Tensor], Tensor], max_positions: int = 64) -> None:
        self.model = model
        self.max_positions = max_positions
        self.rows: list[list[int]] = []
        self.windows: list[list[int]] = []

    @property
    def lengths(self) -> list[int]:
        return [len(row) for row in self.rows]

    def reserve(self, rows: int, positions: int) -> None:
        assert positions <= self.max_positions
        self.rows = []

    def read(self, prompts: Sequence[Sequence[int]]) -> Tensor:
        self.rows += [list(prompt) for prompt in prompts]
        return self._run(self.rows[len(self.rows) - len(prompts) :])

    def advance(self, tokens: Sequence[int]) -> Tensor:
        for row, token in zip(self.rows, tokens, strict=True):
            row.append(token)
        return self._run(self.rows)

    def arrange(self, rows: Sequence[int]) -> None:
        self.rows = [list(self.rows[row]) for row in rows]

    def broadcast_choices(self, choices: list[float]) -> list[float]:
        return choices

    def wipe(self, rows: Sequence[int]) -> None:
        """Nothing is stored."""

    def _run(self, rows: list[list[int]]) -> Tensor:
        self.windows += [list(row) for row in rows]
        with torch.no_grad():
            return torch.stack([self.model(torch.tensor([row]))[0, -1] for row in rows])


def varied(eos_logit: float = -3.0) -> Callable[[Tensor], Tensor]:
    """Logits that depend on the whole sequence."""
    table = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(3))
    table[:, EOS] = eos_logit

    def model(tokens: Tensor) -> Tensor:
        count = torch.arange(1, tokens.shape[1] + 1).view(1, -1, 1)
        return table[tokens].cumsum(1) / count + table[tokens]  # (1, T, V)

    return model


def successor(tokens: Tensor) -> Tensor:
    """The token after n is n + 1, nearly certainly."""
    return 20.0 * torch.nn.functional.one_hot((tokens + 1) % VOCAB, VOCAB).float()


SHAPE = ModelShape(
    vocab_size=160,
    hidden_size=48,
    num_layers=3,
    num_attention_heads=4,
    ffn_hidden_size=96,
    max_position_embeddings=64,
    initializer_range=0.3,  # large logits that depend on everything before
)


def small_model() -> GPT:
    model = GPT(SHAPE)
    initialize(model, seed=5)
    generator = torch.Generator().manual_seed(6)
    for parameter in model.parameters():
        parameter.data += 0.05 * torch.randn(parameter.shape, generator=generator)
    return model.eval()


def small_decoder() -> Decoder:
    return Decoder(small_model())


def spelling(
    tokenizer: Tokenizer, prompt: str, text: str, width: int
) -> Callable[[Tensor], Tensor]:
    """A model that writes `text` after `prompt` and ends; it would rather use its padded ids."""
    script = [*tokenizer.encode(prompt), *tokenizer.encode(text), tokenizer.eos_id]

    def model(tokens: Tensor) -> Tensor:
        logits = torch.zeros(*tokens.shape, width)
        logits[:, -1, script[min(tokens.shape[1], len(script) - 1)]] = 50.0
        logits[..., tokenizer.vocab_size :] = 99.0
        return logits

    return model
