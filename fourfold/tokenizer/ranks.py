"""Merge ranks: tiktoken's rank files, Mistral's tekken.json, and what they leave unsaid.

A rank file has a line per token: its bytes in base64, and its rank, which is its id. The split
rule, the special tokens and what begins and ends a text are written in the program of each family
instead. They are here, and the family is told by the number of ranks:

    Llama 3 and 4, Qwen to 3.0, Qwen 3.5, and OpenAI's r50k, p50k, cl100k and o200k

tekken.json names its rule, and its tokens' bytes in base64; ids begin with the special tokens.
Both are bounded before they are read, and nothing in them is run.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as TokenizerFile

from fourfold.errors import DataError
from fourfold.tokenizer import rules
from fourfold.tokenizer.facts import END_OF_TEXT, SpecialNames
from fourfold.tokenizer.fast import ByteBpe, byte_of_character, every_pair

MOST_BYTES = 64 << 20
_LONGEST_TOKEN_BYTES = 4096


@dataclass(frozen=True)
class RankFamily:
    """What a rank file does not say. Special tokens follow the ranks, or stand where `at` says."""

    name: str
    num_ranks: int
    rule: rules.SplitRule
    names: SpecialNames
    specials: tuple[str, ...] = ()
    at: tuple[tuple[str, int], ...] = ()
    composes: bool = False

    def special_ids(self) -> dict[str, int]:
        after = {token: self.num_ranks + number for number, token in enumerate(self.specials)}
        return after | dict(self.at)


def _numbered(pattern: str, numbers: Iterable[int]) -> tuple[str, ...]:
    return tuple(f"<|{pattern}_{number}|>" for number in numbers)


def _llama3() -> RankFamily:
    named = (
        *("<|begin_of_text|>", "<|end_of_text|>", *_numbered("reserved_special_token", (0, 1))),
        *("<|finetune_right_pad_id|>", "<|step_id|>", "<|start_header_id|>", "<|end_header_id|>"),
        *("<|eom_id|>", "<|eot_id|>", "<|python_tag|>", "<|image|>"),
    )
    specials = (*named, *_numbered("reserved_special_token", range(2, 2 + 256 - len(named))))
    names = SpecialNames(
        eos="<|end_of_text|>",
        bos="<|begin_of_text|>",
        pad="<|finetune_right_pad_id|>",
        adds_bos=True,
    )
    return RankFamily("Llama 3", 128_000, rules.LLAMA3, names, specials)


def _llama4() -> RankFamily:
    text, sight = "text_post_train_reserved_special_token", "vision_reserved_special_token"
    thought = "reasoning_reserved_special_token"
    named = (
        *("<|begin_of_text|>", "<|end_of_text|>"),
        *("<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>"),
        *("<|header_start|>", "<|header_end|>", "<|eom|>", "<|eot|>", "<|step|>"),
        *_numbered(text, range(6)),
        *("<|python_start|>", "<|python_end|>", "<|finetune_right_pad|>"),
        *_numbered(text, range(8, 69)),
        *("<|image_start|>", "<|image_end|>", *_numbered(sight, (0, 1))),
        *("<|tile_x_separator|>", "<|tile_y_separator|>", *_numbered(sight, range(2, 6))),
        *("<|image|>", *_numbered(sight, (6,)), "<|patch|>", *_numbered(sight, range(7, 1048))),
        *_numbered(thought, range(8)),
        *("<|reasoning_thinking_start|>", "<|reasoning_thinking_end|>"),
    )
    specials = (*named, *_numbered("reserved_special_token", range(2048 - len(named))))
    names = SpecialNames(
        eos="<|end_of_text|>", bos="<|begin_of_text|>", pad="<|finetune_right_pad|>", adds_bos=True
    )
    return RankFamily("Llama 4", 200_000, rules.O200K, names, specials)


_CHAT = ("<|im_start|>", "<|im_end|>")
_QWEN35_SPECIALS = (
    *(END_OF_TEXT, *_CHAT, "<|object_ref_start|>", "<|object_ref_end|>"),
    *("<|box_start|>", "<|box_end|>", "<|quad_start|>", "<|quad_end|>"),
    *("<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>"),
    *("<tool_call>", "</tool_call>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>"),
    *("<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<tool_response>", "</tool_response>"),
    *("<think>", "</think>", "<|audio_start|>", "<|audio_end|>", "<tts_pad>", "<tts_text_bos>"),
    *("<tts_text_eod>", "<tts_text_bos_single>", "<|audio_pad|>"),
)
_ENDS = SpecialNames(eos=END_OF_TEXT, adds_bos=False)
_FIM = tuple(
    (f"<|fim_{part}|>", number)
    for number, part in enumerate(("prefix", "middle", "suffix"), 100_258)
)
FAMILIES = (
    _llama3(),
    _llama4(),
    RankFamily(
        "Qwen",
        151_643,
        rules.QWEN,
        _ENDS,
        (END_OF_TEXT, *_CHAT, *_numbered("extra", range(205))),
        composes=True,
    ),
    RankFamily("Qwen 3.5", 248_044, rules.QWEN35, _ENDS, _QWEN35_SPECIALS, composes=True),
    RankFamily("r50k", 50_256, rules.GPT2, _ENDS, (END_OF_TEXT,)),
    RankFamily("p50k", 50_280, rules.GPT2, _ENDS, at=((END_OF_TEXT, 50_256),)),
    RankFamily(
        "cl100k",
        100_256,
        rules.CL100K,
        _ENDS,
        at=((END_OF_TEXT, 100_257), *_FIM, ("<|endofprompt|>", 100_276)),
    ),
    RankFamily(
        "o200k",
        199_998,
        rules.O200K,
        _ENDS,
        at=((END_OF_TEXT, 199_999), ("<|endofprompt|>", 200_018)),
    ),
)


# -- reading --------------------------------------------------------------------------------------


def looks_like_ranks(start: bytes) -> bool:
    """Whether a file that starts so is one of base64 and numbers, line by line."""
    token, _, rank = start.split(b"\n", 1)[0].strip().partition(b" ")
    return rank.isdigit() and _bytes_of(token) is not None


def read_ranks(path: Path) -> tuple[ByteBpe, SpecialNames]:
    """The tokenizer of a rank file, with what its family adds."""
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(_bounded(path).splitlines(), start=1):
        if not line:
            continue
        token, _, rank = line.partition(b" ")
        content = _bytes_of(token)
        if content is None or not rank.isdigit() or len(rank) > 9:
            raise DataError(
                f"{path}:{number}: not a token in base64 and its rank; the file is damaged or no "
                "rank file"
            )
        if content in ranks:
            raise DataError(f"{path}:{number}: the token was there before; the file is damaged")
        ranks[content] = int(rank)
    family = next((one for one in FAMILIES if one.num_ranks == len(ranks)), None)
    if family is None:
        known = ", ".join(f"{one.name} ({one.num_ranks})" for one in FAMILIES)
        raise DataError(
            f"{path}: {len(ranks)} ranks are of no family known here ({known}), and its split rule "
            "and special tokens are not in the file; give the tokenizer.json of its model"
        )
    specials = family.special_ids()
    _check_ranks(path, ranks, specials)
    return ByteBpe(ranks, family.rule, specials, {}, family.composes), family.names


def _bytes_of(token: bytes | str) -> bytes | None:
    try:
        content = base64.b64decode(token, validate=True)
    except (binascii.Error, ValueError):
        return None
    return content if 0 < len(content) <= _LONGEST_TOKEN_BYTES else None


def _bounded(path: Path) -> bytes:
    size = path.stat().st_size
    if size > MOST_BYTES:
        raise DataError(
            f"{path}: {size} bytes, more than the {MOST_BYTES} of any tokenizer known; name the "
            "tokenizer's own file"
        )
    return path.read_bytes()


def _check_ranks(path: Path, ranks: dict[bytes, int], specials: dict[str, int]) -> None:
    missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if missing:
        raise DataError(
            f"{path}: no token for the byte {missing[0]}, so not every text has ids; the file is "
            "damaged or not of byte-level BPE"
        )
    ids = [*ranks.values(), *specials.values()]
    if len(set(ids)) != len(ids) or max(ids) >= 2 * len(ids):
        raise DataError(f"{path}: its ids repeat or have large gaps; the file is damaged")


_TEKKEN_SPECIALS = (
    *("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
    *("[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]"),
    *("[IMG_END]", "[PREFIX]", "[MIDDLE]", "[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"),
    "[TOOL_CONTENT]",
)


def read_tekken(path: Path) -> tuple[ByteBpe, SpecialNames]:
    """Mistral's tekken.json: as many of its tokens as the file says, after the special tokens."""
    try:
        state = json.loads(_bounded(path))
        config, listed = state["config"], state.get("special_tokens")
        size, num_specials = config["default_vocab_size"], config["default_num_special_tokens"]
        kept = [entry for entry in state["vocab"] if entry["rank"] < size - num_specials]
        tokens = [(_bytes_of(entry["token_bytes"]), entry["rank"]) for entry in kept]
        named = {int(one["rank"]): str(one["token_str"]) for one in listed or ()}
        pattern = config["pattern"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise DataError(f"{path}: not a readable tekken.json ({error!r})") from None
    rule = next((one for one in rules.RULES.values() if one.steps == (pattern,)), None)
    if rule is None:
        raise DataError(
            f"{path}: its split rule {pattern!r} is not one known here; give the tokenizer.json of "
            "its model"
        )
    named = named or dict(enumerate(_TEKKEN_SPECIALS))
    is_whole = isinstance(num_specials, int) and 0 < num_specials <= len(tokens) + 4096
    ranks = {
        token: num_specials + rank
        for token, rank in tokens
        if is_whole and token is not None and isinstance(rank, int) and rank >= 0
    }
    if not is_whole or len(ranks) != len(tokens) or len(tokens) != size - num_specials:
        raise DataError(f"{path}: its tokens are not as many as it says; the file is damaged")
    names = [named.get(number, f"<SPECIAL_{number}>") for number in range(num_specials)]
    specials = {name: number for number, name in enumerate(names)}
    _check_ranks(path, ranks, specials)
    if len(specials) != num_specials or not {"<s>", "</s>"} <= set(specials):
        raise DataError(f"{path}: its special tokens repeat, or <s> or </s> is not among them")
    pad = "<pad>" if "<pad>" in specials else None
    return (
        ByteBpe(ranks, rule, specials, {}, composes=False),
        SpecialNames(eos="</s>", bos="<s>", pad=pad, unk="<unk>", adds_bos=True),
    )


# -- the same as a tokenizer.json -----------------------------------------------------------------


def file_of(bpe: ByteBpe, names: SpecialNames) -> TokenizerFile:
    """What `tokenizers` makes of merge ranks: every pair that a rank's token can be made of."""
    character_of = {byte: character for character, byte in byte_of_character().items()}
    vocab = {
        "".join(map(character_of.__getitem__, token)): number for token, number in bpe.ranks.items()
    }
    merges = list(every_pair(vocab))
    ordered = sorted((bpe.specials | bpe.added).items(), key=lambda item: item[1])
    if [number for _, number in ordered] != list(range(len(vocab), len(vocab) + len(ordered))):
        # The library numbers added tokens after the others, unless they are among them.
        vocab |= dict(ordered)
    file = TokenizerFile(models.BPE(vocab=vocab, merges=merges, ignore_merges=True))
    if bpe.composes:
        file.normalizer = normalizers.NFC()
    splits = [pre_tokenizers.Split(Regex(step), "isolated") for step in bpe.rule.steps]
    by_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    file.pre_tokenizer = pre_tokenizers.Sequence([*splits, by_bytes])
    file.decoder = decoders.ByteLevel()
    file.add_tokens(
        [AddedToken(token, special=token in bpe.specials, normalized=False) for token, _ in ordered]
    )
    by_bytes_again = processors.ByteLevel(trim_offsets=False)
    file.post_processor = by_bytes_again
    if names.adds_bos and names.bos is not None:
        template = begin_with(names.bos, (bpe.specials | bpe.added)[names.bos])
        file.post_processor = processors.Sequence([by_bytes_again, template])
    return file


def begin_with(token: str, number: int) -> processors.TemplateProcessing:
    """Every text begins with this token where special tokens are wanted."""
    return processors.TemplateProcessing(
        single=[token, "$A"],
        pair=[token, "$A", f"{token}:1", "$B:1"],
        special_tokens=[(token, number)],
    )
