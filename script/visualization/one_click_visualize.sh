#!/usr/bin/env bash
# Draw all figures of collected tensors, and write report.html.
#
#   bash script/visualization/one_click_visualize.sh [tensor_dir] [output_dir] [workers] [option...]
#   bash script/visualization/one_click_visualize.sh enhanced_tensor_logs draw 4
#   bash script/visualization/one_click_visualize.sh dump draw 4 --formats mxfp8 hifp8
#
#   tensor_dir  folder of tensors, including its subfolders (TENSOR_SAVE_DIR if set, otherwise
#               enhanced_tensor_logs)
#   output_dir  folder for the figures, made if missing (draw)
#   workers     number of reading threads (one per processor)
# Default folders are in the root of the repository; a folder that you give is relative to the current
# one. Other options go to `python -m megatron.analysis draw`, whose exit status this script returns.
#
# DRY_RUN=1 prints the command and runs nothing.
set -euo pipefail

# shellcheck source=script/driver.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/../driver.sh"

case " $* " in *' -h '* | *' --help '*) usage "${BASH_SOURCE[0]}"; exit ;; esac

places=()
while (($#)) && [[ $1 != -* ]] && ((${#places[@]} < 3)); do
  places+=("$1")
  shift
done
draw=(-m megatron.analysis draw "${places[0]:-${TENSOR_SAVE_DIR:-${home}enhanced_tensor_logs}}"
  --output-dir "${places[1]:-${home}draw}" ${places[2]:+--workers "${places[2]}"} "$@")
export PYTHONPATH="$repo${PYTHONPATH:+:$PYTHONPATH}"
if [[ -n ${DRY_RUN-} ]]; then
  quoted python3 "${draw[@]}"
  exit
fi
py=$(bash "$repo/script/setup_env.sh")
exec "$py" "${draw[@]}"
