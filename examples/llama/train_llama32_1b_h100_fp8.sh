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
# Arguments, each with a default; an empty one ("") means the default too
#   CHECKPOINT   folder to save to, and to resume from if it holds a checkpoint; none: save nothing
#                (checkpoints/llama32_<preset>)
#   TENSORBOARD  folder of the event files (tensorboard_logs/llama32_<preset>)
#   TOKENIZER    SentencePiece .model file, or folder with tokenizer.json or tokenizer.model
#                (model/llama3.2-1b)
#   DATA         prefix of a .bin and an .idx file
#                (dataset/wikipedia_processed/wikipedia_processed_text_document)
#   DTYPE        bf16, fp16, fp32; fp8: bf16, and simulated mxfp8 unless CUSTOM_QUANT_TYPE names
#                another type (bf16)
# With neither TOKENIZER nor DATA, and no files at their defaults, a small real corpus is made.
#
# Flags
#   --preset 1b|tiny  the model's shape; tiny has 4 layers of 256 and trains on a laptop
#                     (1b where there is a CUDA device, else tiny)
#   any other         goes to pretrain_gpt.py and wins over the values here; Megatron-LM's names
#
# Environment
#   NPROC     processes (GPUs) of this machine (1)
#   NNODES, NODE_RANK, MASTER_ADDR, MASTER_PORT   several machines, as for torchrun (1, 0, -, 6000)
#   TRAIN_ITERS, MICRO_BATCH, GLOBAL_BATCH, SEQ_LENGTH, LR   change the preset's values
#   DRY_RUN=1 prints the command, and neither makes an environment nor a corpus
set -euo pipefail

# shellcheck source=script/driver.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/../../script/driver.sh"

