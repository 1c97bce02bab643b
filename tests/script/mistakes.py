"""The mistakes of users by entry point: the arguments, and part of the single error message.

`{dump}` is a valid dump, `{empty}` an empty folder, `{file}` a file, `{none}` a missing path;
`{tok}` and `{data}` are empty files.
"""

CELL = "--model llama32-1b --dataset wikipedia --quantization bf16"
FILES = "--tokenizer-path {tok} --data-path {data}"

ANALYSIS = [
    ("", "required: COMMAND"),
    ("drwa {dump}", "invalid choice: 'drwa'"),
    ("draw", "required: DIR"),
    ("draw {none}", "no folder {none}"),
    ("draw {file}", "{file} is not a folder"),
    ("draw {empty}", "no .pt file in {empty}"),
    ("draw {dump} --output-dir {file}", "cannot write to the output folder"),
    ("draw {dump} --output-dri x", "did you mean --output-dir"),
    ("draw {dump} --workers 0", "--workers is 0"),
    ("draw {dump} --workers -1", "--workers is -1"),
    ("draw {dump} --workers two", "invalid int value: 'two'"),
    ("draw {dump} --workers ²", "invalid int value: '²'"),
    ("draw {dump} --formats mxpf8", "mxpf8"),
    ("draw {dump} --formats", "expected at least one argument"),
    ("draw {dump} --figures heat", "invalid choice: 'heat'"),
    ("draw {dump} --image bmp", "invalid choice: 'bmp'"),
    ("draw {dump} --max-memory lots", "lots"),
    ("draw {dump} --max-memory -5", "-5"),
    ("draw {dump} --run nothing", "no run 'nothing'"),
    ("draw {dump} {dump}", "unrecognized arguments"),
    ("report {none}", "no folder {none}"),
    ("quick {none}", "no folder {none}"),
    ("quick {dump} --formats mxfp8", "unrecognized arguments: --formats"),
    ("stats {none}", "no folder {none}"),
    ("stats {dump} --formats mxfp9", "mxfp9"),
    ("stats {dump} --workers nan", "invalid int value: 'nan'"),
    ("verify {none}", "no folder {none}"),
    ("verify {dump} --slack 0", "--slack is 0"),
    ("verify {dump} --slack nan", "--slack is nan"),
    ("verify {dump} --slack x", "invalid float value: 'x'"),
    ("verify {dump} --run", "expected one argument"),
    ("verify {empty}", "no .pt file in {empty}"),
]

FAKE_QUANT = [
    ("", "required: COMMAND"),
    ("lsit", "invalid choice: 'lsit'"),
    ("describe", "required: FORMAT"),
    ("describe mxpf8", "did you mean mxfp8"),
    ("describe mxfp8 mxfp4", "unrecognized arguments: mxfp4"),
    ("describe ''", "unknown format ''"),
    ("describe mx:e3m4:b0:floor", "b0"),
    ("describe mx:e9m9:b32:floor", "e9m9"),
    ("describe mxfp8:fast", "fast"),
    ("table bf16", "2^16 codes"),
    ("table mxfp4 --cvs", "did you mean --csv"),
    ("picture --output {none}/x.png", "no folder {none}"),
    ("picture mxfp4 --output {file}.doc", "Format 'doc' is not supported"),
    ("picture mxfp4 --output {empty}", "{empty}"),
]

POLICY = [
    ("", "required"),
    ("--check-type mxfp9", "unknown quantization type 'mxfp9'"),
    ("--check-type ''", "unknown quantization type ''"),
    ("--check-recipe {none}", "{none}"),
    ("--check-recipe {empty}", "{empty}"),
    ("--check-type mxfp8 --set-type", "not allowed with"),
]

