"""A layout that is left to Fourfold: what is chosen and kept, on what figures, and real runs."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from helpers.forked import fourfold
from helpers.tiny_run import FIXTURE, TINY

from fourfold.cli import main
from fourfold.cli.train import TrainRun
from fourfold.config import Config, read_config
from fourfold.config.auto_constraints import is_auto_requested
from fourfold.errors import ConfigError, UserError
from fourfold.metrics import read_jsonl
from fourfold.plan import auto
from fourfold.plan.auto import choose, describe_cluster
from fourfold.plan.cluster import parse_cluster, save_cluster
from fourfold.plan.doctor import hardware

DOCUMENTS = Path(__file__).parents[2] / "configs" / "gpt" / "auto_parallel"
SMALL = {
    "Model.hidden_size": 32,
    "Model.num_layers": 2,
    "Model.num_attention_heads": 4,
    "Model.ffn_hidden_size": 64,
    "Model.vocab_size": 1024,
    "Engine.max_steps": 2,
    "Engine.eval_iters": 1,
    "Engine.test_iters": 1,
    "Engine.mix_precision.use_pure_fp16": False,
    "Engine.tensorboard": False,
    "Data.batch_size.global_batch_size": 8,
    "Data.dataset.max_seq_len": 16,
    "Data.dataset.input_dir": FIXTURE,
    "Data.dataset.eos_token_id": 0,
}


@pytest.fixture(autouse=True)
def own_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cluster.yaml of whoever runs the tests is not theirs, nor is anything written to it."""
    monkeypatch.chdir(tmp_path)


def write_config(directory: Path, **sections: Any) -> Path:
    """The tiny run with other sections, everything it writes below `directory`."""
    values = json.loads(json.dumps(TINY | sections))
    values["Engine"]["save_load"]["output_dir"] = str(directory / "run")
    values["Data"]["dataset"]["cache_dir"] = str(directory / "cache")
    path = directory / "config.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


def train(*words: str | Path) -> str:
    """`fourfold train` as a user starts it; what it printed."""
    result = fourfold("train", *words)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def refused(capsys: pytest.CaptureFixture[str], *words: str | Path) -> str:
    """What the command says when it ends with code 2."""
    with pytest.raises(SystemExit) as ended:
        main([str(word) for word in words])
    assert ended.value.code == 2
    return capsys.readouterr().err


def degrees(config: Config) -> tuple[int | None, int, int, int]:
    layout = config.Distributed
    return layout.dp_degree, layout.pp_degree, layout.sharding.sharding_degree, layout.mp_degree


# -- real runs -------------------------------------------------------------------------------------


def test_two_processes_get_a_layout_its_reasons_and_its_reckoning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, run = write_config(tmp_path), tmp_path / "run"
    log = train("-c", config, "--auto", "--nproc", "2")
    before, _, after = log.partition("global step 1,")
    assert "legal layouts of 2 process(es)" in before and "auto: next" in before
    assert "`fourfold doctor --nproc 2` measures this machine" in before
    chosen = choose(read_config(config), 2)
    layout = "dp{} x pp{} x sharding{} x mp{}".format(*degrees(chosen.config))
    assert f"auto: chosen {layout.replace(' x ', ' ')}" in before and f"layout: {layout}" in before
    assert chosen.expected.line() in before
    assert after.count("s a step, measured") == 1

    (event,) = [r for r in read_jsonl(run / "metrics.jsonl") if r.get("event") == "prediction"]
    assert event["predicted_step_seconds"] == chosen.expected.step_seconds
    assert event["predicted_bytes"] == round(chosen.expected.bytes_per_rank)
    assert event["measured_step_seconds"] > 0 and event["measured_bytes"] > 1e7

    # The layout that ran is the one to calibrate with.
    (tmp_path / "chosen.yaml").write_text(chosen.config.to_yaml())
    save_cluster(describe_cluster(2, None, "cpu")[0], tmp_path / "before.yaml", "Typical.")
    words = ["--cluster", "before.yaml", "--calibrate", str(run), "--out", "after.yaml"]
    with pytest.raises(SystemExit) as ended:
        main(["plan", "-c", "chosen.yaml", *words])
    assert ended.value.code == 0
    said = capsys.readouterr().out
    shown = re.search(
        r"8 steps of 2 process\(es\), (\S+) s each .* predicted (\S+) s .* calibrated (\S+) s", said
    )
    assert shown is not None, said
    measured, predicted, calibrated = map(float, shown.groups())
    assert predicted == pytest.approx(event["predicted_step_seconds"], rel=1e-3)
    assert abs(calibrated / measured - 1) <= abs(predicted / measured - 1)
    again = choose(read_config(config), 2, "after.yaml")
    assert "(--cluster after.yaml)" in again.config.notices[0]


