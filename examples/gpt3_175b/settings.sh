# What both scripts share: where, on what, and which model. Every value may be set from outside,
# e.g.  NUM_NODES=1 TP=2 PP=2 HIDDEN_SIZE=64 ... bash train_gpt3_175b_distributed.sh ...
# The defaults are GPT-3 175B on 8 machines of 8 GPUs.

if [ $# -ne 4 ]; then
    echo "usage: bash $0 CHECKPOINT_PATH TENSORBOARD_LOGS_PATH VOCAB_FILE MERGE_FILE" >&2
    echo "with DATASET_PATH set to the directory of the prepared data; settings.sh has the rest" >&2
    exit 2
fi
CHECKPOINT_PATH=$1
TENSORBOARD_LOGS_PATH=$2
VOCAB_FILE=$3   # gpt2-vocab.json
MERGE_FILE=$4   # gpt2-merges.txt

GPUS_PER_NODE=${GPUS_PER_NODE:-8}
NUM_NODES=${NUM_NODES:-8}
NODE_RANK=${NODE_RANK:-0}               # on every machine its own, from 0
MASTER_ADDR=${MASTER_ADDR:-localhost}   # the machine with NODE_RANK 0
MASTER_PORT=${MASTER_PORT:-6000}

if [ -z "${DATASET:-}" ] && [ -z "${DATASET_PATH:-}" ]; then
    echo "DATASET_PATH is not set; export DATASET_PATH=<directory of the prepared data>" >&2
    exit 2
fi
DATASET_1=${DATASET_1:-${DATASET_PATH:-}/wikipedia_20220301_en_text_document}
DATASET_2=${DATASET_2:-${DATASET_PATH:-}/openwebtext_Skylion007_text_document}
DATASET=${DATASET:-0.35 $DATASET_1 0.65 $DATASET_2}
DATASETCACHE=${DATASETCACHE:-${PATH_TO:-${DATASET_PATH:-$CHECKPOINT_PATH}}/gptcache}

TP=${TP:-8}
PP=${PP:-8}
NUM_LAYERS=${NUM_LAYERS:-96}
HIDDEN_SIZE=${HIDDEN_SIZE:-12288}
NUM_HEADS=${NUM_HEADS:-96}
SEQ_LENGTH=${SEQ_LENGTH:-2048}
MICRO_BATCH=${MICRO_BATCH:-1}
GLOBAL_BATCH=${GLOBAL_BATCH:-1536}
EVAL_INTERVAL=${EVAL_INTERVAL:-100}
EVAL_ITERS=${EVAL_ITERS:-40}
SAVE_INTERVAL=${SAVE_INTERVAL:-1000}
PRECISION=${PRECISION:-fp16}            # or bf16
INITIAL_LOSS_SCALE=${INITIAL_LOSS_SCALE:-4294967296}   # of fp16; halved until nothing overflows
USE_RECOMPUTE=${USE_RECOMPUTE:-false}   # true: activations are computed again, for their memory
USE_DISTRIBUTED_OPTIMIZER=${USE_DISTRIBUTED_OPTIMIZER:-false}  # true: divided over data ranks

MODEL_ARGS=(
    --num-layers "$NUM_LAYERS"
    --hidden-size "$HIDDEN_SIZE"
    --num-attention-heads "$NUM_HEADS"
    --seq-length "$SEQ_LENGTH"
    --max-position-embeddings "$SEQ_LENGTH"
    --use-flash-attn-v2
)
PARALLEL_ARGS=(
    --tensor-model-parallel-size "$TP"
    --pipeline-model-parallel-size "$PP"
)
[ "$USE_RECOMPUTE" = true ] && PARALLEL_ARGS+=(--recompute-granularity full --recompute-method uniform)
[ "$USE_DISTRIBUTED_OPTIMIZER" = true ] && PARALLEL_ARGS+=(--use-distributed-optimizer)
TRAINING_ARGS=(
    --micro-batch-size "$MICRO_BATCH"
    --global-batch-size "$GLOBAL_BATCH"
    --lr 6.0e-5
    --min-lr 6.0e-6
    --lr-decay-style cosine
    --clip-grad 1.0
    --weight-decay 0.1
    --adam-beta1 0.9
    --adam-beta2 0.95
    --init-method-std 0.006
    "--$PRECISION"
)
[ "$PRECISION" = fp16 ] && TRAINING_ARGS+=(--initial-loss-scale "$INITIAL_LOSS_SCALE")
read -ra DATASET_WORDS <<< "$DATASET"
DATA_ARGS=(
    --data-path "${DATASET_WORDS[@]}"
    --data-cache-path "$DATASETCACHE"
    --tokenizer-type GPT2BPETokenizer
    --vocab-file "$VOCAB_FILE"
    --merge-file "$MERGE_FILE"
    --split 98,2,0
)
OUTPUT_ARGS=(
    --eval-interval "$EVAL_INTERVAL"
    --eval-iters "$EVAL_ITERS"
    --save "$CHECKPOINT_PATH"
    --save-interval "$SAVE_INTERVAL"
    --tensorboard-dir "$TENSORBOARD_LOGS_PATH"
    --log-validation-ppl-to-tensorboard
)

export CUDA_DEVICE_MAX_CONNECTIONS=1

# Trains on this machine, as one of NUM_NODES, with the flags above and those it is given.
pretrain() {
    python -m fourfold.launch \
        --nproc_per_node "$GPUS_PER_NODE" \
        --nnodes "$NUM_NODES" --rank "$NODE_RANK" --master "$MASTER_ADDR:$MASTER_PORT" \
        --log_dir "$CHECKPOINT_PATH/logs" \
        "$(dirname "${BASH_SOURCE[0]}")/pretrain_gpt.py" \
        "${MODEL_ARGS[@]}" "${PARALLEL_ARGS[@]}" "${TRAINING_ARGS[@]}" "${DATA_ARGS[@]}" \
        "${OUTPUT_ARGS[@]}" "$@"
}
