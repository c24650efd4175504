"""The data loader: a rank's slice of global batch `step`, as a pure function of the step.

Batch k is samples [k*G, (k+1)*G) for global batch size G, or the k-th stretch of a batch that
grows (`BatchSchedule`); rank r of R takes the r-th contiguous slice of G/R. So the global batch
does not depend on the number of ranks, and resuming needs the step alone. A batch beyond the last
sample is an error, never a silent second pass: samples are opened for the length of the run. Where
some were left out, as many are missing at its end; then those from the beginning are read again.

A rank reads its own samples only. How many tokens of the others' count comes from an index
(`fourfold.data.index`).

A sample is a stretch of tokens that may hold pieces of several documents. Inside it a document
ends with its end-of-text token, and the token after that begins the next.

Letters: G global batch, B this rank's part of it, T sequence length.
"""

from __future__ import annotations

import os
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from fourfold.config.batch_schedule import BatchSchedule
from fourfold.data.mixture import Mixture
from fourfold.data.samples import Samples
from fourfold.errors import DataError

if TYPE_CHECKING:
    import torch

# Samples of a batch whose tokens are fetched at the same time.
REMOTE_READS = 16


@dataclass(frozen=True)
class Batch:
    """One rank's part of a global batch. The tensors belong to the caller."""

    tokens: torch.Tensor  # (B, T) int64
    labels: torch.Tensor  # (B, T) int64
    loss_mask: torch.Tensor  # (B, T) float32
    position_ids: torch.Tensor  # (B, T) int64
    sample_ids: np.ndarray  # (B,) int64, positions in the samples
    global_valid_tokens: float  # ones in the masks of the whole global batch
    document_ids: torch.Tensor | None = None  # (B, T) int32; None: attention crosses documents


