#!/usr/bin/env bash
# Train DeepSeek-V2-Lite, or a small model of the same architecture, with simulated low precision.
#
#   bash examples/deepseek/train_deepseek2_lite.sh [QUANTIZATION] [option...] [-- flag...]
#
#   bash examples/deepseek/train_deepseek2_lite.sh linear_mxfp4 --preset tiny --train-iters 5
#   bash examples/deepseek/train_deepseek2_lite.sh FA_linear_mxfp8 --preset tiny --train-iters 2 \
#       -- --save-tensors --tensor-save-dir enhanced_tensor_logs/deepseek --control-iter 1
#   bash examples/deepseek/train_deepseek2_lite.sh hifp8 --nproc-per-node 8 --ep 8
#
# The tiny preset keeps latent attention, the dense first layer, and shared and routed experts. It
# trains on a CPU. The second command also collects the tensors of every matmul, including those of
# the experts and of the projections into and out of the latent space.
#
# QUANTIZATION is FA_linear_mxfp8 by default; the dataset is wikipedia unless --dataset is given.
# Options are those of script/train_config.py; flags after -- are passed to pretrain_gpt.py.
set -euo pipefail

# shellcheck source=script/driver.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/../../script/driver.sh"

quantization=FA_linear_mxfp8
if (($#)) && [[ $1 != -* ]]; then
  quantization=$1
  shift
fi
train_config --model deepseek2_lite --dataset wikipedia --quantization "$quantization" "$@"
