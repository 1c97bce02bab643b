#!/usr/bin/env bash
# Find or make the Python environment, and print the path of its interpreter.
#
#   py=$(bash script/setup_env.sh)            # what every driver does first
#   "$py" pretrain_gpt.py --help
#
# Standard output is the path alone; everything else goes to standard error. In this order:
#   1. the python3 in PATH, if its packages are within the ranges of setup.py;
#   2. .venv in the repository's root, if it has the releases of script/constraints.txt;
#   3. .venv, which pip makes or completes once; only this step needs a network.
# If step 1 fails for a LAB_PYTHON, or if pip has to run, a line names the packages that do not fit.
# Several calls at a time are safe: one builds, the others wait. If making .venv was interrupted, it
# is made again. One that you made yourself is completed in place. A .venv that was partly deleted or
# damaged is renamed to .venv.damaged and made again. pip runs only inside .venv.
#
# Options
#   --test      also require the packages that tests/run_tests.sh needs (.venv always has them)
#   --dev       also require these and the linters that script/check.sh runs (ruff, mypy, shellcheck)
#   -h, --help  print this
#
# Environment
#   LAB_PYTHON  the interpreter to use in step 1 and to build .venv from (default: python3).
#               Python 3.10 or newer. To change the Python of a complete .venv, delete .venv.
#   PIP_*       pip reads its own settings: PIP_INDEX_URL names a mirror, and PIP_FIND_LINKS a folder
#               of wheels. On Linux the default torch wheel includes the CUDA libraries (several GB).
#               Without a GPU, let PIP_EXTRA_INDEX_URL or PIP_FIND_LINKS name PyTorch's CPU builds,
#               which are a tenth of the size.
set -euo pipefail

repo=$(unset CDPATH && cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
venv=$repo/.venv
stamp=$venv/.lab-complete     # the installed releases, written as the last step
unfinished=$venv/.lab-making  # exists from the first step to the last
made=$venv/.lab-made          # marks a folder that this script made and may therefore clear

usage() { sed -n '2,/^set -/{/^set -/d; s/^# \{0,1\}//; p;}' "${BASH_SOURCE[0]}"; }
say() { printf '%s\n' "$*" >&2; }
die() {
  say "[ERROR] $*"
  exit 1
}

groups=RUNTIME
for argument in "$@"; do
  case "$argument" in
    -h | --help)
      usage
      exit 0
      ;;
    --test) groups+=' TEST' ;;
    --dev) groups+=' TEST LINT' ;;
    *) die "unknown option '$argument'; the options are --test, --dev and --help" ;;
  esac
done

exec 3>&1 1>&2 # from here on only `found` writes to the caller's standard output
found() {
  printf '%s\n' "$1" >&3
  exit 0
}

# Prints up to five lines: the version, the interpreter, the interpreter that a virtual environment
# is based on, the kind of environment, and what it lacks. The kind is `inside` for the virtual
# environment in the given folder, `base` for a Python installation in that folder, and `outside` for
# anything else. An environment for which a stamp is given must have the exact releases of .venv.
# Installed releases are read without importing the packages. The first half must also run under a
# Python that is too old for the rest, and print its version.
probe='
import sys
sys.path[:] = filter(None, sys.path)  # without the current folder
print("%d.%d.%d" % sys.version_info[:3])
print(sys.executable)
print(getattr(sys, "_base_executable", None) or sys.executable)
if sys.version_info >= (3, 10):
    import importlib.metadata, os, runpy, sysconfig
    setup, groups, venv, stamp = sys.argv[1:]
    real = os.path.realpath
    folders = [sys.prefix] + [sysconfig.get_path(name) for name in ("purelib", "platlib", "scripts")]
    kind = "outside"
    if real(sys.prefix) == real(venv) and all(
        os.path.commonpath([real(venv), real(folder)]) == real(venv) for folder in folders
    ):
        kind = "base" if sys.prefix == sys.base_prefix else "inside"
    print(kind)
    tree = runpy.run_path(setup)
    groups = [tree[name] for name in groups.split()]
    def installed(name):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            return None
    if stamp:
        wanted = tree["pins"](tree["RUNTIME"], tree["TEST"], tree["LINT"])
        lines = "".join("%s==%s\n" % item for item in wanted.items())
        checked = tree["pins"](tree["RUNTIME"], tree["TEST"], *groups)
        wrong = [name for name, pin in checked.items() if (installed(name) or "").split("+")[0] != pin]
        if not os.path.exists(stamp) or open(stamp).read() != lines:
            wrong.append("stamp")
        print(" ".join(wrong))
    else:
        print(tree["misfits"](installed, *groups))
