"""The models PaddleNLP knows by name, and which of its tokenizers each is for.

    preset = find_preset("gpt3-13B-en")
    preset.model()        its keys of the `Model` section

The feed-forward width is 4 * hidden_size in all of them, which is what `Model` takes by itself.
Sizes in names are nominal: OpenAI's "117M" has 124 million parameters with this vocabulary.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Literal

from fourfold.config.suggest import did_you_mean, nearest

ModelType = Literal["gpt", "gpt-cn"]


@dataclass(frozen=True)
class ModelPreset:
    """Names are those of the `Model` section."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_attention_heads: int
    max_position_embeddings: int = 1024
    initializer_range: float = 0.02

    def model(self) -> dict[str, int | float]:
        return asdict(self)


ENGLISH = {
    "gpt2-small-en": ModelPreset(50304, 1024, 4, 4),
    "gpt2-en": ModelPreset(50304, 768, 12, 12),
    "gpt2-medium-en": ModelPreset(50304, 1024, 24, 16),
    "gpt3-1.3B-en": ModelPreset(50304, 2048, 24, 16),
    "gpt3-13B-en": ModelPreset(50304, 5120, 40, 128),
    "gpt3-89B-en": ModelPreset(51200, 12288, 48, 96),
    "gpt3-175B-en": ModelPreset(51200, 12288, 96, 96),
}
CHINESE = {
    "gpt-cpm-large-cn": ModelPreset(30000, 2560, 32, 32),
    "gpt-cpm-small-cn-distill": ModelPreset(30000, 768, 12, 12),
}
PRESETS = ENGLISH | CHINESE
# The end-of-text id of each model type's tokenizer. GPT-2's is what `Data.dataset` assumes.
END_OF_TEXT: dict[ModelType, int] = {"gpt": 50256, "gpt-cn": 7}


def find_preset(name: str) -> ModelPreset | None:
    return PRESETS.get(name)


def model_type_of(name: str) -> ModelType:
    """The `--model_type` that goes with a preset."""
    return "gpt-cn" if name in CHINESE else "gpt"


def unknown_preset(name: str) -> str:
    """What to tell about a name that is neither a preset nor a place."""
    hint = did_you_mean(nearest(name, PRESETS))
    return (
        f"{name} is neither a directory nor one of the models known by name "
        f"({', '.join(PRESETS)}){hint}"
    )
