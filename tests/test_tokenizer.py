"""The tokenizer: same ids as the `tokenizers` library, whichever engine encodes."""

from __future__ import annotations

import copy
import hashlib
import json
import os
import subprocess
import sys
import sysconfig
from itertools import product
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as TokenizerFile

from fourfold.data import open_datasets
from fourfold.data.tokenizer_check import check_agreement, check_checkpoint_tokenizer
from fourfold.errors import DataError, UserError
from fourfold.tokenizer import (
    END_OF_TEXT,
    Tokenizer,
    canonical_identity,
    train,
)
from fourfold.tools.prepare.pipeline import prepare

VOCAB_SIZE = 1500
BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())


def library_sources(limit: int) -> list[str]:
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:limit]
    return [file.read_text(encoding="utf-8") for file in files]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train(library_sources(40), VOCAB_SIZE)


@pytest.fixture(scope="module")
def saved(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tokenizer.save(tmp_path_factory.mktemp("tokenizer") / "tokenizer.json")


@pytest.fixture(scope="module")
def reference(saved: Path) -> TokenizerFile:
    """The independent judge: the file as the `tokenizers` library reads it."""
    file = TokenizerFile.from_file(str(saved))
    file.encode_special_tokens = True
    return file


def byte_level_file(merges: list[tuple[str, str]], learned: list[str]) -> TokenizerFile:
    """256 bytes, the `learned` tokens in the order of their ids, end of text."""
    vocab = {token: number for number, token in enumerate([*BYTES, *learned])}
    file = TokenizerFile(models.BPE(vocab=vocab, merges=merges))
    file.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    file.decoder = decoders.ByteLevel()
    file.add_special_tokens([AddedToken(END_OF_TEXT, special=True)])
    return file


def load_file(file: TokenizerFile, tmp_path: Path) -> Tokenizer:
    file.save(str(tmp_path / "tokenizer.json"))
    return Tokenizer.load(tmp_path)


# Encoding


def test_python_sources_encode_as_in_tokenizers(
    tokenizer: Tokenizer, reference: TokenizerFile
) -> None:
    texts = library_sources(60)
    expected = [encoding.ids for encoding in reference.encode_batch(texts)]
    assert tokenizer.encode_batch(texts) == expected
    assert [tokenizer.encode(text) for text in texts] == expected
    assert [tokenizer.decode(ids) for ids in expected] == texts


EDGES = [
    "",
    " ",
    "     ",
    "\n\n\n",
    " \t\r\n x",
    "x   ",
    "x \n",
    "a\u00a0b\u3000c\u2028d\x1c\x85",
    "it's we'll I'd 'S 'LL",
    "naïve Straße 北京 नमस्ते 🏳️‍🌈 e\u0301",
    "\x00\x01\x7f",
    "1²3½Ⅷ",
    "a" * 5000,
    "=" * 5000,
    " " * 5000 + "x",
]


@pytest.mark.parametrize("text", EDGES, ids=range(len(EDGES)))
def test_edge_cases(tokenizer: Tokenizer, reference: TokenizerFile, text: str) -> None:
    ids = tokenizer.encode(text)
    assert ids == reference.encode(text).ids
    assert tokenizer.decode(ids) == text


@settings(deadline=None, max_examples=300)
@given(text=st.text() | st.text(st.sampled_from(" \n\t'sltab1²é北\u0301\u00a0\u2003!=-")))
def test_random_unicode(tokenizer: Tokenizer, reference: TokenizerFile, text: str) -> None:
    ids = tokenizer.encode(text)
    assert ids == reference.encode(text).ids
    assert tokenizer.decode(ids) == text


def test_end_of_text_in_a_document_is_plain_text(
    tokenizer: Tokenizer, reference: TokenizerFile
) -> None:
    text = f"before{END_OF_TEXT}after"
    ids = tokenizer.encode(text)
    assert tokenizer.eos_id not in ids
    assert ids == reference.encode(text).ids
    assert tokenizer.decode([*ids, tokenizer.eos_id]) == text + END_OF_TEXT


@pytest.mark.parametrize("is_plain", [True, False])
def test_another_process_gets_the_same_tokenizer(tokenizer: Tokenizer, is_plain: bool) -> None:
    if not is_plain:
        file = TokenizerFile.from_str(tokenizer.to_json())
        file.normalizer = normalizers.Lowercase()
        tokenizer = Tokenizer(file)
    text = f"It's A\x00B {END_OF_TEXT} \x01"
    there = copy.deepcopy(tokenizer)  # through the state that a worker is sent
    assert there.encode(text) == tokenizer.encode(text)
    assert there.to_json() == tokenizer.to_json()
    assert (there.identity, there.eos_id) == (tokenizer.identity, tokenizer.eos_id)


def test_lone_surrogates_become_replacement_characters(tokenizer: Tokenizer) -> None:
    assert tokenizer.decode(tokenizer.encode("a\ud800b")) == "a\ufffdb"
    assert tokenizer.decode(tokenizer.encode("\ud83d\ude00")) == "\U0001f600"
    assert tokenizer.encode_batch(["\udfff"]) == [tokenizer.encode("\ufffd")]


def test_a_million_blanks_do_not_break_the_fast_engine(
    tokenizer: Tokenizer, reference: TokenizerFile
) -> None:
    text = " \n" * 600_000 + "x"
    expected = reference.encode(text).ids
    assert tokenizer.encode(text) == expected
    assert tokenizer.encode_batch([text, "x"]) == [expected, tokenizer.encode("x")]


@pytest.mark.parametrize("token_id", [-1, VOCAB_SIZE, 2**31])
def test_unknown_ids_are_refused(tokenizer: Tokenizer, token_id: int) -> None:
    with pytest.raises(UserError, match=f"{token_id} is not in the tokenizer's vocabulary"):
        tokenizer.decode([0, token_id])


# Training


def test_vocabulary_is_laid_out_as_in_gpt2(tokenizer: Tokenizer) -> None:
    assert tokenizer.vocab_size == VOCAB_SIZE
    assert tokenizer.eos_id == VOCAB_SIZE - 1
    assert tokenizer.decode([tokenizer.eos_id]) == END_OF_TEXT
    assert tokenizer.encode("!") == [0]
    assert tokenizer.encode("~") == [ord("~") - ord("!")]


def test_training_is_reproducible(tokenizer: Tokenizer) -> None:
    assert train(library_sources(40), VOCAB_SIZE).identity == tokenizer.identity


def test_training_on_every_nth_text() -> None:
    texts = library_sources(30)
    assert train(texts, 400, every=3).identity == train(texts[::3], 400).identity
    assert train(texts, 400, every=3).identity != train(texts, 400).identity


def test_too_little_text_is_refused() -> None:
    with pytest.raises(DataError, match="only enough distinct words for a vocabulary of 259"):
        train(["ab ab"], 300)


def test_too_small_a_vocabulary_is_refused() -> None:
    with pytest.raises(UserError, match="vocab_size=256 leaves no room"):
        train(["text"], 256)
    assert train(["text"], 257).encode("hi") == [71, 72]


def test_bad_every_is_refused() -> None:
    with pytest.raises(UserError, match="every=0"):
        train(["text"], 300, every=0)


# Files


def test_all_forms_of_one_tokenizer_are_one_tokenizer(
    tokenizer: Tokenizer, saved: Path, tmp_path: Path
) -> None:
    state = json.loads(saved.read_text())
    vocab = state["model"]["vocab"] | {END_OF_TEXT: tokenizer.eos_id}
    (tmp_path / "vocab.json").write_text(json.dumps(vocab))
    merges = [" ".join(pair) for pair in state["model"]["merges"]]
    (tmp_path / "merges.txt").write_text("\n".join(["#version: 0.2", *merges]) + "\n")
    forms = [saved, saved.parent, tmp_path, (tmp_path / "vocab.json", tmp_path / "merges.txt")]
    for form in forms:
        loaded = Tokenizer.load(form)
        assert loaded.identity == tokenizer.identity
        assert (loaded.vocab_size, loaded.eos_id) == (tokenizer.vocab_size, tokenizer.eos_id)
        assert loaded.encode(EDGES[9]) == tokenizer.encode(EDGES[9])


def test_identity_tells_tokenizers_apart(tokenizer: Tokenizer) -> None:
    other = train(library_sources(10), VOCAB_SIZE)
    assert other.identity != tokenizer.identity
    assert len(tokenizer.identity) == 64


def unusual(tmp_path: Path) -> Path:
    """A tokenizer that only `tokenizers` can encode with: blanks are left as they are."""
    state = json.loads(train(["the cat sat on the mat"] * 9, 262).to_json())
    state["pre_tokenizer"]["use_regex"] = False
    (tmp_path / "unusual.json").write_text(json.dumps(state))
    return tmp_path / "unusual.json"


def test_identity_does_not_depend_on_who_wrote_the_file(tmp_path: Path) -> None:
    """As versions of `tokenizers` differ: merges joined or in pairs, options left out or said."""
    tokenizer = Tokenizer.load(unusual(tmp_path))
    assert not tokenizer.is_gpt2_like
    state = json.loads(tokenizer.to_json())
    assert canonical_identity(json.dumps(state)) == tokenizer.identity
    older = json.loads(json.dumps(state))
    older["model"]["merges"] = [" ".join(pair) for pair in state["model"]["merges"]]
    del older["model"]["ignore_merges"], older["model"]["byte_fallback"], older["padding"]
    assert canonical_identity(json.dumps(dict(reversed(older.items())))) == tokenizer.identity
    others = [json.loads(json.dumps(state)) for _ in range(4)]
    others[0]["pre_tokenizer"]["use_regex"] = True
    others[1]["model"]["byte_fallback"] = True
    others[2]["model"]["merges"].reverse()
    others[3]["added_tokens"][0]["id"] = 0
    identities = {canonical_identity(json.dumps(other)) for other in others}
    assert len(identities | {tokenizer.identity}) == 5


def test_what_an_older_version_recorded_is_still_this_tokenizer(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    mine = Tokenizer.load(unusual(tmp_path))
    recorded = hashlib.sha256(TokenizerFile.from_str(mine.to_json()).to_str().encode()).hexdigest()
    assert mine.is_known_as(recorded) and mine.is_known_as(mine.identity)
    assert not mine.is_known_as(tokenizer.identity)
    assert not tokenizer.is_known_as(None)
    # Data of before and of now, and a run on each.
    made = prepare(["the cat sat"], tmp_path / "now", mine)
    prepare(["the cat sat"], tmp_path / "before", mine)
    entry = {key: value for key, value in made["tokenizer"].items() if key != "older_identity"}
    before = made | {"tokenizer": entry | {"identity": recorded}}
    (tmp_path / "before.json").write_text(json.dumps(before))
    datasets = open_datasets([tmp_path / "before", tmp_path / "now"])
    named = str(tmp_path / "unusual.json")
    assert check_agreement(datasets, 300, named, allowed=False) == []
    assert check_checkpoint_tokenizer(recorded, datasets[1:], "step_1", allowed=False) == []
    with pytest.raises(DataError, match="made with another tokenizer"):
        check_checkpoint_tokenizer(tokenizer.identity, datasets, "step_1", allowed=False)


def test_save_into_a_directory_leaves_one_file(tokenizer: Tokenizer, tmp_path: Path) -> None:
    assert tokenizer.save(tmp_path) == tmp_path / "tokenizer.json"
    assert [path.name for path in tmp_path.iterdir()] == ["tokenizer.json"]


def test_what_is_saved_is_on_the_disk_before_it_has_its_name(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    fsync, replace = os.fsync, Path.replace
    monkeypatch.setattr(os, "fsync", lambda number: (done.append("synced"), fsync(number)))
    monkeypatch.setattr(
        Path, "replace", lambda self, target: (done.append("named"), replace(self, target))
    )
    tokenizer.save(tmp_path)
    assert done[:2] == ["synced", "named"]


def test_transformers_loads_what_is_saved(tokenizer: Tokenizer, saved: Path) -> None:
    transformers = pytest.importorskip("transformers")
    loaded = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(saved), eos_token=END_OF_TEXT, clean_up_tokenization_spaces=False
    )
    assert len(loaded) == VOCAB_SIZE
    assert loaded.eos_token_id == tokenizer.eos_id
    for text in (EDGES[8], EDGES[9], "def f(x):\n    return x\n"):
        assert loaded(text)["input_ids"] == tokenizer.encode(text)
        assert loaded.decode(tokenizer.encode(text)) == text


def test_missing_and_foreign_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="holds neither"):
        Tokenizer.load(tmp_path)
    with pytest.raises(DataError, match=r"absent\.json: no such file"):
        Tokenizer.load(tmp_path / "absent.json")
    with pytest.raises(DataError, match=r"vocab\.json: no such file"):
        Tokenizer.load((tmp_path / "vocab.json", tmp_path / "merges.txt"))
    (tmp_path / "vocab.json").write_text("[]")
    (tmp_path / "merges.txt").write_text("a b\n")
    with pytest.raises(DataError, match="not a readable BPE vocabulary"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_bytes(b"\x80\x04not json")
    with pytest.raises(DataError, match=r"not a readable tokenizer\.json"):
        Tokenizer.load(tmp_path)


def test_a_vocabulary_without_end_of_text_is_refused(tmp_path: Path) -> None:
    file = TokenizerFile(models.BPE(vocab={"a": 0}, merges=[]))
    file.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(DataError, match=r"tokenizer.json: .*no special token <\|endoftext\|>"):
        Tokenizer.load(tmp_path)


@settings(deadline=None, max_examples=300)
@given(data=st.data())
def test_damaged_files_are_refused_or_read(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    file = byte_level_file([("a", "b"), ("ab", "c")], ["ab", "abc"])
    content = bytearray(file.to_str().encode())
    for _ in range(data.draw(st.integers(1, 4))):
        position = data.draw(st.integers(0, len(content) - 1))
        edit = data.draw(st.sampled_from(["cut", "set", "drop"]))
        if edit == "cut":
            del content[max(position, 1) :]
        elif edit == "set":
            content[position] = data.draw(st.sampled_from(b'0159-"[]{},:nabc\xff'))
        else:
            del content[position : position + data.draw(st.integers(1, 8))]
        content = content or bytearray(b" ")
    path = tmp_path_factory.mktemp("damaged") / "tokenizer.json"
    path.write_bytes(bytes(content))
    try:
        loaded = Tokenizer.load(path)
    except DataError as error:
        assert str(path) in str(error)
    else:
        judge = TokenizerFile.from_file(str(path))
        judge.encode_special_tokens = True
        assert loaded.encode("abc abcab") == judge.encode("abc abcab").ids


def test_damage_that_panics_the_library_is_an_error_too(tmp_path: Path) -> None:
    state = json.loads(byte_level_file([("a", "b")], ["ab"]).to_str())
    state["model"]["continuing_subword_prefix"] = "longer than the tokens"
    (tmp_path / "tokenizer.json").write_text(json.dumps(state))
    with pytest.raises(DataError, match=r"tokenizer\.json: not a readable tokenizer\.json"):
        Tokenizer.load(tmp_path)


# Tokenizers that ranks cannot express are encoded by `tokenizers`


def assert_encodes_like(tokenizer: Tokenizer, file: TokenizerFile, texts: list[str]) -> None:
    file.encode_special_tokens = True
    expected = [file.encode(text, add_special_tokens=False).ids for text in texts]
    assert [tokenizer.encode(text) for text in texts] == expected
    assert tokenizer.encode_batch(texts) == expected


ABC = ["".join(letters) for n in range(1, 7) for letters in product("abc", repeat=n)]


def test_merges_out_of_id_order(tmp_path: Path) -> None:
    file = byte_level_file([("a", "b"), ("b", "c")], ["bc", "ab"])
    tokenizer = load_file(file, tmp_path)
    ab, bc = 257, 256
    assert tokenizer.encode("abc") == [ab, file.token_to_id("c")]
    assert tokenizer.encode("bc") == [bc]
    assert_encodes_like(tokenizer, file, ABC)


def test_a_token_no_text_reaches(tmp_path: Path) -> None:
    file = byte_level_file([("a", "b"), ("b", "c"), ("a", "bc")], ["ab", "bc", "abc"])
    tokenizer = load_file(file, tmp_path)
    assert tokenizer.encode("abc") == [file.token_to_id("ab"), file.token_to_id("c")]
    assert_encodes_like(tokenizer, file, ABC)


def test_a_normalizer_is_honoured(tmp_path: Path) -> None:
    file = byte_level_file([("a", "b")], ["ab"])
    file.normalizer = normalizers.Lowercase()
    tokenizer = load_file(file, tmp_path)
    assert tokenizer.encode("AB") == tokenizer.encode("ab") == [256]
    assert_encodes_like(tokenizer, file, ["AB Ab", f"x{END_OF_TEXT}", ""])


def test_another_splitter_is_honoured(tmp_path: Path) -> None:
    file = byte_level_file([("a", "b")], ["ab"])
    file.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    assert_encodes_like(load_file(file, tmp_path), file, ["ab", "ab ab", " ab"])


def test_ordinary_added_tokens_are_honoured(tmp_path: Path) -> None:
    file = byte_level_file([], [])
    file.add_tokens(["<code>"])
    tokenizer = load_file(file, tmp_path)
    assert file.token_to_id("<code>") in tokenizer.encode("x<code>y")
    assert_encodes_like(tokenizer, file, ["x<code>y"])


def test_the_bytes_of_tokens_are_those_of_their_text(tokenizer: Tokenizer, tmp_path: Path) -> None:
    other = byte_level_file([("a", "b"), ("Ġ", "ab")], ["ab", "Ġab"])
    other.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
    )
    other.add_tokens([AddedToken("é☃", normalized=False)])
    pieces = {"<unk>": 0, **{f"<0x{byte:02X}>": byte + 1 for byte in range(256)}}
    pieces |= {"▁": 257, "▁the": 258, "cat": 259, "é": 260}
    sentences = TokenizerFile(
        models.Unigram([(piece, -float(number)) for piece, number in pieces.items()], 0, True)
    )
    sentences.pre_tokenizer = pre_tokenizers.Metaspace()
    sentences.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    for file in (other, sentences):
        file.add_special_tokens([AddedToken(END_OF_TEXT, special=True, normalized=False)])
    found = [tokenizer, load_file(other, tmp_path), load_file(sentences, tmp_path)]
    for text in (" the cat é☃ 北京 123", " é the\tthe catcat\n", "é☃é☃"):
        for one in found:
            ids = one.encode(text)
            written = len(one.decode(ids).encode())
            blank = 0 if one is not found[2] else 1  # which begins every text, and is not shown
            assert one.token_bytes[ids].sum() == written + blank, text
    assert all(one.token_bytes[one.eos_id] == 0 for one in found)


def test_truncation_and_padding_of_the_file_are_not_applied(tmp_path: Path) -> None:
    file = byte_level_file([("a", "b")], ["ab"])
    file.enable_truncation(max_length=3)
    file.enable_padding(length=8)
    assert load_file(file, tmp_path).encode("abcabc") == [256, 66, 256, 66]


@settings(deadline=None, max_examples=30)
@given(data=st.data())
def test_any_list_of_merges_encodes_as_in_tokenizers(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Fast engine or not, decided per vocabulary: the ids are the library's."""
    tokens, merges = ["a", "b", "c"], []
    for _ in range(data.draw(st.integers(1, 6))):
        pair = (data.draw(st.sampled_from(tokens)), data.draw(st.sampled_from(tokens)))
        if "".join(pair) not in tokens:
            tokens.append("".join(pair))
            merges.append(pair)
    file = byte_level_file(merges, data.draw(st.permutations(tokens[3:])))
    tokenizer = load_file(file, tmp_path_factory.mktemp("merges"))
    assert_encodes_like(tokenizer, file, ABC)


def test_import_needs_no_torch() -> None:
    code = "import sys, fourfold.tokenizer; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
