#!/bin/sh
# Pre-trains the 345M model in 8 processes; arguments go to run_pretrain.py, such as -o A.B=VALUE.
set -e
cd "$(dirname "$0")"
log_dir=auto
exec python -m fourfold.launch --log_dir $log_dir --devices "0,1,2,3,4,5,6,7" run_pretrain.py \
    -c ./configs_345M_dp8.yaml "$@"
