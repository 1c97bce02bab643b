# shellcheck shell=bash disable=SC2034 # the scripts that source this file use its variables
# Functions that the driver scripts share; this file is sourced, never run. It works with bash 3.2
# (macOS).
#
# Sets repo (the repository's root) and home (the prefix of default paths, empty in the root). A path
# that the user gives is relative to the current folder, a default path to the root.

repo=$(unset CDPATH && cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
home=$repo/
if [[ $PWD == "$repo" ]]; then home=; fi
case ${DRY_RUN-} in # these values count as unset, also in scripts that this one starts
  0 | [Ff]alse | FALSE | [Nn]o | NO) DRY_RUN= ;;
esac

# Options of the tensor collection that are passed on under the same names, each with one value.
# They are the flags in megatron/collection/flags.py except for collect-plan, which has no value.
collection_flags=$(sed -n -e '/"collect_plan"/d' -e 'y/_/-/' -e 's/^ *name="\(collect-.*\)",$/\1/p' \
  "$repo/megatron/collection/flags.py" | tr '\n' ' ')

# Options without a value.
switches="collect-plan quant-audit save-tensors verbose yes dry-run"

# Options that override values of the preset; the training script reads each from a variable.
size_options="train-iters micro-batch-size global-batch-size seq-length lr"

# tell FORMAT WORD...: print a message that may be lost. If the reader of the output has ended, such
# as `head -n 1`, the subshell gets the signal SIGPIPE, which would otherwise end this script.
# shellcheck disable=SC2059 # the caller's format
tell() { (printf "$@") || :; }
say() { tell '%s\n' "$*" >&2; }
die() {
  say "[ERROR] $*"
  exit 1
}
refuse() { # report a wrong command line, and exit with status 2
  say "[ERROR] $*"
  exit 2
}

# quoted WORD...: print a command with its words quoted for a shell, as Python's shlex.join does.
quoted() {
  local word line='' quote="'\"'\"'"
  for word in "$@"; do
    case $word in
      '' | *[!A-Za-z0-9_@%+=:,./-]*) word="'${word//\'/$quote}'" ;;
    esac
    line+="${line:+ }$word"
  done
  printf '%s\n' "$line"
}

# usage FILE: print the header comment of a script, which is its manual.
usage() { sed -n '2,/^set -/{/^set -/d; s/^# \{0,1\}//; p;}' "$1"; }

# option_name WORD: set name to the driver's option for a word. Underscores become hyphens, and
# equivalent names of Megatron-LM and train_config.py are translated.
option_name() {
  name=${1#--}
  name=${name//_/-}
  case $name in
    tensor-dir | tensor-save-dir) name=tensor-path ;;
    custom-quant-type | quantization) name=quant-type ;;
    tokenizer-model) name='tokenizer-path' ;;
    nproc-per-node) name=nproc ;;
  esac
}

# switch NAME: record an option without a value.
switch() {
  case $1 in
    verbose) verbose=--verbose ;;
    yes) yes=--yes ;;
    dry-run) export DRY_RUN=1 ;;
    save-tensors) saves=--save-tensors ;;
    collect-plan | quant-audit) look+=("--$1") ;;
  esac
}

# unknown_option WORD ACCEPTED: report an unknown option, and suggest the most similar ones.
unknown_option() {
  local near=''
  near=$("${LAB_PYTHON:-python3}" "$repo/script/configs" nearest --word="${1%%=*}" \
    --options="$2" 2>/dev/null) || near=''
  refuse "unknown option ${1%%=*}${near:-;} see --help for all; flags of pretrain_gpt.py go after --"
}

