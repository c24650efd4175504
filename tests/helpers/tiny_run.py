"""A tiny run on the Megatron fixture: two layers, dropout on, a second or two."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable
from pathlib import Path

from fourfold.config import Config

FIXTURE = Path(__file__).parent.parent / "fixtures" / "megatron_single"

DATASET = {"input_dir": str(FIXTURE), "split": "90,8,2", "max_seq_len": 16, "eos_token_id": 0}
# For tests of what is around a run.
ONE_LAYER = {
    "vocab_size": 1024,
    "hidden_size": 16,
    "num_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 16,
}

TINY = {
    "Global": {"device": "cpu", "seed": 1024},
    "Engine": {
        "max_steps": 8,
        "logging_freq": 1,
        "eval_freq": 3,
        "eval_iters": 2,
        "test_iters": 2,
        "tensorboard": False,
        "mix_precision": {"dtype": "float32"},
        "save_load": {"save_steps": 2},
    },
    "Data": {
        "batch_size": {"global_batch_size": 8, "local_batch_size": 8, "micro_batch_size": 4},
        "dataset": DATASET,
    },
    "Model": {
        "vocab_size": 1024,
        "hidden_size": 32,
        "num_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 16,
        "hidden_dropout_prob": 0.1,
        "attention_probs_dropout_prob": 0.1,
        "use_recompute": False,
    },
    "Optimizer": {
        "weight_decay": 0.01,
        "grad_clip": 1.0,
        "lr": {"decay_steps": 8, "warmup_rate": 0.25, "max_lr": 1e-2, "min_lr": 1e-3},
    },
}

Configure = Callable[..., Config]


def start_child(work: Callable[[], object]) -> int:
    """Run `work` in a forked process, which is ready at once; its process id."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            work()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    return pid


def exit_status(pid: int) -> int:
    """Wait for a child: its exit code, or minus the signal that ended it."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
