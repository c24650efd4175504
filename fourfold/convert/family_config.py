"""What a family of networks calls its settings and tensors, and what `config.json` says in them.

    family.read(path, config)       the keys of the `Model` section that a config.json stands for
    family.objection(shape)         the setting of a shape that the family does not have
    family.describe(shape)          the config.json of a shape

The families themselves are in families.py. Options with one spelling everywhere (rotary positions,
windows) are written out here. Both spellings of rotary positions are read, that of transformers 4
(`rope_theta`, `rope_scaling` with `type` or `rope_type`) and that of 5 (`rope_parameters`), and
both are written, so that programs of either age have what they look for. Where a file is silent,
transformers' default for that family holds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from fourfold.convert.imported import NETWORK, count_of, options_of
from fourfold.errors import CheckpointError
from fourfold.model.params import ModelShape

# Settings that no family here has: key, the values that mean without it.
_REFUSED: tuple[tuple[str, tuple[Any, ...]], ...] = (
    ("auto_map", ()),
    ("quantization_config", ()),
    ("add_cross_attention", (False,)),
    ("is_encoder_decoder", (False,)),
    ("num_experts", (0,)),
    ("num_local_experts", (0,)),
    ("n_routed_experts", (0,)),
    ("clip_qkv", ()),
    ("attn_logit_softcapping", ()),
    ("final_logit_softcapping", ()),
    ("embedding_multiplier", (1,)),
    ("attention_multiplier", ()),
    ("residual_multiplier", (1,)),
    ("logits_scaling", (1,)),
    ("no_rope_layers", ()),
    ("dual_chunk_attention_config", ()),
)


@dataclass(frozen=True)
class Described:
    """What a config.json says, in keys of the `Model` section."""

    heads: int
    declared: dict[str, int]  # sizes that the tensors have too
    options: dict[str, Any]  # what they do not tell
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Family:
    model_type: str
    architecture: str
    about: str  # the block in a few words
    names: Mapping[str, str]  # our module -> theirs, both up to the dot before weight or bias
    head: str  # of an untied head
    always: Mapping[str, Any]  # options of ours that all its networks have
    free: tuple[str, ...]  # options of ours that it has whatever their value
    biases: Mapping[str, Mapping[str, bool]]  # our bias -> what says so
    activations: Mapping[str, str]
    sizes: Mapping[str, str]
    dropouts: Mapping[str, str]
    activation_key: str = "hidden_act"
    epsilon_key: str = "rms_norm_eps"
    theta_key: str = "rope_theta"
    share_key: str = "partial_rotary_factor"
    # Where the file says nothing, as in transformers.
    defaults: Mapping[str, Any] = field(default_factory=dict)
    # Rows of q, k, v: three tensors, one in our order, or one transposed with all q, all k, all v.
    qkv: Literal["apart", "by_head", "blocks"] = "apart"
    windows: Literal["none", "all", "by_layer"] = "none"
    heads_divide_width: bool = False  # also where head_dim is given

    @property
    def is_rotary(self) -> bool:
        return self.always.get("position_embedding") == "rotary"

    # -- in -----------------------------------------------------------------------------------

    def read(self, path: Path, config: Mapping[str, Any]) -> Described:
        """What `config` says; a setting that our network does not have is an error."""
        for key, without in _REFUSED:
            if config.get(key) not in (*without, None):
                raise refusal(path, key, config[key])
        given = {key: value for key, value in config.items() if value is not None or key in _NULLS}
        said = {**self.defaults, **given}
        sizes = self._sizes(path, said)
        heads = sizes.pop("num_attention_heads")
        options = dict(self.always) | {
            "activation": self._activation(path, said),
            "norm_epsilon": _positive(path, self.epsilon_key, said[self.epsilon_key]),
            "bias": self._bias(path, said),
            "tie_word_embeddings": _flag(path, "tie_word_embeddings", said["tie_word_embeddings"]),
        }
        if "parallel_residual" in self.free:
            key = "use_parallel_residual"
            options["parallel_residual"] = _flag(path, key, said[key])
        if "num_key_value_heads" in self.free:
            options |= _heads(path, said, heads)
        if self.is_rotary:
            options["max_position_embeddings"] = sizes.pop("max_position_embeddings")
            options |= _rotary(path, said, self, options)
            head_dim = options.get("head_dim") or sizes["hidden_size"] // heads
            _check_rotated(path, head_dim, options["partial_rotary_factor"])
        options |= self._windows(path, said, sizes["num_layers"])
        notes: list[str] = []
        return Described(heads, sizes, options | self._dropouts(said, notes), notes)

    def _sizes(self, path: Path, said: Mapping[str, Any]) -> dict[str, int]:
        sizes: dict[str, int] = {}
        for key, ours in self.sizes.items():
            value = said.get(key)
            if key == "n_inner" and value is None:
                value = 4 * sizes["hidden_size"]
            sizes[ours] = count_of(path, key, value)
        return sizes

    def _activation(self, path: Path, said: Mapping[str, Any]) -> str:
        value = said[self.activation_key]
        if not isinstance(value, str) or value not in self.activations:
            known = " or ".join(map(repr, self.activations))
            raise refusal(path, self.activation_key, value, f"; it has {known}")
        return self.activations[value]

    def _bias(self, path: Path, said: Mapping[str, Any]) -> str:
        keys = sorted({key for spelled in self.biases.values() for key in spelled})
        found = {key: _flag(path, key, said[key]) for key in keys}
        for ours, spelled in self.biases.items():
            if found == dict(spelled):
                return ours
        odd = next((key for key in keys if found[key]), keys[0])
        others = [f"{key}={found[key]}" for key in keys if key != odd]
        beside = f" with {', '.join(others)}" if others else ""
        raise refusal(path, odd, found[odd], beside)

    def _windows(self, path: Path, said: Mapping[str, Any], layers: int) -> dict[str, Any]:
        width, kinds = said.get("sliding_window"), said.get("layer_types")
        if self.windows == "by_layer" and not _flag(path, USES, said[USES]):
            width = None
        if self.windows == "none" and width is not None:
            raise refusal(path, "sliding_window", width, f" with model_type={self.model_type}")
        if width is None:
            if kinds is not None and set(_kinds(path, kinds, layers)) != {"full_attention"}:
                raise refusal(path, "layer_types", kinds, " without a sliding_window")
            return {}
        width = count_of(path, "sliding_window", width)
        if self.windows == "all":
            if kinds is not None and set(_kinds(path, kinds, layers)) != {"sliding_attention"}:
                raise refusal(path, "layer_types", kinds)
            return {"sliding_window": width}
        if kinds is None:
            first = said["max_window_layers"]
            if not isinstance(first, int) or isinstance(first, bool) or first < 0:
                raise refusal(path, "max_window_layers", first)
            chosen = list(range(min(first, layers), layers))
        else:
            names = _kinds(path, kinds, layers)
            chosen = [number for number in range(layers) if names[number] == "sliding_attention"]
        return {"sliding_window": width, "sliding_window_layers": chosen} if chosen else {}

    def _dropouts(self, said: Mapping[str, Any], notes: list[str]) -> dict[str, float]:
        """Training's, and so no reason to refuse a file: those that are none are left out."""
        found = {"hidden_dropout_prob": 0.0} if self.is_rotary else {}
        for key, ours in {**self.dropouts, "initializer_range": "initializer_range"}.items():
            value = said.get(key)
            if isinstance(value, int | float) and 0 <= value < 1:
                found[ours] = float(value)
        embedding = said.get("embd_pdrop", said.get("resid_pdrop"))
        if embedding != said.get("resid_pdrop"):
            notes.append(
                f"embd_pdrop={_short(embedding)} differs from resid_pdrop; hidden_dropout_prob is "
                "the latter, for both"
            )
        return found

    # -- out ----------------------------------------------------------------------------------

    def objection(self, shape: ModelShape) -> str | None:
        """The first setting of a shape that this family does not have, or None."""
        for name, value in (*self.always.items(), *NETWORK.items()):
            own = options_of(shape).get(name, NETWORK[name])
            if name == "activation":
                fits = own in self.activations.values()
            elif name == "bias":
                fits = own in self.biases
            else:
                fits = name in self.free or own == self.always.get(name, value)
            if not fits:
                return f"Model.{name}={own}"
        if self.heads_divide_width and shape.hidden_size % shape.num_attention_heads:
            return (
                f"Model.num_attention_heads={shape.num_attention_heads}, which does not divide "
                f"Model.hidden_size={shape.hidden_size},"
            )
        return None

    def describe(self, shape: ModelShape) -> dict[str, Any]:
        """The settings of the network, as config.json spells them."""
        spelled = {ours: theirs for theirs, ours in reversed([*self.activations.items()])}
        config: dict[str, Any] = {
            "architectures": [self.architecture],
            "model_type": self.model_type,
            **{theirs: getattr(shape, ours) for theirs, ours in self.sizes.items()},
            self.activation_key: spelled[shape.activation],
            self.epsilon_key: shape.norm_epsilon,
            "tie_word_embeddings": shape.tie_word_embeddings,
            **self.biases[shape.bias],
        }
        if "num_key_value_heads" in self.free:
            config["num_key_value_heads"] = shape.key_value_heads
            config["head_dim"] = shape.head_size
        if "parallel_residual" in self.free:
            config["use_parallel_residual"] = shape.parallel_residual
        if self.windows != "none":
            config |= _windows_out(shape, self.windows)
        if self.is_rotary:
            config |= _rotary_out(shape, self)
        else:
            config["scale_attn_weights"] = True
        return config


