"""Each recompute granularity keeps less in memory than the one before it.

Peaks are exact sums over live tensors, as torch's own tracker sees them; resident memory would
add the allocator's habits to every figure.
"""

from __future__ import annotations

import pytest
import torch
from torch.distributed._tools.mem_tracker import MemTracker

from fourfold.model import GPT, ModelShape, initialize
from fourfold.parallel.apply import apply_recompute

MODES = ("full", "full_attn", "core_attn", None)


def peak_bytes(granularity: str | None, dropout: float) -> int:
    shape = ModelShape(
        vocab_size=256,
        hidden_size=64,
        num_layers=8,
        num_attention_heads=4,
        ffn_hidden_size=256,
        max_position_embeddings=128,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
    )
    model = GPT(shape)
    initialize(model, seed=0)
    if granularity:
        apply_recompute(model, granularity)
    tokens = torch.zeros(8, 128, dtype=torch.long)
    tracker = MemTracker()
    tracker.track_external(model)
    with tracker:
        model(tokens, tokens).backward()
    return int(tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"])


def test_peak_memory_follows_the_granularity() -> None:
    full, full_attn, core_attn, off = (peak_bytes(mode, dropout=0.1) for mode in MODES)
    print(f"full {full:,}, full_attn {full_attn:,}, core_attn {core_attn:,}, off {off:,} bytes")
    assert full < full_attn < core_attn < off


def test_without_dropout_core_attn_has_little_left_to_save() -> None:
    """torch's fused attention keeps no probabilities by itself, only a sum per row."""
    full, full_attn, core_attn, off = (peak_bytes(mode, dropout=0.0) for mode in MODES)
    print(f"full {full:,}, full_attn {full_attn:,}, core_attn {core_attn:,}, off {off:,} bytes")
    assert full < full_attn < core_attn <= off
    assert core_attn == pytest.approx(off, rel=0.02)
