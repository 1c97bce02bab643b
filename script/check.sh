#!/usr/bin/env bash
# Check the tree: lint, formatting, types, shell scripts, then the tests.
#
#   bash script/check.sh              # everything; the tests are tests/run_tests.sh
#   bash script/check.sh --lint-only  # everything except the tests, in seconds
#   bash script/check.sh --slow       # other options go to tests/run_tests.sh
#
# All checks run, even if one fails; the exit status is 0 only if all pass. `ruff format` and
# `ruff check --fix` (of the same interpreter) fix most problems that the first two checks find.
set -euo pipefail

repo=$(unset CDPATH && cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)

usage() { sed -n '2,/^set -/{/^set -/d; s/^# \{0,1\}//; p;}' "${BASH_SOURCE[0]}"; }

lint_only=0
case "${1-}" in
  -h | --help)
    usage
    exit 0
    ;;
  --lint-only)
    lint_only=1
    shift
    if (($#)); then
      printf "[ERROR] '%s' after --lint-only; it takes no further option\n" "$1" >&2
      exit 2
    fi
    ;;
esac

py=$(bash "$repo/script/setup_env.sh" --dev)
cd -- "$repo"
# Add the environment to PATH, because shellcheck is a program and not a Python module.
PATH="$(dirname -- "$py"):$PATH"

failed=()
check() {
  local name=$1
  shift
  printf '== %s\n' "$name"
  "$@" || failed+=("$name")
}

scripts=(.ci/run)
while IFS= read -r script; do
  scripts+=("$script")
done < <(find . -name '*.sh' -not -path './.*' -not -path './build/*' | sort)

check 'ruff check' "$py" -m ruff check .
check 'ruff format' "$py" -m ruff format --check .
check mypy "$py" -m mypy
check shellcheck shellcheck "${scripts[@]}"
if ((!lint_only)); then check tests bash tests/run_tests.sh "$@"; fi

if ((${#failed[@]})); then
  printf '[ERROR] failed: %s; the reasons are above\n' "$(printf '%s, ' "${failed[@]}" | sed 's/, $//')" >&2
  exit 1
fi
