"""What a configuration says about a plan: its network, its numbers, its own layout.

Here stand the habits of Fourfold itself, as its parallel code has them:
- O2 keeps weights in the low type and fp32 masters; O1 keeps fp32 weights and, through each
  micro-batch, the low-type copies autocast makes of them;
- with sharding, master weights and moments are divided; the weights multiplied with are whole in
  stages 1 and 2 and gathered layer by layer in stage 3; gradients are whole in stage 1;
- norms keep their input in fp32, gradients add up in fp32, logits exist for a chunk of tokens;
- with sequence parallelism the gathered inputs of a block are kept for its backward pass.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fourfold.config import Config
from fourfold.model import ModelShape, count_parameters, flops_per_token
from fourfold.plan.workload import Network, Software, Spread

Precision = Literal["float32", "bfloat16", "float16"]
CONTEXT_BYTES, CONTEXT_BYTES_CPU = 2.0e9, 0.33e9
FRAGMENTATION = 0.05


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
        software=_software(config, on_cpu),
        precision=precision,
        shape=shape,
        global_batch=config.Data.batch_size.global_batch_size,
        batches=tuple(config.pace.batches),
    )


def _software(config: Config, on_cpu: bool) -> Software:
    precision, model = config.Engine.mix_precision, config.Model
    low = precision.dtype != "float32"
    masters = precision.level == "O2"
    return Software(
        compute_bytes=2 if low else 4,
        weight_bytes=2 if masters else 4,
        master_bytes=4 if masters else 0,
        gradient_bytes=4,
        lasting_gradients=config.Fused.tensor_fusion,
        # A processor's fused attention gives its heads in another order than they are read in.
        attention_copies=1 if on_cpu else 0,
        reduce_bytes=4,
        gather_bytes=2 if masters else 4,
        cast_bytes=2 if low and not masters else 0,
        residual_bytes=2 if masters else 4,
        norm_bytes=4,
        wide_norms=masters,
        regathers=False,
        stops_early=True,
        # On a CPU torch has no flash attention with dropout.
        flash=not (on_cpu and model.attention_probs_dropout_prob > 0),
        # In place; in low precision there is also the product, and the gradient for the next.
        logit_bytes=6 if low else 4,
        logit_tokens=model.loss_chunk_tokens,
        # A processor that moves messages does not compute meanwhile.
        overlap=0.0 if on_cpu else 1.0,
        fused=config.Engine.graph_mode == "static",
        reserve_bytes=CONTEXT_BYTES_CPU if on_cpu else CONTEXT_BYTES,
        reserve_share=0.0 if on_cpu else FRAGMENTATION,
    )


def own_spread(config: Config) -> Spread:
    """The layout the file itself asks for."""
    layout, sharding = config.Distributed, config.Distributed.sharding
    return Spread(
        mp=layout.mp_degree,
        pp=layout.pp_degree,
        dp=layout.dp_degree,
        sharding=sharding.sharding_degree,
        stage=sharding.sharding_stage,
        micro_batch=config.Data.batch_size.micro_batch_size,
        micro_batches=config.Engine.accumulate_steps,
        recompute=config.Model.recompute_granularity or "none",
        sequence_parallel=config.Model.sequence_parallel and layout.mp_degree > 1,
        schedule=layout.pp_schedule,
        virtual=layout.virtual_pp_degree,
    )
