"""Tests of the command line: flags reach their configuration, and mistakes are explained."""

from dataclasses import fields
from typing import get_args

import pytest
import torch

from megatron.core._overlay import TESTED_BY_CI, installed_release
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer.transformer_config import MLATransformerConfig
from megatron.training.arguments.config_flags import (
    EXCLUDED,
    config_kwargs,
    flag_options,
    flagged_fields,
    layer_pattern,
)
from megatron.training.arguments.core_releases import LATER, REMOVED
from megatron.training.arguments.parse_args import CONFIGS, build_parser, option_names, parse_args
from megatron.training.errors import UserError
from tests.subprocesses import REPO
from tests.training.runs import MINIMAL

#: flags and the files that read them, see test_flag_readers.py
TABLE = REPO / "tests" / "data" / "option_readers.txt"


@pytest.fixture(autouse=True)
def one_rank(monkeypatch):
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)


def parse(*options: str):
    return parse_args([*MINIMAL, *options])


def test_option_names_are_a_visible_decision():
    """To accept a new flag, run `python -m tests.training.arguments.test_flag_readers`."""
    names = [line.split()[0] for line in TABLE.read_text(encoding="utf-8").splitlines()]
    options = option_names(build_parser())
    removed = {f"--{no}{name.replace('_', '-')}" for name in REMOVED for no in ("", "no-")}
    if installed_release() == TESTED_BY_CI:
        removed = set()
    assert options == [name for name in names if name in options or name not in removed]


def test_every_field_has_a_flag_or_a_reason_not_to():
    """Callables and objects cannot be given on a command line; every other field needs a flag."""
    for config in CONFIGS:
        for field in fields(config):
            if field.name.startswith("_") or not field.init:
                continue
            flagged = field.name in flagged_fields(config)
            excluded = field.name in EXCLUDED or field.name in LATER
            assert flagged != (excluded or flag_options(field.type) is None), field.name


def _spelled(field) -> tuple[list[str], object]:
    """Return the words of a field's value on the command line, and the value itself."""
    options = flag_options(field.type)
    if field.type is bool or bool in get_args(field.type):
        return [], True
    if "choices" in options:
        return [options["choices"][-1]], options["choices"][-1]
    if options.get("type") in (int, float, str):
        word = {int: "7", float: "0.5", str: "word"}[options["type"]]
        value = options["type"](word)
        is_list = options.get("nargs") == "+" and "action" not in options
        return [word], [value] if is_list else value
    words = {"N|LIST": "[0]+[1]*3", "N,N": "128,0"}.get(options["metavar"])
    if words is None:
        words = options["metavar"].strip("{}").split(",")[-1]
    return [words], options["type"](words)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: c.__name__)
def test_every_generated_flag_reaches_its_configuration(config):
    parser = build_parser()
    owners = {name: f for c in reversed(CONFIGS) for name, f in flagged_fields(c).items()}
    for name in flagged_fields(config):
        words, value = _spelled(owners[name])  # the first class with the field defines the flag
        args = parser.parse_args(["--" + name.replace("_", "-"), *words])
        assert config_kwargs(args, config) == {name: value}, name


def test_no_flag_means_the_configurations_own_default():
    assert config_kwargs(build_parser().parse_args([]), MLATransformerConfig) == {}


@pytest.mark.parametrize(
    ("flags", "field", "value"),
    [
        ("--disable-bias-linear", "add_bias_linear", False),
        ("--swiglu", "gated_linear_unit", True),
        ("--swiglu", "activation_func", torch.nn.functional.silu),
        ("--num-query-groups 2", "num_query_groups", 2),
        ("--group-query-attention", "num_query_groups", 1),
        ("--normalization RMSNorm", "normalization", "RMSNorm"),
        ("--norm-epsilon 1e-6", "layernorm_epsilon", 1e-6),
        ("--no-masked-softmax-fusion", "masked_softmax_fusion", False),
        ("--no-persist-layer-norm", "persist_layer_norm", False),
        ("--no-gradient-accumulation-fusion", "gradient_accumulation_fusion", False),
        ("--no-bias-swiglu-fusion", "bias_activation_fusion", False),
        ("--recompute-activations", "recompute_granularity", "selective"),
        ("--num-experts 4", "num_moe_experts", 4),
        ("--num-experts 4 --moe-layer-freq ([0]*1+[1]*3)", "moe_layer_freq", [0, 1, 1, 1]),
        ("--bf16", "params_dtype", torch.bfloat16),
        ("--fp16", "pipeline_dtype", torch.float16),
        ("--attention-dropout 0", "attention_dropout", 0.0),
    ],
)
def test_megatron_lms_names(flags, field, value):
    assert getattr(parse(*flags.split()).transformer, field) == value


