"""The engine: everything to its left, put together and run.

`build_engine` builds a run: the process group, the data and its indices, the model, the optimizer.

Everything with an effect outside this process happens here, in this order, before an `Engine` is
given what it works with:

    connect the ranks -> open the data, rank 0 first -> claim the output directory ->
    build and initialize this rank's part of the model -> make the optimizer's state
"""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from pathlib import Path

from fourfold import heartbeat, storage
from fourfold.config import Config
from fourfold.device import select_device, set_numerics
from fourfold.engine.agreement import check_agreement, compare_hardware, facts_of
from fourfold.engine.in_loop import OpenInLoop, wanted_in_loop
from fourfold.engine.lock import Claim, claim
from fourfold.engine.loop import Engine
from fourfold.engine.monitoring import Prediction
from fourfold.engine.resuming import OpenForeign, check_foreign
from fourfold.engine.run_data import open_run_data
from fourfold.mesh import Mesh, connect
from fourfold.optim import build_optimizer
from fourfold.parallel import layout_of, parallelize

__all__ = ["Engine", "build_engine"]


def build_engine(
    config: Config,
    world_size: int = 1,
    prediction: Prediction | None = None,
    open_foreign: OpenForeign | None = None,
    open_in_loop: OpenInLoop | None = None,
) -> Engine:
    """The run that `config` describes, on this rank of `world_size`.

    `prediction` is what a plan predicted for this run; it is compared with what happens.
    `open_foreign` opens what `ckpt_dir` names where that is another program's checkpoint,
    `open_in_loop` what writes samples and measures tasks at evaluations, where any are wanted.
    """
    heartbeat.beat(0, "start")
    layout = layout_of(config)
    layout.check(world_size)
    set_numerics(config.Engine.matmul_precision, config.Engine.deterministic)
    device = select_device(config.Global.device)
    if device.type == "cuda" and world_size > 1:
        _record_flights(storage.local_path(config.Engine.save_load.output_dir))
    mesh = connect(layout, device, config.Distributed.timeout_seconds)
    check_agreement(mesh, facts_of(config))
    # Rank 0 makes the index caches, the others then find them.
    data = mesh.rank_0_first(
        lambda: open_run_data(config, layout, mesh.data_rank, checked=mesh.rank != 0)
    )
    check_agreement(mesh, {"the training data": data.train_fingerprint})
    data.notices += compare_hardware(mesh, device)
    # Before allocating memory that another run in the same directory may need.
    claimed = mesh.on_all_ranks(lambda: _claim(config, mesh))
    if open_foreign is not None:
        mesh.on_all_ranks(lambda: check_foreign(config, open_foreign))
    in_loop = None
    if open_in_loop is not None and wanted_in_loop(config):
        in_loop = mesh.on_all_ranks(lambda: open_in_loop(config, data))
    runner = parallelize(config, mesh, device)
    optimizer = build_optimizer(config, runner)
    return Engine(config, data, runner, optimizer, claimed, prediction, open_foreign, in_loop)


def _record_flights(output_dir: Path) -> None:
    """Have torch's flight recorder leave what each rank's collectives were when one times out."""
    place = output_dir / "logs" / socket.gethostname()
    with suppress(OSError):
        place.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")
    os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")
    os.environ.setdefault("TORCH_FR_DUMP_TEMP_FILE", str(place / "flight_"))


def _claim(config: Config, mesh: Mesh) -> Claim | None:
    if mesh.rank > 0:
        return None
    claimed = claim(storage.local_path(config.Engine.save_load.output_dir))
    claimed.keep()
    return claimed
