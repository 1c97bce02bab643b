#!/usr/bin/env bash
# Collect tensors, draw them, or both.
#
#   bash run_tensor_draw.sh both mxfp8         # train, collect, and draw the tensors
#   bash run_tensor_draw.sh both batch         # the same with bf16, mxfp8, mxfp4 and hifp8
#   bash run_tensor_draw.sh both quick hifp8   # the first and the last layer only
#   bash run_tensor_draw.sh visualize          # draw everything in enhanced_tensor_logs
#   bash run_tensor_draw.sh visualize mxfp8    # draw enhanced_tensor_logs/mxfp8
#   bash run_tensor_draw.sh collect hifp8      # same as run_tensor_collection.sh single hifp8
#   bash run_tensor_draw.sh --mode visualize --tensor-dir ./enhanced_tensor_logs --output-dir ./draw
#   bash run_tensor_draw.sh --mode both --quant-type mxfp8 --control-iter 3
#
# Writes everything that `python -m megatron.analysis draw` makes: draw/report.html to browse,
# draw/quick_analysis.png and draw/tensor_stats.txt for an overview (earlier versions are kept under
# names with their time), and a folder for each kind of figure. If a ring or a flag file collects
# nothing, `both` draws nothing, with status 0. Exit status 3: some files could not be read; all
# others were drawn.
#
# Mode and type, as the first words or as options
#   --mode M           collect, visualize or both (visualize); it may be followed by a mode of
#                      run_tensor_collection.sh: single, quick or batch (single)
#   --quant-type TYPE  the type to collect, as in run_tensor_collection.sh; with visualize: draw
#                      only the folder of this type (all)
# Drawing
#   --tensor-dir DIR   base folder: tensors are collected in DIR/TYPE/, and drawn from there;
#                      visualize without a type, and both batch, draw everything below DIR
#                      (TENSOR_SAVE_DIR if set, otherwise enhanced_tensor_logs); --tensor-path and
#                      --tensor-save-dir are aliases
#   --output-dir DIR   folder for all figures and reports (draw)
#   --run ID           draw only this run; latest: the newest one (all; both draws its own run)
# Collecting
#   any other option, and flags after --, as in run_tensor_collection.sh; see its --help
#
# --dry-run or DRY_RUN=1 prints the commands and runs nothing. Default folders are in the root of the
# repository; a folder that you give is relative to the current one.
set -euo pipefail

# shellcheck source=script/driver.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/script/driver.sh"

case " $* " in *' -h '* | *' --help '*) usage "${BASH_SOURCE[0]}"; exit ;; esac

collection="control-iter quant-recipe $collection_flags $size_options tokenizer-path data-path dtype \
preset nproc checkpoint-path stall-timeout start-iterations"
mode='' quant_type='' tensor_path='' output_dir='' run='' verbose='' yes=''
# Options of the collection are passed on to run_tensor_collection.sh, which checks them and sets
# their defaults.
for name in $collection; do printf -v "${name//-/_}" %s ''; done
parse "mode quant-type tensor-path output-dir run $collection" "$@"

places=(${positional[@]+"${positional[@]}"})
take_mode 'collect visualize both' visualize
collecting=''
case ${places[0]-} in
  single | quick | batch)
    collecting=${places[0]}
    next_place
    ;;
