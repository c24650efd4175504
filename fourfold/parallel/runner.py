"""Running batches: the same two calls for every layout, `run` to train and `evaluate`.

`run` takes one rank's share of a global batch, cuts it into micro-batches and leaves the summed
gradients on the fp32 master weights. The loss is divided by the valid tokens of the *global*
batch inside, so the cut changes neither loss nor gradients.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from fourfold.data import Batch
from fourfold.model import GPT
from fourfold.model.seeds import mix_seed
from fourfold.parallel.precision import Precision


class Runner:
    """A model in its final place, with its precision and its micro-batch size."""

    def __init__(
        self,
        model: GPT,
        *,
        precision: Precision,
        device: torch.device,
        micro_batch_size: int,
        seed: int,
    ) -> None:
        self.model = model
        self.precision = precision
        self.device = device
        self.micro_batch_size = micro_batch_size
        self.seed = seed
        self.masters = precision.prepare(model)

    def run(self, batch: Batch, step: int, loss_scale: float = 1.0) -> Tensor:
        """Forward and backward over all micro-batches of `step`; the batch's mean loss."""
        self.model.train()
        scale = loss_scale / max(batch.global_valid_tokens, 1.0)
        total = torch.zeros((), device=self.device)
        for micro, inputs in enumerate(self._micro_batches(batch)):
            dropout_seed = mix_seed(self.seed, "dropout", step, micro)
            with self.precision.autocast(self.device):
                loss = self.model(*inputs, loss_scale=scale, dropout_seed=dropout_seed)
            loss.backward()
            total += loss.detach()
        return total / loss_scale

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> Tensor:
        """The batch's mean loss, without dropout and without gradients."""
        self.model.eval()
        scale = 1.0 / max(batch.global_valid_tokens, 1.0)
        total = torch.zeros((), device=self.device)
        for inputs in self._micro_batches(batch):
            with self.precision.autocast(self.device):
                total += self.model(*inputs, loss_scale=scale)
        return total

    @torch.no_grad()
    def refresh(self) -> None:
        """Bring low-precision weights in line with their masters, after an update or a load."""
        for name, parameter in self.model.named_parameters():
            if parameter is not self.masters[name]:
                parameter.copy_(self.masters[name])

    def _micro_batches(self, batch: Batch) -> Iterator[tuple[Tensor, ...]]:
        """The model's positional arguments, cut; document ids only if the batch has them."""
        fields = [batch.tokens, batch.labels, batch.loss_mask, batch.position_ids]
        if batch.document_ids is not None:
            fields.append(batch.document_ids)
        moved = (field.to(self.device, non_blocking=True) for field in fields)
        return zip(*(field.split(self.micro_batch_size) for field in moved))
