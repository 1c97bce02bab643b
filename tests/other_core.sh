#!/usr/bin/env bash
# Make a Python environment that differs from another one only in its release of megatron-core.
#
#   bash tests/other_core.sh PYTHON VERSION        # prints the path of the new environment's Python
#   bash tests/other_core.sh .venv/bin/python 0.19.2
#
# The environment is made once, in .megatron-core/. It contains megatron-core, and finds every other
# package in the environment of PYTHON. megatron-core 0.17 and later are declared for Python 3.12 and
# later; they are installed for any Python here, because their code also runs with Python 3.11.
# The exit status is 69 if pip cannot install the release, for example without a network.
set -euo pipefail

usage() { sed -n '2,/^set -/{/^set -/d; s/^# \{0,1\}//; p;}' "${BASH_SOURCE[0]}"; }

if [[ ${1-} == -h || ${1-} == --help ]]; then
  usage
  exit 0
fi
(($# == 2)) || {
  echo "[ERROR] give the path of a Python and a release of megatron-core; see --help" >&2
  exit 2
}
py=$1 version=$2
repo=$(unset CDPATH && cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
venv=$repo/.megatron-core/$version-$("$py" -c 'import sys; print("py%d.%d" % sys.version_info[:2])')

search='import pathlib, site, sys, sysconfig
venv = pathlib.Path(sys.argv[1])
inside = sysconfig.get_path("purelib", vars={"base": str(venv)})
outside = [path for path in sys.path if path in site.getsitepackages()]
pathlib.Path(inside, "other_core.pth").write_text("\n".join([str(venv / "core"), *outside]) + "\n")'

mkdir -p -- "$repo/.megatron-core"
exec 9>>"$repo/.megatron-core/lock"
flock 9 # several test runs may need the same environment
if [[ ! -e $venv/complete ]]; then
  rm -rf -- "$venv"
  "$py" -m venv --without-pip "$venv"
  if ! trouble=$("$py" -m pip install --quiet --disable-pip-version-check --no-deps --no-compile --retries 2 \
    --ignore-requires-python --target "$venv/core" "megatron-core==$version" 2>&1); then
    echo "pip cannot install megatron-core $version: $(tail -n 1 <<<"$trouble")" >&2
    exit 69
  fi
  : >"$venv/complete"
fi
"$py" -c "$search" "$venv" # each time, because the folder may have been moved
found=$("$venv/bin/python" -c 'import importlib.metadata as m; print(m.version("megatron-core"))')
if [[ $found != "$version" ]]; then
  echo "[ERROR] $venv has megatron-core $found; remove this folder, and start again" >&2
  exit 1
fi
echo "$venv/bin/python"