def test_optimizer_and_data_parallel_flags():
    run = parse(
        *["--bf16", "--adam-beta2", "0.95", "--clip-grad", "0.5", "--use-distributed-optimizer"],
        *["--overlap-grad-reduce", "--overlap-param-gather", "--ddp-bucket-size", "1000"],
    )
    assert isinstance(run.optimizer, OptimizerConfig)
    assert (run.optimizer.adam_beta2, run.optimizer.clip_grad, run.optimizer.bf16) == (
        0.95,
        0.5,
        True,
    )
    assert isinstance(run.ddp, DistributedDataParallelConfig)
    assert run.ddp.grad_reduce_in_fp32, "bf16 gradients are summed in fp32, as in Megatron-LM"
    assert run.ddp.use_distributed_optimizer
    assert run.optimizer.use_distributed_optimizer
    assert run.ddp.bucket_size == 1000


def test_mla_takes_its_own_configuration():
    run = parse("--multi-latent-attention", "--kv-lora-rank", "32", "--qk-head-dim", "16")
    assert isinstance(run.transformer, MLATransformerConfig)
    assert (run.transformer.kv_lora_rank, run.args.kv_lora_rank) == (32, 32)
    assert not isinstance(parse().transformer, MLATransformerConfig)


def test_arguments_show_the_effective_values():
    args = parse().args
    assert args.transformer_impl == "local"
    assert args.normalization == "LayerNorm"
    assert args.ffn_hidden_size == 256
    assert args.global_batch_size == 2
    assert args.max_position_embeddings == 64
    assert args.split is None
    assert not args.create_attention_mask_in_dataloader


@pytest.mark.parametrize(
    ("text", "pattern"), [("2", 2), ("[0,1]", [0, 1]), ("([0]*2+[1]*1)*2", [0, 0, 1, 0, 0, 1])]
)
def test_layer_patterns_are_parsed_not_evaluated(text, pattern):
    assert layer_pattern(text) == pattern


