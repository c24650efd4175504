"""Every option of every verb is used or refused: with it and without it, something is different.

The verbs and their options are those of the command itself, so one that is new and has no row here
fails. A row is the command without the option and with it (`...` stands for the words without), and
what only the second shows: in its output, its exit code or the files it leaves.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import shlex
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
import yaml
from helpers.tiny_text_run import make_run, sentences

from fourfold import serve
from fourfold.cli import command_line, main
from fourfold.cli.plan import MODES, PLANNED
from fourfold.cli.quickstart import make_data
from fourfold.config import Config, load_config
from fourfold.engine import build_engine

LOGS = Path(__file__).parents[1] / "metrics"
MEGATRON = Path(__file__).parents[1] / "fixtures" / "megatron_single"
FLEETX = Path(__file__).parents[1] / "fixtures" / "fleetx_tiny"
LARGEST_SHOWN = 3000


@dataclass(frozen=True)
class Row:
    without: str
    words: str
    shows: str  # a pattern
    slow: bool = False
    before: str = ""  # a command that both come after


TRAIN, PLAN = "train -c short.yaml", "plan -c run.yaml --cluster A100"
BENCH = "bench -c short.yaml --iterations 3 --warmup 1"
TARGET = f"target {LOGS / 'log_one_gpu.txt'}"
GENERATE, EVALUATE = "generate -c run.yaml --prompt cat", "evaluate -c run.yaml"
SERVE, LAYOUT = "serve -c run.yaml", "layout -c short.yaml"
CALIBRATE = "plan -c steps.yaml --cluster A100 --calibrate steps"
DRY_RUN = "plan --dry-run -c short.yaml"
DOCTOR = "doctor --seconds 0.05"
REHEARSE = "rehearse -c short.yaml"
REPLAY, DATA_AT = "replay new --step 1", "data at -c short.yaml"
BISECT = (
    "bisect -c short.yaml -o Model.hidden_dropout_prob=0 -o Model.attention_probs_dropout_prob=0 "
    "--b-override Data.batch_size.micro_batch_size=1"
)
SUBMIT = "submit -c short.yaml --to slurm --nodes 1 --nproc 1"
ACCEPT = "accept --quick --device cpu --nproc 1 --only memory"
MUP_CHECK = "mup check -c run.yaml --widths 16,32 --steps 1"
MUP_SWEEP = (
    "mup sweep -c run.yaml --widths 16,32 --steps 10 --learning-rates 0.0001,0.01,10 "
    "-o Data.dataset.max_seq_len=8"
)
QUICKSTART = "quickstart -c short.yaml --max-mb 0.1 -o Engine.max_steps=1"
PREPARE = "data prepare -i texts.jsonl --output-prefix new --tokenizer tokenizer.json --workers 1"
LEARN = "data train-tokenizer -i texts.jsonl --output new.json --vocab-size 280"
INSPECT, VERIFY = "data inspect data", "data verify data"
MERGE = "data merge data/words data/words --output-prefix new"
SPLIT = "data split data/words --parts 1,1 --output-prefix new"
CONVERT = "data convert data/words --to fleetx --output-prefix new"
BLEND = "data blend --data '1 data/words' --samples 10 --seq-len 8"
REFUSED = r"^exit 2\n[\s\S]*"

ROWS: dict[str, Row] = {
    "--version": Row("", "--version", r"torch \d"),
    "--show-completion": Row("", "--show-completion bash", "complete -o default"),
    "--install-completion": Row("", "--install-completion bash", "completion installed"),
    # train
    "train --config": Row("train", TRAIN, "step_2/"),
    "train --override": Row(TRAIN, "... -o Engine.max_steps=3", "step_3/"),
    "train --nproc": Row(TRAIN, "... --nproc 2", "layout: dp2", slow=True),
    "train --max-restarts": Row(TRAIN, "... --max-restarts 1", REFUSED + "--max-restarts"),
    "train --hang-seconds": Row(TRAIN, "... --hang-seconds 9", REFUSED + "--hang-seconds"),
    "train --nnodes": Row(TRAIN, "... --nnodes 2", REFUSED + "--master"),
    "train --node-rank": Row(TRAIN, "... --node-rank 1", REFUSED + "--nnodes"),
    "train --master": Row(TRAIN, "... --master a:1", REFUSED + "--nnodes"),
    "train --lost-seconds": Row(TRAIN, "... --lost-seconds 9", REFUSED + "--lost-seconds"),
    "train --stopped-exit-code": Row(
        TRAIN, "... --stopped-exit-code 300", REFUSED + "--stopped-exit-code"
    ),
    "train --auto": Row(TRAIN, "... --auto", "auto: chosen dp1"),
    "train --cluster": Row(f"{TRAIN} --auto", "... --cluster A100", r"\(--cluster A100\)"),
    # bench
    "bench --config": Row("bench", BENCH, "tokens"),
    "bench --override": Row(BENCH, "... -o Engine.max_steps=2", REFUSED + "--iterations"),
    "bench --nproc": Row(BENCH, "... --nproc 2", "on 2 device", slow=True),
    "bench --iterations": Row(BENCH, "... --iterations 4", "iteration +4/"),
    "bench --warmup": Row(BENCH, "... --warmup 0", "first 0|0 left out|0 of"),
    "bench --json": Row(BENCH, "... --json", '"median_seconds"'),
    # target
    "target run": Row("target --loss 20", f"{TARGET} --loss 20", "^exit 0"),
    "target --step": Row(f"{TARGET} --loss 20", "... --step 1", "step 1|cannot tell"),
    "target --loss": Row(TARGET, "... --loss 0.1", "not met"),
    "target --ppl": Row(f"{TARGET} --loss 20", "... --ppl 1.1", "not met +ppl"),
    "target --tgs": Row(f"{TARGET} --loss 20", "... --tgs 1e9", "not met"),
    "target --preset": Row(f"{TARGET} --loss 20", "... --preset gpt3-175b", "gpt3-175b is"),
    # generate
    "generate --config": Row("generate", GENERATE, "Generation: cat"),
    "generate --override": Row(
        GENERATE, "... -o Generation.num_return_sequences=2", r"(?s)Prompt: cat.*Prompt: cat"
    ),
    "generate --prompt": Row(GENERATE, "... --prompt dog", "Generation: dog"),
    "generate --prompt-file": Row(GENERATE, "... --prompt-file texts.txt", "Prompt: one text"),
    "generate --nproc": Row(
        f"{GENERATE} -o Distributed.mp_degree=2", "... --nproc 3", REFUSED + "the 3 processes"
    ),
    # evaluate
    "evaluate --config": Row("evaluate", EVALUATE, "loss"),
    "evaluate --override": Row(EVALUATE, "... -o Eval.max_tokens=100", r"tokens +96\b"),
    "evaluate --output": Row(EVALUATE, "... --output found.json", "found.json"),
    "evaluate --json": Row(EVALUATE, "... --json", '"numbers"'),
    # serve, of which only what reaches the server is looked at: tests/serve has the rest
    "serve --config": Row("serve", SERVE, "name='run'"),
    "serve --override": Row(SERVE, "... -o Inference.weights=float16", "weights='float16'"),
    "serve --host": Row(SERVE, "... --host ::1", "host='::1'"),
    "serve --port": Row(SERVE, "... --port 8123", "port=8123"),
    "serve --token-file": Row(SERVE, "... --token-file token", "token='a-token-of-the-tests'"),
    "serve --access-log": Row(SERVE, "... --no-access-log", "logs_requests=False"),
    "serve --slots": Row(SERVE, "... --slots 3", "slots=3"),
    "serve --queue": Row(SERVE, "... --queue 5", "waiting=5"),
    "serve --timeout": Row(SERVE, "... --timeout 7", "request_seconds=7"),
    # convert
    "convert source": Row("convert none new --to hf", "convert output new --to hf", "^exit 0"),
    "convert target": Row("convert output --to hf", "convert output new --to hf", "^exit 0"),
    "convert --to": Row("convert output new", "... --to hf", "new/model.safetensors"),
    "convert --num-attention-heads": Row(
        "convert foreign/fleetx new --to fourfold", "... --num-attention-heads 4", "4 heads"
    ),
    "convert --vocab-size": Row(
        "convert output new --to hf", "... --vocab-size 300", "vocabulary of 300"
    ),
    "convert --megatron-names": Row(
        "convert output new --to megatron", "... --megatron-names core-local", "impl local"
    ),
    "convert --tp": Row("convert output new --to megatron", "... --tp 2", "mp_rank_01"),
    "convert --pp": Row("convert output new --to megatron", "... --pp 2", "mp_rank_00_001"),
    "convert --tokenizer": Row(
        "convert output new --to hf", "... --tokenizer none.json", REFUSED + "none.json"
    ),
    "convert --force": Row(
        "convert output made --to hf --tokenizer new.json",
        "... --force",
        "note: .*another tokenizer",
        before=LEARN,
    ),
    "convert --dtype": Row(
        "convert output new --to hf", "... --dtype bfloat16", r'"torch_dtype": "bfloat16"'
    ),
    # layout
    "layout --config": Row("layout", LAYOUT, "layout dp1"),
    "layout --override": Row(LAYOUT, "... -o Distributed.mp_degree=2", "mp2"),
    "layout --world": Row(LAYOUT, "... --world 2", "layout dp2"),
    # plan
    "plan --config": Row("plan --cluster A100", PLAN, "legal layouts"),
    "plan --override": Row(PLAN, "... -o Model.num_layers=5", r"0\.075\d+ M parameters"),
    "plan --cluster": Row("plan -c run.yaml", PLAN, "legal layouts"),
    "plan --fix": Row(PLAN, "... --fix recompute=full", r"\n1 .*recompute full"),
    "plan --top": Row(f"{PLAN} --cluster 2xA100", "... --top 1", r"^(?![\s\S]*\n2 )"),
    "plan --tokens": Row(PLAN, "... --tokens 300B", "days"),
    "plan --price": Row(f"{PLAN} --tokens 300B", "... --price 2", "per device-hour"),
    "plan --explain": Row(PLAN, "... --explain 1", "time of one step"),
    "plan --plot": Row(PLAN, "... --plot new.html", "new.html"),
    "plan --emit": Row(PLAN, "... --emit new.yaml", "planned for"),
    "plan --json": Row(PLAN, "... --json", '"candidates"'),
    "plan --calibrate": Row(PLAN, CALIBRATE, "Calibrated"),
    "plan --out": Row(CALIBRATE, "... --out new.yaml", "written: new.yaml"),
    "plan --force": Row(f"{CALIBRATE} --out old.yaml", "... --force", "^exit 0"),
    "plan --dry-run": Row("plan -c run.yaml", DRY_RUN, "rank 0 of 1"),
    "plan --rank": Row(f"{DRY_RUN} --world 2", "... --rank 1", "rank 1 of 2"),
    "plan --world": Row(DRY_RUN, "... --world 2", "rank 0 of 2"),
    "plan --self-test": Row("plan", "... --self-test", "met  ", slow=True),
    "plan --rows": Row("plan --rows none.csv", "... --self-test", "none.csv: cannot be read"),
    # rehearse
    "rehearse --config": Row("rehearse", REHEARSE, "all ranks end"),
    "rehearse --override": Row(REHEARSE, "... -o Distributed.mp_degree=2", "2 ranks"),
    "rehearse --world": Row(REHEARSE, "... --world 2", "2 ranks"),
    "rehearse --micro-batches": Row(
        f"{REHEARSE} -o Distributed.pp_degree=2 -o Data.batch_size.micro_batch_size=1",
        "... --micro-batches 3",
        "3 micro-batch",
    ),
    "rehearse --all-ranks": Row(
        f"{REHEARSE} --world 4",
        "... --all-ranks",
        "of which 4 run",
    ),
    "rehearse --processes": Row(f"{REHEARSE} --world 2", "... --processes", "equal to one process"),
    "rehearse --json": Row(REHEARSE, "... --json", '"findings"'),
    # replay, prove, bisect, diff
    "replay run": Row("replay --step 1", "... new", "step 1", before=TRAIN, slow=True),
    "replay --step": Row("replay new", "... --step 2", "step 2", before=TRAIN, slow=True),
    "replay --per-sample": Row(REPLAY, "... --per-sample", "samples by mean loss", before=TRAIN),
    "replay --nproc": Row(REPLAY, "... --nproc 3", REFUSED + "3", before=TRAIN, slow=True),
    "replay --override": Row(
        REPLAY, "... -o Engine.nothing=1", REFUSED + "nothing", before=TRAIN, slow=True
    ),
    "replay --tokenizer": Row(
        f"{REPLAY} --per-sample",
        "... --tokenizer none.json",
        REFUSED + "none.json",
        before=TRAIN,
        slow=True,
    ),
    "replay --top": Row(
        f"{REPLAY} --per-sample", "... --top 1", r"\(1 of ", before=TRAIN, slow=True
    ),
    "replay --json": Row(REPLAY, "... --json", r"^exit 0\n\{", before=TRAIN, slow=True),
    "prove run": Row("prove", "... new", "^exit 0", before=TRAIN, slow=True),
    "prove --sample": Row(
        "prove new", "... --sample 1", "recomputed with", before=TRAIN, slow=True
    ),
    "prove --all": Row("prove new", "... --all", "all 2 steps, recomputed", before=TRAIN),
    "prove --seed": Row("prove new --sample 1", "... --seed x", REFUSED, before=TRAIN, slow=True),
    "prove --nproc": Row(
        "prove new --sample 1", "... --nproc 3", "dp_degree=3", before=TRAIN, slow=True
    ),
    "prove --override": Row(
        "prove new --sample 1", "... -o Engine.nothing=1", "Engine.nothing", before=TRAIN, slow=True
    ),
    "prove --json": Row("prove new", "... --json", r"^exit 0\n\{", before=TRAIN, slow=True),
    "bisect --config": Row("bisect", BISECT, "^exit 0", slow=True),
    "bisect --override": Row(BISECT, "... -o Engine.nothing=1", REFUSED + "nothing", slow=True),
    "bisect --a-override": Row(
        BISECT, "... --a-override Engine.nothing=1", REFUSED + "nothing", slow=True
    ),
    "bisect --b-override": Row(
        BISECT, "... --b-override Engine.nothing=1", REFUSED + "nothing", slow=True
    ),
    "bisect --step": Row(BISECT, "... --step 2", "step 2", slow=True),
    "bisect --from": Row(BISECT, "... --from none", REFUSED + "none", slow=True),
    "bisect --a-python": Row(BISECT, "... --a-python none", REFUSED + "none", slow=True),
    "bisect --b-python": Row(BISECT, "... --b-python none", REFUSED + "none", slow=True),
    "bisect --a-threads": Row(BISECT, "... --a-threads 0", REFUSED + "--a-threads", slow=True),
    "bisect --b-threads": Row(BISECT, "... --b-threads 0", REFUSED + "--b-threads", slow=True),
    "bisect --keep": Row(BISECT, "... --keep kept", "kept/", slow=True),
    "bisect --record": Row(BISECT, "... --record kept", "kept/", slow=True),
    "bisect --json": Row(BISECT, "... --json", r"^exit 0\n\{", slow=True),
    "diff run": Row("diff", "... new steps", "steps in both logs", before=TRAIN),
    "diff other": Row("diff new", "... steps", "steps in both logs", before=TRAIN, slow=True),
    "diff --explain": Row(
        "diff new steps", "... --explain", "replay", before=f"{TRAIN} -o Global.seed=8", slow=True
    ),
    "diff --plot": Row(
        "diff new steps", "... --plot losses.png", "losses.png", before=TRAIN, slow=True
    ),
    "diff --json": Row("diff new steps", "... --json", r"^exit \d\n\{", before=TRAIN, slow=True),
    "data at run": Row("data at", "... steps", "^exit 0"),
    "data at --config": Row("data at", "... -c short.yaml", "^exit 0"),
    "data at --step": Row(DATA_AT, "... --step 2", "step 2"),
    "data at --override": Row(DATA_AT, "... -o Engine.nothing=1", REFUSED + "nothing"),
    "data at --layout": Row(DATA_AT, "... --layout detail", "rank 0"),
    "data at --tokenizer": Row(DATA_AT, "... --tokenizer none.json", REFUSED + "none.json"),
    "data at --json": Row(DATA_AT, "... --json", r'"step": 1'),
    # watch, report
    "watch runs": Row("watch --text --once", "... steps", "steps"),
    "watch --text": Row("watch steps --once", "... --text", "^exit 0"),
    "watch --once": Row("watch steps --text --price x", "watch steps --text --once", "^exit 0"),
    "watch --price": Row("watch steps --text --once", "... --price -1", REFUSED + "--price"),
    "watch --host": Row("watch steps --text --once", "... --host 0.0.0.0", REFUSED + "--host"),
    "watch --port": Row("watch steps --text --once", "... --port 9", REFUSED + "--port"),
    "watch --token-file": Row(
        "watch steps --text --once", "... --token-file none", REFUSED + "--token-file"
    ),
    "report runs": Row("report", "... steps", "report.html"),
    "report --output": Row("report steps", "... -o other.html", "other.html"),
    "report --price": Row("report steps", "... --price -1", REFUSED + "--price"),
    # mup
    "mup check --config": Row(MUP_CHECK.replace("-c run.yaml", ""), MUP_CHECK, "base width 16"),
    "mup check --override": Row(MUP_CHECK, "... -o Model.mup_base_width=8", "base width 8"),
    "mup check --widths": Row(MUP_CHECK, "... --widths 16,48", "width 48"),
    "mup check --steps": Row(MUP_CHECK, "... --steps 2", "after 2 steps"),
    "mup check --random-tokens": Row(
        f"{MUP_CHECK} -o Data.dataset.input_dir=none", "... --random-tokens", "base width 16"
    ),
    "mup check --plot": Row(MUP_CHECK, "... --plot new.png", "drawn: new.png"),
    "mup sweep --config": Row(MUP_SWEEP.replace("-c run.yaml", ""), MUP_SWEEP, "best rate"),
    "mup sweep --override": Row(MUP_SWEEP, "... -o Model.mup_base_width=8", "base width 8"),
    "mup sweep --widths": Row(MUP_SWEEP, "... --widths 16", REFUSED + "one width"),
    "mup sweep --learning-rates": Row(MUP_SWEEP, "... --learning-rates 1,2", REFUSED + "--learn"),
    "mup sweep --steps": Row(MUP_SWEEP, "... --steps 11", "of 11 steps"),
    "mup sweep --plot": Row(MUP_SWEEP, "... --plot new.png", "drawn: new.png"),
    # accept
    "accept --output": Row(ACCEPT, "... --output told", "told/acceptance.html"),
    "accept --quick": Row(ACCEPT.replace(" --quick", ""), ACCEPT, "rows that --quick"),
    "accept --devices": Row(ACCEPT, "... --devices 2", r"accepting 2 process"),
    "accept --device": Row(ACCEPT, "... --device gpu", REFUSED + "no GPU"),
    "accept --only": Row(ACCEPT, "... --only groups", REFUSED + "'groups' is not one of"),
    "accept --keep": Row(ACCEPT, "... --keep", "the trial runs are in"),
    # doctor
    "doctor --nproc": Row(DOCTOR, "... --nproc 2", "all-reduce over 2", slow=True),
    "doctor --out": Row(DOCTOR, "... --out other.yaml", "written: other.yaml", slow=True),
    "doctor --force": Row(f"{DOCTOR} --out old.yaml", "... --force", "^exit 0", slow=True),
    "doctor --seconds": Row("doctor --out old.yaml", "... --seconds 61", "--seconds"),
    "doctor --directory": Row(DOCTOR, "... --directory none", REFUSED + "none", slow=True),
    "doctor --nodes": Row(DOCTOR, "doctor --nodes", "ranks on 1 machine|found:", slow=True),
    "doctor --json": Row("doctor --nodes", "... --json", '"findings"', slow=True),
    "doctor --one-by-one": Row(
        "doctor --nodes", "doctor --one-by-one", REFUSED + "--one-by-one has no effect", slow=True
    ),
    "doctor --nnodes": Row("doctor --nodes", "... --nnodes 2", REFUSED + "missing", slow=True),
    "doctor --node-rank": Row(
        "doctor --nodes", "... --node-rank 1", REFUSED + "missing", slow=True
    ),
    "doctor --master": Row("doctor --nodes", "... --master a:1", REFUSED + "missing", slow=True),
    # quickstart
    "quickstart --override": Row(QUICKSTART, "... -o Engine.max_steps=2", "step_2/", slow=True),
    "quickstart --dir": Row(QUICKSTART, "... --dir there", "there/corpus", slow=True),
    "quickstart --max-mb": Row(
        QUICKSTART, "... --max-mb 0.3", "corpus.jsonl: 0.[23] MB", slow=True
    ),
    "quickstart --config": Row(QUICKSTART, "... --config none.yaml", "none.yaml", slow=True),
    # data prepare
    "data prepare --input": Row(PREPARE.replace("-i texts.jsonl", ""), PREPARE, "documents"),
    "data prepare --output-prefix": Row(
        PREPARE, "... --output-prefix other", "other_text_document.bin"
    ),
    "data prepare --tokenizer": Row(PREPARE, "... --tokenizer gpt2", "gpt2"),
    "data prepare more_inputs": Row(PREPARE, "... texts.txt", ": 22 documents"),
    "data prepare --append-eod": Row(PREPARE, "... --no-append-eod", '"append_eod": false'),
    "data prepare --prepend-bos": Row(PREPARE, "... --prepend-bos", REFUSED + "prepend-bos"),
    "data prepare --workers": Row(PREPARE, "... --workers 0", REFUSED + "workers"),
    "data prepare --format": Row(PREPARE, "... --format fleetx", "new_ids.npy"),
    "data prepare --json-key": Row(PREPARE, "... --json-key title", "title"),
    "data prepare --document-separator": Row(
        PREPARE.replace("jsonl", "txt"), "... --document-separator file", "new.*: 1 document"
    ),
    "data prepare --min-length": Row(PREPARE, "... --min-length 100", "shorter|too short|left out"),
    "data prepare --max-document-mb": Row(PREPARE, "... --max-document-mb 0", REFUSED),
    "data prepare --max-bad-lines": Row(
        PREPARE.replace("texts", "bad"), "... --max-bad-lines 0", REFUSED + "bad.jsonl"
    ),
    "data prepare --allow-damaged-files": Row(
        PREPARE.replace("jsonl", "jsonl damaged.jsonl.gz"), "... --allow-damaged-files", "^exit 0"
    ),
    "data prepare --strict": Row(PREPARE.replace("texts", "bad"), "... --strict", REFUSED),
    "data prepare --overwrite": Row(
        f"{PREPARE} --min-length 50", "... --overwrite", "^exit 0", before=PREPARE
    ),
    "data prepare --stdin-format": Row(PREPARE, "... --stdin-format txt", REFUSED),
    # data train-tokenizer
    "data train-tokenizer --input": Row(LEARN.replace("-i texts.jsonl", ""), LEARN, "^exit 0"),
    "data train-tokenizer --output": Row(LEARN, "... --output other.json", "other.json: a"),
    "data train-tokenizer --vocab-size": Row(LEARN, "... --vocab-size 290", "of 290"),
    "data train-tokenizer more_inputs": Row(LEARN, "... none.txt", REFUSED + "none.txt"),
    "data train-tokenizer --json-key": Row(LEARN, "... --json-key none", REFUSED + "more text"),
    "data train-tokenizer --document-separator": Row(LEARN, "... --document-separator x", REFUSED),
    "data train-tokenizer --every": Row(LEARN, "... --every 0", REFUSED),
    "data train-tokenizer --max-document-mb": Row(LEARN, "... --max-document-mb 0", REFUSED),
    "data train-tokenizer --max-bad-lines": Row(
        LEARN.replace("texts", "bad"), "... --max-bad-lines 0", REFUSED
    ),
    "data train-tokenizer --allow-damaged-files": Row(
        LEARN.replace("jsonl", "jsonl damaged.jsonl.gz"), "... --allow-damaged-files", "^exit 0"
    ),
    "data train-tokenizer --strict": Row(LEARN.replace("texts", "bad"), "... --strict", REFUSED),
    "data train-tokenizer --stdin-format": Row(LEARN, "... --stdin-format txt", REFUSED),
    # the other verbs of data
    "data inspect path": Row("data inspect", INSPECT, "documents +200"),
    "data inspect --samples": Row(INSPECT, "... --samples 4", "(?s)(Document [0-9].*){4}"),
    "data inspect --tokenizer": Row(INSPECT, "... --tokenizer none", REFUSED + "none"),
    "data inspect --png": Row(INSPECT, "... --png new.png", "new.png"),
    "data inspect --json": Row(INSPECT, "... --json", '"prefix":'),
    "data verify path": Row("data verify", VERIFY, "good"),
    "data verify --vocab-size": Row(VERIFY, "... --vocab-size 10", "problem"),
    "data merge sources": Row("data merge --output-prefix new", MERGE, "400 documents"),
    "data merge --output-prefix": Row(MERGE, "... --output-prefix other", "other.bin"),
    "data merge --to": Row(MERGE, "... --to fleetx", "fleetx"),
    "data merge --force": Row(
        MERGE.replace("data/words data", f"{MEGATRON} data"), "... --force", "^exit 0"
    ),
    "data merge --overwrite": Row(MERGE, "... --overwrite", "^exit 0", before=MERGE),
    "data split path": Row("data split --parts 1,1 --output-prefix new", SPLIT, "new_train.bin"),
    "data split --parts": Row(SPLIT, "... --parts 3,1", "new_train: 150"),
    "data split --output-prefix": Row(SPLIT, "... --output-prefix other", "other_train.bin"),
    "data split --rounding": Row(
        f"{SPLIT} --parts 1,1,1", "... --rounding megatron_deepspeed", "new_train: 66 documents"
    ),
    "data split --overwrite": Row(SPLIT, "... --overwrite", "^exit 0", before=SPLIT),
    "data convert path": Row(CONVERT.replace("data/words", ""), CONVERT, "^exit 0"),
    "data convert --to": Row(CONVERT, "... --to legacy", "new_ids.npz|legacy"),
    "data convert --output-prefix": Row(CONVERT, "... --output-prefix other", "other_ids.npy"),
    "data convert --force": Row(
        CONVERT.replace("fleetx", "legacy").replace("data/", ""), "... --force", "became documents"
    ),
    "data convert --overwrite": Row(CONVERT, "... --overwrite", "^exit 0", before=CONVERT),
    "data index --config": Row("data index", "data index -c run.yaml", "samples of 32 tokens"),
    "data index --override": Row(
        "data index -c run.yaml", "... -o Data.dataset.max_seq_len=16", "samples of 16 tokens"
    ),
    "data blend --config": Row("data blend", "data blend -c run.yaml", "^exit 0"),
    "data blend --override": Row(
        "data blend -c run.yaml", "... -o Engine.max_steps=7", "56 samples"
    ),
    "data blend --data": Row("data blend --samples 10 --seq-len 8", BLEND, "^exit 0"),
    "data blend --samples": Row(BLEND, "... --samples 17", "17"),
    "data blend --seq-len": Row(BLEND, "... --seq-len 9", "90 tokens"),
    # submit
    "submit --config": Row("submit --to slurm --nodes 1 --nproc 1", SUBMIT, "sbatch "),
    "submit --to": Row("submit -c short.yaml --nodes 1 --nproc 1", SUBMIT, "sbatch "),
    "submit --override": Row(SUBMIT, "... -o Engine.save_load.output_dir=other", "other.sbatch"),
    "submit --nodes": Row(SUBMIT, "... --nodes 0", REFUSED + "--nodes 0"),
    "submit --nproc": Row(SUBMIT, "... --nproc 0", REFUSED + "--nproc 0"),
    "submit --cluster": Row(SUBMIT, "... --cluster none", REFUSED),
    "submit --auto": Row(SUBMIT, "... --auto --cluster none.yaml", REFUSED + "none.yaml"),
    "submit --time": Row(SUBMIT, "... --time 1m", REFUSED + "--time 1m"),
    "submit --partition": Row(SUBMIT, "... --partition -x", REFUSED + "--partition"),
    "submit --sbatch": Row(SUBMIT, "... --sbatch=--time=1", REFUSED + "--time"),
    "submit --image": Row(SUBMIT, "... --image x", REFUSED + "--image has no place"),
    "submit --volume": Row(SUBMIT, "... --volume x", REFUSED + "--volume has no place"),
    "submit --name": Row(SUBMIT, "... --name other", "other.sbatch"),
    "submit --max-restarts": Row(SUBMIT, "... --max-restarts 77", "most_tries=77"),
    "submit --out": Row(SUBMIT, "... --out other.sbatch", "other.sbatch"),
    "submit --force": Row(SUBMIT, "... --force", "^exit 0", before=SUBMIT),
    # checkpoint
    "checkpoint inspect place": Row("checkpoint inspect", "... output", "parameters"),
    "checkpoint verify place": Row("checkpoint verify", "... output", "good"),
    "checkpoint merge source": Row(
        "checkpoint merge none new", "checkpoint merge output new", "new/"
    ),
    "checkpoint merge target": Row("checkpoint merge output", "... new", "new/"),
    "checkpoint merge --prefix": Row(
        "checkpoint merge output new", "... --prefix model.", "new: 28 tensors"
    ),
    "checkpoint merge --ema": Row(
        "checkpoint merge output new", "... --ema", REFUSED + ".*has no average of the weights"
    ),
    # config
    "config show --config": Row("config show", "... -c run.yaml", "hidden_size: 32"),
    "config show --override": Row("config show -c run.yaml", "... -o Global.seed=8", "seed: 8"),
    "config show --comments": Row(
        "config show -c run.yaml", "... --no-comments", "\nGlobal:\n  device"
    ),
    "config check --config": Row("config check", "... -c run.yaml", "good"),
    "config check --override": Row("config check -c run.yaml", "... -o Global.sed=8", REFUSED),
    "config schema --config": Row("config schema", "... -c run.yaml", '"default": 320'),
    "config schema --override": Row(
        "config schema -c run.yaml", "... -o Engine.max_steps=777", '"default": 777'
    ),
}


def options(command: Any = None, path: tuple[str, ...] = ()) -> Iterator[str]:
    """ "verb --option" and "verb argument" for all there are, and "--option" of the command."""
    command = typer.main.get_command(command_line()) if command is None else command
    for parameter in command.params:
        yield " ".join([*path, max(parameter.opts, key=len)])
    for name, verb in getattr(command, "commands", {}).items():
        yield from options(verb, (*path, name))


def test_every_option_has_a_row() -> None:
    assert sorted(options()) == sorted(ROWS)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trained model, its data and text: what the words of the rows name."""
    directory = tmp_path_factory.mktemp("world")
    run = make_run(directory)
    values = yaml.safe_load(run.config.read_text())
    values["Engine"] |= {"max_steps": 2, "logging_freq": 1}
    values["Data"]["batch_size"]["micro_batch_size"] = 2
    values["Engine"]["save_load"] = {"output_dir": "new", "save_steps": 1}
    (directory / "short.yaml").write_text(yaml.safe_dump(values))
    values["Engine"] |= {"max_steps": 6}
    values["Engine"]["save_load"] = {"output_dir": str(directory / "steps"), "save_steps": 0}
    (directory / "steps.yaml").write_text(yaml.safe_dump(values))
    build_engine(load_config(directory / "steps.yaml")).fit()
    texts = sentences(20, seed=2)
    lines = [json.dumps({"text": text, "title": text.split()[0]}) for text in texts]
    (directory / "texts.jsonl").write_text("\n".join(lines) + "\n")
    (directory / "bad.jsonl").write_text("\n".join([*lines, "no json"]) + "\n")
    (directory / "damaged.jsonl.gz").write_bytes(b"no gzip")
    (directory / "texts.txt").write_text("one text\n\nand another\n")
    (directory / "token").write_text("a-token-of-the-tests\n")
    (directory / "foreign").mkdir()
    (directory / "foreign" / "fleetx").symlink_to(FLEETX)
    # Two documents, the first of them in two sentences.
    np.save(directory / "words_ids.npy", np.arange(1, 8, dtype=np.uint16))
    np.savez(
        directory / "words_idx.npz", lens=np.array([2, 2, 3], np.int32), docs=np.array([0, 2, 3])
    )
    return directory


