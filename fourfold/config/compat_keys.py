"""Compatibility keys, other spellings of the same tree: the 2022 layout under `PreTraining:`,
sections pasted inside another one, and the key names of later FleetX versions.

`translate` rewrites them in place to the names of `fourfold.config.schema`, with a notice. A
request for something that is not offered here is an error if it would change the result, and a
notice if it would not; nothing is dropped silently.
"""

from __future__ import annotations

from typing import Any

from fourfold.config.fields import leaves
from fourfold.config.findings import Report, did_you_mean, nearest
from fourfold.config.model_section import ModelSection
from fourfold.config.schema import Config
from fourfold.config.yaml_nodes import Entry, Tree, find, put, take, value_of, walk

SECTIONS = list(Config.model_fields)
_LATER_DATA = ("Train", "Eval", "Test")
_LATER_DATA_KEYS = {"dataset", "sampler", "loader", "collate_fn", "sample_split"}

RENAMED: dict[str, str] = {
    **{
        f"Global.{size}": f"Data.batch_size.{size}"
        for size in ("global_batch_size", "local_batch_size", "micro_batch_size")
    },
    **{
        f"Data.{part}.dataset.{name}": f"Data.dataset.{name}"
        for part in _LATER_DATA
        for name in ("input_dir", "split", "max_seq_len")
    },
    "Engine.use_recompute": "Model.use_recompute",
    "Distributed.pp_recompute_interval": "Model.recompute_num_layers",
    "Model.max_seq_len": "Data.dataset.max_seq_len",
    "Model.virtual_pp_degree": "Distributed.virtual_pp_degree",
    **{
        path: f"Distributed.sharding.sharding_{name}"
        for name in ("degree", "stage", "offload")
        for path in (f"Distributed.sharding.{name}", f"Distributed.sharding_{name}")
    },
    "Optimizer.beta1": "Optimizer.adam_beta1",
    "Optimizer.beta2": "Optimizer.adam_beta2",
    "Optimizer.epsilon": "Optimizer.adam_epsilon",
    "Optimizer.tensor_fusion": "Fused.tensor_fusion",
    "Offline_Eval": "Eval",
}

_LAYERS_BY_NUMBER = (
    "layers are not chosen by their numbers; Model.recompute_method=block recomputes the first "
    "Model.recompute_num_layers of each stage"
)
WITHOUT_EFFECT: dict[str, str] = {
    "Global.flags": "flags of another framework",
    "Engine.mix_precision.use_main_grad": "with bfloat16 the weights and gradients are float32",
    "Engine.mix_precision.use_fp16_guard": "there is no guarded region",
    "Engine.save_load.save_epoch": "checkpoints follow Engine.save_load.save_steps",
    "Model.scale_qk_by_layer_num": "it divides and multiplies by the same number",
    "Model.use_flash_attn": "attention always takes the fastest kernel there is",
    "Model.fused_softmax_with_triangular": "attention always takes the fastest kernel there is",
    "Model.recompute_layers": _LAYERS_BY_NUMBER,
    "Model.no_recompute_layers": _LAYERS_BY_NUMBER,
    **{
        f"Data.{part}.{name}": "samples become batches in one way only"
        for part in _LATER_DATA
        for name in ("collate_fn", "sample_split")
    },
    **{
        f"Data.{part}.sampler": "the order of samples is a function of Global.seed and the step"
        for part in _LATER_DATA
    },
    **{
        f"Data.{part}.loader": "files are memory-mapped and read ahead by Data.dataset.prefetch"
        for part in _LATER_DATA
    },
    "Optimizer.multi_precision": "float16 training always has float32 master weights",
    "Optimizer.lr.use_increments": "the schedule counts optimizer steps",
    "Distributed.sharding.comm_overlap": "communication is always overlapped where it can be",
    "Distributed.sharding.reduce_overlap": "communication is always overlapped where it can be",
    "Distributed.sharding.broadcast_overlap": "communication is always overlapped where it can be",
    "Distributed.fuse_sequence_parallel_allreduce": "same numbers either way",
    "Generation.use_topp_sampling": "Generation.top_p needs no switch",
    "Generation.inference": "there is no separate graph for inference",
    "Generation.early_finish": "generation ends when every text has",
    "Compress.pretrained": "there is no compression; weights come from Engine.save_load.ckpt_dir",
}

