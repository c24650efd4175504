"""Files of earlier and later FleetX versions."""

from __future__ import annotations

import pytest
from helpers.yaml_text import Load, Problems

LATER = """\
Global:
  device: gpu
  seed: 1024
  flags:
  global_batch_size:
  local_batch_size: 8
  micro_batch_size: 4
Engine:
  run_mode: step
  max_steps: 100
  test_iters:
  mix_precision:
    enable: True
    dtype: "bfloat16"
    level: "o1"
    use_main_grad: True
  save_load:
    save_steps: 1000
    save_epoch: 1
Model:
  module: "GPTModule"
  name: "GPT"
  vocab_size: 50257
  vocab_size_divisible_unit: 128
  hidden_size: 1024
  virtual_pp_degree: 1
  use_flash_attn: True
  no_recompute_layers:
Data:
  Train:
    dataset: {name: GPTDataset, input_dir: ./data/, split: [969, 30, 1], max_seq_len: 512}
    sampler: {name: GPTBatchSampler, shuffle: False, drop_last: True}
    loader: {num_workers: 1, return_list: False, collate_fn: gpt_collate_fn}
  Eval:
    dataset: {name: GPTDataset, input_dir: ./data/, split: [969, 30, 1], max_seq_len: 512}
    sampler: {name: GPTBatchSampler, shuffle: False, drop_last: True}
Distributed:
  mp_degree: 2
  sharding: {sharding_degree: 1, reduce_overlap: False}
Optimizer:
  name: FusedAdamW
  beta1: 0.8
  beta2: 0.95
  epsilon: 1.0e-6
  lr: {name: CosineAnnealingWithWarmupDecay, use_increments: True, max_lr: 3e-4}
  grad_clip: {name: "ClipGradByGlobalNorm", clip_norm: 0.5}
  tensor_fusion: False
Offline_Eval:
  eval_path: lambada.jsonl
  cloze_eval: True
Compress:
  pretrained: ./there
  Quantization: {enable: False, weight_bits: 8}
Quantization:
  weight_bits: 8
Tuning: {enable: False}
"""


def test_later_layout(load: Load) -> None:
    config = load(LATER, world_size=4)
    assert config.Global.device == "cuda"
    sizes = config.Data.batch_size
    assert (sizes.global_batch_size, sizes.local_batch_size, sizes.micro_batch_size) == (16, 8, 4)
    assert (config.Data.dataset.input_dir, config.Data.dataset.split) == ("./data/", "969,30,1")
    assert config.Data.dataset.max_seq_len == 512
    assert config.Engine.mix_precision.dtype == "bfloat16"
    assert config.Model.vocab_size == 50432
    optimizer = config.Optimizer
    assert (optimizer.adam_beta1, optimizer.adam_beta2, optimizer.adam_epsilon) == (0.8, 0.95, 1e-6)
    assert optimizer.grad_clip == 0.5
    assert (config.Eval.eval_path, config.Eval.cloze_eval) == ("lambada.jsonl", True)
    for notice in [
        "run.yaml:6: Global.local_batch_size is read as Data.batch_size.local_batch_size",
        "run.yaml:16: Engine.mix_precision.use_main_grad has no effect here: with bfloat16 the "
        "weights and gradients are float32",
        "run.yaml:24: Model.vocab_size=50257 becomes 50432, a multiple of "
        "vocab_size_divisible_unit * mp_degree = 256",
        "run.yaml:42: Optimizer.beta1 is read as Optimizer.adam_beta1",
        "run.yaml:46: Optimizer.grad_clip.clip_norm is read as Optimizer.grad_clip",
        "run.yaml:48: Offline_Eval is read as Eval",
        "run.yaml:54: Quantization has no effect here: quantization-aware training is not "
        "offered, and it is not enabled",
    ]:
        assert notice in config.notices
    assert not any("no_recompute_layers" in notice for notice in config.notices)


def test_earlier_layout(load: Load) -> None:
    config = load(
        """\
        PreTraining:
          device: cpu
          max_steps: 100
          seed: 7
          use_recompute: False
          batch_size:
            global_batch_size:
            local_batch_size: 8
            micro_batch_size: 1
          quantization: {use_qat: False, weight_bits: 8}
          mix_precision:
            use_pure_fp16: True
          logging_freq: 5
          dataset:
            input_dir: ./data
            max_seq_len: 128
          save_load:
            ckpt_dir: ./step_5
          Model:
            hidden_size: 256
          Distributed:
            mp_degree: 2
            sharding: {degree: 2, sharding_stage: 2}
          Optimizer:
            lr: {max_lr: 1.0e-5, min_lr: 5.0e-5}
        """,
        world_size=4,
    )
    assert (config.Global.device, config.Global.seed) == ("cpu", 7)
    assert (config.Engine.max_steps, config.Engine.logging_freq) == (100, 5)
    assert config.Engine.save_load.ckpt_dir == "./step_5"
    assert config.Eval.ckpt_dir is None
    assert config.Data.dataset.max_seq_len == 128
    assert config.Engine.accumulate_steps == 8
    assert config.Engine.mix_precision.dtype == "float16"
    assert config.Model.use_recompute is False
    assert config.Distributed.mp_degree == 2
    assert config.Distributed.sharding.sharding_degree == 2
    assert any("PreTraining is the 2022 layout" in notice for notice in config.notices)