TRAIN_CONFIG = [
    ("", "missing"),
    ("--model llama32-1b", "missing"),
    ("--model llama32 --dataset wikipedia --quantization bf16", "did you mean llama32-1b"),
    ("--model llama32-1b --dataset wiki --quantization bf16", "did you mean wikipedia"),
    ("--model llama32-1b --dataset wikipedia --quantization fp8", "unknown quantization 'fp8'"),
    (f"{CELL} --preset smal", "unknown preset 'smal'"),
    (f"{CELL} --training-config quick", "unknown training configuration 'quick'"),
    (f"{CELL} --dtype int8", "invalid choice: 'int8'"),
    (f"{CELL} --train-iters 0", "'0' is not an integer of at least 1"),
    (f"{CELL} --train-iters -5", "-5"),
    (f"{CELL} --train-iters 1e3", "'1e3' is not an integer"),
    (f"{CELL} --train-iters ²", "'²' is not an integer"),
    (f"{CELL} --lr nan", "'nan' is not a number above 0"),
    (f"{CELL} --lr -1", "-1"),
    (f"{CELL} --lr inf", "'inf' is not a number above 0"),
    (f"{CELL} --lr", "expected one argument"),
    (f"{CELL} --seq-length 4096 --cp 3", "cannot be cut"),
    (f"{CELL} --tp 3", "--tp 3 does not fit"),
    (f"{CELL} --pp 5", "--pp 5 does not divide"),
    (f"{CELL} --ep 2", "no experts"),
    (f"{CELL} --nnodes 2", "--master-addr"),
    (f"{CELL} --node-rank 1", "--nnodes"),
    (f"{CELL} --micro-batch-size 3 --global-batch-size 4", "is not a multiple"),
    (f"{CELL} --sede 7", "unrecognized arguments: --sede 7"),
    (f"{CELL} --trian-iters 7", "did you mean --train-iters"),
    (f"{CELL} --preset full", "no tokenizer at"),
    (f"{CELL} --tokenizer-path {{none}}", "no tokenizer at {none}"),
    (f"{CELL} --tokenizer-path {{tok}} --data-path {{none}}", "{none}"),
    (f"{CELL} --tokenizer-path {{empty}} --data-path {{data}}", "no tokenizer in the folder"),
    (f"{CELL} --quantization settings {FILES} -- --linear-quant fp7", "unknown format 'fp7'"),
]

FLASH = [
    ("--model llama32-1b --dataset wikipedia", "fa-quantization missing"),
    ("--model llama32-1b --dataset wikipedia --fa-quantization mxfp8", "unknown attention"),
    ("--model llama32-1b --dataset wikipedia --fa-quantization qk_mxfp8,qk_mxfp4", "twice"),
    ("--model llama32-1b --dataset wikipedia --fa-quantization qk_mxfp8,", "unknown attention"),
    (
        "--model llama32-1b --dataset wikipedia --fa-quantization qk_mxfp8"
        " --linear-quantization fp3",
        "unknown format 'fp3'",
    ),
]

MODIFIER = [
    ("", "nothing to do"),
    ("--linear-quant mxpf8", "did you mean mxfp8"),
    ("--linear-quant", "expected one argument"),
    ("--linear-quant ''", "unknown format ''"),
    ("--linera-quant mxfp8", "did you mean --linear-quant"),
    ("--check --restore", "not allowed with"),
    ("--check --pv-quant mxfp8", "exclude each other"),
    ("mxfp8", "unrecognized arguments: mxfp8"),
]

VISUALIZE = [
    ("--tensor_dir {none}", "no folder {none}"),
    ("--tensor_dir {file}", "{file} is not a folder"),
    ("--tensor_dir", "expected one argument"),
    ("{dump}", "unrecognized arguments: {dump}"),
    ("--tensor_dir {dump} --output_dir {file}", "cannot write to the output folder"),
    ("--tensor_dir {dump} --run x", "no run 'x'"),
    ("--tensor_dri {dump}", "did you mean --tensor-dir"),
]

PREPARE = [
    ("", "required: corpus"),
    ("wiki", "invalid choice: 'wiki'"),
    ("wikipedia --tokenizer-model {none}", "no tokenizer at {none}"),
    ("dolma --tokenizer-model {empty}", "{empty}"),
    ("wikipedia --tokenizer-model {tok}", "{tok}"),
    ("wikipedia --tokenizer-type NullTokenizer --vocab-size 9 --limit-files 0", "--limit-files 0"),
    ("wikipedia --input {none} --tokenizer-type NullTokenizer --vocab-size 9", "{none}"),
    ("wikipedia --input {empty} --tokenizer-type NullTokenizer --vocab-size 9", "{empty}"),
    ("wikipedia --workers some", "invalid int value: 'some'"),
    ("wikipedia --limt-files 1", "did you mean --limit-files"),
]

