"""Entry points of other programs: their command lines, translated into Fourfold runs.

Megatron-DeepSpeed's `pretrain_gpt.py` and `preprocess_data.py`, PaddleNLP's gpt-3 scripts, and
`paddle.distributed.launch`, which is `python -m fourfold.launch` here. Two things of other programs
live elsewhere because the core needs them: the keys of other configuration files are in
`config/compat_keys.py`, which every reader of a YAML file needs, and Megatron's log lines are in
`metrics/lines.py`, from which a run chooses by `Engine.log_style`.
"""
