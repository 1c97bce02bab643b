# shellcheck shell=bash disable=SC2034 # what is set here is used there
# What the drivers share; sourced, never run. Works with the bash 3.2 of macOS.
#
# Sets repo (the tree's root) and home: what stands before a default path, empty if this is the root
# already. A path that the user names is meant from the current folder, a default path from the
# root.

repo=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
home=$repo/
if [[ $PWD == "$repo" ]]; then home=; fi
case ${DRY_RUN-} in # a switch that says no is one that is not there, for what this starts too
  0 | [Ff]alse | FALSE | [Nn]o | NO) DRY_RUN= ;;
esac

# Options of a collection that are handed on under the same names, each with one value.
collection_flags="collect-start collect-every collect-iterations collect-micro-batches collect-layers \
collect-modules collect-tensors collect-operations collect-ranks collect-slice collect-max-gib \
collect-max-files collect-keep-free-gib collect-max-host-gib collect-flag-file collect-ring \
collect-ring-events collect-loss-jump collect-grad-norm-jump"

say() { printf '%s\n' "$*" >&2; }
die() {
  say "[ERROR] $*"
  exit 1
}
refuse() { # a wrong command line
  say "[ERROR] $*"
  exit 2
}

# usage FILE: its header comment, which is its manual.
usage() { sed -n '2,/^set -/{/^set -/d; s/^# \{0,1\}//; p;}' "$1"; }

# parse ACCEPTED WORD...: sets a variable for each option (`--data-path` sets data_path), and the
# arrays positional for words without dashes, look for options that print something and stop before
# training, and training_flags for what stands after `--`.
parse() {
  local accepted=$1 name
  shift
  positional=() look=() training_flags=()
  while (($#)); do
    case $1 in
      --)
        training_flags=("${@:2}")
        return
        ;;
      --verbose)
        verbose=--verbose
        shift
        ;;
      --collect-plan | --quant-audit)
        look+=("$1")
        shift
        ;;
      --*=*) set -- "${1%%=*}" "${1#*=}" "${@:2}" ;;
      -*)
        name=${1#--}
        [[ " $accepted " == *" $name "* ]] ||
          refuse "unknown option $1; the options are --${accepted// / --} --collect-plan --quant-audit" \
            "--verbose; flags of pretrain_gpt.py go after --"
        if (($# < 2)) || [[ $2 == --* || -z $2 ]]; then refuse "$1 needs a value; see --help"; fi
        printf -v "${name//-/_}" %s "$2"
        shift 2
        ;;
      *)
        positional+=("$1")
        shift
        ;;
    esac
  done
}

# looks: whether the run stops before training, whoever was told so.
looks() { [[ " ${look[*]-} ${training_flags[*]-} " =~ ' '--(collect-plan|quant-audit)' ' ]]; }

# one NAME OPTION POSITIONAL DEFAULT: sets NAME to what the user gave, as an option or in its place.
one() {
  if [[ -n $2 && -n $3 && $2 != "$3" ]]; then
    refuse "two values for ${1//_/-}: '$3' and '$2'; give one"
  fi
  printf -v "$1" %s "${2:-${3:-$4}}"
}

# whole OPTION VALUE LEAST [HINT]: refuses anything but a whole number of at least LEAST.
whole() {
  if ! [[ $2 =~ ^[0-9]{1,9}$ ]] || ((10#$2 < $3)); then
    refuse "$1 is '$2'; give a whole number of at least $3${4:+ ($4)}"
  fi
}

# find_python: sets py, and makes the environment if need be; a dry run only looks.
find_python() {
  if [[ -n ${DRY_RUN-} ]]; then
    py=${LAB_PYTHON:-python3}
    if [[ -x $repo/.venv/bin/python ]] && { [[ -z ${LAB_PYTHON-} ]] || command -v "$py" >/dev/null; }; then
      py=$repo/.venv/bin/python
    fi
    command -v "$py" >/dev/null || die "there is no '$py'; name a Python 3.10 or newer in LAB_PYTHON"
  else
    py=$(bash "$repo/script/setup_env.sh")
    export LAB_PYTHON=$py # the scripts that this one starts need not look again
  fi
  export PYTHONPATH=$repo${PYTHONPATH:+:$PYTHONPATH}
}

# check_type TYPE: refuses an unknown quantization type, by the code that training uses.
check_type() {
  if [[ -n ${DRY_RUN-} ]]; then return; fi
  "$py" -m megatron.fake_quant.policy --check-type "$1" || exit 2
}

# check_recipe FILE: refuses a recipe that cannot be read, by the code that training uses.
check_recipe() {
  if [[ -n ${DRY_RUN-} ]]; then return; fi
  "$py" -m megatron.fake_quant.policy --check-recipe "$1" || exit 2
}

# choose_preset: sets preset where the user did not, and says so.
choose_preset() {
  if [[ -z $preset ]]; then
    preset=1b
    if ! "$py" "$repo/script/configs" cuda ${DRY_RUN:+--dry-run}; then
      preset=tiny
      say "No CUDA device: the model is the tiny preset (--preset 1b for the real shape)."
    fi
  fi
  if [[ $preset != tiny && $preset != 1b ]]; then
    refuse "--preset is '$preset'; it is tiny (4 layers, for any CPU) or 1b (Llama 3.2 1B)"
  fi
}

# resolve_data TOKENIZER_NAME DATA_NAME: completes the variables tokenizer and data. Where neither
# was named and a default is missing, the small corpus is made and taken. What was named must be
# there.
resolve_data() {
  local found
  found=$("$py" "$repo/script/configs" data ${DRY_RUN:+--dry-run} --tokenizer-name="$1" --data-name="$2" \
    ${tokenizer:+--tokenizer="$tokenizer"} ${data:+--data="$data"}) || exit
  { read -r tokenizer && read -r data; } <<<"$found"
}

# train_config OPTION...: a cell of the experiment matrix, for the generated scripts.
train_config() {
  local word
  for word in "$@"; do
    case $word in
      -h | --help)
        usage "${BASH_SOURCE[1]}"
        echo
        exec "${LAB_PYTHON:-python3}" "$repo/script/train_config.py" --help
        ;;
      --dry-run) local DRY_RUN=1 ;;
      --) break ;;
    esac
  done
  find_python
  export LAB_PYTHON=$py
  exec "$py" "$repo/script/train_config.py" "$@"
}

# run_child COMMAND...: waits for a command, and ends it when this script is asked to end. It runs
# in the background, where bash lets it ignore SIGINT: therefore every signal is passed on as
# SIGTERM. A signal that ends this script without its knowledge (SIGKILL) cannot be passed on: the
# variable LAB_DRIVERS tells the watcher of a collection which scripts it must not outlive.
run_child() {
  local child status=0 caught=0
  LAB_DRIVERS="${LAB_DRIVERS:+$LAB_DRIVERS }$$" "$@" &
  child=$!
  trap 'caught=2; kill -TERM "$child" 2>/dev/null || :' INT
  trap 'caught=15; kill -TERM "$child" 2>/dev/null || :' TERM
  trap 'caught=1; kill -TERM "$child" 2>/dev/null || :' HUP
  wait "$child" || status=$?
  while kill -0 "$child" 2>/dev/null; do
    status=0
    wait "$child" || status=$?
  done
  trap - INT TERM HUP
  if ((caught)); then exit $((128 + caught)); fi
  return "$status"
}