PREPROCESS = [
    ("", "--input is missing"),
    ("--input {file}", "--output-prefix is missing"),
    (
        "--input {none} --output-prefix {empty}/o --tokenizer-type NullTokenizer --vocab-size 9",
        "{none}",
    ),
    ("--input {text} --output-prefix {empty}/o", "no tokenizer is given"),
    ("--input {text} --output-prefix {empty}/o --tokenizer-model {none}", "{none}"),
    (
        "--input {text} --output-prefix {empty}/o --tokenizer-type Null --vocab-size 9",
        "unknown tokenizer type 'Null'",
    ),
    ("--input {text} --output-prefix {empty}/o --tokenizer-type NullTokenizer", "--vocab-size"),
    (
        "--input {text} --output-prefix {empty}/o --tokenizer-type NullTokenizer --vocab-size 9"
        " --workers 0",
        "--workers",
    ),
    (
        "--input {text} --output-prefix {file}/o --tokenizer-type NullTokenizer --vocab-size 9",
        "{file}",
    ),
    ("--input {file} --output-prefix {empty}/o --input-format csv", "invalid choice: 'csv'"),
    ("--check {none}", "{none}"),
]

CORPUS = [
    ("--output-dir {file}/x --model-dir {empty}", "cannot make the default corpus"),
    ("--output-dri x", "did you mean --output-dir"),
]

COLLECT_RUN = [
    ("-- true", "--tensor-dir"),
    ("--tensor-dir {empty}", "no command; give it after --"),
    ("--tensor-dir {empty} --control-iter -1 -- true", "-1"),
    ("--tensor-dir {empty} --stall-timeout nan -- true", "--stall-timeout is nan"),
    ("--tensor-dir {empty} --stall-timeout soon -- true", "invalid float value: 'soon'"),
]

#: Mistakes for bash scripts, each of which takes some tenths of a second.
COLLECTION_DRIVER = [
    ("double mxfp8", "unknown mode 'double'"),
    ("Single mxfp8", "unknown mode 'Single'"),
    ("mxfp8", "unknown mode 'mxfp8'"),
    ("single mxfp9", "unknown quantization type 'mxfp9'"),
    ("single mxfp8 mxfp4", "'mxfp4' is one word too many"),
    ("single ''", "an empty word"),
    ("batch mxfp8", "batch collects bf16, mxfp8, mxfp4 and hifp8"),
    ("single --quant-type", "--quant-type needs a value"),
    ("single --quant-type=", "--quant-type needs a value"),
    ("single mxfp8 --quant-type mxfp4", "two values for quant-type"),
    ("single mxfp8 --control-iter 1 --control-iter 2", "two values for control-iter"),
    ("single mxfp8 --quant-recipe {file}", "--quant-recipe and the type 'mxfp8'"),
    ("single --quant-recipe {none}", "{none}"),
    ("single --quant-recipe {empty}", "{empty}"),
    ("single --control-iter nan", "--control-iter is 'nan'"),
    ("single --control-iter ²", "--control-iter is '²'"),
    ("single --control-iter 99999999999999", "--control-iter is '99999999999999'"),
    ("single --nproc -1", "--nproc is '-1'"),
    ("single --dtype int8", "--dtype is 'int8'"),
    ("single --preset 7b", "--preset is '7b'"),
    ("single --contorl-iter 3", "did you mean --control-iter"),
    ("single -v", "unknown option -v"),
    ("single --seed 7", "flags of pretrain_gpt.py go after --"),
    ("single --verbose=yes", "--verbose takes no value"),
    (f"single {FILES} --collect-layers 9", "9 is not within the layers 0 to 3"),
    (f"single {FILES} --collect-layers last-first", "--collect-layers last-first"),
    (f"single {FILES} --collect-iterations 5-2", "--collect-iterations 5-2"),
    (f"single {FILES} --collect-iterations 3 --collect-start 2", "both select iterations"),
    (f"single {FILES} --collect-tensors inputs", "unknown 'inputs'"),
    (f"single {FILES} --collect-operations sideways", "unknown 'sideways'"),
    (f"single {FILES} --collect-slice s=9:3", "s=9:3 is empty"),
    (f"single {FILES} --collect-ranks 4", "4 is not within the ranks 0 to 0"),
    (f"single {FILES} --collect-max-gib -1", "--collect-max-gib is -1"),
    (f"single {FILES} --collect-max-files 0", "--collect-max-files is '0'"),
    (f"single {FILES} --train-iters 2 --control-iter 3", "--control-iter 3"),
    (f"single {FILES} --lr fast", "fast"),
    (f"single {FILES} --seq-length 0", "0"),
    (f"single {FILES} --global-batch-size 3", "--global-batch-size 3 is not a multiple"),
    (f"single {FILES} --tensor-path {{file}}", "cannot write to {file}"),
    ("single --preset 1b", "no tokenizer at"),
    ("single --tokenizer-path {none} --data-path {data}", "no tokenizer at {none}"),
]