# Keys without effect that the originals' files carry, with the value they have there: only another
# value gets a notice.
USUAL: dict[str, tuple[Any, str]] = {
    "Engine.num_train_epochs": (
        1,
        "Engine.max_steps ends the run, and the data repeats, reshuffled, as often as that needs",
    ),
    "Model.type_vocab_size": (16, "a GPT has no token types"),
    "Model.fuse_attn_qkv": (
        True,
        "query, key and value are one projection, stored head by head",
    ),
}

# Choices the originals offer by name, with the names that mean what is done here.
ONLY: dict[str, tuple[tuple[str, ...], str]] = {
    "Engine.run_mode": (("step",), "set Engine.max_steps instead of counting epochs"),
    "Model.module": (
        ("GPTModule", "GPTModuleAuto", "GPTGenerationModule", "GPTEvalModule"),
        "only GPT language models are trained here",
    ),
    "Model.name": (("GPT", "GPTAuto"), "only GPT language models are trained here"),
    "Optimizer.lr.name": (
        ("CosineAnnealingWithWarmupDecay", "cosine", "consine"),
        "the schedule is warm-up and cosine decay",
    ),
    "Optimizer.grad_clip.name": (("ClipGradByGlobalNorm",), "clipping is by the global norm"),
    **{
        f"Data.{part}.dataset.name": (
            ("GPTDataset",),
            "training reads token files; the section Eval measures WikiText and LAMBADA",
        )
        for part in _LATER_DATA
    },
}

# Other names of AdamW.
ADAMW_NAMES = ("FusedAdamW", "Adam")

# Features that are not offered: (switched on when `enable` is left out, what to do instead).
NOT_OFFERED: dict[str, tuple[bool, str]] = {
    "Quantization": (False, "quantization-aware training is not offered"),
    "Compress.Quantization": (False, "quantization-aware training is not offered"),
    "Compress.Prune": (True, "pruning is not offered"),
    "Compress.Distillation": (True, "distillation is not offered"),
    "FusedPasses": (False, "passes of another framework are not offered"),
    "Tuning": (False, "tuning is not offered; choose Model.recompute_granularity"),
}


def expand_auto(tree: Tree) -> None:
    """`Distributed: auto` becomes `Distributed.auto: True`, so that degrees can be set beside
    it."""
    entry = tree.get("Distributed")
    if entry is not None and is_auto(entry.value):
        entry.value = {"auto": Entry(True, entry.source, entry.layer)}


def is_auto(value: object) -> bool:
    return isinstance(value, str) and value.lower() == "auto"


def translate(tree: Tree, report: Report) -> None:
    """Rewrite every other spelling in `tree` to the documented one."""
    _unfold_old_layout(tree, report)
    _lift_nested_sections(tree, report)
    _divide_auto_parallel_dp(tree, report)
    for path, (names, remedy) in ONLY.items():
        entry = take(tree, path)
        if entry is not None and entry.value is not None and entry.value not in names:
            report.problem(entry.source, f"{path}={_shown(entry)} is not supported: {remedy}")
    _read_optimizer_name(tree, report)
    for path, (by_default, remedy) in NOT_OFFERED.items():
        _refuse_feature(tree, path, by_default, remedy, report)
    for path, reason in WITHOUT_EFFECT.items():
        entry = take(tree, path)
        if entry is not None and entry.value not in (None, [], {}):
            report.notice(entry.source, f"{path} has no effect here: {reason}")
    for path, (usual, reason) in USUAL.items():
        entry = take(tree, path)
        if entry is not None and entry.value not in (None, usual):
            report.notice(entry.source, f"{path}={_shown(entry)} has no effect: {reason}")
    _flatten_grad_clip(tree, report)
    for path, name in RENAMED.items():
        _rename(tree, path, name, report)
    _read_precision_switch(tree, report)
    _pad_vocabulary(tree, report)


