"""Collects one iteration of the small GPT of `tests/core/gpt_worker.py` in several parallel layouts
in one process a rank; run by the tests, with one rank or under torchrun with two.

    layouts_worker.py FOLDER NAME...

The weights follow from a parameter's global name and place, and the data from the data-parallel
rank: what one rank computes, the ranks of a layout compute together.
"""

import sys
import zlib
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "core"))

import gpt_worker
import torch

#: Options of the worker and the quantization type; run with as many ranks as the layout needs.
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
}


def fill(model: torch.nn.Module, rank: int, size: int) -> None:
    """This rank's part of the weights; layer numbers are those of the whole model."""
    offset = model.decoder.layers[0].layer_number - 1
    for name, parameter in model.named_parameters():
        if "norm" in name or name.endswith("bias"):
            continue
        parts = name.split(".")
        if "layers" in parts:
            at = parts.index("layers") + 1
            parts[at] = str(int(parts[at]) + offset)
        axis = parameter.partition_dim if getattr(parameter, "tensor_model_parallel", 0) else None
        shape = [n * size if i == axis else n for i, n in enumerate(parameter.shape)]
        seed = torch.Generator().manual_seed(zlib.crc32(".".join(parts).encode()))
        whole = 0.1 * torch.randn(shape, generator=seed)
        halves = whole.chunk(2) if "linear_fc1" in name else [whole]  # gate and up, each cut
        own = torch.cat([half.chunk(size, axis)[rank] if axis is not None else half
                         for half in halves])  # fmt: skip
        parameter.data.copy_(own)


def collect(folder: Path, options: str, quant_type: str) -> None:
    from megatron.core import parallel_state, tensor_parallel, tensor_saver
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.fake_quant import policy

    given = gpt_worker.parse(options.split())
    parallel_state.initialize_model_parallel(given.tp, given.pp, context_parallel_size=given.cp)
    tensor_parallel.model_parallel_cuda_manual_seed(1234)
    torch.manual_seed(1234)
    policy.configure(custom_quant_type=quant_type)
    tensor_saver.configure(
        {}, save_tensors=True, save_dir=str(folder), control_iter=0, collect_micro_batches=0
    )
    [model] = gpt_worker.build(given)
    ranks = (
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_tensor_model_parallel_world_size(),
    )
    fill(model, *ranks)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not any(part in name for part in given.freeze))
    get_forward_backward_func()(
        forward_step_func=gpt_worker.forward_step,
        data_iterator=gpt_worker.batches(7 + parallel_state.get_data_parallel_rank()),
        model=model,
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
        collect(Path(folder, name), *LAYOUTS[name])
    torch.distributed.barrier()  # a rank that left first could abort the other


if __name__ == "__main__":
    main()
