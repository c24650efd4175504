"""A tiny run on real text: tokenizer, prepared data, a few steps, a configuration file."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from fourfold.config import Config, load_config
from fourfold.engine import build_engine
from fourfold.tokenizer import Tokenizer, train
from fourfold.tools.prepare.pipeline import prepare

TEXT = "the cat sat on a mat and the dog ran after it while rain fell over old stone walls"
VOCAB = 300
# One head of keys and values for all, norms over all heads, a window shorter than the texts.
MODERN: dict[str, Any] = {
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 12,
    "activation": "swiglu",
    "normalization": "RMSNorm",
    "qk_norm": "all_heads",
    "bias": "none",
    "tie_word_embeddings": False,
    "position_embedding": "rotary",
    "sliding_window": 6,
    "sliding_window_layers": [1],
    "logit_scale": 0.8,
    "logit_softcap": 20.0,
    "attention_scale": 0.2,
    "embedding_scale": 2.0,
}


@dataclass(frozen=True)
class TextRun:
    """Where everything is; `load` gives its configuration, with overrides."""

    directory: Path

    @property
    def config(self) -> Path:
        return self.directory / "run.yaml"

    @property
    def tokenizer(self) -> Tokenizer:
        return Tokenizer.load(self.directory / "tokenizer.json")

    def load(self, *overrides: str) -> Config:
        return load_config(self.config, list(overrides), world_size=1)


def sentences(count: int, seed: int) -> list[str]:
    source = random.Random(seed)
    return [
        " ".join(source.choices(TEXT.split(), k=source.randint(5, 30))) + "." for _ in range(count)
    ]


def make_run(directory: Path, num_layers: int = 2, vocab_size: int = 320, **model: Any) -> TextRun:
    """`model` are more keys of the `Model` section."""
    run = TextRun(directory)
    texts = sentences(200, seed=1)
    train(texts, VOCAB).save(directory / "tokenizer.json")
    prepare(iter(texts), directory / "data" / "words", run.tokenizer)
    run.config.write_text(
        yaml.safe_dump(
            {
                "Global": {
                    "device": "cpu",
                    "seed": 7,
                    "tokenizer": str(directory / "tokenizer.json"),
                },
                "Engine": {
                    "max_steps": 30,
                    "eval_freq": 0,
                    "test_iters": 0,
                    "logging_freq": 30,
                    "tensorboard": False,
                    "save_load": {"output_dir": str(directory / "output"), "save_steps": 30},
                },
                "Data": {
                    "batch_size": {"global_batch_size": 8, "micro_batch_size": 8},
                    "dataset": {
                        "input_dir": str(directory / "data"),
                        "split": "90,10,0",
                        "max_seq_len": 32,
                    },
                },
                "Model": {
                    "vocab_size": vocab_size,
                    "hidden_size": 32,
                    "num_layers": num_layers,
                    "num_attention_heads": 2,
                    "max_position_embeddings": 48,
                    "hidden_dropout_prob": 0.0,
                    "attention_probs_dropout_prob": 0.0,
                    "use_recompute": False,
                    **model,
                },
                "Optimizer": {"lr": {"max_lr": 1e-2, "min_lr": 1e-3, "decay_steps": 30}},
                "Generation": {"max_dec_len": 12, "top_k": 20},
            }
        )
    )
    build_engine(run.load()).fit()
    return run
