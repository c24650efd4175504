"""Every kind of file a tokenizer comes in: same ids as its library, damage named, nothing run."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import tiktoken
from helpers.hard_text import FRAGMENTS, hard_texts, python_texts
from helpers.sentence_files import tiny_sentence_model
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as TokenizerFile

from fourfold.data import open_datasets
from fourfold.errors import DataError, UserError
from fourfold.generate import TextStream
from fourfold.tokenizer import END_OF_TEXT, Tokenizer, fast, ranks, rules, train
from fourfold.tokenizer.facts import SpecialNames
from fourfold.tools.prepare.pipeline import prepare

HARD = hard_texts(60)
VOCAB_SIZE = 1200


@pytest.fixture(scope="module")
def trained() -> Tokenizer:
    return train(python_texts(300_000), VOCAB_SIZE)


@pytest.fixture(params=[-1, 10**9], ids=["much text", "little text"])
def amount(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any text is as much as the fast path is for, or as little as it is not."""
    monkeypatch.setattr(fast, "LITTLE_CHARACTERS", request.param)


def check(tokenizer: Tokenizer, expected: Callable[[str], list[int]], texts: list[str]) -> None:
    ids, lengths = tokenizer.encode_joined(texts)
    wanted = [expected(text) for text in texts]
    assert lengths.tolist() == [len(one) for one in wanted]
    assert ids.tolist() == [one for each in wanted for one in each]


def library(file: TokenizerFile) -> Callable[[str], list[int]]:
    judge = TokenizerFile.from_str(file.to_str())
    judge.encode_special_tokens = True
    return lambda text: judge.encode(text, add_special_tokens=False).ids


# -- tokenizer.json with other split rules --------------------------------------------------------


def ruled(trained: Tokenizer, rule: rules.SplitRule, composes: bool = False) -> TokenizerFile:
    """The vocabulary of `trained` with another split rule."""
    state = json.loads(trained.to_json())
    split = {"type": "Split", "behavior": "Isolated", "invert": False}
    steps = [split | {"pattern": {"Regex": step}} for step in rule.steps]
    bytes_alone = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    steps.append(bytes_alone | {"use_regex": False})
    state["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": steps}
    state["normalizer"] = {"type": "NFC"} if composes else None
    return TokenizerFile.from_str(json.dumps(state))


@pytest.mark.parametrize("rule", rules.RULES.values(), ids=lambda rule: rule.name)
def test_every_rule_encodes_as_in_tokenizers(
    trained: Tokenizer, rule: rules.SplitRule, amount: None
) -> None:
    file = ruled(trained, rule, composes=rule.name.startswith("qwen"))
    tokenizer = Tokenizer(file)
    assert tokenizer.path == ("vectors" if rule.begins else "tiktoken")
    check(tokenizer, library(file), HARD)


def test_ordinary_added_tokens_are_found_in_texts(trained: Tokenizer, amount: None) -> None:
    file = ruled(trained, rules.QWEN, composes=True)
    file.add_tokens([AddedToken("<tool>", normalized=False), "<|user|>", "ñandú"])
    texts = ["a <tool> b", "<|user|>", "n\u0303andu\u0301 ñandú", "no such thing é", *HARD[:20]]
    tokenizer = Tokenizer(file)
    assert tokenizer.path == "vectors"
    check(tokenizer, library(file), texts)
    found = tokenizer.encode("a <tool> b")
    assert tokenizer.decode(found) == "a <tool> b"
    assert tokenizer.token_bytes[found].sum() == len("a <tool> b")


def test_long_texts_are_cut_where_it_changes_nothing(
    trained: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fast, "LITTLE_CHARACTERS", 10)
    monkeypatch.setattr(fast, "SLICE_CHARACTERS", 50)
    for rule in (rules.LLAMA3, rules.QWEN, rules.DEEPSEEK):
        file = ruled(trained, rule, composes=True)
        check(Tokenizer(file), library(file), [" ".join(HARD[:12]), python_texts(1)[0][:3000]])