def test_a_layer_pattern_is_no_program():
    with pytest.raises(UserError, match="neither a number nor a list"):
        parse("--moe-layer-freq", "__import__('os').getpid()")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--hidden-sise 3", r"unknown option --hidden-sise; did you mean .*--hidden-size"),
        ("--tensor_model_parallel_size 2", "torchrun --nproc-per-node 2"),
        ("--tensor_model_paralel_size 2", "did you mean --tensor-model-parallel-size"),
        ("stray", "'stray' belongs to no option"),
        ("--hidden-size many", "--hidden-size: invalid int value: 'many'"),
        ("--normalization GroupNorm", "invalid choice.*RMSNorm"),
        ("--num-layers 0", "--num-layers 0 is too small; give 1 or more"),
        ("--control-iter -1", "--control-iter -1 is too small; give 0 or more"),
        ("--collect-micro-batches -2", "--collect-micro-batches -2 is too small"),
        ("--lr nan", "--lr nan is not finite; give 0 or more"),
        ("--recompute-num-layers 0", "--recompute-num-layers 0 is too small; give 1 or more"),
        ("--init-method-std nan", "--init-method-std nan is not finite; give 0 or more"),
        ("--norm-epsilon -1", "--norm-epsilon -1.0 is too small; give 0 or more"),
        (
            "--position-embedding-type rope --rotary-base 0",
            "--rotary-base 0.0 is too small; give 1 or more",
        ),
        ("--num-experts 4 --moe-router-topk 0", "--moe-router-topk 0 is too small; give 1 or more"),
        (
            "--num-experts 4 --moe-ffn-hidden-size 0",
            "--moe-ffn-hidden-size 0 is too small; give 1 or more",
        ),
        (
            "--num-experts 4 --moe-aux-loss-coeff nan",
            "--moe-aux-loss-coeff nan is not finite; give 0 or more",
        ),
        ("--adam-beta1 2", r"--adam-beta1 2.0 is outside \[0, 1\); change it"),
        ("--adam-beta2 1", r"--adam-beta2 1.0 is outside \[0, 1\)"),
        ("--adam-eps 0", r"--adam-eps 0.0 is outside \(0, inf\)"),
        ("--optimizer sgd --sgd-momentum 2", r"--sgd-momentum 2.0 is outside \[0, 1\)"),
        ("--hidden-dropout nan", r"--hidden-dropout nan is outside \[0, 1\]"),
        (
            "--position-embedding-type rope --rotary-percent 3",
            r"--rotary-percent 3.0 is outside \(0, 1\]",
        ),
        (
            "--position-embedding-type rope --rotary-percent 0",
            r"--rotary-percent 0.0 is outside \(0, 1\]",
        ),
        ("--hidden-dropout 1 --attention-dropout 0", None),
        ("--softmax-scale nan", r"--softmax-scale nan is outside \(0, inf\)"),
        ("--rampup-batch-size 2 4 100 --global-batch-size 8", "in whole increments"),
        ("--rampup-batch-size 4 2 100 --global-batch-size 2", "does not reach --global-batch-size"),
        ("--rampup-batch-size 2 0 100 --global-batch-size 4", "holds a number below 1"),
        ("--rampup-batch-size 2 2 100 --global-batch-size 8", None),
        ("--rampup-batch-size 2 3 100 --global-batch-size 8", "cannot be divided into micro-batch"),
        ("--rampup-batch-size 1 1 100 --global-batch-size 8", "the increment multiples of 2"),
        ("--kv-channels 15 --position-embedding-type rope", "--kv-channels 15 is odd"),
        ("--fp32-residual-connection --bf16", "needs Transformer Engine's layers"),
        ("--bf16 --fp16", "fp16"),
        ("--tensor-model-parallel-size 2", "torchrun --nproc-per-node 2"),
        ("--num-layers-per-virtual-pipeline-stage 1", "needs --pipeline-model-parallel-size"),
        ("--global-batch-size 3", "--global-batch-size 3 is not a multiple"),
        ("--num-query-groups 3", "not a multiple of --num-query-groups 3"),
        ("--num-attention-heads 5", "--hidden-size 64 is not a multiple"),
        ("--max-position-embeddings 32", "--seq-length 64 is longer"),
        ("--train-samples 100", "both of --train-iters and --train-samples"),
        ("--min-lr 1", "--min-lr 1.0 is above --lr"),
        ("--lr-warmup-iters 10", "--lr-warmup-iters 10 does not end before"),
        ("--lr-warmup-samples 20", "--lr-warmup-samples 20 does not end before"),
        ("--lr-warmup-iters 1 --lr-warmup-samples 2", "set the same length; give one of them"),
        ("--lr-decay-iters 1 --lr-decay-samples 2", "set the same length; give one of them"),
        ("--lr-warmup-init 1e-4", "acts only with --lr-warmup-iters"),
        ("--lr-decay-style WSD", "needs --lr-wsd-decay-iters"),
        (
            "--lr-decay-style WSD --lr-wsd-decay-iters 4 --lr-wsd-decay-samples 8",
            "set the same length; give one of them",
        ),
        (
            "--lr-decay-style WSD --lr-wsd-decay-iters 6 --lr-warmup-iters 5",
            "12 samples .* is longer than the 10 samples",
        ),
        ("--lr-decay-style WSD --lr-wsd-decay-iters 5 --lr-warmup-iters 5", None),
        ("--start-weight-decay -1", "--start-weight-decay -1.0 is too small"),
        ("--weight-decay-incr-style linear", "give a --start-weight-decay below --end"),
        ("--start-weight-decay 0 --weight-decay-incr-style linear", None),
        ("--reset-position-ids", None),
        ("--reset-position-ids --position-embedding-type rope", "acts only with --position-embed"),
        ("--split 90,5,5", "--split acts only with --data-path"),
        ("--train-data-path x --eval-iters 3", "acts only with --valid-data-path or --test-data"),
        ("--train-data-path x --eval-interval 3", "--eval-interval acts only with --valid-data"),
        ("--save=", "--save is empty; give it a value, or remove it"),
        ("--seed 4294967296", r"--seed 4294967296 is outside \[0, 4294967296\)"),
        ("--allow-changed-run", "--allow-changed-run acts only with --load"),
        ("--fp16-lm-cross-entropy", "does nothing here"),
        ("--swiglu --squared-relu", "exclude each other"),
        ("--transformer-impl transformer_engine", "needs Transformer Engine"),
        ("--fp8-format hybrid", "--custom-quant-type mxfp8"),
        ("--attention-backend flash", "remove it"),
        ("--masked-softmax-fusion", "needs NVIDIA's apex.*--no-masked-softmax-fusion"),
        ("--data-path somewhere", "more than one of --data-path"),
        ("--save-interval 5", "--save-interval was given without --save"),
        ("--finetune", "--finetune was given without --load"),
        ("--overlap-param-gather", "needs --use-distributed-optimizer"),
        ("--optimizer sgd --use-distributed-optimizer", "exclude each other in megatron-core"),
        ("--use-precision-aware-optimizer", "needs Transformer Engine"),
        ("--num-experts 4 --moe-router-topk 2 --moe-router-score-function softmax", None),
    ],
)
def test_mistakes_are_explained(flags, message):
    if message is None:
        parse(*flags.split())
        return
    with pytest.raises(UserError, match=message) as caught:
        parse(*flags.split())
    assert "; " in str(caught.value), "an error reads `problem; what to do`"


