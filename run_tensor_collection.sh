#!/usr/bin/env bash
# Collect the tensors that enter and leave the matmuls of linear and attention layers.
#
#   bash run_tensor_collection.sh single mxfp8     # one type
#   bash run_tensor_collection.sh batch            # bf16, mxfp8, mxfp4 and hifp8 in turn
#   bash run_tensor_collection.sh quick hifp8      # the first and the last layer only
#   bash run_tensor_collection.sh --mode single --quant-type mxfp8 --control-iter 3
#   bash run_tensor_collection.sh single --quant-recipe examples/recipes/nvfp4_pretraining.yaml
#   bash run_tensor_collection.sh single FA_linear_mxfp4 -- --seed 7 --lr 1e-3
#
# Trains with examples/llama/train_llama32_1b_h100_fp8.sh, shows the progress, stops after the
# requested iterations, and prints a report. Tensors are written to enhanced_tensor_logs/TYPE/, the
# training log to logs/, event files to tensorboard_logs/. Files of earlier runs stay. Ctrl-C stops
# training and keeps the tensors written so far. Without a CUDA device the model is small (--preset
# tiny).
#
# Mode and type, as the first two words or as options
#   --mode M                   single, batch or quick (default: single)
#   --quant-type TYPE          X, linear_X, FA_X or FA_linear_X for a format X; bf16 or none for no
#                              quantization; upper or lower case; not with batch (default: the
#                              type that CUSTOM_QUANT_TYPE or script/quant_type_modifier.py sets,
#                              otherwise mxfp8)
#   --quant-recipe FILE        instead of a type: a file with formats per layer, as in
#                              examples/recipes (default: QUANT_RECIPE if set); TYPE is then
#                              recipe_<the file's name>
#   --quant-audit              print the formats of each matmul, and stop before training
# What to collect
#   --control-iter N           iterations to collect before training stops; 0: never stop (default:
#                              1, or all of --collect-iterations; 0 with a ring or a flag file)
#   --collect-start N          first iteration to collect, numbered as in the log (default: 1)
#   --collect-every N          collect every N-th iteration from the first on (default: 1)
#   --collect-iterations SPEC  instead of the two above: 7, 1-3,100- or 100-200:10 (every 10th)
#   --collect-micro-batches N  number of micro-batches per iteration; 0: all (default: 1)
#   --collect-layers SPEC      all, or numbers: first,last or 0,2-4 (default: all; quick:
#                              first,last)
#   --collect-modules LIST     module names or their ends: linear_fc*,mlp.*,core_attention (default:
#                              all)
#   --collect-tensors LIST     input,grad_output,...; attention_scores, attention_probs and codes
#                              are collected on request only, all,codes adds codes (default: all
#                              others)
#   --collect-operations LIST  forward, backward or both (default: forward,backward)
#   --collect-ranks SPEC       world ranks that write: all, first,last or 0,2-4 (default: all)
#   --collect-slice LIST       a part of each tensor, by the letters of its dims: s=0:128,h=0:256:2
# When
#   --collect-flag-file FILE   collect while this file exists: touch and rm switch a running job
#   --collect-ring K           keep the last K iterations in memory; write them if the loss or the
#                              gradient norm is not finite or jumps, or if training ends with an
#                              error
#   --collect-ring-events N    with a ring: number of times it is written before collecting ends
#                              (default: 3)
#   --collect-loss-jump X      a loss above X times the median of recent normal losses is a jump;
#                              the first 8 iterations need a larger factor; 0: no loss is a jump
#                              (default: 1.25)
#   --collect-grad-norm-jump X the same for the gradient norm; use about 4 with large batches
#                              (default: 100)
# How much
#   --collect-plan             print the tensors and bytes of the selection, and stop before
#                              training
#   --collect-max-gib X        GiB that all ranks together may write (default: no limit)
#   --collect-max-files N      number of .pt files that all ranks together may write (default: no
#                              limit)
#   --collect-keep-free-gib X  GiB of the disk to keep free (default: 1, or 5% of a disk below 20
#                              GiB)
#   --collect-max-host-gib X   GiB of memory for tensors that wait to be written, or in a ring
#                              (default: a tenth of the machine's memory)
#   --yes                      collect more than 10 GB without a limit (COLLECT_YES=1)
# Where to
#   --tensor-path DIR          base folder; the tensors go to DIR/TYPE/ (default: TENSOR_SAVE_DIR
#                              if set, otherwise enhanced_tensor_logs); --tensor-dir and --tensor-save-dir
#                              are aliases
# What to train
#   --start-iterations N       iterations of the trained model from which the default job continues;
#                              0: random weights (default: START_ITERATIONS if set, otherwise 300).
#                              See below
#   --tokenizer-path P         see TOKENIZER of the training script (default: model/llama3.2-1b)
#   --data-path P              see DATA of the training script (default:
#                              dataset/wikipedia_processed/wikipedia_processed_text_document)
#   --dtype D                  bf16, fp16, fp32 or fp8 (default: bf16)
#   --preset P                 1b or tiny (default: 1b with a CUDA device and data, otherwise
#                              tiny)
#   --train-iters N, --micro-batch-size N, --global-batch-size N, --seq-length N, --lr X
#                              override the preset's values
#   --nproc N                  processes, one per GPU (default: NPROC if set, otherwise 1)
#   --checkpoint-path DIR      save checkpoints in DIR/TYPE, and resume from the one found there
#                              (default: none, which saves nothing)
#   --                         words after it go to pretrain_gpt.py and take precedence; the type and
#                              the folder of the tensors must be given before it
# Watching
#   --stall-timeout S          stop and fail if neither a tensor nor a line of the log arrives for S
#                              seconds; 0: never (default: 600)
#   --verbose                  show the training output too
#   -h, --help                 print this
#
# The default job collects from a model that has learned: the tiny model is trained in bf16 on the
# default corpus, once, and saved in model/default/. Every type starts from these weights, with a new
# optimizer. The job is the default one unless --preset, --tokenizer-path, --data-path,
# --checkpoint-path, --dtype fp16 or fp32, or a flag after -- that changes more than the formats, the
# collection, the batch or the optimizer is given. Other jobs start from random weights, or from what
# their flags load.
#
# --dry-run or DRY_RUN=1 prints the training commands and the missing files, and runs nothing.
# Default folders are in the root of the repository; a path that you give is relative to the current
# folder. Options may be written with underscores instead of hyphens.
#
# Exit status: 0 all tensors were collected; 1 a run failed; 2 wrong option; 3 training succeeded,
# but a limit ended the collection early.
set -euo pipefail

