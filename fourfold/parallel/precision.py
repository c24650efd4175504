"""Mixed precision: the dtype the network computes in, and where its fp32 weights live.

| dtype    | level | computes in      | weights                                        |
|----------|-------|------------------|------------------------------------------------|
| float32  |       | fp32             | fp32                                           |
| bfloat16 | O1    | autocast to bf16 | fp32                                           |
| bfloat16 | O2    | bf16             | bf16, and an fp32 master the optimizer updates |
| float16  | O1    | autocast to fp16 | fp32; dynamic loss scale                       |
| float16  | O2    | fp16             | fp16, and an fp32 master; dynamic loss scale   |

Whatever the row, the loss is computed in fp32, and gradients of micro-batches add up in fp32; so
are the sums inside of norms and attention, by torch's kernels.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from fourfold import native
from fourfold.config import Config
from fourfold.config.engine_section import default_level
from fourfold.device import is_cpu
from fourfold.model import ParamTable, kernels
from fourfold.parallel.parameters import name_of

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

# The documents' operator names that always hold here. Losses, their sums and their division by the
# token count run in fp32; LayerNorm and attention's softmax accumulate in fp32.
ALWAYS_FP32 = {"reduce_sum", "c_softmax_with_cross_entropy", "softmax_with_cross_entropy"}
ALWAYS_FP32 |= {"elementwise_div", "layer_norm", "softmax"}
# Matrix products and GELU run in the low precision; so does the embedding when its weights are.
ALWAYS_LOW = {"matmul", "matmul_v2", "mul", "gelu"}
LOW_AT_O2 = {"lookup_table", "lookup_table_v2"}


class Precision:
    """One row of the table above."""

    def __init__(self, dtype: str, level: str | None) -> None:
        self.dtype = DTYPES[dtype]
        self.level = level if dtype != "float32" else None

    @classmethod
    def of(cls, config: Config) -> Precision:
        """As configured, on the device that is configured."""
        section, on_cpu = config.Engine.mix_precision, is_cpu(config.Global.device)
        return cls(section.dtype, section.level or default_level(section.dtype, on_cpu=on_cpu))

    @property
    def scales_loss(self) -> bool:
        return self.dtype == torch.float16

    def __str__(self) -> str:
        name = str(self.dtype).removeprefix("torch.")
        how = {None: "", "O1": " autocast, fp32 weights", "O2": " weights, fp32 master weights"}
        return name + how[self.level]

    def apply_autocast(self, module: nn.Module, device: torch.device) -> None:
        """At O1, run the module's forward under autocast; nothing at the other levels, or for a
        model that is only traced and will not run."""
        if self.level == "O1" and device.type != "meta":
            module.forward = torch.autocast(device.type, self.dtype)(module.forward)

    def make_masters(self, parameters: dict[str, nn.Parameter]) -> dict[str, nn.Parameter]:
        """Cast the parameters as the row says; the fp32 weights to optimize, by the same keys."""
        masters = dict(parameters)
        for key, parameter in self.lowered(parameters).items():
            masters[key] = nn.Parameter(parameter.data)
            parameter.data = parameter.data.to(self.dtype)
            parameter.register_post_accumulate_grad_hook(_move_gradient_to(masters[key]))
        return masters

    def lowered(self, parameters: dict[str, nn.Parameter]) -> dict[str, nn.Parameter]:
        """Those that are kept in low precision, beside their masters."""
        return parameters if self.level == "O2" else {}

    def weight_dtype(self, table: ParamTable, key: str, *, sharded: bool) -> torch.dtype:
        """The dtype of this parameter as a step holds it, whole; sharded, as it is gathered.

        At O1 the linear layers' are gathered as autocast would cast them, in half the bytes.
        Norms and embeddings are computed with in fp32 there.
        """
        row = table[name_of(key)]
        cast = sharded and self.level == "O1" and row.in_every_layer and row.kind == "linear"
        return self.dtype if cast or self.level == "O2" else torch.float32

    def collect(
        self, parameters: dict[str, nn.Parameter], masters: dict[str, nn.Parameter]
    ) -> None:
        """Move the gradients that arrived without a hook: schedules that split the backward pass
        call none."""
        for name, parameter in parameters.items():
            if parameter is not masters[name] and parameter.grad is not None:
                _move_gradient_to(masters[name])(parameter)


def _move_gradient_to(master: nn.Parameter) -> Callable[[Tensor], None]:
    """As soon as a low-precision gradient is complete, add it to the master's and free it."""

    def move(parameter: Tensor) -> None:
        assert parameter.grad is not None
        if master.grad is None:
            master.grad = parameter.grad.to(master.dtype)
        else:
            master.grad += parameter.grad
        parameter.grad = None

    return move


def unmet_list_entries(black_list: list[str], white_list: list[str], level: str) -> list[str]:
    """What the custom lists request that does not apply at this level: a line for each list."""
    low = ALWAYS_LOW | (LOW_AT_O2 if level == "O2" else set())
    unmet = {
        "custom_black_list": [name for name in black_list if name not in ALWAYS_FP32],
        "custom_white_list": [name for name in white_list if name not in low],
    }
    return [
        f"Engine.mix_precision.{key}: {', '.join(names)} cannot be forced at level {level}; "
        "torch's own rule applies"
        for key, names in unmet.items()
        if names
    ]


def slow_attention_notice(dropout: float, dtype: torch.dtype, device: torch.device) -> str | None:
    """By torch attention with dropout is computed step by step on a CPU, all its probabilities
    held."""
    if device.type != "cpu" or dropout == 0.0 or kernels.usable(device, dtype):
        return None
    reason = native.why_not("attention") or "it computes in float32 and bfloat16 only"
    return (
        f"Model.attention_probs_dropout_prob={dropout:g}: on a CPU attention with dropout is "
        "several times slower and takes more memory than without, because our kernel for it cannot "
        f"be used ({reason}) and torch's has no dropout; for speed here use "
        "-o Model.attention_probs_dropout_prob=0.0"
    )


def slow_dtype_notice(dtype: torch.dtype, device: torch.device) -> str | None:
    """Low precision on a processor without instructions for it is far slower than fp32."""
    if device.type != "cpu" or dtype == torch.float32:
        return None
    native = {
        torch.bfloat16: torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported(),
        torch.float16: torch.cpu._is_amx_fp16_supported(),
    }
    if native[dtype]:
        return None
    name = str(dtype).removeprefix("torch.")
    return (
        f"this processor has no {name} instructions, so {name} runs several times slower than "
        "float32; for speed here use -o Engine.mix_precision.dtype=float32"
    )