'

# look PYTHON [STAMP]: set version, executable, base, kind and missing; fail if PYTHON does not run.
look() {
  local output
  version='' executable='' base='' kind='' missing=''
  output=$("$1" -c "$probe" "$repo/setup.py" "$groups" "$venv" "${2-}" 2>/dev/null) || return 1
  {
    read -r version
    read -r executable || true
    read -r base || true
    read -r kind || true
    read -r missing || true
  } <<<"$output"
}

new_enough() { [[ $1 =~ ([0-9]+)\.([0-9]+) ]] && ((BASH_REMATCH[1] * 100 + BASH_REMATCH[2] >= 310)); }

venv_is_complete() {
  [[ -x $venv/bin/python && -f $stamp && ! -e $unfinished ]] &&
    look "$venv/bin/python" "$stamp" && new_enough "$version" && [[ $kind == inside && -z $missing ]]
}

python=${LAB_PYTHON:-python3}
# A LAB_PYTHON that does not exist is an error, even if .venv is complete.
if [[ -n ${LAB_PYTHON-} ]] && ! command -v "$python" >/dev/null; then
  die "there is no '$python'; name a Python 3.10 or newer in LAB_PYTHON, or leave it unset"
fi
trouble='' version='' executable='' base='' missing=''
if ! command -v "$python" >/dev/null; then
  trouble="there is no '$python' in PATH"
elif ! look "$python"; then
  trouble="'$python' does not run ($("$python" -c pass 2>&1 | tail -n 1 || true))"
elif ! new_enough "$version"; then
  trouble="'$python' is Python ${version#Python } ($(command -v "$python"))"
elif [[ -z $missing ]]; then
  found "$executable"
fi
builder=$base
builder_version=$version
misfit="$python ($executable, Python $version) is not used, because $missing"

if venv_is_complete; then
  if [[ -n ${LAB_PYTHON-} && -z $trouble ]]; then say "[NOTE] $misfit"; fi
  found "$venv/bin/python"
fi

if [[ -n $trouble ]]; then
  for name in python3.13 python3.12 python3.11 python3.10; do
    if "$name" -c pass 2>/dev/null; then
      die "$trouble; Python 3.10 or newer is needed: run it again with LAB_PYTHON=$(printf %q "$(command -v $name)")"
    fi
  done
  die "$trouble; Python 3.10 or newer is needed: install one, and name it in LAB_PYTHON if it is not" \
    "called python3"
fi

say "[NOTE] $misfit; install the required releases there to use this Python"

# Remove the current folder from the module path, because python -c searches it first.
"$builder" -c 'import sys; sys.path[:] = filter(None, sys.path); import ensurepip, venv' 2>/dev/null ||
  die "Python $builder_version ($builder) has no venv module; on Debian and Ubuntu run" \
    "'apt install python${builder_version%.*}-venv', elsewhere set LAB_PYTHON to a complete Python"

# This shell shares the open lock file with the Python that locks it, so the lock is held until this
# script ends in any way. (macOS has no flock command.)
{ exec 9>>"$repo/.venv.lock"; } 2>/dev/null ||
  die "cannot write to $repo, where .venv is made; use a copy of the repository that you may write to"
