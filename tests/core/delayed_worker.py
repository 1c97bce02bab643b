"""Train a small GPT with delayed scaling in several layouts, and report each amax.

The tests run it on two ranks. Each rank writes a list per layout: one entry for each operand that
was quantized, and for each micro-batch and evaluation, in the order in which they came.
"""

import json
import math
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import gpt_worker
import torch

FORMAT = "fp8_e4m3:delayed3:margin1"
LAYOUTS = {
    "data": [],
    "tensor": ["--tp", "2", "--sequence-parallel"],
    "pipeline": ["--pp", "2", "--recompute", "--micro-batches", "4"],
    "interleaved": ["--pp", "2", "--vpp", "2", "--layers", "4", "--recompute"],
}
ITERATIONS = 2


def logged(log: list) -> None:
    """Record in `log` each use of an amax by a matmul."""
    from megatron.collection.training_clock import clock
    from megatron.core.low_precision.delayed_scaling import DelayedScaling

    amax_of = DelayedScaling.amax_of

    def spy(self, module, operation, slot, x, fmt):
        given = amax_of(self, module, operation, slot, x, fmt)
        mode = "evaluation" if clock.micro_batch is None else "training"
        index = None if clock.micro_batch is None else clock.micro_batch.index
        key = [module, operation, slot]
        again = clock.recomputing and slot.startswith("fprop")
        log.append([mode, index, key, float(x.detach().abs().max()), float(given), again])
        return given

    DelayedScaling.amax_of = spy


def train(options, log: list) -> None:
    from megatron.core.pipeline_parallel import get_forward_backward_func

    model = gpt_worker.build(options)
    rank = int(os.environ["RANK"]) if (options.tp, options.pp) == (1, 1) else 0
    data = [gpt_worker.batches(7 + rank) for _ in model]
    for forward_only in (False, True, False):
        log.append(["iteration"])
        with torch.set_grad_enabled(not forward_only):
            get_forward_backward_func()(
                forward_step_func=gpt_worker.forward_step,
                data_iterator=data if options.vpp else data[0],
                model=model if options.vpp else model[0],
                num_microbatches=options.micro_batches,
                seq_length=gpt_worker.SEQ,
                micro_batch_size=gpt_worker.BATCH,
                forward_only=forward_only,
            )


def one_rank_has_no_values(rank: int) -> list[float]:
    """Return the amaxes of two operands, of which the second has values on rank 1 only."""
    from megatron.core.low_precision.delayed_scaling import of_chunk

    scaling = of_chunk(gpt_worker.build(gpt_worker.parse([]))[0])
    scaling.forward.record(0, torch.tensor([1.0 + rank]), 3)
    scaling.forward.record(1, torch.tensor([7.0] * rank), 3)  # an expert without tokens on rank 0
    scaling.end_forward()
    return scaling.forward.amax[:2].tolist()


def outside_of_the_schedule() -> str:
    model = gpt_worker.build(gpt_worker.parse([]))[0]
    try:
        gpt_worker.forward_step(gpt_worker.batches(), model)
    except ValueError as error:
        return str(error)
    return "nothing was refused"


def main() -> None:
    gpt_worker.start_processes()
    from megatron.core import parallel_state, tensor_parallel
    from megatron.fake_quant import policy

    policy.configure(custom_quant_type=FORMAT)
    rank, report, log = int(os.environ["RANK"]), {}, []
    logged(log)
    for name, flags in LAYOUTS.items():
        options = gpt_worker.parse(flags)
        log.clear()
        parallel_state.initialize_model_parallel(
            options.tp, options.pp, virtual_pipeline_model_parallel_size=options.vpp
        )
        tensor_parallel.model_parallel_cuda_manual_seed(1)
        torch.manual_seed(1)
        train(options, log)
        report[name] = list(log)
        if name == "data":
            report["empty"] = one_rank_has_no_values(rank)
            report["outside"] = outside_of_the_schedule()
        parallel_state.destroy_model_parallel()
    Path(os.environ["REPORT_DIR"], f"rank{rank}.json").write_text(json.dumps(report))
    assert not any(math.isnan(entry[3]) for entry in log if len(entry) > 1)
    torch.distributed.barrier()  # a rank that left first could abort the other


if __name__ == "__main__":
    main()
