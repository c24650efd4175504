"""The adapter for `lm_eval`, with a stand-in for its base class: three questions, in order."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.peers import PYTHON, ROOT, in_peers, needs_peers
from helpers.tiny_text_run import TextRun, make_run

from fourfold.convert import convert
from fourfold.errors import UserError
from fourfold.evaluate.harness import answers_of, harness_model
from fourfold.generate.loading import load_trained


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> TextRun:
    return make_run(tmp_path_factory.mktemp("text_run"))


class Request:
    """Of the harness's `Instance` only `args` is used."""

    def __init__(self, *args: Any) -> None:
        self.args = args


@pytest.fixture
def model(run: TextRun, monkeypatch: pytest.MonkeyPatch) -> Any:
    class LM:
        def __init__(self) -> None:
            self.ready = True

    modules = {name: types.ModuleType(name) for name in ("lm_eval", "lm_eval.api")}
    modules["lm_eval.api.model"] = types.ModuleType("lm_eval.api.model")
    modules["lm_eval.api.model"].LM = LM  # type: ignore[attr-defined]
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    made = harness_model(run.load("Eval.batch_size=3"))
    assert isinstance(made, LM) and made.ready
    return made


@torch.no_grad()
def logprobs(run: TextRun, ids: list[int]) -> tuple[torch.Tensor, list[int]]:
    """Log-probability of each id but the first, and the best id at each place."""
    network = load_trained(run.load(), lambda _: None).model
    table = torch.log_softmax(network(torch.tensor([ids[:-1]]))[0], -1)
    return table.gather(1, torch.tensor(ids[1:]).unsqueeze(1))[:, 0], table.argmax(-1).tolist()


def test_loglikelihood(run: TextRun, model: Any) -> None:
    tokenizer = run.tokenizer
    pairs = [
        ("the cat", " sat on"),
        ("the cat ", "sat on"),
        ("", "the dog"),
        ("rain", " fell over a"),
    ]
    results = model.loglikelihood([Request(*pair) for pair in pairs])
    # A blank at the end of a context belongs to the word after it.
    assert results[1] == pytest.approx(results[0])
    for (context, continuation), (total, greedy) in zip(pairs, results):
        whole = tokenizer.encode(context + continuation)
        before = len(tokenizer.encode(context.rstrip()))
        if not before:
            whole, before = [tokenizer.eos_id, *whole], 1
        each, best = logprobs(run, whole)
        assert total == pytest.approx(float(each[before - 1 :].sum()), abs=1e-3)
        assert greedy == (best[before - 1 :] == whole[before:])


def test_the_greedy_continuation_is_recognised(run: TextRun, model: Any) -> None:
    [text] = model.generate_until([Request("the cat", {"until": [], "max_gen_toks": 3})])
    [(_, greedy)] = model.loglikelihood([Request("the cat", text)])
    whole = run.tokenizer.encode("the cat" + text)
    # Unless the text encodes otherwise than it was written.
    assert greedy or whole != run.tokenizer.encode("the cat") + run.tokenizer.encode(text)


def test_long_contexts_lose_their_beginning(run: TextRun, model: Any) -> None:
    long = "the dog ran over a mat " * 20
    [(total, _)] = model.loglikelihood([Request(long.strip(), " and rain")])
    ids = run.tokenizer.encode(long.strip() + " and rain")[-49:]
    each, _ = logprobs(run, ids)
    assert total == pytest.approx(
        float(each[-len(run.tokenizer.encode(" and rain")) :].sum()), abs=1e-3
    )
    with pytest.raises(UserError, match="does not fit"):
        model.loglikelihood([Request("a", long)])


def test_loglikelihood_rolling(run: TextRun, model: Any) -> None:
    texts = ["the cat sat on a mat.", "rain fell over old stone walls and " * 12]
    results = model.loglikelihood_rolling([Request(text) for text in texts])
    for text, total in zip(texts, results):
        ids = [run.tokenizer.eos_id, *run.tokenizer.encode(text)]
        expected = 0.0
        for start in range(0, len(ids) - 1, 48):
            stop = min(start + 48, len(ids) - 1)
            # The last window reaches back as far as the model can see.
            each, _ = logprobs(run, ids[max(0, stop - 48) : stop + 1])
            expected += float(each[-(stop - start) :].sum())
        assert total == pytest.approx(expected, abs=1e-3)


