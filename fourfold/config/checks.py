"""Constraints between keys of a resolved configuration, and remarks on keys without effect.

Each message gives the values, the constraint they break and what to choose instead.
"""

from __future__ import annotations

from fourfold.config.entry import Findings
from fourfold.config.layouts import check_layout, divisors
from fourfold.config.tree import Config


def check(config: Config, findings: Findings) -> None:
    _check_model(config, findings)
    _check_data(config, findings)
    _check_lengths(config, findings)
    check_layout(config, findings)
    _check_fusion(config, findings)
    _check_learning_rate(config, findings)
    _check_generation(config, findings)
    _check_profiler(config, findings)


def _check_model(config: Config, findings: Findings) -> None:
    model = config.Model
    if model.hidden_size % model.num_attention_heads:
        findings.problem(
            f"Model.num_attention_heads={model.num_attention_heads} does not divide "
            f"Model.hidden_size={model.hidden_size}; "
            f"choose {divisors(model.hidden_size, model.num_attention_heads)}",
            "Model.num_attention_heads",
            "Model.hidden_size",
        )
    ratio = model.ffn_hidden_size / model.hidden_size
    if ratio >= 8:
        findings.notice(
            f"Model.ffn_hidden_size={model.ffn_hidden_size} is {ratio:g} times "
            f"Model.hidden_size={model.hidden_size}; leave it empty for 4 times",
            "Model.ffn_hidden_size",
            "Model.hidden_size",
        )
    if not model.fuse_attn_qkv:
        findings.notice(
            "Model.fuse_attn_qkv=False has no effect: query, key and value are one projection, "
            "stored head by head",
            "Model.fuse_attn_qkv",
        )
    if model.type_vocab_size != type(model).model_fields["type_vocab_size"].default:
        findings.notice(
            f"Model.type_vocab_size={model.type_vocab_size} has no effect: a GPT has no "
            "token types",
            "Model.type_vocab_size",
        )
    eos = config.Data.dataset.eos_token_id
    if eos is not None and eos >= model.vocab_size:
        findings.problem(
            f"Data.dataset.eos_token_id={eos} is outside Model.vocab_size={model.vocab_size}; "
            f"choose an id below {model.vocab_size}",
            "Data.dataset.eos_token_id",
            "Model.vocab_size",
        )


def _check_data(config: Config, findings: Findings) -> None:
    dataset = config.Data.dataset
    own = {"train": dataset.train_data, "valid": dataset.valid_data, "test": dataset.test_data}
    names = [f"Data.dataset.{part}_data" for part, value in own.items() if value is not None]
    if names and dataset.input_dir is not None:
        findings.problem(
            f"{', '.join(names)} and Data.dataset.input_dir={dataset.input_dir} contradict: the "
            "one names each part's data, the other is cut into parts; set one of them to null",
            *names,
            "Data.dataset.input_dir",
        )
    elif names and own["train"] is None:
        findings.problem(
            f"{', '.join(names)} without Data.dataset.train_data leave nothing to train on; give "
            "train_data too, or input_dir in place of all",
            *names,
            "Data.dataset.train_data",
        )
    elif names and findings.given("Data.dataset.split"):
        findings.notice(
            "Data.dataset.split has no effect: with train_data each part is the whole of its own",
            "Data.dataset.split",
            *names,
        )


def _check_lengths(config: Config, findings: Findings) -> None:
    positions = config.Model.max_position_embeddings
    for path, length in (
        ("Data.dataset.max_seq_len", config.Data.dataset.max_seq_len),
        ("Eval.max_seq_len", config.Eval.max_seq_len),
    ):
        if length > positions and (path.startswith("Data") or findings.given(path)):
            findings.problem(
                f"{path}={length} is longer than Model.max_position_embeddings={positions}; "
                f"choose at most {positions}, or raise max_position_embeddings",
                path,
                "Model.max_position_embeddings",
            )
    if config.Eval.overlapping_eval > config.Eval.max_seq_len:
        findings.problem(
            f"Eval.overlapping_eval={config.Eval.overlapping_eval} would skip tokens between "
            f"windows of Eval.max_seq_len={config.Eval.max_seq_len}; "
            f"choose at most {config.Eval.max_seq_len}",
            "Eval.overlapping_eval",
            "Eval.max_seq_len",
            "Data.dataset.max_seq_len",
        )


def _check_fusion(config: Config, findings: Findings) -> None:
    layout = config.Distributed
    degrees = {
        "mp_degree": layout.mp_degree,
        "pp_degree": layout.pp_degree,
        "sharding_degree": layout.sharding.sharding_degree,
    }
    above = [f"{name}={degree}" for name, degree in degrees.items() if degree > 1]
    if config.Fused.tensor_fusion and above:
        findings.problem(
            f"Fused.tensor_fusion works on one device or with data parallelism alone, not with "
            f"{', '.join(above)}; turn it off",
            "Fused.tensor_fusion",
            "Distributed.mp_degree",
            "Distributed.pp_degree",
            "Distributed.sharding.sharding_degree",
        )


def _check_learning_rate(config: Config, findings: Findings) -> None:
    lr = config.Optimizer.lr
    if lr.max_lr < lr.min_lr:
        findings.notice(
            f"Optimizer.lr.max_lr={lr.max_lr:g} is below Optimizer.lr.min_lr={lr.min_lr:g}: after "
            "the warm-up the learning rate rises to min_lr",
            "Optimizer.lr.max_lr",
            "Optimizer.lr.min_lr",
        )


def _check_generation(config: Config, findings: Findings) -> None:
    generation = config.Generation
    if generation.min_dec_len > generation.max_dec_len:
        findings.problem(
            f"Generation.min_dec_len={generation.min_dec_len} is above "
            f"Generation.max_dec_len={generation.max_dec_len}; lower one or raise the other",
            "Generation.min_dec_len",
            "Generation.max_dec_len",
        )
    if generation.decode_strategy != "beam_search":
        return
    fewest = max(1, generation.num_return_sequences)
    if generation.num_beams < fewest:
        findings.problem(
            f"Generation.num_beams={generation.num_beams} is too few for "
            f"decode_strategy=beam_search with "
            f"num_return_sequences={generation.num_return_sequences}; choose at least {fewest}",
            "Generation.num_beams",
            "Generation.decode_strategy",
            "Generation.num_return_sequences",
        )


def _check_profiler(config: Config, findings: Findings) -> None:
    window = config.Profiler.scheduler
    if window is not None and (len(window) != 2 or window[0] >= window[1]):
        findings.problem(
            f"Profiler.scheduler={window} is not [start, end] with start below end; "
            "choose for example [1, 5]",
            "Profiler.scheduler",
        )