# -- reading --------------------------------------------------------------------------------------

USES = "use_sliding_window"
_NULLS = ("sliding_window", "num_key_value_heads", "head_dim")  # where null is not "not said"
_KINDS = ("full_attention", "sliding_attention")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def refusal(path: Path, key: str, value: Any, more: str = "") -> CheckpointError:
    return CheckpointError(
        f"{path}: {key}={_short(value)}{'' if more.startswith(';') else more} is not what "
        f"Fourfold's GPT has{more if more.startswith(';') else ''}"
    )


def _positive(path: Path, key: str, value: Any) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < 1e30:
        return float(value)
    raise CheckpointError(f"{path}: {key}={_short(value)} is not a number above 0")


def _flag(path: Path, key: str, value: Any) -> bool:
    if isinstance(value, bool):
        return value
    raise CheckpointError(f"{path}: {key}={_short(value)} is neither true nor false")


def _heads(path: Path, said: Mapping[str, Any], heads: int) -> dict[str, int]:
    found = {}
    for key in ("num_key_value_heads", "head_dim"):
        if said.get(key) is not None:
            found[key] = count_of(path, key, said[key])
    shared = found.get("num_key_value_heads", heads)
    if heads % shared:
        raise CheckpointError(
            f"{path}: num_key_value_heads={shared} does not divide num_attention_heads={heads}; "
            "the file is damaged"
        )
    return found


