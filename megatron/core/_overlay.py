"""Lay this source tree over the installed megatron-core, one file at a time.

A file here takes the place of the file with the same name in the wheel, which is the installed
package; every other module comes from the wheel unchanged. An overlaid module accesses the module
that it replaces through `shadowed`, so that it can subclass the wheel's classes instead of copying
them.

The overlay works as follows. `megatron/__init__.py` adds the wheel's folder after ours to
`megatron.__path__`. Each overlaid package has an `__init__.py` of three lines that calls `extend`,
which does the same for that package and then runs the wheel's own `__init__.py` in it. Python's
normal import then finds our file first wherever we have one. `shadowed` loads the wheel's file
under a private alias (`megatron.core.tensor_parallel._upstream_layers`) and copies its names into
our module.

The overlay has one limitation: the `__module__` of a class that we do not replace is the alias, so
the plain wheel cannot read a pickle of such a class. megatron-core's checkpoints contain no such
references.

The overlaid files fit every release in `SUPPORTED`; the one that is installed is used. They check
for features of the wheel (with `hasattr`, or by the parameters of a function), never for its
version. Only `UPSTREAM` contains versions. CONTRIBUTING.md explains how to add a release.
"""

import os
import sys
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from pkgutil import extend_path
from types import ModuleType

#: releases of megatron-core that this overlay supports; CONTRIBUTING.md explains how to add one.
#: 0.19.1 has no wheel: it is the version in the source tree of NVIDIA's tag core_v0.19.0.
SUPPORTED = ("0.16.1", "0.17.1", "0.18.2", "0.19.1", "0.19.2")
TESTED_BY_CI = SUPPORTED[0]  #: release in script/constraints.txt; error messages recommend it

#: All names of megatron-core that this tree subclasses, rebinds or calls, by module. A name that
#: not every supported release has is marked with the releases that have it, as in `name>=0.17`.
UPSTREAM = {
    # names that the files in megatron/core subclass or rebind, and methods that they override
    # (written as `Class.method`)
    "megatron.core.models.gpt.gpt_model": "GPTModel",
    "megatron.core.pipeline_parallel.schedules": "backward_step "
    "backward_step_multimodule>=0.17 forward_step "
    "forward_backward_no_pipelining forward_backward_pipelining_with_interleaving "
    "forward_backward_pipelining_without_interleaving",
    "megatron.core.tensor_parallel.layers": "ColumnParallelLinear._forward_impl "
    "RowParallelLinear._forward_impl",
    "megatron.core.tensor_parallel.mappings": "_gather_along_first_dim _reduce "
    "copy_to_tensor_model_parallel_region gather_from_sequence_parallel_region "
    "gather_from_tensor_model_parallel_region scatter_to_sequence_parallel_region",
    "megatron.core.transformer.dot_product_attention": "DotProductAttention.forward",
    "megatron.core.transformer.moe.experts": "GroupedMLP<0.17 gg<0.17",
    "megatron.core.transformer.moe.moe_utils": "get_moe_layer_wise_logging_tracker "
    "get_moe_metrics_tracker>=0.18 maybe_move_tensor_to_cpu track_moe_metrics",
    "megatron.core.transformer.multi_latent_attention": ""
    "FusedMLASelfAttention._qkv_down_projection>=0.17 HAVE_TE MLASelfAttention "
    "MLASelfAttention._resolve_qk_norm_config>=0.19",
    "megatron.core.transformer.torch_norm": "WrappedTorchNorm",
    # names that the files in megatron/core use
    "megatron.core": "dist_checkpointing parallel_state",
    "megatron.core.extensions": "transformer_engine",
    "megatron.core.fusions.fused_softmax": "FusedScaleMaskSoftmax get_default_causal_mask "
    "get_sliding_window_causal_mask",
    "megatron.core.transformer.enums": "AttnMaskType",
    # names that megatron.training uses
    "megatron.core.activations": "squared_relu",
    "megatron.core.datasets.blended_dataset": "BlendedDataset",
    "megatron.core.datasets.blended_megatron_dataset_builder": "BlendedMegatronDatasetBuilder",
    "megatron.core.datasets.gpt_dataset": "GPTDataset GPTDatasetConfig MockGPTDataset",
    "megatron.core.datasets.indexed_dataset": "IndexedDataset",
    "megatron.core.dist_checkpointing": "serialization",
    "megatron.core.dist_checkpointing.core": "CheckpointingException",
    "megatron.core.dist_checkpointing.mapping": "ShardedObject ShardedTensor",
    "megatron.core.dist_checkpointing.strategies": "common filesystem_async torch",
    "megatron.core.dist_checkpointing.strategies.cached_metadata_filesystem_reader": ""
    "CachedMetadataFileSystemReader",
    "megatron.core.dist_checkpointing.strategies.fully_parallel": ""
    "FullyParallelSaveStrategyWrapper",
    "megatron.core.distributed": "DistributedDataParallel DistributedDataParallelConfig "
    "finalize_model_grads",
    "megatron.core.fusions.fused_bias_geglu": "quick_gelu",
    "megatron.core.models.gpt": "GPTModel",
    "megatron.core.models.gpt.gpt_layer_specs": "get_gpt_decoder_block_spec "
    "get_gpt_layer_local_spec get_gpt_layer_with_transformer_engine_spec get_gpt_mtp_block_spec",
    "megatron.core.num_microbatches_calculator": "get_current_global_batch_size "
    "get_num_microbatches init_num_microbatches_calculator update_num_microbatches",
    "megatron.core.optimizer": "OptimizerConfig get_megatron_optimizer "
    "get_standard_config_overrides",
    "megatron.core.optimizer.distrib_optimizer": "DistributedOptimizer",
    "megatron.core.optimizer.optimizer": "MegatronOptimizer",
    "megatron.core.optimizer_param_scheduler": "OptimizerParamScheduler "
    "get_canonical_lr_for_logging",
    "megatron.core.pipeline_parallel": "get_forward_backward_func",
    "megatron.core.tensor_parallel": "param_is_not_tensor_parallel_duplicate",
    "megatron.core.timers": "Timers",
    "megatron.core.tokenizers": "MegatronTokenizer",
    "megatron.core.tokenizers.text.libraries.abstract_tokenizer": "MegatronTokenizerTextAbstract",
    "megatron.core.tokenizers.text.text_tokenizer": "MegatronTokenizerText "
    "TOKENIZER_MAPPING_LIBRARIES",
    "megatron.core.transformer.module": "Float16Module param_is_not_shared",
    "megatron.core.transformer.transformer_config": "MLATransformerConfig TransformerConfig",
    "megatron.core.utils": "get_attr_wrapped_model get_batch_on_this_cp_rank unwrap_model",
}
#: Names that our files define, because the wheel defines them only with Transformer Engine.
ADDED = {"megatron.core.transformer.moe.moe_utils": "te_general_gemm"}


