"""Perplexity and cloze: windows, WikiText's spacing, and the numbers of `transformers`."""

from __future__ import annotations

import json
import math
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from model.test_transformers_parity import SHAPE, to_ours
from transformers import GPT2Config, GPT2LMHeadModel

from fourfold.errors import DataError
from fourfold.evaluate.measures import cloze_request, measure_cloze
from fourfold.evaluate.perplexity import (
    Loss,
    count_words,
    detokenize_wikitext,
    measure_loss,
    windows,
)
from fourfold.evaluate.scoring import Score, Scorer, ScoreRequest
from fourfold.generate import Decoder
from fourfold.metrics.lines import perplexity
from fourfold.model import GPT
from fourfold.tokenizer import Tokenizer, train

TOKENS = torch.randint(
    0, SHAPE.vocab_size, (150,), generator=torch.Generator().manual_seed(4)
).tolist()


@pytest.fixture(scope="module")
def pair() -> tuple[Decoder, GPT2LMHeadModel]:
    torch.manual_seed(3)
    config = GPT2Config(
        vocab_size=SHAPE.vocab_size,
        n_positions=SHAPE.max_position_embeddings,
        n_embd=SHAPE.hidden_size,
        n_layer=SHAPE.num_layers,
        n_head=SHAPE.num_attention_heads,
        initializer_range=0.2,
    )
    peer = GPT2LMHeadModel(config).eval()
    model = GPT(SHAPE)
    weights = to_ours(dict(peer.named_parameters()), SHAPE.num_attention_heads)
    model.load_state_dict({name: tensor.detach().clone() for name, tensor in weights.items()})
    return Decoder(model), peer


@given(num_tokens=st.integers(0, 120), seq_len=st.integers(1, 20), data=st.data())
def test_windows_count_every_token_once(num_tokens: int, seq_len: int, data: st.DataObject) -> None:
    stride = data.draw(st.integers(1, seq_len))
    cuts = sorted(data.draw(st.lists(st.integers(0, num_tokens), max_size=6)))
    pieces = np.split(np.arange(num_tokens, dtype=np.uint16), cuts)
    counted = []
    for number, request in enumerate(windows(iter(pieces), seq_len, stride)):
        start, stop = int(request.tokens[0]), int(request.tokens[-1]) + 1
        assert list(request.tokens) == list(range(start, stop))
        assert start % stride == 0 and stop - start <= seq_len + 1
        assert stop - start == seq_len + 1 or stop == num_tokens
        assert number == 0 or request.scored <= stride
        counted += request.tokens[-request.scored :].tolist()
    assert counted == list(range(1, num_tokens))


@torch.no_grad()
def their_loss(peer: GPT2LMHeadModel, tokens: list[int], seq_len: int, stride: int) -> float:
    """By the benchmark's own recipe: padded windows, a mask, and a sum."""
    targets = len(tokens) - 1
    total = 0.0
    for number in range(max(math.ceil(max(targets - stride, 0) / stride) + 1, 1)):
        window = tokens[number * stride : number * stride + seq_len + 1]
        mask = [1] * len(window) + [0] * (seq_len + 1 - len(window))
        window = window + [0] * (seq_len + 1 - len(window))
        mask = mask[1:]
        if stride != seq_len and number != 0:
            mask[:-stride] = [0] * (seq_len - stride)
        logits = peer(torch.tensor([window[:-1]])).logits[0]
        losses = torch.nn.functional.cross_entropy(
            logits, torch.tensor(window[1:]), reduction="none"
        )
        total += float((losses * torch.tensor(mask)).sum())
    return total


@pytest.mark.parametrize(("seq_len", "stride"), [(48, 48), (48, 16), (32, 5), (20, 1), (48, 47)])
def test_loss_equals_transformers(pair: tuple, seq_len: int, stride: int) -> None:
    decoder, peer = pair
    tokens = TOKENS[:90] if stride == 1 else TOKENS
    loss = measure_loss(Scorer(decoder, batch_size=3), [tokens], seq_len, stride)
    assert loss.tokens == len(tokens) - 1
    assert loss.total == pytest.approx(their_loss(peer, tokens, seq_len, stride), rel=1e-5)


def test_what_follows_the_end_of_text_does_not_count(pair: tuple) -> None:
    decoder, _ = pair
    scorer = Scorer(decoder, batch_size=4)
    whole = measure_loss(scorer, [TOKENS[:30]], 48, 48)
    [score] = scorer.score([ScoreRequest(TOKENS[:30], 29)])
    places = [place for place, token in enumerate(TOKENS[:29]) if token == TOKENS[10]]
    masked = measure_loss(scorer, [TOKENS[:30]], 48, 48, ignored_input=TOKENS[10])
    assert masked.tokens == whole.tokens - len(places)
    lost = -sum(float(score.logprobs[place]) for place in places)
    assert masked.total == pytest.approx(whole.total - lost)


