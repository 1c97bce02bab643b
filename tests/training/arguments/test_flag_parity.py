"""Tests that the classes of flags in hf/fields.py are correct, by comparing logits.

Flags in TRAINING, NUMERICS and LAYOUT do not change the logits of a Hugging Face checkpoint, and
FIXED flags do. The tested flags are derived from the classes. A flag that is refused on a CPU
without Transformer Engine must be in a table of refused flags, or below with a part of the message.
"""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron.training.arguments.core_releases import REMOVED
from megatron.training.arguments.flag_effects import CUDA_ONLY, UNREAD
from megatron.training.hf.fields import LAYOUT, NUMERICS, TRAINING
from tests import forks
from tests.subprocesses import REPO, environment
from tests.training.hf import hf_models
from tests.training.hf.command_lines import FIELDS, another_value
from tests.training.hf.hf_models import DEEPSEEK, LLAMA, VOCABULARY, YARN
from tests.training.runs import ENTRY

WORKER = Path(__file__).with_name("flag_parity_worker.py")
TOLERANCE = 1e-5  #: largest relative RMS difference in float32
LOW_PRECISION = 0.1  #: largest relative RMS difference in bfloat16 and float16
DIFFERENT = 1e-3  #: smallest relative RMS difference that a FIXED flag causes

FULL = "--recompute-granularity full --recompute-num-layers 1 --recompute-method"
ALLTOALL = "--moe-token-dispatcher-type alltoall"
PIPELINE = "--pipeline-model-parallel-size 2"
STAGES = f"{PIPELINE} --num-layers-per-virtual-pipeline-stage 1"
TENSOR = "--tensor-model-parallel-size 2 --sequence-parallel"
EXPERTS = "--expert-model-parallel-size 2"
#: command lines for flags that need a particular value or other flags
GIVEN = {
    "activation_func_fp8_input_store": "--bias-activation-fusion --activation-func-fp8-input-store",
    "attention_backend": "--attention-backend unfused",
    "config_logger_dir": "--config-logger-dir {folder}/logged",
    "cp_comm_type": "--cp-comm-type all_gather",
    "make_vocab_size_divisible_by": "--make-vocab-size-divisible-by 128",
    "moe_aux_loss_coeff": "--moe-aux-loss-coeff 0.5",
    "moe_shared_expert_overlap": f"{ALLTOALL} --moe-shared-expert-overlap",
    "moe_token_dispatcher_type": ALLTOALL,
    "variable_seq_lengths": f"{ALLTOALL} --variable-seq-lengths",
    "recompute_granularity": f"{FULL} uniform",
    "recompute_method": f"{FULL} block",
    "recompute_num_layers": f"{FULL} uniform",
    "recompute_modules": "--recompute-granularity selective --recompute-modules core_attn",
}
#: command lines for flags that have an effect only with two ranks
TWO_RANKS = {
    "account_for_embedding_in_pipeline_split": f"{PIPELINE} --num-layers-in-first-pipeline-stage 2",
    "batch_p2p_comm": f"{PIPELINE} --no-overlap-p2p-communication",
    "context_parallel_size": "--context-parallel-size 2",
    "deallocate_pipeline_outputs": f"{PIPELINE} --no-deallocate-pipeline-outputs",
    "distribute_saved_activations": "--tensor-model-parallel-size 2 "
    f"{FULL} uniform --distribute-saved-activations",
    "expert_model_parallel_size": f"{EXPERTS} {ALLTOALL}",
    "expert_tensor_parallel_size": f"{TENSOR} {EXPERTS} --expert-tensor-parallel-size 1",
    "microbatch_group_size_per_vp_stage": f"{STAGES} --microbatch-group-size-per-vp-stage 2",
    "num_layers_in_first_pipeline_stage": f"{PIPELINE} --num-layers-in-first-pipeline-stage 1",
    "num_layers_in_last_pipeline_stage": f"{PIPELINE} --num-layers-in-last-pipeline-stage 1",
    "pipeline_model_parallel_layout": f"{PIPELINE} --pipeline-model-parallel-layout Et|tttL",
    "pipeline_model_parallel_size": PIPELINE,
    "sequence_parallel": TENSOR,
    "tensor_model_parallel_size": "--tensor-model-parallel-size 2",
}
#: cases that are left out, because experts need sequence parallelism with tensor parallelism
NO_EXPERTS = [
    ("deepseek", "tensor_model_parallel_size"),
    ("deepseek", "distribute_saved_activations"),
]
#: flags that checks other than the tables refuse on a CPU, each with a part of the message
REFUSED = {
    **dict.fromkeys(
        (
            *("cross_entropy_fusion_impl", "moe_deepep_num_sms", "moe_flex_dispatcher_backend"),
            *("moe_hybridep_num_sms", "moe_pad_expert_input_to_capacity", "moe_token_drop_policy"),
            *("moe_router_bias_update_rate", "moe_use_legacy_grouped_gemm"),
            *("mtp_loss_scaling_factor", "wgrad_deferral_limit"),
        ),
        " acts only with ",
    ),
    "apply_rope_fusion": "needs Transformer Engine",
    "defer_embedding_wgrad_compute": "when pipeline model parallel is not used",
    "fp4": "works only with Transformer Engine's layers",
    "fp8": "works only with Transformer Engine's layers",
    "gradient_accumulation_fusion": "needs NVIDIA's apex",
    "hierarchical_context_parallel_sizes": "does not run on the local layers",
    "hybrid_context_parallel": "does not run on the local layers",
    "masked_softmax_fusion": "needs NVIDIA's apex",
    "memory_efficient_layer_norm": "not supported by torch LayerNorm",
    "moe_enable_deepep": "only supported with flex token dispatcher",
    "moe_grouped_gemm": "--moe-grouped-gemm",
    "moe_permute_fusion": "needs the package transformer_engine",
    "moe_router_fusion": "needs the package transformer_engine",
    "overlap_moe_expert_parallel_comm": " only ",
    "overlap_p2p_comm_warmup_flush": "is only compatible with overlap_p2p_comm",
    "persist_layer_norm": "needs NVIDIA's apex",
    "pipeline_model_parallel_comm_backend": "UCC-backend requires",
    "qk_clip": "does nothing here",
    "transformer_impl": "supports only the local layers",
    "variable_seq_lengths": "allgather does not support variable sequence length",
}
#: flags that change the model's function but not the shapes of its weights
CHANGING = {
    "llama": [
        "--rotary-percent 0.5",
        "--rotary-interleaved",
        "--rotary-base 1000",
        "--rotary-seq-len-interpolation-factor 2",
        "--no-rope-freq 2",
        "--position-embedding-type none",
        "--norm-epsilon 0.1",
        "--softmax-scale 0.1",
        "--window-size 8,0",
        "--glu-linear-offset 0.5",
        "--activation-func-clamp-value 0.5",
        "--qk-l2-norm",
        "--use-rope-scaling",
    ],
    "deepseek": [
        "--moe-router-force-load-balancing",
        "--moe-input-jitter-eps 0.1",
        "--moe-router-topk 1",
        "--moe-router-score-function sigmoid",
        "--no-moe-router-pre-softmax",
        "--moe-router-topk-scaling-factor 2.5",
        "--moe-expert-capacity-factor 0.5",
    ],
}


