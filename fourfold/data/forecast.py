"""What a mixture will really serve: samples, tokens and epochs of each source.

Weights are shares of samples, whatever the sources hold, so a small source with a large share
repeats. This counts by the rule that serves them, without building any sample index.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from fourfold.data.blend import choose_sources, normalised
from fourfold.data.mixture import Share
from fourfold.data.serving import Part


def forecast(part: Part) -> list[Share]:
    """A share for each source of a part; without weights all datasets are one source."""
    streams = [part.serving.stream(source.datasets) for source in part.sources]
    holding = [pair for pair in zip(part.sources, streams) if pair[1].tokens_per_epoch > 0]
    if not holding:
        return []
    weights = normalised([source.weight for source, _ in holding])
    weights = normalised(weights.tolist())
    counts = np.bincount(choose_sources(weights, part.wanted), minlength=len(holding))
    return [
        Share(source.name, weight, count, part.serving.seq_len, stream.tokens_per_epoch)
        for (source, stream), weight, count in zip(holding, weights.tolist(), counts.tolist())
    ]


def forecast_lines(name: str, part: Part) -> Iterator[str]:
    """A small table for people, and a warning for every source that repeats."""
    shares = forecast(part)
    if not shares:
        yield f"{name}: no tokens"
        return
    total = sum(share.tokens for share in shares)
    yield f"{name}: {part.wanted:,} samples of {part.serving.seq_len:,} tokens = {total:,} tokens"
    head = ("weight", "samples", "tokens", "of", "epochs", "source")
    rows = [
        (
            f"{share.weight:.4f}",
            f"{share.samples:,}",
            f"{share.tokens:,}",
            f"{share.tokens_per_epoch:,}",
            f"{share.epochs:.2f}",
            share.name,
        )
        for share in shares
    ]
    widths = [max(map(len, column)) for column in zip(head, *rows)]
    for row in (head, *rows):
        cells = [cell.rjust(width) for cell, width in zip(row[:-1], widths)]
        yield "  " + "  ".join([*cells, row[-1]])
    for source in part.sources:
        if source.name not in {share.name for share in shares}:
            yield f"  warning: {source.name} has no tokens in the {name} part; the others share it"
    for share in shares:
        if share.epochs > 1:
            fits = int(share.tokens_per_epoch // share.seq_len / max(share.weight, 1e-300))
            yield (
                f"  warning: {share.name} is read {share.epochs:.2f} times over; a mixture of at "
                f"most {fits:,} samples, or a smaller weight, would not repeat it"
            )