NO_ALTERNATIVES = (torch.empty(0), torch.empty(0))


class Uniform(Scorer):
    """Finds each of `vocab_size` tokens equally probable, without a model."""

    def __init__(self, vocab_size: int, batch_size: int = 4) -> None:
        self._logprob, self._batch_size, self._on_batch = -math.log(vocab_size), batch_size, None

    def _score_batch(self, batch: list[ScoreRequest]) -> list[Score]:
        return [
            Score(
                torch.full((one.scored,), self._logprob, dtype=torch.float64),
                torch.zeros(one.scored, dtype=torch.bool),
                *NO_ALTERNATIVES,
            )
            for one in batch
        ]


def test_bits_per_byte_is_of_the_bytes_that_were_predicted() -> None:
    """A model of 8 bits a token: 4 bits a byte where each token has two, whatever is left out."""
    ids, end = np.array([1, 1, 0] * 50), 0
    token_bytes = np.array([0, 2])
    whole = measure_loss(Uniform(256), [ids], 16, 16, token_bytes=token_bytes)
    # 149 predictions, of which 50 are ends of text: they cost bits and are no bytes.
    assert whole.num_bytes == 99 * 2
    assert whole.bits_per_byte == pytest.approx(149 * 8 / (99 * 2))
    masked = measure_loss(Uniform(256), [ids], 16, 16, ignored_input=end, token_bytes=token_bytes)
    # Of each document only its second token and its end are predicted.
    assert masked.tokens == 100 and masked.num_bytes == 50 * 2
    assert masked.bits_per_byte == pytest.approx(8.0)
    with pytest.raises(DataError, match="token id 1 is not in the vocabulary of 1"):
        measure_loss(Uniform(256), [ids], 16, 16, token_bytes=token_bytes[:1])


def test_memory_does_not_grow_with_the_data() -> None:
    def peak(pieces: int) -> int:
        piece = np.arange(1000, dtype=np.uint16)
        tracemalloc.start()
        try:
            loss = measure_loss(Uniform(2, batch_size=8), (piece for _ in range(pieces)), 64, 64)
            assert loss.tokens == 1000 * pieces - 1
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    assert peak(400) < 1.5 * peak(100)


def test_batches_hold_requests_of_similar_length(pair: tuple) -> None:
    decoder, _ = pair
    lengths = [2, 40] * 16
    widths: list[tuple[int, int]] = []
    hidden = decoder.model.hidden
    requests = [ScoreRequest(TOKENS[n : n + length], 1) for n, length in enumerate(lengths)]
    decoder.model.hidden = lambda tokens, *rest: (
        widths.append(tuple(tokens.shape)) or hidden(tokens, *rest)
    )
    try:
        scores = list(Scorer(decoder, 4).score(requests))
    finally:
        del decoder.model.hidden
    assert widths == [(4, 39)] * 4 + [(4, 1)] * 4
    alone = [next(Scorer(decoder, 1).score([request])).total for request in requests]
    assert [score.total for score in scores] == pytest.approx(alone, abs=1e-4)


def test_batches_do_not_change_an_answer(pair: tuple) -> None:
    decoder, _ = pair
    requests = [ScoreRequest(TOKENS[i : i + 2 + 9 * i], 1 + i) for i in range(5)]
    one = [score.total for score in Scorer(decoder, 1).score(requests)]
    all_at_once = [score.total for score in Scorer(decoder, 8).score(requests)]
    assert one == pytest.approx(all_at_once, abs=1e-4)


def test_formulas() -> None:
    assert perplexity(2.0) == pytest.approx(math.exp(2))
    assert perplexity(99.0) == pytest.approx(math.exp(20))
    assert Loss(8 * math.log(2), 3, 4).bits_per_byte == pytest.approx(2.0)
    assert count_words(" one two  three\nfour \n") == 4  # a double blank makes an empty word


def test_too_short_a_text_is_refused(pair: tuple) -> None:
    scorer = Scorer(pair[0], 2)
    for pieces in ([], [[5]], [[], [5], []]):
        with pytest.raises(DataError, match="no token can be scored"):
            measure_loss(scorer, pieces, 8, 8)
    with pytest.raises(DataError, match="no token can be scored"):
        measure_loss(scorer, [[5, 5, 5]], 8, 8, ignored_input=5)