def test_generate_until(run: TextRun, model: Any) -> None:
    settings = {"until": ["\n\n"], "max_gen_toks": 16, "do_sample": False, "temperature": 0.0}
    [whole] = model.generate_until([Request("the cat", settings)])
    assert whole
    stop = whole[len(whole) // 2 :][:2]
    [cut] = model.generate_until([Request("the cat", settings | {"until": stop})])
    assert cut == whole[: whole.index(stop)]
    sampled = settings | {"do_sample": True, "temperature": 1.0, "top_k": 40}
    assert isinstance(model.generate_until([Request("", sampled)])[0], str)
    assert model.generate_until([Request("the cat", {"max_new_tokens": 16})]) == [whole]
    with pytest.raises(UserError, match="num_beams"):
        model.generate_until([Request("a", settings | {"num_beams": 2})])


def test_texts_are_generated_in_batches_and_returned_in_order(run: TextRun, model: Any) -> None:
    contexts = ["the", "the cat sat on a mat and", "rain", "", "a dog ran after it", "old stone"]
    settings = [{"until": ["."], "max_gen_toks": length} for length in (8, 8, 5, 8, 8, 5)]
    requests = [Request(*pair) for pair in zip(contexts, settings)]
    alone = [model.generate_until([request])[0] for request in requests]
    decoder = model._answers._decoder
    rows = []
    for name in ("advance", "take_in"):
        run_step = getattr(decoder, name)
        setattr(decoder, name, lambda given, go=run_step: rows.append(len(given)) or go(given))
    assert model.generate_until(requests) == alone
    assert max(rows) == 3  # Eval.batch_size


def test_arguments_of_the_harness_become_configuration_keys(run: TextRun, model: Any) -> None:
    made = type(model)(
        config=str(run.config), batch_size=5, max_batch_size=None, device="cpu",
        **{"Inference.weights": "int8"},
    )  # fmt: skip
    assert made._answers._batch_size == 5
    asked = [Request("the cat", " sat on")]
    assert made.loglikelihood(asked) != model.loglikelihood(asked)
    with pytest.raises(UserError, match="--model_args pretrained: not known here"):
        type(model)(config=str(run.config), pretrained="gpt2")
    with pytest.raises(UserError, match="--batch_size auto"):
        type(model)(config=str(run.config), batch_size="auto")


def test_without_the_package_the_way_is_told(run: TextRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(UserError, match="pip install lm_eval"):
        harness_model(run.load())


# The harness itself

TEXTS = [
    "the cat sat on a mat.",
    "rain fell over old stone walls and " * 12,
    "the dog ran after it while " * 9 + "rain",
    "a",
    "",
]
PAIRS = [
    ("the cat", " sat on"),
    ("the cat ", "sat on"),
    ("", "the dog"),
    ("rain\n", "fell over a"),
    ("the dog ran over a mat " * 20, "and rain"),
    ("old stone", " walls"),
    ("é☃ 123", " - never seen"),
]
PROMPTS = [
    ("the cat", {"until": ["\n\n"], "max_gen_toks": 16, "do_sample": False}),
    ("the cat", {"until": ["on", "zz"], "max_gen_toks": 16, "temperature": 0.0}),
    ("rain fell over old stone walls and " * 12, {"until": [], "max_gen_toks": 20}),
    ("a dog", {"until": ".", "max_gen_toks": 5}),
    ("the dog ran after it", {"until": ["\n\n"], "max_gen_toks": 16, "do_sample": False}),
    ("old", {"until": ["\n\n"], "max_gen_toks": 16, "do_sample": False}),
]

ASK = """
from types import SimpleNamespace
{make}
def ask(method, arguments):
    return method([SimpleNamespace(args=tuple(one)) for one in arguments])
answer = [
    ask(model.loglikelihood, given["pairs"]),
    ask(model.loglikelihood_rolling, [[text] for text in given["texts"]]),
    ask(model.generate_until, given["prompts"]),
]
"""
THEIRS = """
from lm_eval.models.huggingface import HFLM
model = HFLM(pretrained=given["model"], device="cpu", batch_size=1, dtype="float32")
"""
OURS = """
from fourfold.config import load_config
from fourfold.evaluate.harness import answers_of, harness_model
model = harness_model(load_config(given["model"], ["Eval.batch_size=3"]))
"""


@needs_peers
def test_the_harness_finds_the_same_with_our_model_and_with_its_own(
    run: TextRun, tmp_path: Path
) -> None:
    exported = tmp_path / "exported"
    convert(run.directory / "output", exported, "hf", tokenizer=run.directory / "tokenizer.json")
    [greedy] = answers_of(run.load()).generate_until([("the cat", {"max_gen_toks": 3})])
    asked = {"pairs": [*PAIRS, ("the cat", greedy)], "texts": TEXTS, "prompts": PROMPTS}
    theirs = in_peers(ASK.replace("{make}", THEIRS), model=exported, **asked)
    ours = in_peers(ASK.replace("{make}", OURS), model=run.config, **asked)
    for mine, their in zip(ours[0], theirs[0], strict=True):
        assert mine[0] == pytest.approx(their[0], abs=1e-4) and mine[1] == their[1]
    assert ours[1] == pytest.approx(theirs[1], abs=1e-4, rel=1e-6)
    assert ours[2] == theirs[2]
    assert ours[0][-1][1] and not ours[0][0][1] and all(ours[2])


TASK = """
task: words
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: loglikelihood
doc_to_text: "{{{{context}}}}"
doc_to_target: " {{{{word}}}}"
metric_list: [{{metric: acc}}, {{metric: perplexity}}]
"""


@needs_peers
def test_the_harness_command_knows_the_model_by_its_name(run: TextRun, tmp_path: Path) -> None:
    file = tmp_path / "words.jsonl"
    examples = [{"context": "the cat sat on a", "word": word} for word in ("mat", "dog", "wall")]
    file.write_text("".join(json.dumps(one) + "\n" for one in examples))
    (tmp_path / "words.yaml").write_text(TASK.format(file=file))
    words = ["--model", "fourfold", "--tasks", "words", "--include_path", str(tmp_path)]
    words += ["--model_args", f"config={run.config},Inference.weights=float32"]
    words += ["--batch_size", "2", "--output_path", str(tmp_path / "results")]
    done = subprocess.run(
        [PYTHON, "-m", "fourfold.evaluate.harness", *words],
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "HF_HUB_OFFLINE": "1",
            "HF_HOME": str(tmp_path),
        },
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    [results] = (tmp_path / "results").rglob("results_*.json")
    found = json.loads(results.read_text())["results"]["words"]
    expected = answers_of(run.load()).loglikelihood(
        [(one["context"], f" {one['word']}") for one in examples]
    )
    assert found["acc,none"] == pytest.approx(sum(best for _, best in expected) / 3)
    mean = sum(total for total, _ in expected) / 3
    assert found["perplexity,none"] == pytest.approx(math.exp(-mean), rel=1e-4)


IN_LOOP = """
import os
os.environ.update(HF_HUB_OFFLINE="1", HF_HOME=given["home"])
from fourfold.config import load_config
from fourfold.engine import build_engine
from fourfold.evaluate.harness import harness_model
from fourfold.evaluate.in_loop import WeightsInLoop, harness_numbers
from fourfold.metrics import read_jsonl

keys = [f"Engine.save_load.output_dir={given['home']}/run"]
named = "{name: mine, kind: lm_eval, task: words, path: %s}" % given["home"]
more = ["Engine.max_steps=2", "Engine.save_load.save_steps=1", f"Engine.eval_tasks=[{named}]"]
more += ["Engine.eval_tasks_freq=1"]
engine = build_engine(load_config(given["config"], keys + more), open_in_loop=WeightsInLoop)
engine.fit()
records = read_jsonl(f"{given['home']}/run/metrics.jsonl")
answer = {"inside": [one["numbers"] for one in records if one["kind"] == "task"], "after": []}
from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager
for step in (1, 2):
    place = f"Engine.save_load.ckpt_dir={given['home']}/run/step_{step}"
    model = harness_model(load_config(given["config"], keys + [place]))
    told = simple_evaluate(model=model, tasks=["words"],
                           task_manager=TaskManager(include_path=given["home"]))
    answer["after"].append(harness_numbers(told["results"]["words"]))
"""


@needs_peers
def test_a_task_of_the_harness_between_steps(run: TextRun, tmp_path: Path) -> None:
    """As the harness finds it afterwards on the checkpoint of that step."""
    file = tmp_path / "words.jsonl"
    examples = [{"context": "the cat sat on a", "word": word} for word in ("mat", "dog", "wall")]
    file.write_text("".join(json.dumps(one) + "\n" for one in examples))
    (tmp_path / "words.yaml").write_text(TASK.format(file=file))
    found = in_peers(IN_LOOP, config=run.config, home=tmp_path)
    assert len(found["inside"]) == 2 and found["inside"][0] != found["inside"][1]
    for inside, after in zip(found["inside"], found["after"], strict=True):
        assert inside.keys() == {"acc", "perplexity"} and inside == pytest.approx(after, rel=1e-5)