def _read_optimizer_name(tree: Tree, report: Report) -> None:
    entry = find(tree, "Optimizer.name")
    if entry is None or entry.value in ("AdamW", "Muon"):
        return
    if entry.value == "Adam" and value_of(tree, "Optimizer.weight_decay", 0) not in (0, 0.0):
        report.notice(
            entry.source,
            "Optimizer.name=Adam is read as AdamW: Optimizer.weight_decay is taken from the "
            "weights, where Adam adds it to the gradient; 0 makes the two the same",
        )
    elif entry.value is not None and entry.value not in ADAMW_NAMES:
        report.problem(
            entry.source,
            f"Optimizer.name={_shown(entry)} is not supported: the optimizer is AdamW or Muon",
        )
    entry.value = "AdamW"


def _unfold_old_layout(tree: Tree, report: Report) -> None:
    """`PreTraining:` was a flat list of keys beside some sections; names were unique over all."""
    root = tree.pop("PreTraining", None)
    if root is None or root.value is None:
        return
    if not root.is_section:
        report.problem(root.source, "PreTraining must hold keys and sections")
        return
    report.notice(root.source, "PreTraining is the 2022 layout; its keys go to today's sections")
    paths: dict[str, str] = {}
    for path in [*(path for path, _ in leaves(Config)), *USUAL]:
        paths.setdefault(path.rsplit(".", 1)[-1], path)
    for path, entry in walk(root.value):
        name = path.rsplit(".", 1)[-1]
        if path.split(".")[0] in SECTIONS:
            _place(tree, path, entry, report)
        elif path.startswith("quantization."):
            name = "enable" if name == "use_qat" else name
            _place(tree, f"Quantization.{name}", entry, report)
        elif name in paths:
            _place(tree, paths[name], entry, report)
        elif path not in ("batch_size", "dataset", "mix_precision", "save_load") or entry.value:
            hint = did_you_mean(nearest(name, paths))
            report.problem(entry.source, f"PreTraining.{path}: unknown key{hint}")


def _lift_nested_sections(tree: Tree, report: Report) -> None:
    """The documents print some sections indented; pasted below another they end up inside it."""
    outers = [(name, tree[name].value) for name in SECTIONS if name in tree]
    for outer, keys in [(name, keys) for name, keys in outers if isinstance(keys, dict)]:
        for name in [name for name in keys if name in SECTIONS]:
            inner = keys[name]
            later_data = outer == "Data" and name in _LATER_DATA and inner.is_section
            if later_data and _LATER_DATA_KEYS & set(inner.value):
                continue
            del keys[name]
            report.notice(inner.source, f"{outer}.{name} is read as the section {name}")
            _place(tree, name, inner, report)


def _divide_auto_parallel_dp(tree: Tree, report: Report) -> None:
    """Auto-parallel files (recompute in Engine) count the sharding ranks inside dp_degree."""
    entry = find(tree, "Distributed.dp_degree")
    sharding = value_of(tree, "Distributed.sharding.sharding_degree", 1)
    dp = entry.value if entry is not None else None
    if find(tree, "Engine.use_recompute") is None or entry is None:
        return
    if not (type(dp) is int and type(sharding) is int and sharding > 1):
        return
    said = (
        f"Distributed.dp_degree={dp} of an auto-parallel file contains sharding_degree={sharding}"
    )
    if dp % sharding:
        report.problem(entry.source, f"{said}, which does not divide it")
        entry.value = None
    else:
        entry.value = dp // sharding
        report.notice(entry.source, f"{said}; it becomes dp_degree={entry.value}")