# shellcheck source=script/driver.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/script/driver.sh"

case " $* " in *' -h '* | *' --help '*) usage "${BASH_SOURCE[0]}"; exit ;; esac

unbounded='' listed='' mode='' quant_type='' quant_recipe='' control_iter='' type_from=flag
for name in $collection_flags $size_options; do printf -v "${name//-/_}" %s ''; done
tensor_path='' tokenizer_path='' data_path='' dtype='' preset='' nproc='' yes=''
checkpoint_path='' stall_timeout='' verbose='' start_iterations='' continuation=()
parse "mode quant-type quant-recipe control-iter $collection_flags $size_options tensor-path \
tokenizer-path data-path dtype preset nproc checkpoint-path stall-timeout start-iterations" "$@"
: "${dtype:=bf16}" "${nproc:=${NPROC:-1}}" "${checkpoint_path:=none}" "${stall_timeout:=600}"
: "${tensor_path:=${TENSOR_SAVE_DIR:-${home}enhanced_tensor_logs}}"
places=(${positional[@]+"${positional[@]}"})
take_mode 'single batch quick' single
take_type
case $mode in
  single) ;;
  quick) : "${collect_layers:=first,last}" ;;
  batch)
    if [[ -n $quant_recipe ]]; then
      refuse "batch collects bf16, mxfp8, mxfp4 and hifp8; --quant-recipe needs single or quick"
    fi
    if [[ -n $quant_type ]]; then
      refuse "batch collects bf16, mxfp8, mxfp4 and hifp8; for '$quant_type' alone, use single"
    fi
    ;;
  *) refuse "unknown mode '$mode'; it is single, batch or quick; see --help" ;;
esac
if [[ -n $quant_recipe && -n $quant_type ]]; then
  refuse "--quant-recipe and the type '$quant_type' were both given; give one of the two"
elif [[ $mode != batch && -z $quant_type ]]; then
  quant_recipe=${quant_recipe:-${QUANT_RECIPE-}}
