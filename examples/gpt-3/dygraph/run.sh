#!/bin/sh
# Pre-trains gpt2-small-en in 8 processes: 2 copies, each of 2 pipeline stages of 2 processes.
# Arguments are added to the flags, and of a flag given twice the last counts. GPUS, task_name and
# PYTHON may be set in the environment:  GPUS=0,1 sh run.sh --dp_degree 1 --mp_degree 1
set -e
cd "$(dirname "$0")"
task_name=${task_name:-gpt-dp2-mp2-pp2}

exec "${PYTHON:-python}" -u -m fourfold.launch \
    --gpus "${GPUS:-0,1,2,3,4,5,6,7}" \
    --log_dir "output/$task_name/log" run_pretrain.py \
    --model_type "gpt" \
    --model_name_or_path "gpt2-small-en" \
    --input_dir "./data" \
    --output_dir "output/$task_name" \
    --max_seq_len 1024 \
    --micro_batch_size 2 \
    --global_batch_size 16 \
    --sharding_degree 1 \
    --mp_degree 2 \
    --dp_degree 2 \
    --pp_degree 2 \
    --use_pure_fp16 true \
    --use_recompute false \
    --max_lr 0.00015 \
    --min_lr 0.00001 \
    --max_steps 500000 \
    --save_steps 100000 \
    --decay_steps 320000 \
    --weight_decay 0.01 \
    --warmup_rate 0.01 \
    --grad_clip 1.0 \
    --logging_freq 1 \
    --eval_freq 1000 \
    --device "gpu" \
    "$@"
