"""The adapter for `lm_eval`, with a stand-in for its base class: three questions, in order."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest
import torch
from tiny_text_run import TextRun, make_run

from fourfold.errors import UserError
from fourfold.evaluate.harness import harness_model
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
        expected = sum(
            float(logprobs(run, ids[start : start + 49])[0].sum())
            for start in range(0, len(ids) - 1, 48)
        )
        assert total == pytest.approx(expected, abs=1e-2)


def test_generate_until(run: TextRun, model: Any) -> None:
    settings = {"until": ["\n\n"], "max_gen_toks": 16, "do_sample": False, "temperature": 0.0}
    [whole] = model.generate_until([Request("the cat", settings)])
    assert whole
    stop = whole[len(whole) // 2 :][:2]
    [cut] = model.generate_until([Request("the cat", settings | {"until": stop})])
    assert cut == whole[: whole.index(stop)]
    sampled = settings | {"do_sample": True, "temperature": 1.0, "top_k": 40}
    assert isinstance(model.generate_until([Request("", sampled)])[0], str)
    with pytest.raises(UserError, match="num_beams"):
        model.generate_until([Request("a", settings | {"num_beams": 2})])


def test_without_the_package_the_way_is_told(run: TextRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(UserError, match="pip install lm_eval"):
        harness_model(run.load())
