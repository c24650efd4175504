"""The plain side of speedrun.py: GPT-2 in the manner of nanoGPT, in nothing but torch.

GPT-2 with a tied head and depth-scaled initial weights, AdamW (fused, decay
on matrices only), linear warm-up and cosine decay to a tenth, clipping at 1, attention by torch's
`scaled_dot_product_attention`, batches of windows drawn at random from one array of tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class PlainOptions:
    vocab_size: int
    max_steps: int
    layers: int = 4
    width: int = 256
    heads: int = 4
    positions: int = 256
    batch: int = 16
    lr: float = 2e-3
    warmup: float = 0.05
    weight_decay: float = 0.1
    dtype: str = "float32"
    compiled: bool = False
    seed: int = 1337


class Block(nn.Module):
    def __init__(self, options: PlainOptions) -> None:
        super().__init__()
        width, self.heads = options.width, options.heads
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.c_attn, self.attn_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.c_fc, self.mlp_proj = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = (
            part.view(batch, length, self.heads, width // self.heads).transpose(1, 2)
            for part in self.c_attn(self.ln_1(x)).split(width, dim=2)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attn_proj(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp_proj(F.gelu(self.c_fc(self.ln_2(x))))


class PlainGPT(nn.Module):
    def __init__(self, options: PlainOptions) -> None:
        super().__init__()
        self.wte = nn.Embedding(options.vocab_size, options.width)
        self.wpe = nn.Embedding(options.positions, options.width)
        self.blocks = nn.ModuleList(Block(options) for _ in range(options.layers))
        self.ln_f = nn.LayerNorm(options.width)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                depth = math.sqrt(2 * options.layers) if name.endswith("proj.weight") else 1.0
                nn.init.normal_(parameter, std=0.02 / depth)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.ln_f(x), self.wte.weight)
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


class PlainRun:
    """`steps()` makes one optimizer step at a time; `loss` is the mean of windows it is given."""

    def __init__(self, options: PlainOptions, tokens: np.ndarray) -> None:
        torch.manual_seed(options.seed)
        self.options = options
        self.tokens = torch.from_numpy(tokens.astype(np.int64))
        self.model = PlainGPT(options)
        matrices = [p for p in self.model.parameters() if p.dim() == 2]
        others = [p for p in self.model.parameters() if p.dim() != 2]
        self.optimizer = torch.optim.AdamW(
            [
                {"params": matrices, "weight_decay": options.weight_decay},
                {"params": others, "weight_decay": 0.0},
            ],
            betas=(0.9, 0.95),
            fused=True,
        )
        self.forward = torch.compile(self.model) if options.compiled else self.model

    def steps(self) -> Iterator[int]:
        """Yields before each step the number of those made."""
        length = self.options.positions
        for step in range(self.options.max_steps):
            yield step
            starts = torch.randint(len(self.tokens) - length - 1, (self.options.batch,))
            windows = torch.stack([self.tokens[i : i + length + 1] for i in starts.tolist()])
            for group in self.optimizer.param_groups:
                group["lr"] = self.lr_at(step)
            with self._autocast():
                loss = self.forward(windows[:, :-1], windows[:, 1:])
            loss.backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)

    def lr_at(self, step: int) -> float:
        options = self.options
        warmup = max(1, int(options.warmup * options.max_steps))
        if step < warmup:
            return options.lr * (step + 1) / warmup
        done = (step - warmup) / max(1, options.max_steps - warmup)
        return options.lr * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * done)))

    @torch.no_grad()
    def loss(self, windows: Tensor) -> float:
        with self._autocast():
            return float(self.model(windows[:, :-1], windows[:, 1:]))

    def _autocast(self) -> AbstractContextManager[None]:
        dtype = getattr(torch, self.options.dtype)
        return torch.autocast("cpu", dtype=dtype, enabled=dtype != torch.float32)
