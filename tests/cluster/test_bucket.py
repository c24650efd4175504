"""Checkpoints in a bucket, written by two machines that share no directory."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from cluster.machines import REPOSITORY, Command, Machines, wait_until
from helpers.bucket import S3Server
from helpers.tiny_run import TINY

KILLS = int(os.environ.get("BUCKET_KILLS", "3"))
PORT = 5055
RUN = "s3://shelf/run"
SETTINGS = {
    "Distributed.mp_degree": 2,
    "Distributed.pp_degree": 2,
    "Engine.save_load.save_steps": 1,
    "Engine.save_load.output_dir": RUN,
    "Engine.max_steps": 400,
    "Engine.eval_freq": 0,
    "Engine.test_iters": 0,
    "Model.hidden_size": 256,
}


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[Machines]:
    pytest.importorskip("s3fs", reason="the extra `remote` is not installed")
    pytest.importorskip("moto", reason="moto is not installed")
    with Machines(2, tmp_path) as both:
        yield both


def variables(machines: Machines) -> dict[str, str]:
    return S3Server().variables() | {
        "AWS_ENDPOINT_URL": f"http://{machines.addresses[0]}:{PORT}",
        # A machine's own: nothing of the run is on a disk that both see.
        "XDG_CACHE_HOME": "/tmp/cache",
        "PYTHONPATH": os.pathsep.join(
            filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")])
        ),
    }


def overrides(**changed: object) -> list[str]:
    """The settings as options; `changed` ones by their last name."""
    values = {key: changed.get(key.rpartition(".")[2], value) for key, value in SETTINGS.items()}
    return [word for key, value in values.items() for word in ("-o", f"{key}={value}")]


def start(machines: Machines, config: Path, node: int) -> Command:
    where = ["--nnodes", "2", "--node-rank", str(node), "--master", "node0:29500", "--nproc", "2"]
    command = [sys.executable, "-m", "fourfold", "train", "-c", config, *where, *overrides()]
    return machines.start(node, command, variables(machines))


def newest(machines: Machines) -> int:
    """The newest step in the bucket, read by one process that knows nothing of the layout; all
    that are there are whole."""
    code = (
        "import json, torch; from fourfold import checkpoint, storage\n"
        f"names = checkpoint.candidates('{RUN}')\n"
        "if not names: print(json.dumps([0, []])); raise SystemExit\n"
        "wanted = {n: torch.empty(s, dtype=d)"
        " for n, (s, d) in checkpoint.tensor_names(names[0]).items()}\n"
        f"path, state = checkpoint.resume('{RUN}', wanted, lambda text: None)\n"
        "bad = [p for name in names for p in checkpoint.verify(name)]\n"
        "print(json.dumps([state['step'], bad]))\n"
    )
    done = machines.run(0, [sys.executable, "-c", code], variables(machines))
    assert done.returncode == 0, done.output()
    step, bad = json.loads(done.output().splitlines()[-1])
    assert bad == []
    return int(step)


def kill_during_uploads(machines: Machines, kills: int, seed: int) -> None:
    server = machines.start(
        0,
        [sys.executable, "-m", "moto.server", "-H", "0.0.0.0", "-p", str(PORT)],
        variables(machines),
    )
    server.until("Running on", 120)
    made = (
        "import urllib.request as u; "
        f"u.urlopen(u.Request('http://127.0.0.1:{PORT}/shelf', method='PUT'))"
    )
    assert machines.run(0, [sys.executable, "-c", made]).returncode == 0
    config = machines.directory / "tiny.yaml"
    config.write_text(yaml.safe_dump(TINY))
    chance, before = random.Random(seed), 0
    for number in range(kills):
        before = killed_once(machines, config, chance, before)
        print(f"kill {number + 1}: step_{before} is the newest in the bucket", flush=True)
    assert before > 0
    go_on_alone(machines, config, before)


def go_on_alone(machines: Machines, config: Path, before: int) -> None:
    """One process trains on from what four have left."""
    alone = overrides(mp_degree=1, pp_degree=1)
    command = [sys.executable, "-m", "fourfold", "train", "-c", config, *alone]
    job = machines.start(0, command, variables(machines))
    job.until(f"global step {before + 2},", 180)
    job.send_signal(signal.SIGTERM)
    assert job.wait(120) == 0, job.output()[-3000:]
    first = re.search(r"global step (\d+),", job.output())
    assert first and int(first[1]) == before + 1, job.output()[-3000:]
    assert newest(machines) >= before + 2


def killed_once(machines: Machines, config: Path, chance: random.Random, before: int) -> int:
    """Start both, kill them some steps later, and look at what is in the bucket."""
    jobs = [start(machines, config, node) for node in (0, 1)]
    goal = f"global step {before + chance.randint(3, 5)},"
    wait_until(
        lambda: (
            any(goal in job.output() for job in jobs)
            or any(job.returncode is not None for job in jobs)
            or goal in logs(machines)
        ),
        180,
        lambda: f"{goal}: {jobs[0].output()[-3000:]}",
    )
    ended = [job for job in jobs if job.returncode is not None]
    assert not ended, ended[0].output()[-3000:] + logs(machines)[-3000:]
    time.sleep(chance.uniform(0, 1))
    for job in chance.sample(jobs, 2):
        if job.returncode is None:
            job.send_signal(signal.SIGKILL)
    for job in jobs:
        job.wait(60)
    after = newest(machines)
    assert after >= before, "a committed checkpoint was lost"
    return after


def logs(machines: Machines) -> str:
    """What rank 0 printed, below the local face of the run on its machine."""
    place = machines.tmp(0) / "cache" / "fourfold" / "remote" / "s3" / "shelf" / "run" / "logs"
    files = sorted(place.rglob("*.log"), key=lambda path: path.stat().st_mtime)
    return "".join(path.read_text(errors="replace") for path in files[-4:])


def test_killed_during_upload_and_resumed_by_one_process(machines: Machines) -> None:
    kill_during_uploads(machines, KILLS, seed=2)