@pytest.mark.parametrize(
    ("raw", "plain"),
    [
        (" = Robert Boulter = \n", " = Robert Boulter =\n"),
        ("= = Career = = \n", "== Career ==\n"),
        (
            "a self @-@ made 1 @,@ 000 at 2 @.@ 5 % , he said .",
            "a self-made 1,000 at 2.5 %, he said .",
        ),
        ("Boulter 's role ; then : none ! why ? yes", "Boulter's role; then: none! why? yes"),
        ('he ( the actor ) said " well " , once', 'he (the actor) said "well", once'),
        ("the boys ' team [ sic ] { x }", "the boys' team [sic] {x}"),
        ("40 \u00b0 north , N days", "40\u00b0north, 1 days"),
    ],
)
def test_wikitext_spacing(raw: str, plain: str) -> None:
    assert detokenize_wikitext(raw) == plain


# Cloze

TEXTS = [
    "the cat sat on the mat",
    "a dog and a cat sat\non the  mat",
    "on the mat the dog sat",
    "the cat",
]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train(["the cat sat on the mat and the dog"] * 3, 270)


def test_the_last_word_is_encoded_apart_with_a_blank(tokenizer: Tokenizer) -> None:
    request = cloze_request(tokenizer, "the mat  and mat\n", 48)
    assert request.tokens == tokenizer.encode("the mat  and") + tokenizer.encode(" mat")
    assert request.scored == len(tokenizer.encode(" mat"))
    short = cloze_request(tokenizer, "the cat sat on the mat", 3)
    assert list(short.tokens) == tokenizer.encode("the cat sat on the mat")[-4:]


@torch.no_grad()
def test_cloze_equals_transformers(pair: tuple, tokenizer: Tokenizer, tmp_path: Path) -> None:
    decoder, peer = pair
    correct, logprob = 0, 0.0
    texts = list(TEXTS)
    for text in TEXTS:
        # The word the model itself would write, so that some examples are right.
        best = int(peer(torch.tensor([tokenizer.encode(text)])).logits[0, -1, :269].argmax())
        texts.append(f"{text} {tokenizer.decode([best]).strip()}x")
    for text in texts:
        word = text.split()[-1]
        context = tokenizer.encode(text[: text.rindex(word)].strip())
        target = tokenizer.encode(f" {word}")
        logits = peer(torch.tensor([context + target[:-1]])).logits[0, -len(target) :]
        correct += logits.argmax(-1).tolist() == target
        chosen = torch.log_softmax(logits, -1).gather(1, torch.tensor([target]).T)
        logprob += float(chosen.sum())
    file = tmp_path / "cloze.jsonl"
    file.write_text("\n".join(json.dumps({"text": text}) for text in texts) + "\n\n")
    result = measure_cloze(Scorer(decoder, 3), tokenizer, file, 48)
    assert (result.correct, result.examples) == (correct, len(texts))
    assert result.logprob == pytest.approx(logprob, abs=1e-3)


def test_cloze_counts_what_the_model_gets_right(tokenizer: Tokenizer, tmp_path: Path) -> None:
    file = tmp_path / "cloze.jsonl"
    file.write_text("\n".join(json.dumps({"text": text}) for text in TEXTS))
    right = {tuple(cloze_request(tokenizer, text, 48).tokens) for text in TEXTS[:3]}

    class Knowing(Scorer):
        def __init__(self) -> None:
            pass

        def score(self, requests):  # type: ignore[no-untyped-def]
            for one in requests:
                known = torch.full((one.scored,), tuple(one.tokens) in right)
                known[:-1] = True  # all but the last token alone is not enough
                zeros = torch.zeros(one.scored, dtype=torch.float64)
                yield Score(zeros, known, *NO_ALTERNATIVES)

    result = measure_cloze(Knowing(), tokenizer, file, 48)
    assert (result.correct, result.examples, result.accuracy) == (3, 4, 0.75)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "not JSON"),
        ('{"words": 1}', "no text here"),
        ('{"text": "alone"}', "no word before its last"),
        ("", "holds no text"),
        ("[" * 100_000, "not JSON"),
    ],
    ids=["half", "no text", "one word", "empty", "deep"],
)
def test_bad_cloze_files_are_refused(
    pair: tuple, tokenizer: Tokenizer, tmp_path: Path, line: str, said: str
) -> None:
    file = tmp_path / "bad.jsonl"
    file.write_text(line)
    with pytest.raises(DataError, match=said):
        measure_cloze(Scorer(pair[0], 2), tokenizer, file, 48)
