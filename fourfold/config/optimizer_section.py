"""The `Optimizer` section: AdamW or Muon, and the learning rate over a run."""

from __future__ import annotations

from typing import Annotated, Literal

from annotated_types import Ge, Lt

from fourfold.config.fields import (
    BelowOne,
    Count,
    CountOrZero,
    NotNegative,
    Number,
    Positive,
    Probability,
    Section,
    derived,
    key,
    section,
)


class LearningRateSection(Section):
    decay_steps: Count = derived(
        "Step at which the learning rate reaches min_lr. Null is max_steps. (FleetX's default was "
        "360000.)"
    )
    warmup_rate: Probability = key(
        0.01, "The learning rate rises linearly over the first warmup_rate * decay_steps steps."
    )
    decay_samples: Count | None = key(
        None,
        "In place of decay_steps: the samples after which the learning rate is min_lr. The rate "
        "then follows the samples read before a step, as Megatron's does, so the first step of a "
        "warm-up has rate 0. Null with warmup_samples given is the samples of the whole run.",
    )
    warmup_samples: NotNegative | None = key(
        None,
        "The learning rate rises over this many samples. Null with decay_samples given is "
        "warmup_rate * decay_samples.",
    )
    decay_style: Literal["cosine", "linear", "constant", "wsd", "inverse_sqrt"] = key(
        "cosine",
        "How the rate falls from max_lr to min_lr. constant stays at max_lr; wsd (warm-up, stable, "
        "decay) stays there until the last wsd_decay_steps before decay_steps; inverse_sqrt falls "
        "with the square root of the step from the end of the warm-up on.",
    )
    wsd_decay_style: Literal["linear", "1-sqrt", "cosine", "exponential"] = key(
        "linear",
        "With decay_style wsd, how the rate falls at the end; done is the share of that behind: "
        "linear is 1 - done, 1-sqrt is 1 - sqrt(done), exponential is 2 * 0.5^done - 1.",
    )
    wsd_decay_rate: Probability = key(
        0.2, "With decay_style wsd, the share of decay_steps (or decay_samples) that decays."
    )
    wsd_decay_steps: CountOrZero | None = key(
        None,
        "With decay_style wsd, the last steps up to decay_steps, in which the rate falls. Null is "
        "wsd_decay_rate * decay_steps.",
    )
    wsd_decay_samples: CountOrZero | None = key(
        None, "The same in samples, where the rate follows samples (decay_samples)."
    )
    max_lr: NotNegative = key(
        5.0e-5,
        "Learning rate at the end of the warm-up. (FleetX's default, 1e-5, was below its min_lr.)",
    )
    min_lr: NotNegative = key(
        1.0e-5,
        "Learning rate at the end of the cosine decay and after. (FleetX's default was 5e-5.)",
    )


class MuonSection(Section):
    lr: NotNegative | None = key(
        None,
        "Muon's own learning rate at the end of the warm-up, from where it follows the same "
        "schedule. Null is Optimizer.lr.max_lr, AdamW's.",
    )
    adjust_lr_fn: Literal["original", "match_rms_adamw"] = derived(
        "How the learning rate is adjusted to a matrix of A x B: original multiplies it with "
        "sqrt(max(1, A / B)), match_rms_adamw (Moonlight's) with 0.2 * sqrt(max(A, B)), so that "
        "updates are as large as AdamW's. Null is original, torch's default, with an lr of its "
        "own, and match_rms_adamw without."
    )
    weight_decay: NotNegative = derived(
        "Decoupled weight decay of Muon's matrices. Null is Optimizer.weight_decay."
    )
    momentum: BelowOne = key(0.95, "Decay of the average of gradients that is orthogonalised.")
    nesterov: bool = key(True, "Orthogonalise the gradient moved towards that average, not it.")
    ns_steps: Annotated[int, Number, Ge(1), Lt(100)] = key(
        5, "Newton-Schulz iterations by which a matrix is orthogonalised."
    )
    ns_dtype: Literal["float32", "bfloat16"] | None = key(
        None,
        "Number format of the iterations. bfloat16 is torch's; it turns the last bit of a gradient "
        "into percents of single updates, so that layouts agree in the loss curve and not in "
        "digits. float32 agrees to 1e-5. Null is bfloat16 on a GPU and float32 on a CPU.",
    )


def default_ns_dtype(*, on_cpu: bool) -> Literal["float32", "bfloat16"]:
    return "float32" if on_cpu else "bfloat16"


class OptimizerSection(Section):
    name: Literal["AdamW", "Muon"] = key(
        "AdamW",
        "AdamW for all parameters, or Muon for the matrices of the layers and AdamW for the rest: "
        "embeddings, head, norms and biases.",
    )
    weight_decay: NotNegative = key(
        0.0, "Decoupled weight decay of matrices and embeddings; biases and norms have none."
    )
    adam_beta1: BelowOne = key(0.9, "Decay of AdamW's average of gradients.")
    adam_beta2: BelowOne = key(0.999, "Decay of AdamW's average of squared gradients.")
    adam_epsilon: Positive = key(1.0e-8, "Added to AdamW's denominator.")
    grad_clip: NotNegative = key(0.0, "Largest global norm of the gradient; 0 does not clip.")
    ema_decay: BelowOne | None = key(
        None,
        "Keep an exponential moving average of the weights with this decay, in float32: saved in "
        "checkpoints, evaluated beside the weights. The decay of update t is at most "
        "(1 + t) / (10 + t), so that the first weights are soon forgotten. Null keeps none.",
    )
    muon: MuonSection = section(
        MuonSection, "Muon, in the words of torch.optim.Muon; without effect with name AdamW."
    )
    lr: LearningRateSection = section(LearningRateSection, "Linear warm-up, then decay.")
