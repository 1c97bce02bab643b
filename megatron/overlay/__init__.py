"""Run an unmodified training script of another source tree with this project's megatron-core.

    python -m megatron.overlay --quant mxfp8 --save-tensors DIR pretrain_gpt.py ARGUMENTS
    torchrun --nproc-per-node 2 -m megatron.overlay --quant mxfp8 pretrain_gpt.py ARGUMENTS

The script runs as a plain Python script does: with its own arguments, its folder first in
`sys.path`, and its module as `__main__`. Only the origin of `megatron.*` differs: the packages in
`module_sources.PARTS` come from this tree, and `megatron.training`, `megatron.legacy` and all
others come from where the script would find them. docs/foreign_trainers.md has the details.

The package needs `megatron.core` and never imports this tree's `megatron.training`, which the
script's own package replaces.
"""
