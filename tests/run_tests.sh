#!/usr/bin/env bash
# Run the tests. This is the one command: it finds or makes the Python environment first.
#
#   bash tests/run_tests.sh                        # what CI runs on the CPU; takes minutes
#   bash tests/run_tests.sh --quick                # formats, collection, statistics: under 2 minutes
#   bash tests/run_tests.sh --slow                 # adds the tests that take longer
#   bash tests/run_tests.sh --gpu                  # adds the tests that need a CUDA device
#   bash tests/run_tests.sh tests/fake_quant -k mxfp8 -n 0
#
# Options
#   --quick        leave out tests that start processes or take seconds each
#   --slow, --gpu  add these tests; the two can be combined
#   -h, --help     print this help; `-- --help` prints pytest's own help
# All other options are passed to pytest and override the ones set here. Paths are relative to the
# root of the repository.
#
# Environment
#   MEGATRON_CORE  supported release of megatron-core to test instead of the installed one; it is
#                  downloaded once, into .megatron-core/
#   TEST_WORKERS   processes that share the tests, one file at a time (default 3, because
#                  many tests wait; 0 runs all in pytest)
set -euo pipefail

repo=$(unset CDPATH && cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
: "${TEST_WORKERS:=3}"

usage() { sed -n '2,/^set -/{/^set -/d; s/^# \{0,1\}//; p;}' "${BASH_SOURCE[0]}"; }

left_out=(slow gpu)
rest=()
while (($#)); do
  case "$1" in
    -h | --help)
      usage
      exit 0
      ;;
    --slow) left_out=("${left_out[@]/slow/}") ;;
    --gpu) left_out=("${left_out[@]/gpu/}") ;;
    --)
      shift
      rest+=("$@")
      break
      ;;
    *) rest+=("$1") ;;
  esac
  shift
done
marks=
for mark in "${left_out[@]}"; do
  if [[ -n $mark ]]; then marks+="${marks:+ and }not $mark"; fi
done

py=$(bash "$repo/script/setup_env.sh" --test)
if [[ -n ${MEGATRON_CORE-} ]]; then py=$(bash "$repo/tests/other_core.sh" "$py" "$MEGATRON_CORE"); fi
cd -- "$repo"
export PYTHONPATH="$repo${PYTHONPATH:+:$PYTHONPATH}"
# One thread per test process; otherwise each process would use as many threads as there are cores.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
# Let the C library keep freed memory: to get it anew costs a page fault per 4 KiB.
export MALLOC_TRIM_THRESHOLD_="${MALLOC_TRIM_THRESHOLD_:-1073741824}"
export MALLOC_MMAP_THRESHOLD_="${MALLOC_MMAP_THRESHOLD_:-33554432}"
# Let torch.compile compile in the test process; its own processes would each import torch first.
export TORCHINDUCTOR_COMPILE_THREADS="${TORCHINDUCTOR_COMPILE_THREADS:-1}"
# Let Python keep compiled modules, because the tests start hundreds of processes.
unset PYTHONDONTWRITEBYTECODE
# Keep the order of tests/conftest.py; by default, xdist starts with the files with the most tests.
exec "$py" -m pytest -n "$TEST_WORKERS" --dist loadfile --no-loadscope-reorder -m "$marks" ${rest[@]+"${rest[@]}"}
