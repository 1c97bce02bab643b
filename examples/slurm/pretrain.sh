#!/usr/bin/env bash
# Train a cell of the experiment matrix under SLURM, on one machine or several.
#
#   sbatch --nodes 2 examples/slurm/pretrain.sh deepseek2_lite dolma FA_linear_mxfp8 --ep 8
#
# Submit from the root of the repository, which every machine must be able to read. The first three
# words are the model, the dataset and the quantization. Options of script/train_config.py follow
# (see its --help), then -- and flags of pretrain_gpt.py. One task per machine starts one process per
# GPU. The log is slurm-NAME-JOB.log in the root, because sbatch opens it before any script can make
# a folder. `bash examples/slurm/pretrain.sh --help` prints this.
#SBATCH --job-name=lowprec
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
#SBATCH --output=slurm-%x-%j.log
set -euo pipefail

die() {
  printf '[ERROR] %s\n' "$*" >&2
  exit 2
}

case " $* " in *' -h '* | *' --help '*)
  sed -n '2,/^#SBATCH/{/^#SBATCH/d; s/^# \{0,1\}//; p;}' "${BASH_SOURCE[0]}"
  exit
  ;;
esac

if (($# < 3)); then
  die "MODEL, DATASET and QUANTIZATION are missing; script/train_config.py --list prints them"
fi
# SLURM runs a copy of this file, so the path of the file does not lead to the repository.
if [[ -z ${SLURM_SUBMIT_DIR-} ]]; then
  die "SLURM_SUBMIT_DIR is not set; start this with sbatch, as in" \
    "'sbatch examples/slurm/pretrain.sh deepseek2_lite dolma FA_linear_mxfp8'"
fi
cd -- "$SLURM_SUBMIT_DIR"
if [[ ! -f script/train_config.py ]]; then
  die "$PWD is not the root of the repository; submit from its root"
fi

read -r MASTER_ADDR < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
MASTER_PORT=$((20000 + SLURM_JOB_ID % 20000))
LAB_PYTHON=$(bash script/setup_env.sh) # set up once, before the machines start
export MASTER_ADDR MASTER_PORT LAB_PYTHON
# Since SLURM 22.05, srun ignores the job's --cpus-per-task and would bind a task to one core.
if [[ -n ${SLURM_CPUS_PER_TASK-} ]]; then export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK; fi

# The task's shell expands SLURM_NODEID, because only there is it the number of the task's machine.
# shellcheck disable=SC2016
srun --kill-on-bad-exit=1 bash -c \
  'exec "$LAB_PYTHON" script/train_config.py --node-rank "$SLURM_NODEID" "$@"' train \
  --model "$1" --dataset "$2" --quantization "$3" --nnodes "$SLURM_NNODES" \
  --nproc-per-node "${SLURM_GPUS_ON_NODE:-8}" "${@:4}"
