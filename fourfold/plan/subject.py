"""The subject of a plan: one model and one global batch, out of a configuration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fourfold.config import Config
from fourfold.cost.flops import flops_per_token
from fourfold.cost.workload import Network, Software, software_of
from fourfold.model import ModelShape, count_parameters

Precision = Literal["float32", "bfloat16", "float16"]


@dataclass(frozen=True)
class Subject:
    """One model and one global batch, to be laid out."""

    config: Config
    network: Network
    software: Software
    precision: Precision
    shape: ModelShape
    global_batch: int
    batches: tuple[int, ...]  # of every size that a growing batch has; the last is the whole

    @property
    def parameters(self) -> int:
        return count_parameters(self.shape)

    @property
    def tokens_per_step(self) -> int:
        return int(self.global_batch * self.network.seq)

    @property
    def model_flops(self) -> float:
        """Model FLOPs of one step, full attention: the numerator of MFU."""
        return flops_per_token(self.shape, int(self.network.seq)) * self.tokens_per_step


def subject_of(config: Config, *, on_cpu: bool = False) -> Subject:
    model = config.Model
    shape = ModelShape.of(model)
    network = Network.of(shape, config.Data.dataset.max_seq_len)
    precision = config.Engine.mix_precision.dtype
    return Subject(
        config=config,
        network=network,
        software=software_of(config, on_cpu=on_cpu),
        precision=precision,
        shape=shape,
        global_batch=config.Data.batch_size.global_batch_size,
        batches=tuple(config.batch_schedule.batches),
    )