class Observer:
    """Runs the command in this process, each time in a new directory, and says all that shows."""

    def __init__(self, world: Path, scratch: Path) -> None:
        self.world, self.scratch = world, scratch
        self.seen: dict[tuple[str, str], str] = {}

    def __call__(self, words: str, before: str = "") -> str:
        """What `words` show after the command `before`; remembered."""
        if (words, before) not in self.seen:
            place = Path(tempfile.mkdtemp(dir=self.scratch))
            for there in self.world.iterdir():
                (place / there.name).symlink_to(there)
            (place / "old.yaml").write_text("device: A100\n")
            if before:
                self.run(before, place)
            code, said = self.run(words, place)
            self.seen[words, before] = f"exit {code}\n{said}" + "".join(files_in(place))
        return self.seen[words, before]

    def run(self, words: str, place: Path) -> tuple[object, str]:
        said = io.StringIO()
        with (
            contextlib.chdir(place),
            contextlib.redirect_stdout(said),
            contextlib.redirect_stderr(said),
            pytest.raises(SystemExit) as ended,
        ):
            main(shlex.split(words))
        return ended.value.code, said.getvalue()


def files_in(place: Path) -> Iterator[str]:
    for file in sorted(path for path in place.rglob("*") if path.is_file()):
        if not any(part.is_symlink() for part in (file, *file.parents)):
            yield f"{file.relative_to(place)}\n"
            content = file.read_bytes()[:LARGEST_SHOWN]
            yield content.decode("utf-8", "ignore") if b"\0" not in content else ""