def _refuse_feature(tree: Tree, path: str, by_default: bool, remedy: str, report: Report) -> None:
    entry = take(tree, path)
    if entry is None or entry.value is None:
        return
    enabled = value_of(entry.value, "enable", by_default) if entry.is_section else entry.value
    if enabled is not False:
        report.problem(entry.source, f"{path}: {remedy}; remove it or set {path}.enable to False")
    else:
        report.notice(entry.source, f"{path} has no effect here: {remedy}, and it is not enabled")


def _flatten_grad_clip(tree: Tree, report: Report) -> None:
    path = "Optimizer.grad_clip.clip_norm"
    norm = take(tree, path)
    if norm is None:
        return
    report.notice(norm.source, f"{path} is read as Optimizer.grad_clip")
    if find(tree, "Optimizer.grad_clip") is None:  # else unknown keys are left, to be reported
        _place(tree, "Optimizer.grad_clip", norm, report)


def _rename(tree: Tree, path: str, name: str, report: Report) -> None:
    entry = take(tree, path)
    if entry is None:
        return
    if entry.value is not None:
        report.notice(entry.source, f"{path} is read as {name}")
    _place(tree, name, entry, report)


def _read_precision_switch(tree: Tree, report: Report) -> None:
    """Later files: `enable` decides whether `dtype` (float16 when left out) is used at all."""
    block = "Engine.mix_precision"
    enable = take(tree, f"{block}.enable")
    if enable is None or enable.value is None:
        return
    if not isinstance(enable.value, bool):
        report.problem(enable.source, f"{block}.enable={_shown(enable)} is not true or false")
        return
    dtype = find(tree, f"{block}.dtype")
    decided_later = dtype is not None and dtype.value is not None and dtype.layer > enable.layer
    if enable.value:
        if dtype is None or dtype.value is None:
            _place(tree, f"{block}.dtype", Entry("float16", enable.source, enable.layer), report)
            report.notice(enable.source, f"{block}.enable is read as {block}.dtype: float16")
    elif not decided_later:
        for name in ("dtype", "level", "use_pure_fp16"):
            take(tree, f"{block}.{name}")
        _place(tree, f"{block}.dtype", Entry("float32", enable.source, enable.layer), report)
        report.notice(enable.source, f"{block}.enable=False is read as {block}.dtype: float32")


def _pad_vocabulary(tree: Tree, report: Report) -> None:
    unit = take(tree, "Model.vocab_size_divisible_unit")
    if unit is None or unit.value is None:
        return
    if type(unit.value) is not int or not 1 <= unit.value <= 2**20:
        said = f"Model.vocab_size_divisible_unit={_shown(unit)}"
        report.problem(unit.source, f"{said} is not an integer of at least 1")
        return
    size = value_of(tree, "Model.vocab_size", ModelSection.model_fields["vocab_size"].default)
    mp = value_of(tree, "Distributed.mp_degree", 1)
    if type(size) is not int or type(mp) is not int or mp < 1:
        return  # reported where types are checked
    multiple = unit.value * mp
    padded = -(-size // multiple) * multiple
    if padded == size:
        return
    report.notice(
        unit.source,
        f"Model.vocab_size={size} becomes {padded}, a multiple of vocab_size_divisible_unit * "
        f"mp_degree = {multiple}",
    )
    take(tree, "Model.vocab_size")
    _place(tree, "Model.vocab_size", Entry(padded, unit.source, unit.layer), report)


def _place(tree: Tree, path: str, entry: Entry, report: Report) -> None:
    """Put an entry where it belongs; a section key by key."""
    items = [(path, entry)]
    if entry.is_section:
        items = [(f"{path}.{name}", inner) for name, inner in walk(entry.value)]
    for item_path, item in items:
        other = put(tree, item_path, item)
        if other is not None:
            report.problem(
                item.source,
                f"{item_path}={_shown(item)} contradicts {_shown(other)} at {other.source}; "
                "keep one of the two",
            )


def _shown(entry: Entry) -> Any:
    return "a section" if entry.is_section else entry.value
