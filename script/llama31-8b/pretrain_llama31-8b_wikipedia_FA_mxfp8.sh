#!/usr/bin/env bash
# Train Llama 3.1 8B on Wikipedia: mxfp8 in Q K^T.
#
#   bash script/llama31-8b/pretrain_llama31-8b_wikipedia_FA_mxfp8.sh
#   bash script/llama31-8b/pretrain_llama31-8b_wikipedia_FA_mxfp8.sh --preset tiny --train-iters 2
#   bash script/llama31-8b/pretrain_llama31-8b_wikipedia_FA_mxfp8.sh --nproc-per-node 8 -- --seed 7
#
# Options are those of script/train_config.py; what follows -- goes to pretrain_gpt.py.
# Made by script/train_config.py --write-scripts from script/configs/; change it there.
set -euo pipefail

# shellcheck source=script/driver.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/../driver.sh"
train_config --model llama31-8b --dataset wikipedia --quantization FA_mxfp8 "$@"
