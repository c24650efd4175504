"""Train inside Ray Train, on a Ray cluster or on this machine.

Ray places the workers and gives each its rank and its GPUs; Fourfold's engine trains in them, with
the numbers it has under any other launcher. Its checkpoints are the run's own, in a directory that
all machines share: a worker that Ray starts again (`FailureConfig`) resumes from the last one.

The engine makes its own process groups, so the one that Ray's TorchTrainer has made is given back
first.
"""

from __future__ import annotations

import os
from argparse import ArgumentParser
from pathlib import Path


def train_loop_per_worker(settings: dict[str, str]) -> None:
    import ray.train
    import torch.distributed as dist

    from fourfold.config import read_config
    from fourfold.engine import build_engine

    dist.destroy_process_group()
    # A worker on each GPU sees its own only, whatever its local rank.
    os.environ["LOCAL_RANK"] = str(ray.train.get_context().get_local_rank())
    world_size = ray.train.get_context().get_world_size()
    # Relative paths in the file are those of the one who started this.
    os.chdir(settings["directory"])
    build_engine(read_config(Path(settings["file"]), []).load(world_size), world_size).fit()


def main(file: str, workers: int) -> None:
    import ray
    import torch
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    ray.init(ignore_reinit_error=True)
    trainer = TorchTrainer(
        train_loop_per_worker,
        train_loop_config={"file": file, "directory": str(Path.cwd())},
        # One machine after the other, so that model-parallel groups stay inside machines.
        scaling_config=ScalingConfig(
            num_workers=workers, use_gpu=torch.cuda.is_available(), placement_strategy="PACK"
        ),
        run_config=RunConfig(failure_config=FailureConfig(max_failures=3)),
    )
    trainer.fit()


if __name__ == "__main__":
    parser = ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("config", help="the YAML file of the run")
    parser.add_argument("workers", type=int, help="number of workers, one rank each")
    options = parser.parse_args()
    main(options.config, options.workers)