def _kinds(path: Path, kinds: Any, layers: int) -> list[str]:
    if not isinstance(kinds, list) or len(kinds) != layers:
        raise CheckpointError(f"{path}: layer_types is no list of the {layers} layers' kinds")
    for kind in kinds:
        if kind not in _KINDS:
            raise refusal(path, "layer_types", kind, f"; it has {' or '.join(_KINDS)}")
    return kinds


def _check_rotated(path: Path, head_dim: int, share: float) -> None:
    rotated = int(head_dim * share)
    if rotated < 2 or rotated % 2:
        raise CheckpointError(
            f"{path}: {rotated} numbers of a head of {head_dim} would be rotated, and they are "
            "rotated in pairs; the file is damaged"
        )


# -- rotary positions -----------------------------------------------------------------------------

_SCALINGS = ("linear", "llama3", "yarn")
_BASIC = ("type", "rope_type", "rope_theta", "partial_rotary_factor", "finetuned")
_STRETCHING = ("factor", "original_max_position_embeddings")
_KNOWN = {
    "none": (*_BASIC, *_STRETCHING),  # without a type, a factor is left over from one
    "linear": (*_BASIC, *_STRETCHING),
    "llama3": (*_BASIC, *_STRETCHING, "low_freq_factor", "high_freq_factor"),
    "yarn": (*_BASIC, *_STRETCHING, "beta_fast", "beta_slow", "attention_factor", "truncate",
             "mscale", "mscale_all_dim"),
}  # fmt: skip


