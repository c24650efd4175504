"""Small runs whose checkpoints are kept in `fixtures/earlier`, and how each goes on.

A later Fourfold must go on from them with the same numbers. They are written anew, by hand and only
when a format changes on purpose, with

    cd tests && python -m helpers.earlier_runs
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import torch
import yaml

from fourfold import checkpoint
from fourfold.config import load_config
from fourfold.engine import build_engine
from fourfold.metrics import read_jsonl
from helpers.ranks import on_ranks

FOLDER = Path(__file__).parent.parent / "fixtures" / "earlier"
SAVED, LAST = 3, 6  # the checkpoint that is kept, and where the run that goes on ends

SETTINGS = {
    "Global": {"device": "cpu", "seed": 7},
    "Engine": {
        "max_steps": LAST,
        "logging_freq": 1,
        "eval_freq": 0,
        "test_iters": 0,
        "save_load": {"save_steps": SAVED, "output_dir": "run"},
    },
    "Data": {
        "batch_size": {"global_batch_size": 8, "micro_batch_size": 2},
        "dataset": {"input_dir": "data/one", "split": "1,0,0", "max_seq_len": 16},
    },
    "Model": {
        "vocab_size": 300,
        "hidden_size": 16,
        "num_layers": 2,
        "num_attention_heads": 2,
        "ffn_hidden_size": 32,
        "max_position_embeddings": 16,
        "hidden_dropout_prob": 0.1,
        "attention_probs_dropout_prob": 0.0,
        "use_recompute": False,
    },
    "Optimizer": {"lr": {"decay_steps": 10, "warmup_rate": 0.2, "max_lr": 1.0e-3, "min_lr": 1e-4}},
}

MIXED = "Data.dataset.input_dir=0.3 data/one 0.7 data/two"
CASES: dict[str, tuple[int, list[str]]] = {
    "plain": (1, []),
    "mp2_pp2_sharding2": (
        8,
        [
            "Distributed.mp_degree=2",
            "Distributed.pp_degree=2",
            "Distributed.sharding.sharding_degree=2",
            "Distributed.sharding.sharding_stage=2",
            "Model.sequence_parallel=True",
        ],
    ),
    "fp16_o2": (1, ["Engine.mix_precision.dtype=float16", "Engine.mix_precision.level=O2"]),
    "mixture": (1, [MIXED, "Data.dataset.order=elastic"]),
    "async_save": (2, ["Engine.save_load.async_save=True", "Distributed.dp_degree=2"]),
}


def train(case: str, into: Path) -> None:
    """Run a case to its end in `into`, from the checkpoint there if there is one."""
    world, overrides = CASES[case]
    if not (into / "data").exists():
        shutil.copytree(FOLDER / "data", into / "data")
    (into / "run.yaml").write_text(yaml.safe_dump(SETTINGS))
    os.chdir(into)

    def fit(rank: int) -> None:
        build_engine(load_config(Path("run.yaml"), overrides, world_size=world), world).fit()

    on_ranks(world, fit)


def tensors(step: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint, whole."""
    names = checkpoint.tensor_names(step)
    found = {name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in names.items()}
    checkpoint.load(step, found)
    return found


def digest(found: dict[str, torch.Tensor]) -> str:
    """Of names, shapes, types and every bit."""
    content = hashlib.sha256()
    for name, tensor in sorted(found.items()):
        content.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}\n".encode())
        content.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return content.hexdigest()


def losses(run: Path) -> dict[str, float]:
    """By step; what the run after a resume says of a step stands for both."""
    told = [record for record in read_jsonl(run / "metrics.jsonl") if record["kind"] == "train"]
    return {str(record["step"]): record["loss"] for record in told}


def sums(found: dict[str, torch.Tensor]) -> dict[str, list[float]]:
    """Two numbers that any change of a tensor moves, for processors that round otherwise."""
    weights = {
        name: torch.linspace(1, 2, t.numel(), dtype=torch.float64) for name, t in found.items()
    }
    return {
        name: [float(t.double().sum()), float((t.double().flatten() * weights[name]).sum())]
        for name, t in found.items()
    }


def processor() -> str:
    """What decides the bits of a sum: the processor's name and what it can do."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if sys.platform == "linux" else []
    told = sorted({line for line in lines if line.startswith(("model name", "flags"))})
    told.append(f"{torch.__version__} {torch.backends.cpu.get_cpu_capability()}")
    return hashlib.sha256("\n".join(told).encode()).hexdigest()[:16]


def make() -> None:
    os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
    torch.set_num_threads(1)
    shutil.rmtree(FOLDER, ignore_errors=True)
    _prepare_data()
    for case in CASES:
        place = FOLDER / case
        place.mkdir()
        train(case, place)
        told = {
            "processor": processor(),
            "losses": losses(place / "run"),
            "saved": digest(tensors(place / f"run/step_{SAVED}")),
            "last": digest(tensors(place / f"run/step_{LAST}")),
            "sums": sums(tensors(place / f"run/step_{LAST}")),
        }
        (place / "expected.json").write_text(json.dumps(told, indent=1) + "\n")
        (place / f"run/step_{SAVED}").rename(place / f"step_{SAVED}")
        for left in ("run", "data"):
            shutil.rmtree(place / left)
        (place / "run.yaml").unlink()


def _prepare_data() -> None:
    texts = {"one": Path(os.__file__), "two": Path(json.__file__)}
    for name, source in texts.items():
        target = FOLDER / "data" / name
        target.mkdir(parents=True)
        words = [line.strip() for line in source.read_text().splitlines() if line.strip()][:120]
        documents = [" ".join(words[start : start + 6]) for start in range(0, len(words), 6)]
        text = target / "text.jsonl"
        text.write_text("".join(json.dumps({"text": each}) + "\n" for each in documents))
        _write_tokenizer(FOLDER / "tokenizer.json", documents)
        subprocess.run(
            [
                *(sys.executable, "-m", "fourfold", "data", "prepare", "--input", text.name),
                *("--tokenizer", "../../tokenizer.json", "--output-prefix", "tokens"),
            ],
            cwd=target,
            check=True,
        )
        text.unlink()
    (FOLDER / "tokenizer.json").unlink()


def _write_tokenizer(path: Path, documents: list[str]) -> None:
    from tokenizers import ByteLevelBPETokenizer

    if not path.exists():
        tokenizer = ByteLevelBPETokenizer()
        tokenizer.train_from_iterator(documents, 300, special_tokens=["<|endoftext|>"])
        tokenizer.save(str(path))


if __name__ == "__main__":
    make()
