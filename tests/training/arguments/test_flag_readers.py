"""Tests that every flag is read by some code or is refused, so that no flag silently does nothing.

A reader is a source file that loads `args.x`, `config.x` or the like, in this tree or in the
code of megatron-core for GPT models. Declarations, `__post_init__` and checks do not count.
tests/data/option_readers.txt lists the reader of every flag. To rewrite it after adding a flag:

    python -m tests.training.arguments.test_flag_readers
"""

import ast
from functools import cache
from pathlib import Path

import pytest

import megatron.core
from megatron.core._overlay import TESTED_BY_CI, installed_release
from megatron.training.arguments.core_releases import REMOVED
from megatron.training.arguments.flag_effects import CUDA_ONLY, NEEDS, UNREAD
from megatron.training.arguments.parse_args import build_parser, parse_args
from megatron.training.errors import UserError
from tests.subprocesses import REPO
from tests.training.runs import MINIMAL

TABLE = REPO / "tests" / "data" / "option_readers.txt"
WHEEL = Path(megatron.core.__path__[1])
#: parts of megatron-core that a GPT model with local layers never runs, and declarations
ELSEWHERE = (
    "inference",
    "ssm",
    "export",
    "extensions",
    "post_training",
    "models/T5",
    "models/bert",
    "models/mamba",
    "models/mimo",
    "models/multimodal",
    "models/vision",
    "models/huggingface",
    "fsdp",
    "fully_sharded",
    "resharding",
    "tokenizers",
    "dist_checkpointing",
    "energy",
    "muon",
    "optimizer/layer_wise",
    "optimizer/qk_clip",
    "experimental_attention",
    "fp8_utils",
    "fp4_utils",
    "nccl_allocator",
    "_config.py",
)
#: files of this tree that check or describe flags without acting on them
CHECKS = ("validation.py", "flag_effects.py", "moe_mla_checks.py", "schedule_checks.py", "/hf/")
HOLDERS = ("args", "ddp", "run", "settings", "transformer", "optimizer")
#: flags that act by setting another flag, and the file that sets the other flag
SETS_ANOTHER = {
    "group_query_attention": "megatron/training/arguments/defaults.py",
    "use_rotary_position_embeddings": "megatron/training/arguments/defaults.py",
    "num_layers_per_virtual_pipeline_stage": "megatron/training/arguments/defaults.py",
    "num_virtual_stages_per_pipeline_rank": "megatron/training/arguments/defaults.py",
    "init_method_std": "wheel transformer/transformer_config.py",
    "embedding_init_method_std": "wheel transformer/transformer_config.py",
    "disable_bf16_reduced_precision_matmul": "wheel transformer/transformer_config.py",
    "moe_layer_recompute": "wheel transformer/transformer_config.py",
    "moe_enable_deepep": "wheel transformer/transformer_config.py",
    "enable_cuda_graph": "wheel transformer/transformer_config.py",
    "external_cuda_graph": "wheel transformer/transformer_config.py",
    "main_grads_dtype": "wheel optimizer/optimizer_config.py",
    "help": "argparse",
    "use_mcore_models": "nothing: accepted for older scripts, as its help says",
}
#: flags that only the configuration reads since a release after 0.16.1, kept for older scripts
SUPERSEDED = {
    "cuda_graph_scope": "wheel transformer/transformer_config.py",
    "moe_deepep_num_sms": "wheel transformer/transformer_config.py",
    "moe_hybridep_num_sms": "wheel transformer/transformer_config.py",
}
#: flags that are refused by a separate check
REFUSED_ELSEWHERE = {
    "cache_mla_latents": "refused by moe_mla_checks.py",
    "qk_clip": "refused by moe_mla_checks.py",
    "hybrid_context_parallel": "refused by model.py",
}


def _holder(node: ast.expr) -> str:
    while isinstance(node, ast.Call):
        node = node.func
    return getattr(node, "attr", getattr(node, "id", ""))


