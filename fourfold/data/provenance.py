"""Where the samples of a step come from: documents, their files, offsets and text.

A sample is seq_len + 1 tokens, laid together from parts of documents (`Piece`). The loss at
position t of a sample is that of its token t + 1, so it belongs to the piece that token is in.

`StepSamples` answers for one training step by the loader's own order; no model is needed for it.
`DocumentText` turns ids into one printable line, whichever tokenizer made the data, or into the ids
themselves where none is at hand.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fourfold.data.datasets import TokenDataset
from fourfold.data.loader import Loader
from fourfold.data.mixture import Mixture
from fourfold.data.samples import Samples
from fourfold.data.tokenizer_check import find_tokenizer
from fourfold.errors import UserError
from fourfold.tokenizer import Tokenizer

SHOWN_TOKENS = 24
TEXT_COLUMNS = 70


@dataclass(frozen=True)
class Piece:
    """A part of a document in a sample."""

    dataset: TokenDataset
    document: int  # its number in the dataset
    start: int  # which of the document's tokens
    stop: int
    first: int  # where it begins in the sample
    document_tokens: int  # all of the document's

    @property
    def file(self) -> Path:
        return self.dataset.path

    @property
    def positions(self) -> slice:
        """The positions of the sample whose loss is of this piece's tokens."""
        return slice(max(self.first - 1, 0), self.first + self.stop - self.start - 1)

    def ids(self, start: int | None = None, stop: int | None = None) -> np.ndarray:
        """Tokens of the document from `start` to `stop`, by default those of the piece."""
        first = self.start if start is None else max(start, 0)
        last = self.stop if stop is None else min(stop, self.document_tokens)
        return self.dataset.tokens(self.document, first, max(first, last))

    def to_dict(self) -> dict[str, Any]:
        return {
            "file": str(self.file),
            "document": self.document,
            "tokens": [self.start, self.stop],
            "document_tokens": self.document_tokens,
            "at": self.first,
        }


def pieces_of(samples: Samples | Mixture, sample: int) -> list[Piece]:
    """What a sample is made of, in order."""
    pieces, first = [], 0
    for dataset, document, start, stop in samples.places_of(sample):
        size = int(dataset.sizes[document])
        pieces.append(Piece(dataset, document, start, stop, first, size))
        first += stop - start
    return pieces


class DocumentText:
    """Text of token ids, by the tokenizer given or the one each dataset was made with."""

    def __init__(self, tokenizer: Tokenizer | None = None) -> None:
        self._given = tokenizer
        self._found: dict[Path, Tokenizer | None] = {}

    def of(self, dataset: TokenDataset) -> Tokenizer | None:
        if self._given is not None:
            return self._given
        if dataset.path not in self._found:
            self._found[dataset.path] = find_tokenizer(dataset)[0]
        return self._found[dataset.path]

    def text(self, dataset: TokenDataset, ids: Sequence[int] | np.ndarray) -> str | None:
        """None where no tokenizer is known, or it cannot decode these."""
        tokenizer = self.of(dataset)
        if tokenizer is None:
            return None
        try:
            return tokenizer.decode([int(one) for one in ids])
        except UserError:
            return None

    def line(self, dataset: TokenDataset, ids: Sequence[int] | np.ndarray) -> str:
        """One line for a terminal: what could steer it is escaped; the ids without a tokenizer."""
        text = self.text(dataset, ids)
        if text is None:
            return "ids " + " ".join(str(int(one)) for one in ids)
        return printable(text)


def printable(text: str) -> str:
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


@dataclass(frozen=True)
class Share:
    """Which rank a sample of a step goes to."""

    data_rank: int
    micro_batch: int  # among this rank's


class StepSamples:
    """The samples of training step `step`, counted from 1 as in the log."""

    def __init__(self, loader: Loader, step: int, data_ranks: int, micro_batch_size: int) -> None:
        self.samples = loader.samples
        self.step = step
        self.ids: list[int] = [int(one) for one in loader.sample_ids(step - 1)]
        self._per_rank = len(self.ids) // data_ranks
        self._micro_batch_size = micro_batch_size

    def share(self, place: int) -> Share:
        """Of the sample at that place of the global batch."""
        rank, row = divmod(place, self._per_rank)
        return Share(rank, row // self._micro_batch_size)

    def source(self, sample: int) -> str | None:
        """The source of a mixture it is from."""
        if isinstance(self.samples, Mixture):
            return self.samples.sources[self.samples.locate(sample)[0]].name
        return None

    def to_dict(self, decoder: DocumentText, *, detail: bool) -> dict[str, Any]:
        """Plain values, ready for JSON; with `detail` who reads what."""
        return {
            "step": self.step,
            "global_batch_size": len(self.ids),
            "samples": [
                self._sample(place, sample, decoder, detail=detail)
                for place, sample in enumerate(self.ids)
            ],
        }

    def _sample(
        self, place: int, sample: int, decoder: DocumentText, *, detail: bool
    ) -> dict[str, Any]:
        told: dict[str, Any] = {"sample": sample}
        if detail:
            told |= vars(self.share(place))
        if (source := self.source(sample)) is not None:
            told["source"] = source
        told["documents"] = [
            piece.to_dict()
            | {
                "ids": (
                    ids := piece.ids(stop=min(piece.start + SHOWN_TOKENS, piece.stop))
                ).tolist(),
                "text": decoder.text(piece.dataset, ids),
            }
            for piece in pieces_of(self.samples, sample)
        ]
        return told


def step_lines(told: Mapping[str, Any]) -> Iterator[str]:
    """What `StepSamples.to_dict` says, for a terminal."""
    yield f"step {told['step']}: {told['global_batch_size']} samples"
    for sample in told["samples"]:
        where = ""
        if "data_rank" in sample:
            where = f", data rank {sample['data_rank']}, micro-batch {sample['micro_batch']}"
        source = f", from {sample['source']}" if "source" in sample else ""
        yield f"sample {sample['sample']}{where}{source}"
        for piece in sample["documents"]:
            first, stop = piece["tokens"]
            yield (
                f"  at {piece['at']:>5}  {piece['file']}, document {piece['document']}, tokens "
                f"{first} to {stop - 1} of {piece['document_tokens']}"
            )
            text = piece["text"]
            shown = "ids " + " ".join(map(str, piece["ids"])) if text is None else printable(text)
            more = " ..." if len(shown) > TEXT_COLUMNS or stop - first > len(piece["ids"]) else ""
            yield f"            {shown[:TEXT_COLUMNS]}{more}"
