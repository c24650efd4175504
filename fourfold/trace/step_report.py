"""Whose loss a step's was: the samples and documents of its batch, each with its share.

Each rank on which the network ends sums up its own samples, and rank 0 is told the sums: what
travels is a few numbers for each document. The loss of a token belongs to the document it is in.
Documents are ordered by their *excess*: the sum over their tokens of loss minus what is usual, the
median over the documents of the batch of their mean loss (or the caller's figure). A long ordinary
document has a large share of the loss and no excess; one that the model finds absurd has both.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from fourfold.data import Batch
from fourfold.data.mixture import Mixture
from fourfold.data.provenance import DocumentText, Piece, pieces_of, printable
from fourfold.data.samples import Samples
from fourfold.parallel import Runner
from fourfold.parallel.runner import sum_of_squares
from fourfold.terminal import table_lines
from fourfold.trace.token_losses import TokenLosses

WORST_TOKENS = 3
TOKENS_AROUND = 8
MOST_SHOWN = 10
TEXT_COLUMNS = 72


@dataclass(frozen=True)
class DocumentLoss:
    """The part of a document in one sample, and its tokens' loss."""

    sample: int
    file: str
    document: int
    tokens: tuple[int, int]  # of the document, first and after the last
    counted: int  # tokens that count for the loss
    loss: float  # their sum
    share: float  # of the loss of the batch
    excess: float  # the sum of loss above what is usual
    worst: list[dict[str, Any]] = field(default_factory=list)  # tokens, their loss, text around

    @property
    def mean(self) -> float:
        return self.loss / self.counted if self.counted else 0.0


@dataclass(frozen=True)
class SampleLoss:
    sample: int
    counted: int
    loss: float
    share: float

    @property
    def mean(self) -> float:
        return self.loss / self.counted if self.counted else 0.0


@dataclass(frozen=True)
class StepReport:
    """What a step's loss was made of; the same dictionary in `replay`, `spikes/` and JSON."""

    step: int
    loss: float
    grad_norm: float | None
    usual_loss: float  # of a token
    samples: list[SampleLoss]  # largest mean first
    documents: list[DocumentLoss]  # largest excess first
    gradient_norms: dict[str, float] | None = None  # by layer
    logits: tuple[float, float] | None = None  # smallest and largest
    activations: dict[str, float] | None = None  # largest magnitude of each layer's output

    def to_dict(self) -> dict[str, Any]:
        told = asdict(self)
        for name in ("samples", "documents"):
            for entry, held in zip(told[name], getattr(self, name)):
                entry["mean"] = held.mean
        return told

    @classmethod
    def make(
        cls,
        losses: TokenLosses,
        batch: Batch,
        samples: Samples | Mixture,
        decoder: DocumentText,
        *,
        step: int,
        loss: float,
        grad_norm: float | None,
        usual: float | None = None,
        **more: Any,
    ) -> StepReport:
        """Of a step that `losses` has watched, for all ranks; a collective."""
        mesh = losses.runner.mesh
        own = _own_sums(losses.table(step, samples.seq_len), batch, samples, step, decoder)
        if mesh.coordinates["mp"] > 0:
            own = []  # its neighbours know the same
        rows = [row for text in mesh.gather(json.dumps(own)) for row in json.loads(text)]
        rows.sort(key=lambda row: (row["sample"], row["at"]))
        total = sum(row["loss"] for row in rows)
        means = [row["loss"] / row["counted"] for row in rows if row["counted"]]
        usual_loss = usual if usual is not None else statistics.median(means or [0.0])
        documents = [
            DocumentLoss(
                sample=row["sample"],
                file=row["file"],
                document=row["document"],
                tokens=(row["tokens"][0], row["tokens"][1]),
                counted=row["counted"],
                loss=row["loss"],
                share=_share(row["loss"], total),
                excess=row["loss"] - row["counted"] * usual_loss,
                worst=row["worst"],
            )
            for row in rows
        ]
        documents.sort(key=lambda one: -_sortable(one.excess))
        by_sample: dict[int, list[DocumentLoss]] = {}
        for one in documents:
            by_sample.setdefault(one.sample, []).append(one)
        whole = [
            SampleLoss(
                sample,
                counted=sum(one.counted for one in held),
                loss=math.fsum(one.loss for one in held),
                share=math.fsum(one.share for one in held),
            )
            for sample, held in by_sample.items()
        ]
        whole.sort(key=lambda one: -_sortable(one.mean))
        return cls(step, loss, grad_norm, usual_loss, whole, documents, **more)


def _sortable(value: float) -> float:
    return math.inf if math.isnan(value) else value


def _share(loss: float, total: float) -> float:
    return loss / total if math.isfinite(total) and total > 0 else 0.0


def _own_sums(
    table: Tensor | None,
    batch: Batch,
    samples: Samples | Mixture,
    step: int,
    decoder: DocumentText,
) -> list[dict[str, Any]]:
    """A row for each piece of a document in this rank's samples."""
    if table is None:
        return []
    assert len(table) == len(batch.sample_ids), (step, len(table))
    rows = []
    for row, sample in enumerate(batch.sample_ids.tolist()):
        counts = batch.loss_mask[row].double().cpu()
        for piece in pieces_of(samples, sample):
            where = piece.positions
            losses, mask = table[row, where], counts[where]
            weighted = losses * mask
            rows.append(
                {
                    "sample": int(sample),
                    **piece.to_dict(),
                    "counted": int(mask.sum()),
                    "loss": float(weighted.sum()),
                    "worst": _worst(piece, weighted, decoder),
                }
            )
    return rows