take='import fcntl, sys; fcntl.flock(9, fcntl.LOCK_EX | (fcntl.LOCK_NB if sys.argv[1:] else 0))'
if ! "$builder" -I -c "$take" now 2>/dev/null; then
  say "Waiting for another setup_env.sh, which is making $venv ..."
  "$builder" -I -c "$take"
  if venv_is_complete; then found "$venv/bin/python"; fi
fi

if [[ -n ${PYTHONHOME-} ]]; then
  die "PYTHONHOME is set to '$PYTHONHOME', which breaks virtual environments; unset it," \
    "and run it again"
fi

# Empty .venv if this script made it. Rename it otherwise, because its content may be the user's.
clear='import os, shutil, sys
venv, made = sys.argv[1:]
for name in os.listdir(venv):
    path = os.path.join(venv, name)
    if path == made:
        continue
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path)
    else:
        os.unlink(path)'
make_room() {
  if [[ -L $venv && ! -d $venv ]]; then
    die "$venv is a link to $(readlink "$venv"), which is not an existing folder; delete the link," \
      "or make the folder, and run it again"
  elif [[ -e $venv && ! -d $venv ]]; then
    die "$venv is not a folder; rename or delete it, and run it again"
  elif [[ -e $made ]]; then
    "$builder" -I -c "$clear" "$venv" "$made" ||
      die "cannot empty $venv (the reason is above); rename or delete it, and run it again"
  elif [[ -d $venv ]] && ! "$builder" -I -c 'import os, sys; sys.exit(bool(os.listdir(sys.argv[1])))' "$venv"; then
    if [[ -L $venv ]]; then
      die "$venv is a link to $(readlink "$venv"), which is not a virtual environment that works;" \
        "delete the link, and run it again"
    fi
    local aside=$venv.damaged number=1
    while [[ -e $aside || -L $aside ]]; do
      number=$((number + 1))
      aside=$venv.damaged.$number
    done
    mv -- "$venv" "$aside" ||
      die "cannot rename $venv (the reason is above); rename or delete it, and run it again"
    say "$venv is not a virtual environment that works. It is now $aside: delete it unless you need it."
  fi
}

if [[ -e $unfinished ]] || ! look "$venv/bin/python" "$stamp" || [[ $kind == outside ]]; then
  make_room
  say "Making $venv with Python $builder_version ($builder) ..."
  # The files .lab-made and .lab-making are written first, so that they exist after an interruption
  # at any later point. The real path is given, because venv does not accept a symbolic link.
  if ! { mkdir -p -- "$venv" && : >"$made" && : >"$unfinished" &&
    "$builder" -I -m venv --without-pip "$(cd -P -- "$venv" && pwd)"; }; then
    die "cannot make $venv (the reason is above); free the space or fix the folder, and run it again"
  fi
elif ! new_enough "$version"; then
  die "$venv has Python $version, but 3.10 or newer is needed; rename or delete it, and run it again"
elif [[ $kind == base ]]; then
  die "$venv is a Python installation, not a virtual environment, so pip is not run there; install what" \
    "setup.py requires and name $venv/bin/python in LAB_PYTHON, or rename $venv, and run it again"
else
  say "Completing $venv (Python $version) ..."
  # After an interruption, .venv is made again only if this script made it, not if a user did.
  if [[ -e $made ]]; then : >"$unfinished"; fi
fi
rm -f "$stamp"

# inside: end with an error unless the Python of .venv installs into .venv.
inside() {
  if ! look "$venv/bin/python" || [[ $kind != inside ]]; then
    die "$venv is not the virtual environment that its Python would install into; delete $venv, and" \
      "run it again"
  fi
}
# in_venv MODULE...: run a module of .venv, never one from the current folder or PYTHONPATH.
in_venv() { "$venv/bin/python" -I -m "$@"; }

