"""Networks to plan, by their sizes."""

from __future__ import annotations

from fourfold.cost.workload import Network
from fourfold.model import ModelShape


def gpt(layers: int, hidden: int, heads: int, ffn: int, vocab: int, seq: int) -> Network:
    """A GPT with dropout and as many positions as a sequence has tokens."""
    return Network.of(ModelShape(vocab, hidden, layers, heads, ffn, seq, 0.1, 0.1), seq)
