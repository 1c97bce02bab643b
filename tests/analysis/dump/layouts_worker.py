"""Collect one iteration of the small models of `tests/core` in several parallel layouts.

    layouts_worker.py FOLDER NAME...

The models are a GPT and a DeepSeek. Tests run this file with one rank, or under torchrun with two,
one process per rank. Each weight depends only on its parameter's global name and position, and the
data only on the data-parallel rank. The ranks of a layout therefore compute together what one rank
computes.
"""

import os
import sys
import zlib
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "core"))

import deepseek_worker
import gpt_worker
import torch

#: Settings that no record contains: straight-through backward, unnormalized probabilities.
RECIPE = """
configs:
  both:
    linear: {format: mxfp4, backward: bf16}
    qk: {format: mxfp8, backward: bf16}
    pv: {format: mxfp8, probabilities: unnormalized}
matchers:
  all: {config: both, type: glob, pattern: "decoder.*", enabled: true}
"""

#: Options of the worker, and the quantization type, by layout.
LAYOUTS = {
    "one": ("--micro-batches 2", "bf16"),
    "tp2": ("--micro-batches 2 --tp 2", "bf16"),
    "tp2sp": ("--micro-batches 2 --tp 2 --sequence-parallel", "bf16"),
    "pp2": ("--micro-batches 2 --pp 2", "bf16"),
    "cp2": ("--micro-batches 2 --cp 2", "bf16"),
    "dp2": ("--micro-batches 1", "bf16"),
    "mxfp8": ("--micro-batches 1 --dtype bf16 --bias --recompute", "mxfp8"),
    "hifp8-frozen": ("--micro-batches 1 --freeze linear_qkv", "hifp8"),
    "dropout": ("--micro-batches 1 --layers 1 --attention-dropout 0.5", "FA_mxfp8"),
    "stochastic": ("--micro-batches 1 --layers 1", "mxfp8:sr"),
    "tp2sp-mxfp4": ("--micro-batches 1 --dtype bf16 --tp 2 --sequence-parallel", "mxfp4"),
    "cp2-mxfp8": ("--micro-batches 1 --dtype bf16 --cp 2", "mxfp8"),
    "window": ("--micro-batches 1 --window 5", "bf16"),
    "window-cp2": ("--micro-batches 1 --window 5 --cp 2", "FA_mxfp8"),
    "recipe": ("--micro-batches 1 --dtype bf16", RECIPE),
}
#: The same for the model with latent attention and experts.
MIXTURES = {
    "experts": ("--micro-batches 2", "bf16"),
    "ep2": ("--micro-batches 1 --ep 2", "bf16"),
    "ep2-mxfp8": ("--micro-batches 1 --ep 2 --dtype bf16", "mxfp8"),
    "latent-mxfp8": ("--micro-batches 1 --dtype bf16", "mxfp8"),
}
#: Layouts whose run cards contain the audit of the matmuls' formats; the others have none.
WITH_AUDIT = ("window", "window-cp2", "recipe", *MIXTURES)


def fill(model: torch.nn.Module, rank: int, size: int) -> None:
    """Fill this rank's part of the weights.

    Layers and experts are numbered as in the whole model.
    """
    offset = model.decoder.layers[0].layer_number - 1
    for name, parameter in model.named_parameters():
        if "norm" in name or name.endswith("bias"):
            continue
        parts = name.split(".")
        if "layers" in parts:
            at = parts.index("layers") + 1
            layer = model.decoder.layers[int(parts[at])]
            parts[at] = str(int(parts[at]) + offset)
            if "local_experts" in parts:
                at = parts.index("local_experts") + 1
                parts[at] = str(layer.mlp.local_expert_indices[int(parts[at])])
        axis = parameter.partition_dim if getattr(parameter, "tensor_model_parallel", 0) else None
        shape = [n * size if i == axis else n for i, n in enumerate(parameter.shape)]
        seed = torch.Generator().manual_seed(zlib.crc32(".".join(parts).encode()))
        whole = 0.1 * torch.randn(shape, generator=seed)
        # gate and up are sharded separately
        halves = whole.chunk(2) if "linear_fc1" in name else [whole]
        own = torch.cat(
            [half.chunk(size, axis)[rank] if axis is not None else half for half in halves]
        )
        parameter.data.copy_(own)


def batches(given, rank: int):
    """Return the data of a data-parallel rank.

    A rank with several micro-batches gets the first micro-batch of each data-parallel rank of the
    other layouts, in order.
    """
    if hasattr(given, "experts") and given.micro_batches > 1:
        return (next(gpt_worker.batches(7 + rank)) for rank in range(given.micro_batches))
    return gpt_worker.batches(7 + rank)


def audited(model: torch.nn.Module) -> list[dict]:
    """Return the audit that the trainer writes to the run card."""
    from megatron.core.low_precision import matmul_audit

    found = matmul_audit.of_whole_model([model], gpt_worker.SEQ)
    return [
        {
            "iteration": 1,
            "matmuls": matmul_audit.table(found),
            "operands": matmul_audit.for_card(found),
        }
    ]


def configure(folder: Path, quant_type: str) -> None:
    """Set the formats, given as a type or as the text of a recipe."""
    from megatron.fake_quant import policy

    if quant_type == RECIPE:
        recipe = folder.with_name(f"{folder.name}-{os.getpid()}.yaml")
        recipe.write_text(quant_type)
        policy.configure(recipe=str(recipe))
    else:
        policy.configure(custom_quant_type=quant_type)


def collect(folder: Path, name: str) -> None:
    from megatron.core import parallel_state, tensor_parallel, tensor_saver
    from megatron.core.pipeline_parallel import get_forward_backward_func

    is_mixture = name in MIXTURES
    worker = deepseek_worker if is_mixture else gpt_worker
    options, quant_type = (MIXTURES if is_mixture else LAYOUTS)[name]
    given = worker.parse(options.split())
    of_model = (
        {"expert_model_parallel_size": given.ep}
        if is_mixture
        else {"context_parallel_size": given.cp}
    )
    parallel_state.initialize_model_parallel(given.tp, given.pp, **of_model)
    tensor_parallel.model_parallel_cuda_manual_seed(1234)
    torch.manual_seed(1234)
    configure(folder, quant_type)
    built = worker.build(given)
    model = built.module if is_mixture else built[0]
    tensor_saver.configure(
        {},
        save_tensors=True,
        save_dir=str(folder),
        control_iter=0,
        collect_micro_batches=0,
        quantization=audited(model) if name in WITH_AUDIT else None,
    )
    ranks = (
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_tensor_model_parallel_world_size(),
    )
    fill(model, *ranks)
    frozen = [] if is_mixture else given.freeze
    for parameter_name, parameter in model.named_parameters():
        parameter.requires_grad_(not any(part in parameter_name for part in frozen))
    if is_mixture:
        built.zero_grad_buffer()
    get_forward_backward_func()(
        forward_step_func=gpt_worker.forward_step,
        data_iterator=batches(given, parallel_state.get_data_parallel_rank()),
        model=built if is_mixture else model,
        num_microbatches=given.micro_batches,
        seq_length=gpt_worker.SEQ,
        micro_batch_size=gpt_worker.BATCH,
    )
    assert tensor_saver.close() is None
    parallel_state.destroy_model_parallel()


def main() -> None:
    folder, *names = sys.argv[1:]
    gpt_worker.start_processes()
    for name in names:
        collect(Path(folder, name), name)
    torch.distributed.barrier()  # a rank that exits first could abort the other


if __name__ == "__main__":
    main()
