#!/usr/bin/env bash
# Train DeepSeek-V2-Lite on Dolma: hifp8 in linear layers.
#
#   bash script/deepseek2_lite/pretrain_deepseek2_lite_dolma_linear_hifp8.sh
#   bash script/deepseek2_lite/pretrain_deepseek2_lite_dolma_linear_hifp8.sh --preset tiny --train-iters 2
#   bash script/deepseek2_lite/pretrain_deepseek2_lite_dolma_linear_hifp8.sh --nproc-per-node 8 -- --seed 7
#
# Options are those of script/train_config.py; what follows -- goes to pretrain_gpt.py.
# Made by script/train_config.py --write-scripts from script/configs/; change it there.
set -euo pipefail

# shellcheck source=script/driver.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/../driver.sh"
train_config --model deepseek2_lite --dataset dolma --quantization linear_hifp8 "$@"
