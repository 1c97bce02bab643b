#!/usr/bin/env bash
# Collect tensors of a cell of the experiment matrix under SLURM, on the disk of each machine.
#
#   sbatch --nodes 8 examples/slurm/collect.sh /shared/dump llama31-8b dolma FA_linear_mxfp8 \
#       --tp 4 -- --control-iter 1
#
# Submit from the root of the repository, which every machine must be able to read. The first
# argument, FOLDER, must be writable on every machine. The others are those of
# examples/slurm/pretrain.sh, which trains. During the training, each machine writes to its own
# disk: to dump-JOB in LOCAL_SCRATCH (default: /tmp). After the training, even if it has failed,
# each machine moves its files to FOLDER/nodeN. `bash examples/slurm/collect.sh --help` prints this.
#SBATCH --job-name=collect
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
#SBATCH --output=slurm-%x-%j.log
set -euo pipefail

case " $* " in *' -h '* | *' --help '*)
  sed -n '2,/^#SBATCH/{/^#SBATCH/d; s/^# \{0,1\}//; p;}' "${BASH_SOURCE[0]}"
  exit
  ;;
esac

if (($# < 4)); then
  printf '[ERROR] %s\n' "FOLDER, MODEL, DATASET and QUANTIZATION are missing; see --help" >&2
  exit 2
fi
if [[ -z ${SLURM_SUBMIT_DIR-} ]]; then
  printf '[ERROR] %s\n' "SLURM_SUBMIT_DIR is not set; start this with sbatch" >&2
  exit 2
fi
cd -- "$SLURM_SUBMIT_DIR"

SHARED=$1
LOCAL=${LOCAL_SCRATCH:-/tmp}/dump-$SLURM_JOB_ID
export SHARED LOCAL
shift
case " $* " in *' -- '*) ;; *) set -- "$@" -- ;; esac

status=0
bash examples/slurm/pretrain.sh "$@" --save-tensors --tensor-save-dir "$LOCAL" || status=$?

# The task's shell expands SLURM_NODEID, because only there is it the number of the task's machine.
# shellcheck disable=SC2016
srun bash -c '
  if [[ -d $LOCAL ]]; then
    mkdir -p "$SHARED/node$SLURM_NODEID"
    cp -r "$LOCAL/." "$SHARED/node$SLURM_NODEID/"
    rm -r "$LOCAL"
  fi'
exit "$status"