@pytest.mark.parametrize("missing", ["--num-layers", "--lr", "--seq-length"])
def test_what_is_required_is_named(missing):
    arguments = list(MINIMAL)
    position = arguments.index(missing)
    del arguments[position : position + 2]
    with pytest.raises(UserError, match=f"{missing} is missing; give it a value"):
        parse_args(arguments)


def test_the_tokenizers_type_is_read_off_its_path(tmp_path):
    position = MINIMAL.index("--tokenizer-type")
    arguments = [*MINIMAL[:position], *MINIMAL[position + 4 :]]
    with pytest.raises(UserError, match="--tokenizer-model is missing; give it a value, or --tok"):
        parse_args(arguments)
    with pytest.raises(UserError, match="none does not exist; give a SentencePiece"):
        parse_args([*arguments, "--tokenizer-model", str(tmp_path / "none")])
    (tmp_path / "llama3.model").write_text("IQ== 0\n")
    run = parse_args([*arguments, "--tokenizer-model", str(tmp_path / "llama3.model")])
    assert run.args.tokenizer_type == "TikTokenizer"


def test_a_missing_data_file_is_named(tmp_path):
    arguments = [a for a in MINIMAL if a != "--mock-data"]
    with pytest.raises(UserError, match=r"none of --data-path"):
        parse_args(arguments)
    with pytest.raises(UserError, match=r"nothing\.bin does not exist; make it with"):
        parse_args([*arguments, "--data-path", str(tmp_path / "nothing")])
    for suffix in (".bin", ".idx"):
        (tmp_path / f"text{suffix}").touch()
    with pytest.raises(UserError, match="leave the suffix off"):
        parse_args([*arguments, "--data-path", str(tmp_path / "text.bin")])


def test_sequence_parallelism_without_tensor_parallelism_is_off_and_said_so():
    run = parse("--sequence-parallel")
    assert not run.transformer.sequence_parallel
    assert any("sequence parallelism is off" in note for note in run.notes)


@pytest.mark.parametrize(
    "flags",
    [
        "--ffn-hidden-size 129",
        "--num-experts 4 --sequence-parallel --moe-ffn-hidden-size 33",
        "--num-experts 4 --sequence-parallel --moe-shared-expert-intermediate-size 35",
    ],
)
def test_widths_that_cannot_be_cut(monkeypatch, flags):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match=r"cannot be cut into 2 equal parts.* a multiple of 2"):
        parse("--tensor-model-parallel-size", "2", *flags.split())


def test_interleaved_stages(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    flags = ["--pipeline-model-parallel-size", "2", "--global-batch-size", "4"]
    run = parse(*flags, "--num-layers-per-virtual-pipeline-stage", "1")
    assert run.transformer.virtual_pipeline_model_parallel_size == 2
    assert run.transformer.overlap_p2p_comm
    assert not run.transformer.deallocate_pipeline_outputs, "gloo would send what was freed"
    with pytest.raises(UserError, match="remove --no-overlap-p2p-communication"):
        parse(
            *flags,
            *["--num-layers-per-virtual-pipeline-stage", "1", "--no-overlap-p2p-communication"],
        )
    with pytest.raises(UserError, match="the increment multiples of 4"):
        parse(
            *(*flags[:2], "--global-batch-size", "8", "--rampup-batch-size", "4", "2", "10"),
            *("--num-layers-per-virtual-pipeline-stage", "1"),
        )
    with pytest.raises(UserError, match="cannot be cut into stages of 3 layers"):
        parse(*flags, "--num-layers-per-virtual-pipeline-stage", "3")


def test_help_tells_what_each_flag_is_for(capsys):
    with pytest.raises(SystemExit) as stopped:
        parse_args(["--help"])
    assert stopped.value.code == 0
    text = capsys.readouterr().out
    for words in (
        "examples:",
        "Transformer (generated from",
        "Tensor collection (not in Megatron-LM)",
        "Number of transformer layers",
        "--control-iter N",
    ):
        assert words in text