def _worst(piece: Piece, losses: Tensor, decoder: DocumentText) -> list[dict[str, Any]]:
    """The tokens with the largest losses, with the text around them."""
    if not losses.numel():
        return []
    found = losses.topk(min(WORST_TOKENS, losses.numel()))
    worst = []
    # The first loss is of the piece's first token, but for a sample's, which nothing predicts.
    skipped = 1 if piece.first == 0 else 0
    for loss, place in zip(found.values.tolist(), found.indices.tolist()):
        token = piece.start + place + skipped
        around = piece.ids(token - TOKENS_AROUND, token + TOKENS_AROUND)
        worst.append(
            {
                "token": token,
                "id": int(piece.ids(token, token + 1)[0]),
                "loss": loss,
                "text": decoder.line(piece.dataset, around),
            }
        )
    return worst


# -- the gradient ---------------------------------------------------------------------------------


@torch.no_grad()
def gradient_norms(runner: Runner, loss_scale: float = 1.0) -> dict[str, float]:
    """The norm of every parameter's gradient, by its name in the whole network, before clipping;
    between `Runner.run` and the update. A collective."""
    names = [name for name, _ in runner.table]
    squares = dict.fromkeys(names, 0.0)
    for shard in runner.shards.values():
        if shard.owns_norm and shard.gradient is not None:
            squares[shard.name] += float(sum_of_squares([shard.gradient]))
    summed = runner.mesh.all_reduce(*(squares[name] for name in names))
    return {name: math.sqrt(value) / loss_scale for name, value in zip(names, summed)}


def by_layer(norms: Mapping[str, float]) -> dict[str, float]:
    """The norms of parameters as those of layers: `layers.3`, `embeddings`, `norm`, `head`."""
    squares: dict[str, float] = {}
    for name, norm in norms.items():
        words = name.split(".")
        group = ".".join(words[:2]) if words[0] == "layers" else words[0]
        squares[group] = squares.get(group, 0.0) + norm * norm
    return {group: math.sqrt(square) for group, square in squares.items()}


# -- for people -----------------------------------------------------------------------------------


def report_lines(report: Mapping[str, Any], most: int = MOST_SHOWN) -> Iterator[str]:
    """What `StepReport.to_dict` says, for a terminal."""
    norm = report["grad_norm"]
    yield (
        f"step {report['step']}: loss {report['loss']:.6f}"
        + (f", gradient norm {norm:.6f}" if norm is not None else "")
        + f"; a token's loss is usually {report['usual_loss']:.3f} here"
    )
    documents: Sequence[Mapping[str, Any]] = report["documents"]
    yield ""
    yield f"documents by excess loss ({min(most, len(documents))} of {len(documents)})"
    rows: list[tuple[str, ...]] = [
        ("", "excess", "mean", "tokens", "of the loss", "sample", "document")
    ]
    for number, one in enumerate(documents[:most], start=1):
        first, stop = one["tokens"]
        rows.append(
            (
                str(number),
                f"{one['excess']:.2f}",
                f"{one['mean']:.3f}",
                str(one["counted"]),
                f"{one['share']:.2%}",
                str(one["sample"]),
                f"{one['document']} of {one['file']}, tokens {first} to {stop - 1}",
            )
        )
    yield from table_lines(rows, ">>>>>><")
    for number, one in enumerate(documents[: min(most, 3)], start=1):
        for token in one["worst"]:
            text = printable(token["text"])[:TEXT_COLUMNS]
            yield f"  {number}: token {token['token']}, loss {token['loss']:.2f}: {text}"
    yield ""
    samples: Sequence[Mapping[str, Any]] = report["samples"]
    yield f"samples by mean loss ({min(most, len(samples))} of {len(samples)})"
    rows = [("sample", "mean", "tokens", "of the loss")]
    for one in samples[:most]:
        cells = (f"{one['mean']:.4f}", str(one["counted"]), f"{one['share']:.2%}")
        rows.append((str(one["sample"]), *cells))
    yield from table_lines(rows, ">")
    yield from _inside_lines(report)


def _inside_lines(report: Mapping[str, Any]) -> Iterator[str]:
    """Gradients, logits and activations, where they were looked at."""
    norms, activations = report.get("gradient_norms"), report.get("activations") or {}
    if report.get("logits") is not None:
        least, largest = report["logits"]
        yield ""
        yield f"logits from {least:.4g} to {largest:.4g}"
    if norms:
        yield ""
        rows: list[tuple[str, ...]] = [("layer", "gradient norm", "largest activation")]
        for layer, norm in norms.items():
            largest = f"{activations[layer]:.4g}" if layer in activations else ""
            rows.append((layer, f"{norm:.6g}", largest))
        yield from table_lines(rows, "<>>")