esac
take_type
: "${tensor_path:=${TENSOR_SAVE_DIR:-${home}enhanced_tensor_logs}}" "${output_dir:=${home}draw}"
given=()
for name in $collection; do
  value=${name//-/_}
  if [[ -n ${!value} ]]; then given+=("--$name" "${!value}"); fi
done
if [[ $mode != collect ]] && looks; then
  refuse "--collect-plan and --quant-audit collect nothing that could be drawn; use the mode collect"
fi
case $mode in
  visualize)
    if ((${#given[@]} + ${#training_flags[@]})) || [[ -n $collecting$saves ]]; then
      refuse "visualize trains nothing: '${collecting:-${given[0]-${training_flags[0]-$saves}}}'" \
        "belongs to collect or both"
    fi
    ;;
  collect | both)
    if [[ -n $run ]]; then
      refuse "--run belongs to visualize: both draws the run that it has collected"
    fi
    ;;
  *)
    refuse "unknown mode '$mode'; it is collect, visualize or both, as in" \
      "'run_tensor_draw.sh both ${quant_type:-mxfp8}'; see --help"
    ;;
esac

# folder_of TYPE: set folder to the folder of a quantization type. An existing folder is found even
# if it differs in upper and lower case.
folder_of() {
  local candidate wanted
  wanted=$(folder_name "$1")
  folder=$tensor_path/$wanted
  if [[ -d $folder ]]; then return; fi
  shopt -s nocasematch
  for candidate in "$tensor_path"/*/; do
    candidate=${candidate%/}
    if [[ ${candidate##*/} == "$wanted" ]]; then folder=$candidate; fi
  done
  shopt -u nocasematch
}

folder=$tensor_path
if [[ $mode == visualize ]]; then
  if [[ -n $quant_type ]]; then folder_of "$quant_type"; fi
  if [[ ! -d $folder && -z ${DRY_RUN-} ]]; then
    collect=(bash "${home}run_tensor_collection.sh" single "${quant_type:-mxfp8}")
    if [[ $tensor_path != "${home}enhanced_tensor_logs" ]]; then
      collect+=(--tensor-dir "$tensor_path")
    fi
    there=
    for candidate in "$tensor_path"/*/; do
      name=$(basename -- "$candidate")
      if [[ -d $candidate && $name == "$(folder_name "$name")" ]]; then there+="${there:+, }$name"; fi
    done
    die "no folder $folder;${there:+ the folders in $tensor_path are $there;} collect first with \`$(quoted "${collect[@]}")\`, or name another" \
      "folder in --tensor-dir"
  fi
fi

# saved: print the number of tensors below tensor_path. A collection never deletes any.
saved() { (find "$tensor_path" -maxdepth 2 -name '*.pt' 2>/dev/null || :) | wc -l; }

# The collection comes before find_python, because run_tensor_collection.sh checks its options
# before it makes a Python environment.
status=0 before=''
if [[ $mode != visualize ]]; then
  if [[ $mode == both && -z ${DRY_RUN-} ]]; then before=$(saved); fi
  run_child bash "$repo/run_tensor_collection.sh" "${collecting:-single}" \
    ${quant_type:+"$quant_type"} --tensor-path "$tensor_path" \
    ${given[@]+"${given[@]}"} ${look[@]+"${look[@]}"} ${verbose:+--verbose} ${yes:+--yes} \
    -- ${training_flags[@]+"${training_flags[@]}"} || status=$?
  if ((status && status != 3)); then exit "$status"; fi # 3: a limit was reached; draw
fi
if [[ -n $before ]] && (($(saved) == before)); then
  say "Nothing is drawn, because this run collected no tensor."
  exit "$status"
fi
if [[ $mode != collect ]]; then
  find_python
  if [[ $mode == both && $collecting != batch ]]; then
    run=latest
    recipe=${quant_recipe:-${QUANT_RECIPE-}}
    if [[ -n $quant_type || -z $recipe ]]; then
      choose type ${quant_type:+--type="$quant_type"} 2>/dev/null # the collection printed the same messages
    else
      quant_type=$(recipe_type "$recipe")
    fi
    folder=$tensor_path/$(folder_name "$quant_type")
  fi
  draw=("$py" "$repo/script/visualization/tensor_visualizer.py" --tensor_dir "$folder"
    --output_dir "$output_dir" ${run:+--run "$run"})
  if [[ -n ${DRY_RUN-} ]]; then
    quoted "${draw[@]}"
    exit
  fi
  run_child "$py" "$repo/script/collect/draw_run.py" -- "${draw[@]}"
fi
exit "$status"