@pytest.mark.slow
def test_torchrun_ranks_choose_alike_from_a_cluster_file_and_keep_a_degree(tmp_path: Path) -> None:
    """Were one to choose otherwise, their groups would not meet and the run would hang."""
    config = write_config(tmp_path, Distributed="auto")
    save_cluster(parse_cluster("1x2xA100-40G"), tmp_path / "ours.yaml", "A machine of our own.")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        master = f"127.0.0.1:{probe.getsockname()[1]}"
    nodes = ["--nnodes", "1", "--node-rank", "0", "--master", master, "--nproc", "2"]
    fixed = ["-o", "Distributed.mp_degree=2", "-o", "Engine.max_steps=2"]
    log = train("-c", config, *nodes, *fixed, "--cluster", tmp_path / "ours.yaml")
    assert "with mp=2 as given, on 1x2xA100-40G" in log and "ours.yaml)" in log
    assert "layout: dp1 x pp1 x sharding1 x mp2" in log
    assert "global step 2," in log and "s a step, measured" in log


def test_the_documents_auto_parallel_form_trains(tmp_path: Path) -> None:
    values = yaml.safe_load((DOCUMENTS / "configs_345M_dp8.yaml").read_text())
    del values["Model"]["use_recompute"], values["Distributed"]
    values["Engine"]["use_recompute"] = True
    assert set(values["Data"]["batch_size"]) == {"global_batch_size"}
    path = tmp_path / "document.yaml"
    path.write_text(yaml.safe_dump(values))
    places = {"Engine.save_load.output_dir": "run", "Data.dataset.cache_dir": "cache"}
    words = [f"-o{name}={value}" for name, value in (SMALL | places).items()]
    log = train("-c", path, "--auto", "--nproc", "2", *words)
    assert "Engine.use_recompute is read as Model.use_recompute" in log
    assert "auto: chosen" in log and "8 samples x 16 tokens" in log
    assert "global step 2," in log and "s a step, measured" in log


# -- every process chooses the same ----------------------------------------------------------------


@pytest.mark.slow
def test_the_choice_does_not_depend_on_the_process(tmp_path: Path) -> None:
    config = write_config(tmp_path, Distributed={"auto": True})
    script = (
        "import sys; from pathlib import Path; from fourfold.plan.auto import choose; "
        "from fourfold.config import read_config; "
        "made = choose(read_config(Path(sys.argv[1])), 8, '2x4xA100-40G'); "
        "print(made.config.to_yaml(), made.expected, *made.config.notices, sep='\\n')"
    )
    running = [
        subprocess.Popen(
            [sys.executable, "-c", script, str(config)],
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONHASHSEED": seed, "RANK": rank},
        )
        for seed, rank in (("1", "0"), ("2", "7"))
    ]
    said = [process.communicate(timeout=60)[0] for process in running]
    assert [process.returncode for process in running] == [0, 0]
    assert said[0] == said[1] and "auto: chosen" in said[0]


# -- what is kept, and what is free ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["Distributed.mp_degree=2"], {"Distributed.mp_degree": 2}),
        (["Distributed.mp_degree=1", "Distributed.pp_degree=1"], {"Distributed.mp_degree": 1}),
        (["Distributed.pp_degree=2"], {"Distributed.pp_degree": 2}),
        (["Distributed.dp_degree=4"], {"Distributed.dp_degree": 4}),
        (
            ["Distributed.sharding.sharding_degree=2", "Distributed.sharding.sharding_stage=3"],
            {"Distributed.sharding.sharding_degree": 2, "Distributed.sharding.sharding_stage": 3},
        ),
        (["Data.batch_size.micro_batch_size=1"], {"Data.batch_size.micro_batch_size": 1}),
        (["Engine.use_recompute=True"], {"Model.recompute_granularity": "full"}),
        (
            ["Model.use_recompute=True", "Model.recompute_granularity=core_attn"],
            {"Model.recompute_granularity": "core_attn"},
        ),
        (["Model.sequence_parallel=True"], {"Model.sequence_parallel": True}),
        (["Distributed.pp_schedule=GPipe"], {"Distributed.pp_schedule": "GPipe"}),
        (["Distributed.pp_layers=[1,1]"], {"Distributed.pp_degree": 2}),
    ],
)
def test_what_an_override_sets_is_kept(
    tmp_path: Path, overrides: list[str], expected: dict[str, object]
) -> None:
    chosen = choose(read_config(write_config(tmp_path), overrides), 4).config
    assert chosen.Data.batch_size.global_batch_size == 8 and not chosen.Distributed.auto
    assert "as given" in chosen.notices[0]
    for path, value in expected.items():
        section: Any = chosen
        for name in path.split("."):
            section = getattr(section, name)
        assert section == value, path