DRAW_DRIVER = [
    ("paint", "unknown mode 'paint'"),
    ("visualize --tensor-dir {none}", "no folder {none}"),
    ("visualize mxfp8 --tensor-dir {empty}", "no folder {empty}/mxfp8"),
    ("visualize --control-iter 2", "visualize trains nothing"),
    ("visualize -- --seed 7", "visualize trains nothing"),
    ("both mxfp8 --run latest", "--run belongs to visualize"),
    ("both mxfp8 --collect-plan", "collect nothing that could be drawn"),
    ("both batch mxfp8", "batch collects"),
    ("both mxfp9", "unknown quantization type 'mxfp9'"),
    ("both --mode collect", "two values for mode"),
    ("both mxfp8 mxfp4", "'mxfp4' is one word too many"),
    ("visualize --output-dri x", "did you mean --output-dir"),
]

TRAINING_SCRIPT = [
    ("a b c d e", "DTYPE is 'e'"),
    ("none tb {none} {data}", "no tokenizer at {none}"),
    ("none tb {tok} {none}", "no data at {none}"),
    ("a b {tok} {data} bf16 f", "6 arguments, but at most five are allowed"),
    ("--preset", "--preset needs a value"),
    ("--preset --train-iters 2", "--preset needs a value"),
    ("--preset=", "--preset needs a value"),
    ("--preset big", "--preset is 'big'"),
]

ONE_CLICK = [
    ("{none}", "no folder {none}"),
    ("{dump} {file}", "cannot write to the output folder"),
    ("{dump} {empty}/draw many", "invalid int value: 'many'"),
    ("{dump} {empty}/draw 0", "--workers is 0"),
    ("{dump} {empty}/draw 1 more", "unrecognized arguments: more"),
]

#: Mistakes for the bash scripts of the matrix and those that work like them.
CELL_SCRIPT = [
    ("--preset smal", "unknown preset 'smal'"),
    ("--trian-iters 2", "did you mean --train-iters"),
    ("2", "unrecognized arguments: 2"),
]
DEEPSEEK = [("FA_mxfp9", "unknown quantization 'FA_mxfp9'"), ("bf16 --ep 7", "--ep 7")]
SLURM = [("llama32-1b", "are missing"), ("a b c", "SLURM_SUBMIT_DIR")]
SLURM_COLLECT = [("a b c", "are missing"), ("a b c d", "SLURM_SUBMIT_DIR")]

_SMALL = (
    "--num-layers 1 --hidden-size 32 --num-attention-heads 2 --seq-length 16"
    " --micro-batch-size 1 --train-iters 1 --lr 1e-3 --tokenizer-type NullTokenizer"
    " --vocab-size 63 --mock-data "
)
PRETRAIN = [
    ("", "--num-layers"),
    (_SMALL + "--hiden-size 3", "did you mean --hidden-size"),
    (_SMALL + "stray", "'stray' belongs to no option"),
    (_SMALL + "--hidden-size ²", "'²'"),
    (_SMALL + "--num-layers 0", "--num-layers 0 is too small"),
    (_SMALL + "--lr nan", "--lr nan"),
    (_SMALL + "--custom-quant-type mxfp9", "unknown quantization type 'mxfp9'"),
    (_SMALL + "--custom-quant-type", "expected one argument"),
    (_SMALL + "--quant-recipe {none}", "{none}"),
    (_SMALL + "--quant-recipe {empty}", "{empty}"),
    (_SMALL + "--control-iter 3", "no tensors are collected"),
    (_SMALL + "--save-tensors --collect-layers 7", "7 is not within the layers"),
    (_SMALL + "--save-tensors --tensor-save-dir {file}", "{file}"),
    (_SMALL + "--load {none}", "{none}"),
    (_SMALL + "--load-hf {empty}", "{empty}"),
    (_SMALL.replace("--mock-data", "--data-path {none}"), "{none}"),
    (_SMALL + "--tensor-model-parallel-size 2", "torchrun --nproc-per-node 2"),
]