# parse ACCEPTED WORD...: set a variable for each option (`--data-path` sets data_path) and three
# arrays. `positional` holds the words without dashes, `look` the options that print something and
# stop before training, and `training_flags` the words after `--`.
parse() {
  local accepted=$1 name value variable seen=' '
  shift
  positional=() look=() training_flags=() saves=''
  while (($#)); do
    case $1 in
      --)
        shift
        for value in "$@"; do
          name=${value%%=*}
          if [[ $name == --* ]]; then value=${name//_/-}${value#"$name"}; fi
          training_flags+=("$value")
        done
        return
        ;;
      '') refuse "an empty word ('') among the arguments; leave it out, or give a value" ;;
      -*) ;;
      *)
        positional+=("$1")
        shift
        continue
        ;;
    esac
    option_name "${1%%=*}"
    if [[ " $switches " == *" $name "* && $1 == --* ]]; then
      if [[ $1 == *=* ]]; then refuse "$1: ${1%%=*} takes no value; leave it out"; fi
      switch "$name"
      shift
      continue
    fi
    if [[ $1 != --* || " $accepted " != *" $name "* ]]; then
      unknown_option "$1" "--${accepted// / --} --${switches// / --}"
    fi
    if [[ $1 == *=* ]]; then
      value=${1#*=}
    else
      value=${2-}
      if [[ $value == --* ]]; then value=''; fi
    fi
    if [[ -z $value ]]; then refuse "${1%%=*} needs a value; see --help"; fi
    variable=${name//-/_}
    if [[ $seen == *" $name "* && ${!variable} != "$value" ]]; then
      refuse "two values for ${name}: '${!variable}' and '$value'; give one"
    fi
    seen+="$name "
    printf -v "$variable" %s "$value"
    if [[ $1 != *=* ]]; then shift; fi
    shift
  done
}

# looks: succeed if an option or a flag of training stops the run before training.
looks() { [[ " ${look[*]-} ${training_flags[*]-} " =~ ' '--(collect-plan|quant-audit)' ' ]]; }

# next_place: remove the first element of the array places.
next_place() { places=(${places[@]+"${places[@]:1}"}); }

# take_mode MODES DEFAULT: set mode from an option or from the first word in the array places, which
# is then removed.
take_mode() {
  if [[ -n ${places[0]-} && (-z $mode || " $1 " == *" ${places[0]} "*) ]]; then
    one mode "$mode" "${places[0]}" ''
    next_place
  fi
  : "${mode:=$2}"
}

# take_type: set quant_type from an option or from the only word left in the array places.
take_type() {
  if ((${#places[@]} > 1)); then
    refuse "'${places[1]}' is one word too many; give MODE and TYPE, and put flags of" \
      "pretrain_gpt.py after --"
  fi
  one quant_type "$quant_type" "${places[0]-}" ''
}

# one NAME OPTION POSITIONAL DEFAULT: set the variable NAME to the value of the option or of the
# positional argument. Two different values are an error.
one() {
  if [[ -n $2 && -n $3 && $2 != "$3" ]]; then
    refuse "two values for ${1//_/-}: '$3' and '$2'; give one"
  fi
  printf -v "$1" %s "${2:-${3:-$4}}"
}

# whole OPTION VALUE LEAST [HINT]: report an error unless VALUE is an integer of at least LEAST.
whole() {
  if ! [[ $2 =~ ^[0-9]{1,9}$ ]] || ((10#$2 < $3)); then
    refuse "$1 is '$2'; give an integer of at least $3${4:+ ($4)}"
  fi
}

# find_python: set py to the Python interpreter, and make its environment if necessary. A dry run
# makes nothing.
find_python() {
  if [[ -n ${DRY_RUN-} ]]; then
    py=${LAB_PYTHON:-python3}
    if [[ -x $repo/.venv/bin/python ]] && { [[ -z ${LAB_PYTHON-} ]] || command -v "$py" >/dev/null; }; then
      py=$repo/.venv/bin/python
    fi
    command -v "$py" >/dev/null || die "there is no '$py'; name a Python 3.10 or newer in LAB_PYTHON"
  else
    py=$(bash "$repo/script/setup_env.sh")
    export LAB_PYTHON=$py # the scripts that this one starts need not search again
  fi
  export PYTHONPATH=$repo${PYTHONPATH:+:$PYTHONPATH}
}

# run_module MODULE WORD...: run a module as python -m does, but import nothing from the current
# folder, which may contain an unrelated module named numpy.
run_module() {
  "$py" -c 'import sys; sys.path[:] = [p for p in sys.path if p]; import runpy
runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)' "$@"
}

# choose QUERY... OPTION...: ask script/configs, and set the variables for each query. One Python
# answers all of them, because it takes longer to start than to answer.
#   type    quant_type: the canonical name of --type, or of the type that is set, or mxfp8;
#           type_from: flag, or settings if training reads it from environment and settings file
#   preset  preset: --preset, or tiny without a CUDA device, or if the user gives no data and the
#           default data are missing
#   data    tokenizer and data. If the user gives neither and a default is missing, the tiny preset
#           makes and uses the default corpus. Files that the user gives must exist, and so must the
#           data of the published model.
#   start   start_iterations and continuation: the iterations of the trained model from which a
#           default collection continues, and the flags that load it; otherwise 0 and no flags
#   name    effective_type: the type that results from --flags and everything else
choose() {
  local answers answer query
  answers=$("$py" "$repo/script/configs" "$@" ${DRY_RUN:+--dry-run}) || exit
  for query in "$@"; do
    case $query in
      type)
        read -r quant_type && read -r type_from
        export LAB_CHECKED_TYPE=$quant_type # train_config.py need not check it again
        ;;
      preset) read -r preset ;;
      data)
        read -r tokenizer && read -r data
        export LAB_MISSING_SAID=1 # the scripts that this one starts need not list missing files again
        ;;
      start)
        read -r start_iterations
        continuation=()
        while ((start_iterations && ${#continuation[@]} < 3)); do
          read -r answer
          continuation+=("$answer")
        done
        ;;
      name) read -r effective_type ;;
    esac
  done <<<"$answers"
}

# folder_name TYPE: print the name of a type's folder, as megatron.tensor_record forms it.
folder_name() { printf '%s' "${1//[^A-Za-z0-9_.+-]/-}"; }

# recipe_type FILE: print the name that a recipe has instead of a quantization type.
recipe_type() {
  local name=${1##*/}
  printf 'recipe_%s' "${name%.*}"
}

# check_recipe FILE: report an error if the training code cannot read a recipe.
check_recipe() {
  if [[ -n ${DRY_RUN-} ]]; then return; fi
  run_module megatron.fake_quant.policy --check-recipe "$1" || exit 2
}

# files_given: set the array file_options to options that pass on the user's preset, tokenizer and
# data to `choose`.
files_given() {
  if [[ -n $preset && $preset != tiny && $preset != 1b ]]; then
    refuse "--preset is '$preset'; it is tiny (4 layers, for any CPU) or 1b (Llama 3.2 1B)"
  fi
  file_options=(${preset:+--preset="$preset"} ${tokenizer:+--tokenizer="$tokenizer"}
    ${data:+--data="$data"})
}

# prepare CORPUS OPTION...: run script/data/prepare.py; a dry run prints the command.
prepare() {
  local word words=()
  for word in "$@"; do
    if [[ $word == --dry-run || $word == --dry_run ]]; then DRY_RUN=1; else words+=("$word"); fi
  done
  find_python
  words=("$py" "$repo/script/data/prepare.py" "${words[@]}")
  if [[ -n ${DRY_RUN-} ]]; then
    quoted "${words[@]}"
    return
  fi
  exec "${words[@]}"
}

# train_config OPTION...: train one cell of the experiment matrix, for the generated scripts.
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

# run_child COMMAND...: run a command, and end it when this script is asked to end. The command runs
# in the background, where bash makes it ignore SIGINT, so every signal is passed on as SIGTERM.
# SIGKILL cannot be passed on. The variable LAB_DRIVERS therefore lists the scripts whose end also
# ends the process that watches a collection or a drawing.
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