@pytest.mark.parametrize("change", ["another order", "a pair missing", "another normalizer"])
def test_what_the_fast_path_cannot_prove_is_left_to_the_library(
    trained: Tokenizer, change: str
) -> None:
    state = json.loads(ruled(trained, rules.LLAMA3).to_str())
    merges = state["model"]["merges"]
    if change == "another order":
        merges[0], merges[5] = merges[5], merges[0]
    elif change == "a pair missing":
        del merges[40]
    else:
        state["normalizer"] = {"type": "NFKC"}
    file = TokenizerFile.from_str(json.dumps(state))
    tokenizer = Tokenizer(file)
    assert tokenizer.path == "tokenizers"
    check(tokenizer, library(file), HARD[:40])


def test_a_library_that_splits_otherwise_is_believed(
    trained: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one with another version of Unicode would, on the text that is tried when loading."""
    file = ruled(trained, rules.LLAMA3)
    encode = fast.FastEncoder.encode_joined
    with monkeypatch.context() as patch:
        patch.setattr(
            fast.FastEncoder, "encode_joined", lambda *given: (encode(*given)[0][:-1], [])
        )
        tokenizer = Tokenizer(file)
    assert tokenizer.path == "tokenizers"
    assert tokenizer.identity == Tokenizer(file).identity
    check(tokenizer, library(file), HARD[:40])


# -- merge ranks ----------------------------------------------------------------------------------


@pytest.fixture
def small_family(trained: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> ranks.RankFamily:
    assert trained._bpe is not None
    names = SpecialNames(eos="<|end|>", bos="<|begin|>", pad="<|pad|>", adds_bos=True)
    specials = ("<|begin|>", "<|end|>", "<|pad|>", END_OF_TEXT)
    family = ranks.RankFamily("small", VOCAB_SIZE - 1, rules.LLAMA3, names, specials)
    monkeypatch.setattr(ranks, "FAMILIES", (family,))
    return family


def rank_lines(trained: Tokenizer) -> bytes:
    assert trained._bpe is not None
    lines = [b"%s %d" % (base64.b64encode(t), n) for t, n in trained._bpe.ranks.items()]
    return b"\n".join(lines) + b"\n"


def test_rank_files_encode_as_tiktoken_does(
    trained: Tokenizer, small_family: ranks.RankFamily, tmp_path: Path, amount: None
) -> None:
    file = tmp_path / "small.tiktoken"
    file.write_bytes(rank_lines(trained))
    tokenizer = Tokenizer.load(file)
    assert tokenizer.path == "vectors" and tokenizer.kind == "byte-level BPE"
    assert (tokenizer.vocab_size, tokenizer.eos_token) == (VOCAB_SIZE + 3, "<|end|>")
    assert tokenizer.begin_ids == (VOCAB_SIZE - 1,)
    assert trained._bpe is not None
    theirs = tiktoken.Encoding(
        "theirs",
        pat_str=rules.LLAMA3.steps[0],
        mergeable_ranks=trained._bpe.ranks,
        special_tokens=small_family.special_ids(),
    )
    sound = [text.encode("utf-16", "surrogatepass").decode("utf-16", "replace") for text in HARD]
    check(tokenizer, theirs.encode_ordinary, sound)
    assert [tokenizer.decode(tokenizer.encode(text)) for text in sound] == sound
    # The same as a tokenizer.json, alone and beside what it does not say.
    saved = Tokenizer.load(tokenizer.save(tmp_path / "json" / "tokenizer.json"))
    assert saved.identity == tokenizer.identity and saved.path == "vectors"
    assert (saved.begin_ids, saved.eos_id) == (tokenizer.begin_ids, tokenizer.eos_id)
    check(saved, theirs.encode_ordinary, HARD[:50])
    alone = Tokenizer(TokenizerFile.from_file(str(tmp_path / "json" / "tokenizer.json")))
    assert alone.identity == tokenizer.identity and alone.eos_token == END_OF_TEXT
    assert Tokenizer.load(tmp_path).identity == tokenizer.identity  # the directory


def test_special_ids_may_lie_anywhere(
    trained: Tokenizer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    at = ((END_OF_TEXT, VOCAB_SIZE + 10), ("<|p|>", VOCAB_SIZE + 30))
    family = ranks.RankFamily(
        "odd", VOCAB_SIZE - 1, rules.CL100K, SpecialNames(eos=END_OF_TEXT), at=at
    )
    monkeypatch.setattr(ranks, "FAMILIES", (family,))
    (tmp_path / "odd.tiktoken").write_bytes(rank_lines(trained))
    tokenizer = Tokenizer.load(tmp_path / "odd.tiktoken")
    saved = Tokenizer.load(tokenizer.save(tmp_path / "tokenizer.json"))
    assert saved.eos_id == tokenizer.eos_id == VOCAB_SIZE + 10
    assert saved.identity == tokenizer.identity and saved.vocab_size == VOCAB_SIZE + 31
    check(saved, tokenizer.encode, HARD[:40])
    with pytest.raises(UserError, match="is not in the tokenizer's vocabulary"):
        tokenizer.decode([VOCAB_SIZE + 11])


def test_ranks_of_no_known_family_are_refused(trained: Tokenizer, tmp_path: Path) -> None:
    (tmp_path / "some.tiktoken").write_bytes(rank_lines(trained))
    with pytest.raises(DataError, match=r"1199 ranks are of no family known here \(Llama 3 \(128"):
        Tokenizer.load(tmp_path / "some.tiktoken")


def tekken(trained: Tokenizer) -> dict[str, object]:
    assert trained._bpe is not None
    entries = [
        {"rank": number, "token_bytes": base64.b64encode(token).decode(), "token_str": None}
        for token, number in sorted(trained._bpe.ranks.items(), key=lambda item: item[1])
    ]
    config = {"pattern": rules.TEKKEN.steps[0], "version": "v3"}
    config |= {"default_vocab_size": 1000, "default_num_special_tokens": 30}  # type: ignore
    return {"config": config, "vocab": entries}


def test_tekken_files_are_read(trained: Tokenizer, tmp_path: Path) -> None:
    content = tekken(trained)
    (tmp_path / "tekken.json").write_text(json.dumps(content))
    tokenizer = Tokenizer.load(tmp_path)
    assert (tokenizer.vocab_size, tokenizer.eos_id, tokenizer.begin_ids) == (1000, 2, (1,))
    assert trained._bpe is not None
    kept = {token: number for token, number in trained._bpe.ranks.items() if number < 970}
    theirs = tiktoken.Encoding(
        "theirs", pat_str=rules.TEKKEN.steps[0], mergeable_ranks=kept, special_tokens={}
    )
    check(tokenizer, lambda text: [30 + one for one in theirs.encode_ordinary(text)], HARD)
    saved = Tokenizer.load(tokenizer.save(tmp_path / "json" / "tokenizer.json"))
    assert saved.identity == tokenizer.identity
    check(saved, tokenizer.encode, HARD[:40])


# -- SentencePiece --------------------------------------------------------------------------------


def sentence_model(kind: str, place: Path, **settings: object) -> Path:
    sentencepiece = pytest.importorskip("sentencepiece")
    (place / "text.txt").write_text("\n".join(python_texts(120_000)), encoding="utf-8")
    sentencepiece.SentencePieceTrainer.train(
        input=str(place / "text.txt"),
        model_prefix=str(place / kind),
        model_type=kind,
        vocab_size=700,
        minloglevel=3,
        **settings,
    )
    return place / f"{kind}.model"


LLAMA2 = {
    "byte_fallback": True,
    "normalization_rule_name": "identity",
    "remove_extra_whitespaces": False,
    "split_digits": True,
    "allow_whitespace_only_pieces": True,
}


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("bpe", LLAMA2),
        ("bpe", LLAMA2 | {"add_dummy_prefix": False}),
        ("bpe", {"normalization_rule_name": "identity"}),
        ("unigram", {"normalization_rule_name": "identity"}),
        ("unigram", LLAMA2),
    ],
    ids=["bpe as Llama 2", "bpe without prefix", "bpe", "unigram", "unigram with bytes"],
)
def test_sentencepiece_models_encode_as_their_library(
    kind: str, settings: dict[str, object], tmp_path: Path, amount: None
) -> None:
    sentencepiece = pytest.importorskip("sentencepiece")
    path = sentence_model(kind, tmp_path, **settings)
    theirs = sentencepiece.SentencePieceProcessor(model_file=str(path))
    tokenizer = Tokenizer.load(path)
    assert (tokenizer.vocab_size, tokenizer.eos_id, tokenizer.begin_ids) == (700, 2, (1,))
    is_fast = "byte_fallback" in settings
    assert tokenizer.path == ("vectors" if kind == "bpe" and is_fast else "tokenizers")
    texts = [*python_texts(60_000), *HARD]
    if kind == "unigram" and "byte_fallback" in settings:
        # The library takes the name of a byte that a text spells out for that byte, and of runs of
        # blanks that score alike another one.
        texts = [re.sub(" +", " ", text) for text in texts if "<0x" not in text]
    check(tokenizer, theirs.encode, texts)
    # Special tokens are text, and a saved copy is the same tokenizer.
    assert tokenizer.eos_id not in tokenizer.encode("</s> <s>")
    saved = Tokenizer.load(tokenizer.save(tmp_path / "json" / "tokenizer.json"))
    assert (saved.identity, saved.begin_ids) == (tokenizer.identity, tokenizer.begin_ids)
    check(saved, theirs.encode, texts[-30:])


def test_text_of_sentencepiece_models_arrives_piece_by_piece(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(sentence_model("bpe", tmp_path, **LLAMA2))
    for text in ("the cat", " two  blanks", "猫が好き\n🏳️‍🌈 x", "\n\n猫猫猫猫猫猫猫 def", "tail "):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        stream = TextStream(tokenizer)
        pieces = [stream.feed(one) for one in ids]
        # It continues another text, so the blank before its first word is there.
        assert "".join([*pieces, stream.flush()]) == f" {text}"
        assert all("\ufffd" not in piece for piece in pieces)
    ids = tokenizer.encode_continuation(" x y")
    assert tokenizer.encode("a x y")[-len(ids) :] == ids
    assert tokenizer.decode([1, *tokenizer.encode("hi"), 2], skip_special=True) == "hi"


def test_what_tokenizers_would_do_otherwise_is_refused(tmp_path: Path) -> None:
    for kind in ("word", "char"):
        path = sentence_model(kind, tmp_path, hard_vocab_limit=False)
        with pytest.raises(DataError, match=f"of the kind {kind.upper()}"):
            Tokenizer.load(path)
    with pytest.raises(DataError, match="normalized by a map of characters"):
        Tokenizer.load(sentence_model("unigram", tmp_path))
    path = sentence_model("bpe", tmp_path, treat_whitespace_as_suffix=True)
    with pytest.raises(DataError, match="belong to the word before them"):
        Tokenizer.load(path)


def test_a_sentencepiece_model_by_hand(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(tiny_sentence_model())
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.encode("ab aab cc") == [4, 5, 6, 3, 5, 0]
    assert (tokenizer.eos_token, tokenizer.begin_ids) == ("</s>", (1,))
    assert tokenizer.decode([4, 5, 6]) == "ab a"


# -- damage ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["ranks", "sentences", "tekken"])
@settings(deadline=None, max_examples=150)
@given(data=st.data())
def test_damaged_files_are_refused_or_read(
    tmp_path_factory: pytest.TempPathFactory, kind: str, data: st.DataObject
) -> None:
    lines = b"".join(b"%s %d\n" % (base64.b64encode(bytes([n])), n) for n in range(256))
    state = {
        "config": {
            "pattern": rules.TEKKEN.steps[0],
            "default_vocab_size": 266,
            "default_num_special_tokens": 10,
        },
        "vocab": [
            {"rank": n, "token_bytes": base64.b64encode(bytes([n])).decode()} for n in range(256)
        ],
    }
    name, content = {
        "ranks": ("x.tiktoken", bytearray(lines)),
        "sentences": ("x.model", bytearray(tiny_sentence_model())),
        "tekken": ("tekken.json", bytearray(json.dumps(state).encode())),
    }[kind]
    for _ in range(data.draw(st.integers(0, 4))):
        position = data.draw(st.integers(0, len(content) - 1))
        edit = data.draw(st.sampled_from(["cut", "set", "drop"]))
        if edit == "cut":
            del content[max(position, 1) :]
        elif edit == "set":
            content[position] = data.draw(st.integers(0, 255))
        else:
            del content[position : position + data.draw(st.integers(1, 8))]
        content = content or bytearray(b" ")
    path = tmp_path_factory.mktemp("damaged") / name
    path.write_bytes(bytes(content))
    family = ranks.RankFamily("bytes", 256, rules.QWEN, SpecialNames(eos="<e>"), ("<e>",))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ranks, "FAMILIES", (family,))
        try:
            loaded = Tokenizer.load(path)
        except DataError as error:
            assert str(path) in str(error)
        else:
            assert isinstance(loaded.decode(loaded.encode("ab a\n")), str)


def test_files_too_large_to_be_a_tokenizer_are_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranks, "MOST_BYTES", 100)
    (tmp_path / "x.tiktoken").write_bytes(b"IQ== 0\n" * 100)
    with pytest.raises(DataError, match="700 bytes, more than the 100 of any tokenizer"):
        Tokenizer.load(tmp_path / "x.tiktoken")


# -- special tokens -------------------------------------------------------------------------------


def with_template(trained: Tokenizer) -> TokenizerFile:
    file = TokenizerFile.from_str(trained.to_json())
    file.add_special_tokens(["<s>", "<stop>"])
    file.post_processor = processors.TemplateProcessing(
        single="<s> $A <stop>", special_tokens=[("<s>", VOCAB_SIZE), ("<stop>", VOCAB_SIZE + 1)]
    )
    return file


def test_the_post_processor_says_how_a_text_begins(trained: Tokenizer, tmp_path: Path) -> None:
    file = with_template(trained)
    tokenizer = Tokenizer(file)
    assert tokenizer.begin_ids == (VOCAB_SIZE,)
    assert tokenizer.encode_prompt("x") == [VOCAB_SIZE, *tokenizer.encode("x")]
    assert tokenizer.encode("x") == trained.encode("x")
    assert trained.begin_ids == () and trained.encode_prompt("x") == trained.encode("x")


def test_the_files_beside_it_say_what_special_tokens_are_for(
    trained: Tokenizer, tmp_path: Path
) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(with_template(trained).to_str())
    (tmp_path / "special_tokens_map.json").write_text(
        json.dumps({"eos_token": {"content": "<stop>"}, "pad_token": "<unheard of>"})
    )
    tokenizer = Tokenizer.load(path)
    assert (tokenizer.eos_token, tokenizer.names.pad) == ("<stop>", None)
    config = {"add_bos_token": False, "bos_token": "<s>", "eos_token": END_OF_TEXT}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = Tokenizer.load(tmp_path)
    assert (tokenizer.eos_token, tokenizer.begin_ids) == (END_OF_TEXT, ())
    # Saved elsewhere it is the same.
    copy = Tokenizer.load(tokenizer.save(tmp_path / "copy" / "words.json"))
    assert (copy.eos_token, copy.begin_ids) == (END_OF_TEXT, ())
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(DataError, match=r"tokenizer_config\.json: not readable as JSON"):
        Tokenizer.load(tmp_path)


def test_documents_begin_as_the_family_has_it(trained: Tokenizer, tmp_path: Path) -> None:
    tokenizer = Tokenizer(with_template(trained))
    manifest = prepare(["the cat", "", "sat"], tmp_path / "data", tokenizer)
    [dataset] = open_datasets([tmp_path / "data"])
    begin, end = VOCAB_SIZE, tokenizer.eos_id
    found = [dataset.tokens(number).tolist() for number in range(len(dataset))]
    texts = ("the cat", "sat")
    assert [one for one in found if one] == [[begin, *trained.encode(t), end] for t in texts]
    assert manifest["begin_ids"] == [begin]
    assert "begin_ids" not in prepare(["the cat"], tmp_path / "plain", trained)
    assert tokenizer.beginning(False) == () and trained.beginning(None) == ()
    with pytest.raises(UserError, match="names no token that begins a text"):
        trained.beginning(True)


@pytest.mark.parametrize("kind", ["Unigram", "WordPiece"])
def test_special_tokens_in_a_text_are_text_for_every_kind(kind: str) -> None:
    words = ["<unk>", "<s>", "</s>", "a", "b", "<", "s", ">", "/", "##s", "##>", "##/"]
    if kind == "Unigram":
        model = models.Unigram([(word, -float(n)) for n, word in enumerate(words)], 0)
    else:
        model = models.WordPiece({word: n for n, word in enumerate(words)}, unk_token="<unk>")
    file = TokenizerFile(model)
    file.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    file.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer = Tokenizer(file)
    assert tokenizer.eos_id == 2
    assert not {1, 2} & set(tokenizer.encode("a </s> <s> b"))
    assert tokenizer.path == "tokenizers"


@settings(deadline=None, max_examples=200)
@given(text=st.lists(st.sampled_from(FRAGMENTS), max_size=8).map("".join) | st.text())
def test_composed_as_the_library_does(text: str) -> None:
    sound = fast.without_surrogates(text)
    assert fast.composed(sound) == normalizers.NFC().normalize_str(sound)