def test_degrees_of_the_file_are_kept_and_details_of_its_layout_are_not(tmp_path: Path) -> None:
    written = {"auto": True, "mp_degree": 2, "pp_layers": [2], "sharding": {"sharding_degree": 1}}
    model = TINY["Model"] | {"use_recompute": True, "sequence_parallel": True}
    config = write_config(tmp_path, Distributed=written, Model=model)
    chosen = choose(read_config(config), 4).config
    assert chosen.Distributed.mp_degree == 2 and "with mp=2 as given" in chosen.notices[0]
    assert chosen.Distributed.pp_layers is None and not chosen.Model.use_recompute
    assert chosen.Data.batch_size.micro_batch_size != 4, "the file's"


def test_layers_listed_for_the_files_stages_stay_with_them(tmp_path: Path) -> None:
    written = {"auto": True, "pp_degree": 2, "pp_layers": [2, 1]}
    config = write_config(tmp_path, Distributed=written, Model=TINY["Model"] | {"num_layers": 3})
    chosen = choose(read_config(config), 4).config
    assert chosen.Distributed.pp_degree == 2 and chosen.Distributed.pp_layers == [2, 1]


def test_without_a_global_batch_a_local_one_for_each_data_rank_is_taken(tmp_path: Path) -> None:
    data = TINY["Data"] | {"batch_size": {"local_batch_size": 4}}
    config = write_config(tmp_path, Data=data)
    assert choose(read_config(config), 4).config.Data.batch_size.global_batch_size == 16
    halved = choose(read_config(config, ["Distributed.mp_degree=2"]), 4).config
    assert halved.Data.batch_size.global_batch_size == 8


def test_a_batch_that_grows_is_one_the_layout_can_cut_at_every_size(tmp_path: Path) -> None:
    chosen = choose(read_config(write_config(tmp_path), ["Data.batch_size.rampup=[2,2,16]"]), 4)
    sizes = chosen.config.Data.batch_size
    dp, _, sharding, _ = degrees(chosen.config)
    assert dp is not None and 2 % (sizes.micro_batch_size * dp * sharding) == 0
    assert chosen.expected.global_batch == 8


# -- figures of the machine ------------------------------------------------------------------------


def test_what_doctor_wrote_in_the_directory_is_used(tmp_path: Path) -> None:
    typical, _ = describe_cluster(2, None, "cpu")
    measured = typical.device.model_copy(update={"peak_tflops_fp32": 0.2, "name": "bench"})
    cluster = typical.model_copy(update={"device": measured})
    save_cluster(cluster, Path("cluster.yaml"), "Measured.")
    found, origin = describe_cluster(2, None, "cpu")
    assert found.device.peak_tflops_fp32 == 0.2
    assert origin == f"{tmp_path / 'cluster.yaml'}, measured on an unnamed machine"
    shared, _ = describe_cluster(8, None, "cpu")
    assert shared.world == 8 and shared.device.peak_tflops_fp32 == pytest.approx(0.05)
    config = write_config(tmp_path)
    chosen = choose(read_config(config), 2).config.notices[0]
    assert f"on 1x2xbench ({tmp_path / 'cluster.yaml'}, measured on" in chosen
    faster = choose(read_config(config), 2, "1x2xA100-40G")
    assert faster.expected.step_seconds != choose(read_config(config), 2).expected.step_seconds


def test_figures_of_another_machine_are_named(tmp_path: Path) -> None:
    typical, _ = describe_cluster(2, None, "cpu")
    elsewhere = typical.model_copy(update={"measured_on": "node17, Some Processor"})
    save_cluster(elsewhere, Path("cluster.yaml"), "Measured.")
    _, origin = describe_cluster(2, None, "cpu")
    assert "measured on node17, Some Processor, while this machine is" in origin
    assert "fourfold doctor --force" in origin
    here = typical.model_copy(update={"measured_on": f"node17, {hardware()}"})
    save_cluster(here, Path("cluster.yaml"), "Measured.")
    _, origin = describe_cluster(2, None, "cpu")
    assert origin.endswith(f"measured on node17, {hardware()}")


