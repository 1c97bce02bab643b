#!/usr/bin/env bash
# Collect tensors, draw them, or both.
#
#   bash run_tensor_draw.sh both mxfp8         # train, collect, draw what was collected
#   bash run_tensor_draw.sh visualize          # draw all that is in enhanced_tensor_logs
#   bash run_tensor_draw.sh visualize mxfp8    # draw enhanced_tensor_logs/mxfp8
#   bash run_tensor_draw.sh collect hifp8      # as run_tensor_collection.sh single hifp8
#   bash run_tensor_draw.sh --mode visualize --tensor-dir ./enhanced_tensor_logs --output-dir ./draw
#   bash run_tensor_draw.sh --mode both --quant-type mxfp8 --control-iter 3
#
# Leaves everything that `python -m megatron.analysis draw` makes: draw/report.html to click through,
# draw/quick_analysis.png and draw/tensor_stats.txt for the first look (earlier ones are kept under a
# name with their time), and a folder for each kind of figure. Exit status 3: all is drawn but files
# that could not be read.
#
# Mode and type, in their places or as options
#   --mode M           collect, visualize or both (visualize)
#   --quant-type TYPE  what to collect (mxfp8); visualize: draw only the folder of this type (all)
# Drawing
#   --tensor-dir DIR   base folder: tensors are collected in DIR/TYPE/, and drawn from there;
#                      visualize without a type draws all that is below DIR
#                      (TENSOR_SAVE_DIR if set, else enhanced_tensor_logs); --tensor-path is
#                      the same
#   --output-dir DIR   where all of it goes (draw)
#   --run ID           visualize: only this run; latest: the newest (all; both: its own)
# Collecting
#   any other option, and flags after --, as in run_tensor_collection.sh; see its --help
#
# DRY_RUN=1 prints the commands and runs nothing.
set -euo pipefail

# shellcheck source=script/driver.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/script/driver.sh"

case " $* " in *' -h '* | *' --help '*) usage "${BASH_SOURCE[0]}" && exit ;; esac

collection="control-iter $collection_flags tokenizer-path data-path dtype preset nproc \
checkpoint-path stall-timeout"
mode='' quant_type='' tensor_path='' tensor_dir='' output_dir=${home}draw run='' verbose=''
# those of the collection are passed on as they are; it has the defaults and checks the values
for name in $collection; do printf -v "${name//-/_}" %s ''; done
parse "mode quant-type tensor-dir tensor-path output-dir run $collection" "$@"
if ((${#positional[@]} > 2)); then
  refuse "'${positional[2]}' is one word too many; the places are MODE and TYPE, flags of" \
    "pretrain_gpt.py go after --"
fi
one mode "$mode" "${positional[0]-}" visualize
one quant_type "$quant_type" "${positional[1]-}" ''
one tensor_dir "$tensor_dir" "$tensor_path" "${TENSOR_SAVE_DIR:-${home}enhanced_tensor_logs}"
given=()
for name in $collection; do
  value=${name//-/_}
  if [[ -n ${!value} ]]; then given+=("--$name" "${!value}"); fi
done
if [[ $mode != collect ]] && looks; then
  refuse "--collect-plan and --quant-audit collect nothing that could be drawn; give them to collect"
fi
case $mode in
  visualize)
    if ((${#given[@]} + ${#training_flags[@]})); then
      refuse "visualize trains nothing: '${given[0]-${training_flags[0]-}}' belongs to collect or" \
        "both"
    fi
    ;;
  collect | both)
    if [[ -n $run ]]; then
      refuse "--run belongs to visualize: both draws the run that it has collected"
    fi
    : "${quant_type:=${CUSTOM_QUANT_TYPE:-mxfp8}}"
    ;;
  *) refuse "unknown mode '$mode'; it is collect, visualize or both; see --help" ;;
esac
folder=$tensor_dir
if [[ -n $quant_type ]]; then folder+=/${quant_type//[^A-Za-z0-9_.+-]/-}; fi
if [[ $mode == visualize && ! -d $folder && -z ${DRY_RUN-} ]]; then
  die "no folder $folder; collect first with" \
    "'bash ${home}run_tensor_collection.sh single ${quant_type:-mxfp8}', or name another folder" \
    "in --tensor-dir"
fi

# the collection checks its options first, and only then makes an environment: so it goes before
# ours
status=0
if [[ $mode != visualize ]]; then
  run_child bash "$repo/run_tensor_collection.sh" single "$quant_type" --tensor-path "$tensor_dir" \
    ${given[@]+"${given[@]}"} ${look[@]+"${look[@]}"} ${verbose:+--verbose} \
    -- ${training_flags[@]+"${training_flags[@]}"} || status=$?
  if ((status && status != 3)); then exit "$status"; fi # 3: up to a limit, which can be drawn
fi
if [[ $mode == both ]]; then run=latest; fi
if [[ $mode != collect ]]; then
  find_python
  draw=("$py" "$repo/script/visualization/tensor_visualizer.py" --tensor_dir "$folder"
    --output_dir "$output_dir" ${run:+--run "$run"})
  if [[ -n ${DRY_RUN-} ]]; then
    printf '%q ' "${draw[@]}"
    echo
    exit
  fi
  run_child "${draw[@]}"
fi
exit "$status"
