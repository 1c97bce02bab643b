#!/usr/bin/env bash
# Train Llama 3.2 1B on Dolma: hifp8 in linear layers.
#
#   bash script/llama32-1b/pretrain_llama32-1b_dolma_linear_hifp8.sh
#   bash script/llama32-1b/pretrain_llama32-1b_dolma_linear_hifp8.sh --preset tiny --train-iters 2
#   bash script/llama32-1b/pretrain_llama32-1b_dolma_linear_hifp8.sh --nproc-per-node 8 -- --seed 7
#
# Options are those of script/train_config.py; what follows -- goes to pretrain_gpt.py.
# Made by script/train_config.py --write-scripts from script/configs/; change it there.
set -euo pipefail

# shellcheck source=script/driver.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/../driver.sh"
train_config --model llama32-1b --dataset dolma --quantization linear_hifp8 "$@"