@pytest.mark.parametrize(
    ("cluster", "world", "nodes"),
    [
        ("1x8xH100", 12, "2x6"),
        ("1x4xH100", 6, "2x3"),
        ("2x8xH100", 16, "2x8"),
        ("8xH100", 5, "1x5"),
    ],
)
def test_ranks_that_do_not_fill_the_nodes_get_a_layout_of_their_own(
    tmp_path: Path, cluster: str, world: int, nodes: str
) -> None:
    config = write_config(tmp_path)
    chosen = choose(
        read_config(config, ["Data.batch_size.global_batch_size=120"]), world, cluster
    ).config
    dp, pp, sharding, mp = degrees(chosen)
    assert (dp or 1) * pp * sharding * mp == world
    assert f"on {nodes}xH100-80G (--cluster {cluster}" in chosen.notices[0]
    assert ("do not fill nodes of" in chosen.notices[0]) is (nodes in ("2x6", "2x3"))


def test_gpus_of_several_nodes_are_not_taken_for_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for index in range(4):
        card = tmp_path / "gpus" / f"0000:0{index}"
        card.mkdir(parents=True)
        (card / "information").write_text("Model: \t\t NVIDIA A100-SXM4-40GB\nIRQ: 5\n")
    monkeypatch.setattr(auto, "GPU_MODELS", tmp_path / "gpus")
    assert str(describe_cluster(8, None, "auto")[0]) == "2x4xA100-40G"
    assert str(describe_cluster(2, None, "cuda")[0]) == "1x2xA100-40G"
    assert describe_cluster(2, None, "cpu")[0].device.is_cpu
    save_cluster(describe_cluster(2, None, "cpu")[0], Path("cluster.yaml"), "Measured.")
    found, _ = describe_cluster(4, None, "auto")
    assert not found.device.is_cpu, "figures of the processor say nothing of the GPUs"


# -- what cannot be --------------------------------------------------------------------------------


def test_a_model_that_fits_nowhere_is_refused_with_the_arithmetic(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = ["-oModel.hidden_size=12288", "-oModel.num_layers=96", "-oModel.num_attention_heads=96"]
    said = refused(capsys, "train", "-c", write_config(tmp_path), "--auto", "--nproc", "2", *sizes)
    assert "no layout fits 1x2xCPU" in said and "optimizer" in said and "GiB more than" in said
    assert "smallest cluster of CPU that would" in said and "Traceback" not in said
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--auto", "-oDistributed.mp_degree=3"], "with mp=3 is legal: dp * pp * sharding * mp"),
        (["--auto", "-oDistributed.dp_degree=4"], "with dp=4 is legal"),
        (["--auto", "-oDistributed.pp_degree=2", "-oModel.num_layers=1"], "pp at most 1 layers"),
        (["--auto", "-oData.batch_size.micro_batch_size=3"], "global batch of 8"),
        (["--auto", "-oData.batch_size.local_batch_size=4"], "follows from the layout"),
        (["--auto", "--cluster", "2xCPU"], "fourfold doctor --nproc 2"),
        (["--auto", "--cluster", "nowhere.yaml"], "cannot be read"),
        (["--auto", "-oModel.hidden_size=31"], "hidden_size"),
        (["--cluster", "2xA100-40G", "-oData.batch_size.local_batch_size=4"], "add --auto"),
    ],
)
def test_contradictions_are_sentences(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    shown = refused(capsys, "train", "-c", write_config(tmp_path), "--nproc", "2", *words)
    assert said in shown and "Traceback" not in shown


def test_three_processes_for_a_batch_of_eight(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no layout of 3 .* change the batch, or start another"):
        choose(read_config(write_config(tmp_path)), 3)


def test_a_layout_yet_to_be_chosen_need_not_fit_together_as_written(tmp_path: Path) -> None:
    config = write_config(tmp_path, Distributed={"auto": True, "mp_degree": 2})
    resolved, expected = TrainRun(config, [], auto=False, cluster=None).resolve(2)
    assert expected is not None and degrees(resolved) == (1, 1, 1, 2)


def test_a_file_that_does_not_ask_for_it_keeps_all_of_its_problems(tmp_path: Path) -> None:
    config = write_config(tmp_path, Distributed={"mp_degree": 3})
    wrong = ["Model.num_layer=4"]
    assert not is_auto_requested(read_config(config, wrong))
    with pytest.raises(ConfigError, match=r"(?s)mp_degree=3.*did you mean num_layers"):
        TrainRun(config, wrong, auto=False, cluster=None).resolve(2)
