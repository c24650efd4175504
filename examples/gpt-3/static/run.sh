#!/bin/sh
# Pre-trains gpt2-en in 8 processes: each layer on 2, in 4 groups that share the optimizer's state.
# Arguments are added to the flags, and of a flag given twice the last counts. GPUS, task_name and
# PYTHON may be set in the environment:  GPUS=0 sh run.sh --mp_degree 1 --use_sharding false
set -e
cd "$(dirname "$0")"
task_name=${task_name:-gpt-mp2-sharding4}

exec "${PYTHON:-python}" -u -m fourfold.launch \
    --gpus "${GPUS:-0,1,2,3,4,5,6,7}" \
    --log_dir "output/$task_name/log" run_pretrain_static.py \
    --model_type "gpt" \
    --model_name_or_path "gpt2-en" \
    --input_dir "./data" \
    --output_dir "output/$task_name" \
    --max_seq_len 1024 \
    --micro_batch_size 8 \
    --global_batch_size 32 \
    --sharding_degree 4 \
    --mp_degree 2 \
    --dp_degree 1 \
    --pp_degree 1 \
    --use_sharding true \
    --use_amp true \
    --use_recompute true \
    --max_lr 0.00015 \
    --min_lr 0.00001 \
    --max_steps 500000 \
    --save_steps 100000 \
    --decay_steps 320000 \
    --weight_decay 0.01 \
    --warmup_rate 0.01 \
    --grad_clip 1.0 \
    --logging_freq 1 \
    --eval_freq 10000 \
    --device "gpu" \
    "$@"