# Some settings make pip install elsewhere. They are unset here in the environment. In a
# configuration file they are an error, because nothing overrides them.
unset PIP_PYTHON PIP_TARGET PIP_PREFIX PIP_ROOT PIP_DRY_RUN
PIP_USER=0 PIP_REQUIRE_VIRTUALENV=1
export PIP_USER PIP_REQUIRE_VIRTUALENV
inside
if ! settings=$(in_venv pip config list 2>/dev/null); then # pip is missing or broken
  in_venv ensurepip >/dev/null ||
    die "cannot put pip into $venv (the reason is above); free the space or fix it, and run it again"
  settings=$(in_venv pip config list 2>/dev/null || true)
fi
elsewhere=$(grep -E '^(global|install)\.(python|target|prefix|root|dry-run)=' <<<"$settings" || true)
if [[ -n $elsewhere ]]; then
  die "pip's configuration would install elsewhere (${elsewhere//$'\n'/, }); remove this setting, or set" \
    "PIP_CONFIG_FILE=/dev/null, and run it again"
fi

list='import runpy, sys
tree = runpy.run_path(sys.argv[1])
for item in tree["pins"](tree["RUNTIME"], tree["TEST"], tree["LINT"]).items():
    print("%s==%s" % item)'
"$venv/bin/python" -I -c "$list" "$repo/setup.py" >"$venv/requirements.txt"

say "Installing the pinned requirements into $venv (once; later calls need no network) ..."
progress=(--quiet --progress-bar off)
if [[ -t 2 ]]; then progress=(--progress-bar on); fi
inside
# pip 23, which Python 3.11 contains, needs twice the time of pip 26 for these requirements. Without
# an index, there is no newer pip.
if [[ ${PIP_NO_INDEX:-0} == 0 ]] && ! in_venv pip --require-virtualenv install --disable-pip-version-check --no-input \
  --quiet --upgrade pip; then
  say "[NOTE] pip could not be upgraded (the reason is above); installing with the present one"
fi
# Show pip's messages, and keep them, because they show why pip failed. pip's own log would take
# 60 MB and a sixth of the time.
exec 4>&2
if ! messages=$(
  in_venv pip --require-virtualenv install --disable-pip-version-check --no-input --no-compile \
    --prefer-binary "${progress[@]}" -r "$venv/requirements.txt" 2>&1 1>&4 4>&- |
    while IFS= read -r line; do
      say "$line"
      printf '%s\n' "$line"
    done
); then
  if grep -q 'No space left on device' <<<"$messages"; then
    die "the disk is full: pip needs about 2 GB for $venv and its cache (more with CUDA); free the" \
      "space, and run it again"
  elif grep -qE 'Max retries|NewConnection|connection broken|timed out|name resolution|SSLError' <<<"$messages"; then
    die "pip cannot reach its package index; check the network and the proxy, or name a mirror in" \
      "PIP_INDEX_URL or a folder of wheels in PIP_FIND_LINKS, and run it again"
  fi
  die "pip cannot install the requirements for Python $builder_version (its message is above); if no" \
    "release fits, set LAB_PYTHON to Python 3.10 to 3.13, and run it again"
fi

# Python compiles a file when it is first imported, unless PYTHONDONTWRITEBYTECODE is set: imports
# would then always take twice as long, so all files are compiled here. pip would compile one file at
# a time. Templates that are not valid Python do not compile, which does no harm. Files that are
# rarely imported, 40 % of all, are left out.
if [[ -n ${PYTHONDONTWRITEBYTECODE-} ]]; then
  "$venv/bin/python" -I -m compileall -q -j 0 -x '/(tests|transformers/models|plotly)/' \
    "$venv"/lib/python3.*/site-packages >/dev/null 2>&1 || true
fi

cp "$venv/requirements.txt" "$stamp.partial"
mv "$stamp.partial" "$stamp"
rm -f "$unfinished"
venv_is_complete || die "$venv still lacks: $missing; delete it, and run it again"
found "$venv/bin/python"