def test_earlier_layout_problems(problems: Problems) -> None:
    assert problems("PreTraining:\n  max_step: 3\n  batch_size:\n    global_size: 3\n") == [
        "run.yaml:2: PreTraining.max_step: unknown key; did you mean max_steps?",
        "run.yaml:4: PreTraining.batch_size.global_size: unknown key; did you mean "
        "global_batch_size?",
    ]


def test_auto_parallel_form(load: Load, problems: Problems) -> None:
    text = (
        "Engine: {{use_recompute: True}}\n"
        "Data: {{batch_size: {{global_batch_size: 64}}}}\n"
        "Distributed: {{dp_degree: {dp}, sharding: {{sharding_degree: 16, sharding_stage: 2}}}}\n"
    )
    config = load(text.format(dp=16), world_size=16)
    assert config.Model.use_recompute is True
    assert config.Distributed.dp_degree == 1
    assert config.Data.batch_size.local_batch_size == 4
    assert any("it becomes dp_degree=1" in notice for notice in config.notices)
    (problem,) = problems(text.format(dp=20))
    assert "contains sharding_degree=16, which does not divide it" in problem


@pytest.mark.parametrize(
    ("enable", "dtype", "resolved"),
    [
        ("True", "", "float16"),
        ("True", "bfloat16", "bfloat16"),
        ("False", "float16", "float32"),
        ("False", "", "float32"),
    ],
)
def test_precision_switch(enable: str, dtype: str, resolved: str, load: Load) -> None:
    config = load(f"Engine:\n  mix_precision:\n    enable: {enable}\n    dtype: {dtype}\n")
    assert config.Engine.mix_precision.dtype == resolved


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("Engine: {run_mode: epoch}", "Engine.run_mode=epoch is not supported: set Engine.max_st"),
        ("Model: {module: GPTFinetuneModule}", "Model.module=GPTFinetuneModule is not supported"),
        ("Optimizer: {name: Lamb}", "Optimizer.name=Lamb is not supported: the optimizer is"),
        ("Optimizer: {lr: {name: Linear}}", "Optimizer.lr.name=Linear is not supported"),
        ("Optimizer: {grad_clip: {name: ClipGradByNorm}}", "Optimizer.grad_clip.name=ClipGradBy"),
        ("Compress: {Prune: {ratio: 0.1}}", "Compress.Prune: pruning is not offered; remove it"),
        ("Compress: {Distillation: {enable: True}}", "Compress.Distillation: distillation is not"),
        ("Quantization: {enable: True}", "Quantization: quantization-aware training is not"),
        ("Compress: {Quantization: {enable: True}}", "Compress.Quantization: quantization-aware"),
        ("Tuning: {enable: True}", "Tuning: tuning is not offered"),
        ("Data: {Train: {dataset: {mode: x}}}", "Data.Train.dataset.mode: unknown key"),
        ("Engine: {mix_precision: {enable: 3}}", "Engine.mix_precision.enable=3 is not true or"),
        ("Model: {vocab_size_divisible_unit: x}", "Model.vocab_size_divisible_unit=x is not an"),
        (
            "Optimizer: {beta1: 0.5, adam_beta1: 0.6}",
            "Optimizer.adam_beta1=0.5 contradicts 0.6 at run.yaml:1; keep one of the two",
        ),
        (
            "Data: {Train: {dataset: {input_dir: a}}, Eval: {dataset: {input_dir: b}}}",
            "Data.dataset.input_dir=b contradicts a at run.yaml:1; keep one of the two",
        ),
    ],
)
def test_what_cannot_be_honoured_is_refused(text: str, problem: str, problems: Problems) -> None:
    (line,) = problems(text)
    assert line.startswith(f"run.yaml:1: {problem}")


def test_keys_that_say_nothing_are_taken_in_every_layout(load: Load) -> None:
    usual = load("Engine: {num_train_epochs: 1}\nModel: {type_vocab_size: 16, fuse_attn_qkv: True}")
    assert not [notice for notice in usual.notices if "no effect" in notice]
    old = load("PreTraining: {num_train_epochs: 2}").notices
    assert any("Engine.num_train_epochs=2 has no effect: Engine.max_steps" in line for line in old)
