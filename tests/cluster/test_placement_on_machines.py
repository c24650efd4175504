"""Ranks that were dealt out to machines in turn, on machines whose own names are the loopback's."""

from __future__ import annotations

import sys
from pathlib import Path

import yaml
from cluster.machines import Command, Machines
from launch.test_launch_commands import TINY


def start(machines: Machines, rank: int, **other: str) -> Command:
    """A rank as a launcher that deals them out starts it; its machine is rank % 2."""
    node = rank % 2
    # As Debian writes it: this machine's name has no address that others know.
    hosts = machines.directory / f"hosts{node}"
    lines = ["127.0.0.1 localhost", f"127.0.1.1 node{node}"]
    lines += [f"10.77.0.{10 + 1 - node} node{1 - node}"]
    hosts.write_text("\n".join(lines) + "\n")
    variables = {"RANK": str(rank), "WORLD_SIZE": "4", "LOCAL_RANK": str(rank // 2)}
    variables |= {"MASTER_ADDR": "10.77.0.10", "MASTER_PORT": "29511"} | other
    inside = 'mount --bind "$0" /etc/hosts && exec "$@"'
    command = [sys.executable, "-m", "fourfold", "train", "-c", "run.yaml"]
    return machines.start(
        node, ["unshare", "--mount", "sh", "-c", inside, hosts, *command], variables
    )


def test_gloo_takes_the_network_of_the_others_and_groups_over_machines_are_named(
    tmp_path: Path,
) -> None:
    engine = TINY["Engine"] | {"save_load": {"output_dir": str(tmp_path / "run")}}
    dataset = TINY["Data"]["dataset"] | {"cache_dir": str(tmp_path)}
    data = TINY["Data"] | {"dataset": dataset}
    layout = {"Distributed": {"mp_degree": 2, "timeout_seconds": 60}}
    written = TINY | {"Engine": engine, "Data": data} | layout
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(written))
    with Machines(2, tmp_path) as machines:
        ranks = [start(machines, rank) for rank in range(4)]
        codes = [rank.wait(180) for rank in ranks]
        said = ranks[0].output()
        assert codes == [0] * 4, said + ranks[1].output()
        assert "2 machines: node0 (ranks 0, 2 at 10.77.0.10), node1 (ranks 1, 3 at" in said
        assert "node0: its own name resolves to 127.0.1.1" in said
        assert "gloo uses eth0 (10.77.0.10)" in said
        assert "2 of 2 model-parallel groups span machines (ranks 0, 1 are on node0 and" in said
        assert "srun --distribution=block" in said
        # A wrong interface is not repaired: it is the user's word.
        ranks = [
            start(machines, rank, GLOO_SOCKET_IFNAME="eth9", MASTER_PORT="29512")
            for rank in range(4)
        ]
        assert [rank.wait(120) for rank in ranks] == [2] * 4
        assert all("GLOO_SOCKET_IFNAME=eth9 on node" in rank.output() for rank in ranks)