def given(name: str, checkpoint: str) -> str:
    flags = GIVEN.get(name) or another_value(name)
    return flags if checkpoint == "deepseek" else flags.replace(ALLTOALL, "").strip()


def applies(name: str, checkpoint: str) -> bool:
    return checkpoint == "deepseek" or not name.startswith(("moe_", "expert_"))


CHECKED = sorted((TRAINING | NUMERICS | LAYOUT) & set(FIELDS))
CASES = [
    (checkpoint, name)
    for checkpoint in ("llama", "deepseek")
    for name in CHECKED
    if name not in TWO_RANKS and applies(name, checkpoint)
]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory) -> dict[str, Path]:
    return written(tmp_path_factory.mktemp("theirs"))


def written(folder: Path) -> dict[str, Path]:
    """Write the checkpoints, in which every expert has its own weights."""
    hf_models.write(folder / "llama", **LLAMA)
    hf_models.write(folder / "deepseek", **DEEPSEEK, rope_parameters=YARN)
    for path in (folder / "deepseek").glob("*.safetensors"):
        tensors = load_file(path)
        for name, tensor in tensors.items():
            if name.endswith("mlp.gate.weight"):
                tensor *= 3  # so that the choice of experts matters
        save_file(tensors, path, metadata={"format": "pt"})
    return {path.name: path for path in folder.iterdir()}


def run(folder: Path, checkpoints, cases: dict[str, tuple[str, str, bool]], ranks: int) -> dict:
    """Return the logits of each case from the rank that has them, or the message of its error.

    cases: by name, the checkpoint, the flags, and True if contradictions are accepted.
    """
    base = [
        *("--seq-length", str(hf_models.TOKENS), "--micro-batch-size", "2", "--lr", "0"),
        *("--global-batch-size", "4", "--train-iters", "1", "--mock-data"),
        *("--tokenizer-type", "NullTokenizer", "--vocab-size", str(VOCABULARY - 1)),
    ]
    requests = {}
    for name, (checkpoint, flags, unchecked) in cases.items():
        vocabulary = ("--make-vocab-size-divisible-by", "40")
        options = ["--load-hf", str(checkpoints[checkpoint]), *base, *vocabulary]
        options += flags.format(folder=folder).split()
        requests[name] = {"options": options, "unchecked": unchecked}
    (folder / "cases.json").write_text(json.dumps(requests))
    words = (WORKER, folder / "cases.json", folder / "results")
    env = environment(PYTHONPATH=REPO)
    done = forks.run(*words, ranks=ranks if ranks > 1 else None, env=env)
    assert done.returncode == 0, done.stderr[-4000:]
    results: dict = {}
    for rank in range(ranks):
        rank_results = torch.load(folder / f"results_{rank}.pt")
        results |= {name: value for name, value in rank_results.items() if value is not None}
    return results