@pytest.fixture(scope="module")
def observe(world: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Observer]:
    patch = pytest.MonkeyPatch()
    patch.setenv("HOME", str(tmp_path_factory.mktemp("home")))
    patch.setenv("_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION", "1")
    patch.setattr(serve, "serve", tell_what_is_served)
    yield Observer(world, tmp_path_factory.mktemp("scratch"))
    patch.undo()


def tell_what_is_served(config: Config, name: str, **given: Any) -> None:
    print(f"{name=}", *(f"{key}={value!r}" for key, value in given.items()))
    print(f"weights={config.Inference.weights!r}")


@pytest.mark.parametrize(
    "option",
    [
        pytest.param(name, marks=[pytest.mark.slow] if row.slow else [])
        for name, row in ROWS.items()
    ],
)
def test_option_is_used_or_refused(option: str, observe: Observer) -> None:
    row = ROWS[option]
    without = observe(row.without, row.before)
    with_it = observe(row.words.replace("...", row.without), row.before)
    assert not re.search(row.shows, without), without[:LARGEST_SHOWN]
    assert re.search(row.shows, with_it), with_it[:LARGEST_SHOWN]
    assert "Traceback" not in without + with_it


PLAN_VALUES = {
    "--config": "run.yaml", "--override": "Global.seed=1", "--cluster": "A100", "--fix": "mp=1",
    "--top": "3", "--tokens": "1B", "--price": "1", "--explain": "1", "--plot": "x.png",
    "--emit": "x.yaml", "--out": "x.yaml", "--rank": "1", "--world": "2", "--rows": "x.csv",
    "--calibrate": "steps",
}  # fmt: skip
FLAGS = ("--json", "--force", "--dry-run", "--self-test")


