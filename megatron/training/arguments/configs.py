"""Build megatron-core's configuration objects from the command line."""

import argparse

import torch
import torch.nn.functional as F

from megatron.core.activations import squared_relu
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.fusions.fused_bias_geglu import quick_gelu
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from megatron.training.arguments.config_flags import HISTORICAL_DEFAULTS, config_kwargs
from megatron.training.errors import UserError


def params_dtype(args: argparse.Namespace) -> torch.dtype:
    """Return the dtype of the model's weights and activations."""
    return torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else torch.float32


def _checked(config: type, kwargs: dict):
    """Build a configuration object, and convert megatron-core's errors to `UserError`.

    Raises:
        UserError: if megatron-core rejects the values. The error includes megatron-core's message;
            a field `hidden_size` in the message corresponds to the flag `--hidden-size`.
    """
    try:
        return config(**kwargs)
    except (
        ValueError,
        AssertionError,
        RuntimeError,
        NotImplementedError,
        ImportError,
        KeyError,
    ) as error:
        reason = " ".join(str(error).split()) or f"{config.__name__} refuses the given values"
        raise UserError(
            f"{reason.rstrip('.')}; change the flags with the same names (field a_b is --a-b)"
        ) from error


def transformer_config(args: argparse.Namespace) -> TransformerConfig:
    """Return megatron-core's configuration object for the model."""
    config = MLATransformerConfig if args.multi_latent_attention else TransformerConfig
    kwargs = config_kwargs(args, config)
    if args.multi_latent_attention:
        kwargs = HISTORICAL_DEFAULTS | kwargs
    kwargs |= {
        "params_dtype": params_dtype(args),
        "pipeline_dtype": params_dtype(args),
        "gated_linear_unit": args.swiglu or args.quick_geglu,
    }
    if args.swiglu:
        kwargs["activation_func"] = F.silu
    elif args.quick_geglu:
        kwargs["activation_func"] = quick_gelu
    elif args.squared_relu:
        kwargs["activation_func"] = squared_relu
    if args.init_method_xavier_uniform:
        kwargs["init_method"] = torch.nn.init.xavier_uniform_
    return _checked(config, kwargs)


def optimizer_config(args: argparse.Namespace) -> OptimizerConfig:
    """Return megatron-core's configuration object for the optimizer."""
    return _checked(
        OptimizerConfig,
        config_kwargs(args, OptimizerConfig) | {"params_dtype": params_dtype(args)},
    )


def ddp_config(args: argparse.Namespace) -> DistributedDataParallelConfig:
    """Return megatron-core's configuration object for data parallelism and gradient reduction."""
    return _checked(
        DistributedDataParallelConfig, config_kwargs(args, DistributedDataParallelConfig)
    )