def cases_of_one_rank() -> dict[str, tuple[str, str, bool]]:
    """Return the cases, with an unmodified load first and last."""
    cases = {}
    for checkpoint in CHANGING:
        cases[f"{checkpoint} first"] = (checkpoint, "", False)
        cases |= {f"{c} {n}": (c, given(n, c), False) for c, n in CASES if c == checkpoint}
        cases |= {f"{checkpoint} {f}": (checkpoint, f, True) for f in CHANGING[checkpoint]}
        cases[f"{checkpoint} last"] = (checkpoint, "", False)
    probs = "--moe-router-topk 1 --moe-apply-probs-on-input"
    return cases | {"deepseek probs": ("deepseek", probs, True)}


def cases_of_two_ranks() -> dict[str, tuple[str, str, bool]]:
    return {
        f"{checkpoint} {name}": (checkpoint, flags, False)
        for checkpoint in CHANGING
        for name, flags in TWO_RANKS.items()
        if applies(name, checkpoint) and (checkpoint, name) not in NO_EXPERTS
    }


@pytest.fixture(scope="module")
def alone(checkpoints, tmp_path_factory) -> dict:
    return run(tmp_path_factory.mktemp("alone"), checkpoints, cases_of_one_rank(), 1)


@pytest.fixture(scope="module")
def two_ranks(checkpoints, tmp_path_factory) -> dict:
    return run(tmp_path_factory.mktemp("two_ranks"), checkpoints, cases_of_two_ranks(), 2)


def difference(logits: torch.Tensor, reference: torch.Tensor) -> float:
    """Return the relative RMS difference over the checkpoint's vocabulary."""
    unpadded = logits[..., :VOCABULARY].float()
    return float((unpadded - reference).norm() / reference.norm())


def allowed(name: str) -> float:
    return LOW_PRECISION if name in ("bf16", "fp16") else TOLERANCE


@pytest.mark.parametrize(("checkpoint", "name"), CASES, ids=lambda word: word)
def test_a_harmless_flag_leaves_the_logits_alone(alone, checkpoint, name):
    result = alone[f"{checkpoint} {name}"]
    if isinstance(result, str):
        flag = "--" + name.replace("_", "-")
        if name in set(UNREAD) | CUDA_ONLY:
            assert f"{flag} " in result
        else:
            assert name in REFUSED, result
            assert REFUSED[name] in result
        return
    assert difference(result, alone[f"{checkpoint} first"]) < allowed(name)


def test_only_what_is_refused_is_listed_so(alone):
    refused = {case.split()[1] for case, result in alone.items() if isinstance(result, str)}
    missing = set(REFUSED) - refused
    assert missing <= REMOVED - set(FIELDS), "the installed megatron-core lacks only removed fields"


@pytest.mark.parametrize("checkpoint", ["llama", "deepseek"])
def test_no_case_changes_those_after_it(alone, checkpoint, checkpoints):
    expected = hf_models.logits(hf_models.read(checkpoints[checkpoint]))
    for place in ("first", "last"):
        assert difference(alone[f"{checkpoint} {place}"], expected) < TOLERANCE


def test_flags_of_two_ranks_leave_the_logits_alone(alone, two_ranks):
    wrong = {}
    for name, result in two_ranks.items():
        if isinstance(result, str):
            wrong[name] = result
        elif (error := difference(result, alone[f"{name.split()[0]} first"])) > TOLERANCE:
            wrong[name] = error
    assert not wrong


@pytest.mark.parametrize(
    ("checkpoint", "flags"),
    [(checkpoint, flags) for checkpoint, lists in CHANGING.items() for flags in lists],
)
def test_a_fixed_flag_changes_the_logits(alone, checkpoint, flags):
    logits = alone[f"{checkpoint} {flags}"]
    assert not isinstance(logits, str), logits
    assert difference(logits, alone[f"{checkpoint} first"]) > DIFFERENT


def test_probabilities_on_the_input_change_the_logits(alone):
    """The reference has one expert per token, which megatron-core requires for this flag."""
    assert difference(alone["deepseek probs"], alone["deepseek --moe-router-topk 1"]) > DIFFERENT


@pytest.mark.parametrize(
    "flags",
    [
        "--moe-router-topk 1 --moe-apply-probs-on-input",
        "--moe-router-load-balancing-type sinkhorn",
        "--moe-router-force-load-balancing",
        "--moe-input-jitter-eps 0.01",
    ],
)
def test_the_real_command_refuses_another_routing(checkpoints, tmp_path, flags):
    folders = ("--load-hf", checkpoints["deepseek"], "--save-hf", tmp_path / "saved")
    options = ("--train-iters", "0", "--seq-length", "96", *flags.split())
    done = forks.run(ENTRY, *folders, *options)
    assert done.returncode == 2
    (line,) = [line for line in done.stderr.splitlines() if line.strip()]
    assert line.startswith(f"[ERROR] --load-hf {checkpoints['deepseek']} holds another model")
    assert list(tmp_path.iterdir()) == []