# From the first flag on, a word without dashes is a flag's value.
arguments=() flags=() preset='' control_iter=0
while (($#)); do
  case $1 in
    -h | --help)
      usage "${BASH_SOURCE[0]}"
      exit 0
      ;;
    --preset=*) preset=${1#*=} ;;
    --preset)
      preset=${2-}
      shift
      ;;
    *)
      if [[ $1 == --control-iter ]]; then control_iter=${2-}; fi
      if [[ $1 == --control-iter=* ]]; then control_iter=${1#*=}; fi
      if [[ $1 == --* ]] || ((${#flags[@]})); then flags+=("$1"); else arguments+=("$1"); fi
      ;;
  esac
  if (($#)); then shift; fi
done
if ((${#arguments[@]} > 5)); then
  refuse "${#arguments[@]} arguments, but there are five: CHECKPOINT TENSORBOARD TOKENIZER DATA" \
    "DTYPE; see --help"
fi

dtype=${arguments[4]-}
case ${dtype:=bf16} in
  bf16) precision=(--bf16) ;;
  fp16) precision=(--fp16 --initial-loss-scale 65536) ;;
  fp32) precision=() ;;
  fp8)
    precision=(--bf16)
    export CUSTOM_QUANT_TYPE=${CUSTOM_QUANT_TYPE:-mxfp8}
    ;;
  *) refuse "DTYPE is '$dtype'; it is bf16, fp16, fp32 or fp8 (bf16 with simulated mxfp8)" ;;
esac

: "${NPROC:=1}" "${NNODES:=1}" "${NODE_RANK:=0}" "${MASTER_PORT:=6000}"
whole NPROC "$NPROC" 1
whole NNODES "$NNODES" 1
find_python
choose_preset
tokenizer=${arguments[2]-} data=${arguments[3]-}
resolve_data TOKENIZER DATA

if [[ $tokenizer == *.json || -f $tokenizer/tokenizer.json || -f $tokenizer/tokenizer_config.json ]]
then
  tokenizer_type=HuggingFaceTokenizer
elif [[ -f $tokenizer || $tokenizer == *.model || -f $tokenizer/tokenizer.model ]]; then
  tokenizer_type=SentencePieceTokenizer
else
  die "no tokenizer in the folder $tokenizer; it needs tokenizer.json (Hugging Face) or" \
    "tokenizer.model"
fi

# Llama 3.2 1B as its authors describe it; the vocabulary's size is the tokenizer's.
model=(
  --normalization RMSNorm --norm-epsilon 1e-5 --swiglu --disable-bias-linear
  --position-embedding-type rope --rotary-base 500000 --use-rope-scaling --rope-scaling-factor 32
  --group-query-attention --attention-dropout 0 --hidden-dropout 0 --init-method-std 0.02
)
training=(
  --optimizer adam --adam-beta1 0.9 --adam-beta2 0.95 --weight-decay 0.1 --clip-grad 1.0
  --lr-decay-style cosine --split "99,1,0"
)
if [[ $preset == 1b ]]; then
  : "${TRAIN_ITERS:=10000}" "${MICRO_BATCH:=1}" "${GLOBAL_BATCH:=$((8 * NPROC * NNODES))}"
  : "${SEQ_LENGTH:=8192}" "${LR:=3e-4}"
  model+=(
    --num-layers 16 --hidden-size 2048 --ffn-hidden-size 8192 --num-attention-heads 32
    --num-query-groups 8 --kv-channels 64 --max-position-embeddings 131072
    --recompute-activations # the scores of 8192 x 8192 a head are not kept
  )
  training+=(--min-lr 3e-5 --lr-warmup-fraction 0.02 --eval-iters 10 --eval-interval 500)
  saving=(--save-interval 1000)
  if ((NPROC * NNODES > 1)); then
    training+=(--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather)
  fi
else
  : "${TRAIN_ITERS:=50}" "${MICRO_BATCH:=2}" "${GLOBAL_BATCH:=4}" "${SEQ_LENGTH:=256}" "${LR:=2e-3}"
  model+=(
    --num-layers 4 --hidden-size 256 --ffn-hidden-size 1024 --num-attention-heads 8
    --num-query-groups 2 --kv-channels 32 --max-position-embeddings 131072
  )
  training+=(--min-lr 2e-4 --lr-warmup-fraction 0.1 --eval-iters 0)
  saving=()
fi
if [[ $control_iter =~ ^[0-9]{1,9}$ ]] && ((control_iter > TRAIN_ITERS)); then
  TRAIN_ITERS=$control_iter # no fewer than are to be collected
fi

checkpoint=${arguments[0]-} tensorboard=${arguments[1]-}
: "${checkpoint:=${home}checkpoints/llama32_$preset}"
: "${tensorboard:=${home}tensorboard_logs/llama32_$preset}"
if [[ $checkpoint == none ]]; then
  saving=()
else
  saving+=(--save "$checkpoint")
  if [[ -f $checkpoint/latest_checkpointed_iteration.txt ]]; then
    say "Resuming from the checkpoint in $checkpoint."
    saving+=(--load "$checkpoint")
  fi
fi

if ((NNODES > 1)); then
  : "${MASTER_ADDR:?names the first machine; set it as for torchrun}"
  launch=("$py" -m torch.distributed.run --nnodes "$NNODES" --node-rank "$NODE_RANK"
    --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT" --nproc-per-node "$NPROC")
elif ((NPROC > 1)); then
  launch=("$py" -m torch.distributed.run --standalone --nproc-per-node "$NPROC")
else
  launch=("$py") # one process needs no launcher
fi

command=(
  "${launch[@]}" "$repo/pretrain_gpt.py" "${model[@]}" "${training[@]}"
  --seq-length "$SEQ_LENGTH" --micro-batch-size "$MICRO_BATCH" --global-batch-size "$GLOBAL_BATCH"
  --train-iters "$TRAIN_ITERS" --lr "$LR" ${precision[@]+"${precision[@]}"} --log-interval 1
  --tokenizer-type "$tokenizer_type" --tokenizer-model "$tokenizer" --data-path "$data"
  --tensorboard-dir "$tensorboard" ${saving[@]+"${saving[@]}"} ${flags[@]+"${flags[@]}"}
)
if [[ -n ${DRY_RUN-} ]]; then
  printf '%q ' "${command[@]}"
  echo
  exit
fi
# By default OpenMP's threads spin while they wait for each other. Where anything else runs on the
# same processors that is fatal: on 2 cores beside one busy process an iteration of the tiny preset
# took 25 to 49 s; with a short spin it takes 1.5 s there, and 0.66 s instead of 0.47 s on an idle
# machine.
if [[ -z ${OMP_WAIT_POLICY-} ]]; then export GOMP_SPINCOUNT=${GOMP_SPINCOUNT:-1000}; fi
export CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-1}
exec "${command[@]}"