class Loader:
    """Serves batches in any order; the next `prefetch` batches are read ahead in the background."""

    def __init__(
        self,
        samples: Samples | Mixture,
        global_batch_size: int | BatchSchedule,
        eos_token_id: int | None = None,
        eod_mask_loss: bool = True,
        reset_position_ids: bool = False,
        reset_attention_mask: bool = False,
        rank: int = 0,
        size: int = 1,
        prefetch: int = 2,
        vocab_size: int | None = None,
        pin_memory: bool = False,
    ) -> None:
        """With `pin_memory` a GPU copies the batches while the host goes on."""
        batch_schedule = (
            BatchSchedule(global_batch_size)
            if isinstance(global_batch_size, int)
            else global_batch_size
        )
        for batch in batch_schedule.batches:
            if batch < 1 or batch % size != 0:
                raise DataError(
                    f"global_batch_size={batch} cannot be divided over {size} data ranks; "
                    f"choose a multiple of {size}"
                )
        if eos_token_id is None and (reset_position_ids or reset_attention_mask):
            asked = "reset_position_ids" if reset_position_ids else "reset_attention_mask"
            raise DataError(
                f"Data.dataset.{asked} needs the end-of-text token to tell where documents of "
                f"{samples.name} end, and its id is not known; set Data.dataset.eos_token_id to "
                f"the id the data was prepared with, or leave {asked} off"
            )
        assert 0 <= rank < size and prefetch >= 0, (rank, size, prefetch)
        self.samples = samples
        self.batch_schedule = batch_schedule
        self._eos_token_id = eos_token_id
        self._masked_token = eos_token_id if eod_mask_loss else None
        self._reset_position_ids = reset_position_ids
        self._reset_attention_mask = reset_attention_mask
        self._rank = rank
        self._size = size
        self._prefetch = prefetch
        self._vocab_size = vocab_size
        self._pin_memory = pin_memory
        if self._masked_token is not None and size > 1:
            samples.index_ends(self._masked_token)
        self._pending: dict[int, Future[Batch]] = {}
        self._worker: ThreadPoolExecutor | None = None
        self._worker_process = 0

    @property
    def num_batches(self) -> int:
        """How many whole global batches the samples hold."""
        return self.batch_schedule.steps_within(len(self.samples))

    def batch(self, step: int) -> Batch:
        """This rank's slice of global batch `step`, counted from 0."""
        self._check_step(step)
        self._forget_if_forked()
        future = self._pending.pop(step, None)
        self._schedule(range(step + 1, min(step + 1 + self._prefetch, self.num_batches)))
        return self._make(step) if future is None else future.result()

    def sample_ids(self, step: int) -> np.ndarray:
        """The numbers of the samples of global batch `step`."""
        ids = np.asarray(self.batch_schedule.samples_of(step))
        return ids % len(self.samples) if self.batch_schedule.left_out else ids

    def close(self) -> None:
        """Stop the background thread. The loader may still be used and starts another."""
        if self._worker is not None and self._worker_process == os.getpid():
            self._worker.shutdown(wait=True, cancel_futures=True)
        self._worker = None
        self._pending.clear()

    def _check_step(self, step: int) -> None:
        if 0 <= step < self.num_batches:
            return
        if len(self.samples) == 0:
            raise DataError(
                f"{self.samples.name}: holds no samples, so it has no batch {step}; give it a "
                "share in Data.dataset.split, or more documents"
            )
        raise DataError(
            f"{self.samples.name}: batch {step} does not exist; {len(self.samples)} samples give "
            f"{self.num_batches} batches of {self.batch_schedule.batch} "
            f"(0 to {self.num_batches - 1})"
        )

    def _forget_if_forked(self) -> None:
        """A forked process has its parent's futures but not the thread that would finish them."""
        if self._worker_process != os.getpid():
            self._worker = None
            self._pending = {}

    def _schedule(self, steps: range) -> None:
        for step in [step for step in self._pending if step not in steps]:
            self._pending.pop(step).cancel()
        for step in steps:
            if step not in self._pending:
                if self._worker is None:
                    self._worker = ThreadPoolExecutor(1, thread_name_prefix="fourfold-data")
                    self._worker_process = os.getpid()
                self._pending[step] = self._worker.submit(self._make, step)

    def _make(self, step: int) -> Batch:
        # Preparing and inspecting data import this package too, and should not wait for torch.
        import torch

        samples, length = self.samples, self.samples.seq_len
        global_ids = self.sample_ids(step)
        local_batch_size = len(global_ids) // self._size
        first = self._rank * local_batch_size
        local_ids = global_ids[first : first + local_batch_size]
        rows = np.empty((len(local_ids), length + 1), np.int64)  # (B, T+1)
        if samples.is_remote:
            # A store answers late, but many at once.
            with ThreadPoolExecutor(REMOTE_READS, "fourfold-remote") as readers:
                list(readers.map(samples.read, map(int, local_ids), rows))
        else:
            for row, sample in zip(rows, local_ids):
                samples.read(int(sample), row)
        self._check_vocabulary(rows, local_ids)
        tokens, labels = rows[:, :-1].copy(), rows[:, 1:].copy()  # (B, T) each
        ends = tokens == self._eos_token_id  # (B, T), nowhere if that is not known
        loss_mask = np.ones(tokens.shape, np.float32)
        valid = len(global_ids) * length
        if self._masked_token is not None:
            loss_mask[ends] = 0.0
            others = np.concatenate([global_ids[:first], global_ids[first + len(local_ids) :]])
            masked = int(np.count_nonzero(ends))
            self._check_count(local_ids, masked)
            valid -= masked + samples.count_all(others, self._masked_token)
        positions, documents = torch.arange(length).repeat(len(local_ids), 1), None  # (B, T)
        if self._reset_position_ids:
            positions = torch.from_numpy(positions_in_documents(ends))
        if self._reset_attention_mask:
            documents = torch.from_numpy(document_ids(ends))
        return Batch(
            tokens=self._pinned(torch.from_numpy(tokens)),
            labels=self._pinned(torch.from_numpy(labels)),
            loss_mask=self._pinned(torch.from_numpy(loss_mask)),
            position_ids=self._pinned(positions),
            sample_ids=local_ids,
            global_valid_tokens=float(valid),
            document_ids=None if documents is None else self._pinned(documents),
        )

    def _pinned(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.pin_memory() if self._pin_memory else tensor

    def _check_vocabulary(self, rows: np.ndarray, local_ids: np.ndarray) -> None:
        """Check what the manifest only claims: that the ids are within the vocabulary."""
        if self._vocab_size is None or rows.size == 0:
            return
        smallest, largest = int(rows.min()), int(rows.max())
        if smallest < 0 or largest >= self._vocab_size:
            wrong = smallest if smallest < 0 else largest
            raise DataError(
                f"{self.samples.name}: token id {wrong} in one of the samples {local_ids[0]} to "
                f"{local_ids[-1]} is outside the vocabulary of {self._vocab_size}; the data is "
                "damaged or not what its manifest says: see `fourfold data verify`"
            )

    def _check_count(self, local_ids: np.ndarray, masked: int) -> None:
        """Check the index every rank trusts for the others' samples against this rank's own."""
        token = self._masked_token
        if token is None or self._size == 1 or not self.samples.has_indexed(token):
            return
        counted = self.samples.count_all(local_ids, token)
        if counted != masked:
            raise DataError(
                f"{self.samples.name}: the samples {local_ids[0]} to {local_ids[-1]} hold {masked} "
                f"end-of-text tokens, and {counted} were counted; the data is damaged or not "
                "what its manifest says (see `fourfold data verify`), or the index cache is damaged"
            )


def document_ids(ends: np.ndarray) -> np.ndarray:
    """Documents numbered from 0 in each row, given the places (B, T) of the end-of-text tokens."""
    return np.cumsum(ends, axis=1, dtype=np.int32) - ends


def positions_in_documents(ends: np.ndarray) -> np.ndarray:
    """Positions that start again at 0 after each end-of-text token."""
    columns = np.arange(ends.shape[1])
    first_columns = np.zeros(ends.shape, np.int64)  # of the document that begins there, else 0
    first_columns[:, 1:] = np.where(ends[:, :-1], columns[1:], 0)
    return columns - np.maximum.accumulate(first_columns, axis=1)