def test_every_mode_of_plan_refuses_what_it_would_ignore(observe: Observer) -> None:
    verb = typer.main.get_command(command_line()).commands["plan"]  # type: ignore[attr-defined]
    names = {parameter.name: max(parameter.opts, key=len) for parameter in verb.params}
    assert {*names.values()} == {*PLAN_VALUES, *FLAGS}
    assert {*names} == PLANNED.union(*MODES.values())
    for mode, used in {**MODES, None: PLANNED}.items():
        said = "plan" if mode is None else f"plan {words_of(names[mode])}"
        for name, option in names.items():
            if name in used or name in MODES:
                continue
            told = observe(f"{said} {words_of(option)}")
            assert told.startswith("exit 2\n") and f"{option} has no effect with" in told, told


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (f"{DRY_RUN} --self-test", "--dry-run"),
        (f"{CALIBRATE} --dry-run", "--cluster and --calibrate have no effect with --dry-run"),
        (f"{PLAN} --explain 1 --json", "--json has no effect with --explain"),
        (f"{PLAN} --explain 1 --top 3", "--top has no effect with --explain"),
        (f"{PLAN} --price 3", "--price has no effect without --tokens"),
        (f"{PREPARE} --strict --max-bad-lines 3", "give one of the two"),
        (f"{BLEND} -c run.yaml", "either a configuration"),
        (f"{BLEND} -o Global.seed=1", "either a configuration"),
        ("data blend -c run.yaml --samples 3", "go with --data"),
        ("config schema -o Global.seed=1", "name the file with -c"),
        (f"{TRAIN} --cluster A100", "add --auto"),
        (f"{TARGET} --step 3", "no target is given"),
    ],
)
def test_options_that_exclude_each_other_are_refused(
    words: str, said: str, observe: Observer
) -> None:
    told = observe(words)
    assert told.startswith("exit 2\n") and said in told, told


def words_of(option: str) -> str:
    return option if option in FLAGS else f"{option} {PLAN_VALUES[option]}"


def test_quickstart_says_when_it_keeps_the_text_of_an_earlier_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "python_text_document.json").touch()
    make_data(tmp_path, 300, None)
    make_data(tmp_path, 300, 1.5)
    first, second = capsys.readouterr().out.splitlines()
    assert "--max-mb" not in first and second.endswith("--max-mb has no effect on what is there")