else
  quant_recipe=
fi
unset QUANT_RECIPE # from here on, the recipe is passed as a flag, or a type replaces it
before=''
for word in ${training_flags[@]+"${training_flags[@]}"}; do
  if [[ $before == --control-iter ]]; then control_iter=$word; fi
  before=$word
  case $word in # a ring or a flag file determines when the collection ends
    --collect-ring | --collect-ring=* | --collect-flag-file | --collect-flag-file=*) unbounded=yes ;;
    --collect-iterations | --collect-iterations=*) listed=yes ;;
    --control-iter=*) control_iter=${word#*=} ;;
    --custom-quant-type | --custom-quant-type=* | --quant-recipe | --quant-recipe=*)
      refuse "${word%%=*} after -- would collect into the folder of another type; give the type" \
        "before --, as in 'single mxfp4' or 'single --quant-recipe FILE'"
      ;;
    --linear-quant | --linear-quant=* | --qk-quant | --qk-quant=* | --pv-quant | --pv-quant=*)
      value=${word%%=*}
      value=$(tr 'a-z-' 'A-Z_' <<<"${value#--}")_TYPE
      refuse "${word%%=*} after -- would collect into the folder of another type; set the variable" \
        "$value to the format instead, without a type"
      ;;
    --save | --save=* | --save-hf | --save-hf=* | --tensorboard-dir | --tensorboard-dir=*)
      if [[ $mode == batch ]]; then
        refuse "${word%%=*} after -- is one folder for all types of batch; collect the types one by" \
          "one, or give --checkpoint-path DIR before --, which saves checkpoints in DIR/TYPE"
      fi
      ;;
    --tensor-save-dir | --tensor-save-dir=*)
      refuse "--tensor-save-dir was given after --; give --tensor-path DIR before --, so that the" \
        "tensors go to DIR/TYPE"
      ;;
  esac
done
if [[ -n $collect_ring$collect_flag_file ]]; then unbounded=yes; fi
if [[ -z $collect_iterations$listed$unbounded ]]; then
  : "${control_iter:=1}" # otherwise the iterations are listed, or unlimited
fi
: "${collect_micro_batches:=1}"
whole --control-iter "${control_iter:-0}" 0 '0: never stop by itself'
whole --collect-micro-batches "$collect_micro_batches" 0 '0: all'
for name in start every max-files ring ring-events; do
  value=collect_${name//-/_}
  whole "--collect-$name" "${!value:-1}" 1
done
whole --stall-timeout "$stall_timeout" 0 'seconds; 0: never'
whole --nproc "$nproc" 1
case $dtype in
  bf16 | fp16 | fp32 | fp8) ;;
  *) refuse "--dtype is '$dtype'; it is bf16, fp16, fp32 or fp8" ;;
esac

