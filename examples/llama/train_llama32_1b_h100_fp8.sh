#!/usr/bin/env bash
# Train Llama 3.2 1B, or a small model of the same architecture, with simulated low precision.
#
#   bash examples/llama/train_llama32_1b_h100_fp8.sh \
#       [CHECKPOINT [TENSORBOARD [TOKENIZER [DATA [DTYPE]]]]] [flags]
#
#   CUSTOM_QUANT_TYPE=mxfp8 bash examples/llama/train_llama32_1b_h100_fp8.sh \
#       checkpoints/llama32_1b_mxfp8 tensorboard_logs/llama32_1b_mxfp8 model/llama3.2-1b \
#       dataset/wikipedia_processed/wikipedia_processed_text_document bf16
#   NPROC=2 bash examples/llama/train_llama32_1b_h100_fp8.sh --tensor-model-parallel-size 2
#
# Arguments, each with a default; an empty one ("") also selects the default
#   CHECKPOINT   folder to save to, and to resume from if it holds a checkpoint; none: save nothing
#                (checkpoints/llama32_<preset>_<type>, as in llama32_tiny_mxfp8, so that a run
#                resumes only in the formats that it was started with)
#   TENSORBOARD  folder of the event files (tensorboard_logs/llama32_<preset>)
#   TOKENIZER    SentencePiece .model file, or folder with tokenizer.json or tokenizer.model
#                (model/llama3.2-1b)
#   DATA         common prefix of a .bin and an .idx file
#                (dataset/wikipedia_processed/wikipedia_processed_text_document)
#   DTYPE        bf16, fp16, fp32; fp8: bf16 with simulated mxfp8 unless CUSTOM_QUANT_TYPE names
#                another type (bf16)
# If TOKENIZER and DATA are not given and their default files are missing, the tiny preset makes a
# small corpus of real text and trains on it. For the published model, missing files are an error.
#
# Flags
#   --preset 1b|tiny  the model's shape; tiny has 4 layers of 256 and trains on a laptop
#                     (1b with a CUDA device and data, otherwise tiny)
#   any other flag    is passed to pretrain_gpt.py, where it takes precedence
#
# Environment
#   NPROC     processes on this machine, one per GPU (1)
#   NNODES, NODE_RANK, MASTER_ADDR, MASTER_PORT   several machines, as for torchrun (1, 0, -, 6000)
#   TRAIN_ITERS, MICRO_BATCH, GLOBAL_BATCH, SEQ_LENGTH, LR   override the preset's values
#   DRY_RUN=1, or --dry-run, prints the command and the missing files, and runs nothing
#
# script/configs/ builds the command, from the model llama32-1b and the training configuration
# collect.
set -euo pipefail

# shellcheck source=script/driver.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/../../script/driver.sh"

# After the first flag, a word without dashes is the value of a flag.
arguments=() flags=() preset=''
while (($#)); do
  case $1 in
    -h | --help)
      usage "${BASH_SOURCE[0]}"
      exit 0
      ;;
    --dry-run | --dry_run) export DRY_RUN=1 ;;
    --preset | --preset=*)
      preset=${2-}
      if [[ $1 == *=* ]]; then preset=${1#*=}; else shift; fi
      if [[ -z $preset || $preset == --* ]]; then refuse "--preset needs a value: tiny or 1b"; fi
      ;;
    *)
      if [[ $1 == --* ]] || ((${#flags[@]})); then flags+=("$1"); else arguments+=("$1"); fi
      ;;
  esac
  if (($#)); then shift; fi
done
if ((${#arguments[@]} > 5)); then
  refuse "${#arguments[@]} arguments, but at most five are allowed: CHECKPOINT TENSORBOARD" \
    "TOKENIZER DATA DTYPE; see --help"
fi

dtype=${arguments[4]-}
case ${dtype:=bf16} in
  bf16 | fp16 | fp32) ;;
  fp8)
    dtype=bf16
    export CUSTOM_QUANT_TYPE=${CUSTOM_QUANT_TYPE:-mxfp8}
    ;;
  *) refuse "DTYPE is '$dtype'; give bf16, fp16, fp32 or fp8 (bf16 with simulated mxfp8)" ;;
esac

find_python
tokenizer=${arguments[2]-} data=${arguments[3]-}
files_given
checkpoint=${arguments[0]-}
queries=(preset data)
if [[ -z $checkpoint ]]; then queries+=(name); fi
choose "${queries[@]}" --tokenizer-name=TOKENIZER --data-name=DATA \
  --flags="$(quoted ${flags[@]+"${flags[@]}"})" ${file_options[@]+"${file_options[@]}"}
name=llama32_$preset
if [[ -z $checkpoint ]]; then
  checkpoint=${home}checkpoints/${name}_${effective_type//:/-}
  export LAB_EFFECTIVE_TYPE=$effective_type # so that train_config.py does not resolve it again
fi
if [[ $preset == 1b ]]; then preset=full; fi

export LAB_PYTHON=$py
exec "$py" "$repo/script/train_config.py" --model llama32-1b --preset "$preset" \
  --training-config collect --quantization settings --dtype "$dtype" \
  --tokenizer-path "$tokenizer" --data-path "$data" \
  --checkpoint-path "$checkpoint" \
  --tensorboard-path "${arguments[1]:-${home}tensorboard_logs/$name}" \
  ${TRAIN_ITERS:+--train-iters "$TRAIN_ITERS"} ${MICRO_BATCH:+--micro-batch-size "$MICRO_BATCH"} \
  ${GLOBAL_BATCH:+--global-batch-size "$GLOBAL_BATCH"} ${SEQ_LENGTH:+--seq-length "$SEQ_LENGTH"} \
  ${LR:+--lr "$LR"} -- ${flags[@]+"${flags[@]}"}
