#!/bin/sh
# Pre-trains the 1.3B model in 8 processes; arguments go to run_pretrain.py, such as -o A.B=VALUE.
set -e
cd "$(dirname "$0")"
log_dir=dp8
exec python -m fourfold.launch --log_dir $log_dir --devices "0,1,2,3,4,5,6,7" run_pretrain.py \
    -c ./configs_1.3B_dp8.yaml "$@"