def _reads(tree: ast.AST):
    """Yield every name that code loads from a configuration or from the arguments."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            holder = _holder(node.value)
            if "config" in holder.lower() or holder in HOLDERS:
                yield node.attr
        elif isinstance(node, ast.Call) and _holder(node.func) == "getattr":
            if len(node.args) > 1 and isinstance(node.args[1], ast.Constant):
                yield node.args[1].value
        elif isinstance(node, ast.FunctionDef) and node.name == "parse":
            yield from (a.arg for a in (*node.args.args, *node.args.kwonlyargs))


@cache
def readers() -> dict[str, str]:
    """Return the first file that reads each name; this tree comes before megatron-core."""
    files: dict[str, str] = {}
    roots = ((REPO, REPO / "megatron", CHECKS, ""), (WHEEL, WHEEL, ELSEWHERE, "wheel "))
    for base, root, left_out, prefix in roots:
        for path in sorted(root.rglob("*.py")):
            file = path.relative_to(base).as_posix()
            if any(part in file for part in (*left_out, "arguments/defaults.py")):
                continue
            for name in _reads(ast.parse(path.read_text(encoding="utf-8"))):
                files.setdefault(name, prefix + file)
    return files


def reader_of(name: str) -> str:
    """Return the file that reads a flag, or the one that refuses it."""
    if name in UNREAD:
        return "refused by flag_effects.py"
    reader = REFUSED_ELSEWHERE.get(name) or SETS_ANOTHER.get(name) or readers().get(name)
    return reader or SUPERSEDED.get(name, "NOTHING")


def table() -> str:
    """Return one line per spelling of a flag, with the flag's reader."""
    actions = build_parser()._option_string_actions
    return "".join(f"{flag:54s} {reader_of(actions[flag].dest)}\n" for flag in sorted(actions))


def test_every_flag_has_a_reader_or_is_refused():
    assert [line for line in table().splitlines() if line.endswith("NOTHING")] == []


@pytest.mark.skipif(installed_release() != TESTED_BY_CI, reason=f"table of {TESTED_BY_CI}")
def test_the_readers_are_a_visible_decision():
    assert TABLE.read_text(encoding="utf-8") == table()


def test_the_tables_name_flags_that_exist():
    known = {action.dest for action in build_parser()._actions}
    gone = set() if installed_release() == TESTED_BY_CI else REMOVED
    for names in (UNREAD, CUDA_ONLY, SETS_ANOTHER, *(need.flags for need in NEEDS)):
        assert set(names) <= known | gone, set(names) - known


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--expert-tensor-parallel-size 1", "acts only with --num-experts"),
        ("--qk-clip", "the optimizers here do not clip the weights of queries and keys"),
        ("--heterogeneous-block-specs", "needs another configuration class"),
        ("--tp-comm-overlap", "only Transformer Engine's layers read it; remove it"),
        ("--muon-momentum 0.5", "the optimizers here are adam and sgd"),
        ("--moe-router-topk 4", "acts only with --num-experts; add that, or remove"),
        ("--kv-lora-rank 8", "acts only with --multi-latent-attention"),
        ("--rope-scaling-factor 4", "acts only with --use-rope-scaling"),
        ("--recompute-modules mlp", "acts only with --recompute-granularity selective"),
        ("--initial-loss-scale 1024", "acts only with --fp16"),
        ("--enable-autocast", "acts only on a CUDA device"),
        ("--use-kitchen", "only Transformer Engine's layers read it"),
    ],
)
def test_a_flag_that_would_do_nothing_is_refused(flags, message, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(UserError, match=message):
        parse_args([*MINIMAL, *flags.split()])


@pytest.mark.parametrize(
    "flags", ["--no-fp8-wgrad", "--moe-router-topk 2", "--no-tp-comm-split-ag"]
)
def test_a_flag_that_asks_for_what_happens_anyway_is_accepted(flags, monkeypatch):
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    parse_args([*MINIMAL, *flags.split()])


if __name__ == "__main__":
    TABLE.write_text(table(), encoding="utf-8")