def _rotary(
    path: Path, said: Mapping[str, Any], family: Family, options: Mapping[str, Any]
) -> dict[str, Any]:
    key = "rope_scaling" if said.get("rope_scaling") else "rope_parameters"
    given = said.get(key) or {}
    if isinstance(given, dict) and given and all(isinstance(one, dict) for one in given.values()):
        first, *others = given.values()
        if any(one != first for one in others):
            raise refusal(path, key, given, ", different for kinds of layers,")
        given = first
    if not isinstance(given, dict):
        raise CheckpointError(f"{path}: {key}={_short(given)} is no JSON object")
    kind = given.get("rope_type") or given.get("type") or "default"
    if kind not in ("default", *_SCALINGS):
        raise refusal(path, f"{key}.rope_type", kind, f"; it has {', '.join(_SCALINGS)}")
    kind = "none" if kind == "default" else kind
    for name in given:
        if name not in _KNOWN[kind]:
            raise refusal(path, f"{key}.{_short(name)[1:-1]}", given[name], f" with {kind}")

    def setting(name: str, default: Any) -> float:
        value = given.get(name)
        return _positive(path, f"{key}.{name}", default if value is None else value)

    theta = setting("rope_theta", said.get(family.theta_key) or 10000.0)
    share = setting("partial_rotary_factor", said.get(family.share_key) or 1.0)
    if share > 1 or ("partial_rotary_factor" not in family.free and share != 1):
        raise refusal(path, family.share_key, share)
    found = {"rope_theta": theta, "partial_rotary_factor": share}
    if kind == "none":
        return found
    length = options["max_position_embeddings"]
    original = said.get("original_max_position_embeddings") or given.get(_STRETCHING[1])
    scaling: dict[str, Any] = {"type": kind}
    if kind != "linear":
        name = f"{key}.{_STRETCHING[1]}"
        scaling[_STRETCHING[1]] = length if original is None else count_of(path, name, original)
    if kind == "yarn":
        if theta <= 1:
            raise refusal(path, "rope_theta", theta, " with yarn")
        # As transformers has it where there is no factor.
        scaling["factor"] = setting("factor", length / scaling[_STRETCHING[1]])
        scaling |= _yarn(path, key, given, scaling["factor"])
        scaling |= {"beta_fast": setting("beta_fast", 32), "beta_slow": setting("beta_slow", 1)}
    else:
        scaling["factor"] = setting("factor", None)
    if kind == "llama3":
        low, high = setting("low_freq_factor", None), setting("high_freq_factor", None)
        if low >= high:
            raise refusal(path, f"{key}.low_freq_factor", low, f" with high_freq_factor={high}")
        scaling |= {"low_freq_factor": low, "high_freq_factor": high}
    return found | {"rope_scaling": scaling}


def _yarn(path: Path, key: str, given: Mapping[str, Any], factor: float) -> dict[str, Any]:
    """What rotated numbers are multiplied by, and how borders are rounded."""
    said = {
        name: _positive(path, f"{key}.{name}", given[name])
        for name in ("attention_factor", "mscale", "mscale_all_dim")
        if given.get(name)
    }
    amplitude = said.get("attention_factor")
    if amplitude is None and len(said) == 2:
        one, other = (
            0.1 * said[name] * math.log(factor) + 1.0 if factor > 1 else 1.0
            for name in ("mscale", "mscale_all_dim")
        )
        amplitude = one / other
    truncate = given.get("truncate")
    return {
        "attention_factor": amplitude,
        "truncate": True if truncate is None else _flag(path, f"{key}.truncate", truncate),
    }


def _rotary_out(shape: ModelShape, family: Family) -> dict[str, Any]:
    scaling = dict(options_of(shape).get("rope_scaling", {}))
    scaling = {"rope_type": scaling.pop("type", "default"), **scaling}
    if scaling.get("attention_factor", 1) is None:
        del scaling["attention_factor"]
    if scaling.get("truncate"):
        del scaling["truncate"]
    share: dict[str, Any] = {}
    if "partial_rotary_factor" in family.free:
        share = {"partial_rotary_factor": shape.partial_rotary_factor}
    return {
        family.theta_key: shape.rope_theta,
        **({family.share_key: shape.partial_rotary_factor} if share else {}),
        "rope_scaling": scaling if len(scaling) > 1 else None,
        "rope_parameters": {"rope_theta": shape.rope_theta, **share, **scaling},
    }


def _windows_out(shape: ModelShape, windows: str) -> dict[str, Any]:
    config: dict[str, Any] = {"sliding_window": shape.sliding_window}
    if windows == "by_layer":
        layers = range(shape.num_layers)
        slides = [shape.window_of(number) is not None for number in layers]
        config[USES] = any(slides)
        # Before there was layer_types, the layers from this one on.
        config["max_window_layers"] = slides.index(True) if any(slides) else shape.num_layers
        config["layer_types"] = [_KINDS[slide] for slide in slides]
    return config