given=''
for name in preset tokenizer-path data-path checkpoint-path; do
  value=${name//-/_}
  if [[ -n ${!value} && ${!value} != none ]]; then given=--$name; fi
done
tokenizer=$tokenizer_path data=$data_path
files_given
find_python
types=(bf16 mxfp8 mxfp4 hifp8) queries=(preset data)
if [[ -n $quant_recipe ]]; then
  check_recipe "$quant_recipe"
  types=("$(recipe_type "$quant_recipe")")
elif [[ $mode != batch ]]; then
  queries=(type preset data)
fi
if ! looks; then queries+=(start); fi
choose "${queries[@]}" ${quant_type:+--type="$quant_type"} ${file_options[@]+"${file_options[@]}"} \
  ${start_iterations:+--start-iterations="$start_iterations"} --given="$given" --dtype="$dtype" \
  --flags="$(quoted ${training_flags[@]+"${training_flags[@]}"})"
if [[ ${queries[0]} == type ]]; then types=("$quant_type"); fi
if [[ $type_from == settings && ${#training_flags[@]} -eq 0 ]]; then
  export LAB_EFFECTIVE_TYPE=$quant_type # train_config.py need not resolve it again
fi

draw=(bash "${home}run_tensor_draw.sh" visualize)
if [[ $tensor_path != "${home}enhanced_tensor_logs" ]]; then draw+=(--tensor-dir "$tensor_path"); fi

# collect TYPE: run and watch the collection of one type.
collect() {
  local name tensors stamp checkpoint=$checkpoint_path
  name=$(folder_name "$1")
  tensors=$tensor_path/$name
  stamp=$(date +%Y%m%d_%H%M%S)
  if [[ $checkpoint != none ]]; then checkpoint+=/$name; fi
  local formats=(--custom-quant-type "$1")
  if [[ -n $quant_recipe ]]; then
    formats=(--quant-recipe "$quant_recipe")
  elif [[ $type_from == settings ]]; then
    formats=()
  fi
  local name_of value selected=()
  for name_of in $collection_flags; do
    value=${name_of//-/_}
    if [[ -n ${!value} ]]; then selected+=("--$name_of" "${!value}"); fi
  done
  local training=(
    bash "$repo/examples/llama/train_llama32_1b_h100_fp8.sh" "$checkpoint"
    "${home}tensorboard_logs/llama32_${preset}_${name}_$stamp" "$tokenizer" "$data" "$dtype"
    --preset "$preset" ${formats[@]+"${formats[@]}"} --save-tensors --tensor-save-dir "$tensors"
    ${control_iter:+--control-iter "$control_iter"} "${selected[@]}"
    ${look[@]+"${look[@]}"} ${continuation[@]+"${continuation[@]}"}
    ${training_flags[@]+"${training_flags[@]}"}
  )
  export NPROC=$nproc
  if [[ -n $train_iters ]]; then export TRAIN_ITERS=$train_iters; fi
  if [[ -n $micro_batch_size ]]; then export MICRO_BATCH=$micro_batch_size; fi
  if [[ -n $global_batch_size ]]; then export GLOBAL_BATCH=$global_batch_size; fi
  if [[ -n $seq_length ]]; then export SEQ_LENGTH=$seq_length; fi
  if [[ -n $lr ]]; then export LR=$lr; fi
  if [[ -n ${DRY_RUN-} ]]; then
    "${training[@]}"
    return
  fi
  if looks; then
    run_child "${training[@]}"
    return
  fi
  local next
  next=$(quoted "${draw[@]}" "$1")
  if [[ $mode == batch ]]; then next=; fi # a single command for all types is printed at the end
  run_child "$py" "$repo/script/collect/run.py" --name "$1" --tensor-dir "$tensors" \
    --log-dir "${home}logs" --control-iter "${control_iter:-0}" --stall-timeout "$stall_timeout" \
    --next "$next" ${unbounded:+--may-be-empty} \
    ${verbose:+--verbose} -- "${training[@]}"
}

# announce COMMAND: print the size of the collection, and ask before a large one.
announce() {
  if looks; then return; fi
  "$py" "$repo/script/configs" size --command="$1" --types "${#types[@]}" ${yes:+--yes} \
    ${DRY_RUN:+--dry-run} || exit
}

export LAB_SIZE_ANNOUNCED=1 # train_config.py need not print the size again
command=$(DRY_RUN=1 collect "${types[0]}") || exit
announce "$command"
if ((${#continuation[@]})) && [[ -z ${DRY_RUN-} ]]; then
  run_child "$py" "$repo/script/collect/train_model.py" --iterations "$start_iterations"
fi

failed=() limited=()
for quant_type in "${types[@]}"; do
  status=0
  if [[ -n ${DRY_RUN-} && $quant_type == "${types[0]}" ]]; then
    tell '%s\n' "$command"
    continue
  fi
  collect "$quant_type" || status=$?
  if ((status > 128)); then exit "$status"; fi # interrupted: collect no further type
  if ((status == 3)); then
    limited+=("$quant_type")
  elif ((status)); then failed+=("$quant_type"); fi
done
if [[ $mode == batch && -z ${DRY_RUN-} ]] && ! looks; then
  tell 'batch: %s of %s types are in %s\n  next       %s\n' "$((${#types[@]} - ${#failed[@]}))" \
    "${#types[@]}" "$tensor_path" "$(quoted "${draw[@]}")"
fi
if [[ ${#failed[@]} -eq 1 && $mode != batch ]]; then exit 1; fi # the error was printed above
if ((${#failed[@]})); then die "not collected in full: ${failed[*]}; the reasons are above"; fi
if ((${#limited[@]})); then
  say "[WARNING] collected up to a limit: ${limited[*]}; raise the limit or select less"
  exit 3
fi
