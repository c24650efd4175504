"""A trained model ready to write: configuration and checkpoint in, texts out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from fourfold import checkpoint
from fourfold.config import Config
from fourfold.errors import UserError
from fourfold.generate import complete_text
from fourfold.mesh import select_device
from fourfold.model import GPT, ModelShape
from fourfold.tokenizer import Tokenizer


class GenerationModule:
    """The model of a configuration, its weights from `ckpt_dir` (or the run's own output)."""

    def __init__(self, config: Config, on_notice: Callable[[str], None] = print) -> None:
        if config.Global.tokenizer is None:
            raise UserError(
                "Global.tokenizer is not set, so text cannot be turned into tokens; name the "
                "tokenizer the model was trained with, e.g. -o Global.tokenizer=tokenizer.json"
            )
        self.config = config
        self.tokenizer = Tokenizer.load(Path(config.Global.tokenizer))
        save_load = config.Engine.save_load
        where = checkpoint.named(save_load.ckpt_dir or "latest", Path(save_load.output_dir))
        self.device = select_device(config.Global.device)
        with torch.device("meta"):
            model = GPT(ModelShape.of(config.Model))
        self.model = model.to_empty(device=self.device).eval()
        weights = {f"model.{name}": p.data for name, p in self.model.named_parameters()}
        checkpoint.resume(where, weights, on_notice, prefix="model.")

    def generate(self, text: str) -> list[str]:
        """Prompt and continuation, once for each of `num_return_sequences`."""
        section = self.config.Generation
        return complete_text(
            self.model,
            self.tokenizer,
            text,
            max_dec_len=section.max_dec_len,
            min_dec_len=section.min_dec_len,
            top_k=section.top_k,
            top_p=section.top_p,
            temperature=section.temperature,
            repetition_penalty=section.repetition_penalty,
            decode_strategy=section.decode_strategy,
            num_return_sequences=section.num_return_sequences,
            seed=self.config.Global.seed if section.seed is None else section.seed,
            max_positions=self.config.Model.max_position_embeddings,
        )
