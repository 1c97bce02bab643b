#!/usr/bin/env bash
# Train Llama 3.2 1B on Dolma: mxfp4 in Q K^T and linear layers.
#
#   bash script/llama32-1b/pretrain_llama32-1b_dolma_FA_linear_mxfp4.sh
#   bash script/llama32-1b/pretrain_llama32-1b_dolma_FA_linear_mxfp4.sh --preset tiny --train-iters 2
#   bash script/llama32-1b/pretrain_llama32-1b_dolma_FA_linear_mxfp4.sh --nproc-per-node 8 -- --seed 7
#
# Options are those of script/train_config.py; what follows -- goes to pretrain_gpt.py.
# Made by script/train_config.py --write-scripts from script/configs/; change it there.
set -euo pipefail

# shellcheck source=script/driver.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/../driver.sh"
train_config --model llama32-1b --dataset dolma --quantization FA_linear_mxfp4 "$@"
