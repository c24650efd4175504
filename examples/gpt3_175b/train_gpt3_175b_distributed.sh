#!/bin/bash
# GPT-3 175B, pre-trained as the document describes; run again, it goes on where it stopped.
#
#   bash train_gpt3_175b_distributed.sh CHECKPOINT_PATH TENSORBOARD_LOGS_PATH VOCAB_FILE MERGE_FILE

set -euo pipefail
source "$(dirname "$0")/settings.sh"

TRAIN_SAMPLES=${TRAIN_SAMPLES:-10846761}
RAMPUP=${RAMPUP:-16 16 433870}   # start, increment, samples; "none" is whole from the start
LR_DECAY_SAMPLES=${LR_DECAY_SAMPLES:-9400526}
LR_WARMUP_SAMPLES=${LR_WARMUP_SAMPLES:-13558}
LOG_INTERVAL=${LOG_INTERVAL:-10}

LENGTH_ARGS=(
    --train-samples "$TRAIN_SAMPLES"
    --lr-decay-samples "$LR_DECAY_SAMPLES"
    --lr-warmup-samples "$LR_WARMUP_SAMPLES"
    --log-interval "$LOG_INTERVAL"
)
if [ "$RAMPUP" != none ]; then
    read -ra RAMPUP_WORDS <<< "$RAMPUP"
    LENGTH_ARGS+=(--rampup-batch-size "${RAMPUP_WORDS[@]}")
fi

pretrain "${LENGTH_ARGS[@]}" --load "$CHECKPOINT_PATH"
