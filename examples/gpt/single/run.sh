#!/bin/sh
# Pre-trains the 345M model on one device; arguments go to run_pretrain.py, such as -o A.B=VALUE.
set -e
cd "$(dirname "$0")"
exec python run_pretrain.py -c ./configs_345m_single_card.yaml "$@"
