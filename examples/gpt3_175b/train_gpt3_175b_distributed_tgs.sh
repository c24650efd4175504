#!/bin/bash
# Ten iterations at the full global batch, for tokens per GPU per second. It begins at step 1 every
# time, in directories of its own, tgs, below the two it is given.
#
#   bash train_gpt3_175b_distributed_tgs.sh CHECKPOINT_PATH TENSORBOARD_LOGS_PATH VOCAB_FILE MERGE_FILE

set -euo pipefail
if [ $# -eq 4 ]; then
    set -- "$1/tgs" "$2/tgs" "$3" "$4"
fi
# From Megatron's 2**32 every one of ten updates would overflow and be left out of the time.
INITIAL_LOSS_SCALE=${INITIAL_LOSS_SCALE:-65536}
source "$(dirname "$0")/settings.sh"

TRAIN_ITERS=${TRAIN_ITERS:-10}
LR_DECAY_ITERS=${LR_DECAY_ITERS:-8}

pretrain \
    --train-iters "$TRAIN_ITERS" \
    --lr-decay-iters "$LR_DECAY_ITERS" \
    --lr-warmup-fraction .001 \
    --log-interval 1