def _installed(package: str, filename: str) -> Path:
    """Return the path of a file in the installed megatron-core wheel.

    The first entry of the package's `__path__` is this tree, so it is skipped.
    """
    for directory in sys.modules[package].__path__[1:]:
        if (path := Path(directory, filename)).is_file():
            return path
    raise ImportError(
        f"{package.replace('.', '/')}/{filename} of megatron-core is not installed; "
        f"run `pip install megatron-core=={TESTED_BY_CI}` or `bash script/setup_env.sh`"
    )


def check_version() -> None:
    """Raise ImportError if the installed megatron-core is not one of the `SUPPORTED` releases.

    Call `extend` first.

    Raises:
        ImportError: if the installed release is not in `SUPPORTED`. The message contains this
            release, its folder and the supported releases.
    """
    package = sys.modules["megatron.core"]
    if installed_release() not in SUPPORTED:
        raise ImportError(
            f"megatron-core {package.__version__} is installed in {package.__path__[1]}, but the "
            f"files of this tree overlay {', '.join(SUPPORTED[:-1])} and {SUPPORTED[-1]}; run "
            f"`pip install megatron-core=={TESTED_BY_CI}`, and take other copies of Megatron out "
            "of PYTHONPATH"
        )


def installed_release() -> str:
    """Return the release of the megatron-core that this tree overlays.

    Since 0.18, megatron-core appends a commit to its version if its folder is in a Git repository.
    """
    return sys.modules["megatron.core"].__version__.partition("+")[0]


def extend(package: str) -> None:
    """Add the wheel's folder to the `__path__` of `package`, and run the wheel's `__init__.py`.

    Python then searches this tree first and the wheel afterward.
    """
    module = sys.modules[package]
    # Python may find this tree twice, through a link or another spelling of its path. The tree
    # would then overlay itself forever.
    once: dict[str, str] = {}
    for folder in extend_path(module.__path__, package):
        once.setdefault(os.path.realpath(folder), str(Path(folder).absolute()))
    # Python may also find several copies of megatron-core, such as a source checkout and the wheel.
    # This tree overlays only the first one.
    module.__path__ = list(once.values())[:2]
    SourceFileLoader(package, str(_installed(package, "__init__.py"))).exec_module(module)


def shadowed(name: str) -> ModuleType:
    """Import the wheel's version of our module `name`, and copy its names into our module.

    The names are copied, not forwarded by a module's `__getattr__`, because megatron-core reads
    `vars(module)` and imports names that begin with an underscore.
    """
    package, _, leaf = name.rpartition(".")
    alias = f"{package}._upstream_{leaf}"
    loader = SourceFileLoader(alias, str(_installed(package, f"{leaf}.py")))
    upstream = sys.modules[alias] = module_from_spec(spec_from_loader(alias, loader))
    loader.exec_module(upstream)
    vars(sys.modules[name]).update(
        {k: v for k, v in vars(upstream).items() if not k.startswith("__")}
    )
    return upstream
