"""The engine inside Ray Train."""

from __future__ import annotations

from pathlib import Path

import yaml
from helpers.schedulers import ROOT, in_schedulers, needs_schedulers
from helpers.tiny_run import TINY


@needs_schedulers
def test_two_workers_of_ray_train_together(tmp_path: Path) -> None:
    engine = TINY["Engine"] | {"save_load": {"save_steps": 4, "output_dir": str(tmp_path / "run")}}
    dataset = TINY["Data"]["dataset"] | {"cache_dir": str(tmp_path / "cache")}
    sizes = {"global_batch_size": 8, "micro_batch_size": 4}
    data = {"batch_size": sizes, "dataset": dataset}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(TINY | {"Engine": engine, "Data": data}))
    done = in_schedulers([ROOT / "examples/ray/train.py", "run.yaml", "2"], tmp_path, seconds=600.0)
    said = done.stdout + done.stderr
    assert done.returncode == 0, said[-4000:]
    assert "global step 8," in said and "dp2 x pp1" in said
    assert (tmp_path / "run" / "latest").read_text().strip() == "step_8"
