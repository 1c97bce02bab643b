"""Train a small Llama or Llama 3.2 1B, one step per request from `training.py`.

For each line of standard input, the worker runs one step: the forward and backward pass of two
micro-batches (or of the given number), and Adam. It then prints the duration of the step in
seconds, the process's peak memory in MiB and the loss. Before the first step it prints a line with
the word `ready`, the peak memory after building the model, and the name of the GPU if there is one.
The worker imports nothing from `megatron.training`, so that it also runs with the plain
megatron-core wheel. With `--plain`, this repository is not on the path; only the CPU backend is
loaded from its file.

    echo | python benchmarks/training_worker.py --hidden-size 64 --layers 2 --seq-length 64 \\
        --dtype bf16
"""

import argparse
import importlib.util
import os
import resource
import sys
import time
from functools import partial
from pathlib import Path

REPO = Path(__file__).resolve().parents[1]
VOCAB = 4096
SEQUENCES = 2  #: default number of sequences per micro-batch
MICRO_BATCHES = 2  #: default number of micro-batches per step
#: Shape of Llama 3.2 1B. The scaling of its rotary embedding is omitted, because it does not affect
#: the cost of a step.
LLAMA32_1B = {
    "num_layers": 16,
    "hidden_size": 2048,
    "ffn_hidden_size": 8192,
    "num_attention_heads": 32,
    "num_query_groups": 8,
    "kv_channels": 64,
    "layernorm_epsilon": 1e-5,
}
#: Arguments of GPTModel for Llama 3.2 1B.
LLAMA32_1B_MODEL = {
    "vocab_size": 128256,
    "share_embeddings_and_output_weights": True,
    "rotary_base": 500000,
}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--plain", action="store_true")
    parser.add_argument("--model", choices=("small", "llama32-1b"), default="small")
    parser.add_argument("--hidden-size", type=int, help="required for the small model")
    parser.add_argument("--layers", type=int, help="required for the small model")
    parser.add_argument("--seq-length", type=int, required=True)
    parser.add_argument("--dtype", choices=("bf16", "fp32"), required=True)
    parser.add_argument("--sequences", type=int, default=SEQUENCES, help="per micro-batch")
    parser.add_argument("--micro-batches", type=int, default=MICRO_BATCHES, help="per step")
    parser.add_argument("--recompute-attention", action="store_true")
    parser.add_argument("--wait", action="store_true", help="wait for a line before building")
    options = parser.parse_args()
    sizes = (options.hidden_size, options.layers)
    if options.model == "small" and None in sizes:
        parser.error("the small model requires --hidden-size and --layers")
    if options.model != "small" and sizes != (None, None):
        parser.error(f"--hidden-size and --layers do not apply to --model {options.model}")
    return options


def load_cpu_backend() -> None:
    """Activate megatron/cpu_backend.py if there is no GPU, so that megatron-core runs on the CPU.

    That file and the module that it imports are loaded by path, because this repository is not
    importable with `--plain`.
    """
    import torch

    if torch.cuda.is_available():
        return
    backend = "cpu_backend_of_the_benchmark"
    for name, file in {"megatron.cpu_matmul": "cpu_matmul.py", backend: "cpu_backend.py"}.items():
        spec = importlib.util.spec_from_file_location(name, REPO / "megatron" / file)
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    sys.modules[backend].activate()


def shape(options: argparse.Namespace) -> tuple[dict, dict]:
    """Return the arguments of TransformerConfig and of GPTModel that set the model's shape."""
    # Other programs import this module; their options have no `model`.
    if getattr(options, "model", "small") == "llama32-1b":
        return LLAMA32_1B, LLAMA32_1B_MODEL
    config = {
        "num_layers": options.layers,
        "hidden_size": options.hidden_size,
        "ffn_hidden_size": 4 * options.hidden_size,
        "num_attention_heads": 8,
        "num_query_groups": 2,
    }
    return config, {"vocab_size": VOCAB}


def build(options: argparse.Namespace):
    """Return the model. If there is a GPU, megatron-core creates the weights there."""
    import torch

    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig

    torch.manual_seed(1234)
    torch.distributed.init_process_group(
        "nccl" if torch.cuda.is_available() else "gloo",
        world_size=1,
        rank=0,
        store=torch.distributed.HashStore(),
    )
    parallel_state.initialize_model_parallel()
    tensor_parallel.model_parallel_cuda_manual_seed(1234)
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[options.dtype]
    sizes, arguments = shape(options)
    recompute = {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}
    config = TransformerConfig(
        **sizes,
        **(recompute if getattr(options, "recompute_attention", False) else {}),
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        attention_softmax_in_fp32=True,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        bf16=options.dtype == "bf16",
        params_dtype=dtype,
        pipeline_dtype=dtype,
    )
    spec = get_gpt_layer_local_spec(normalization="RMSNorm")
    model = GPTModel(
        config,
        spec,
        max_sequence_length=options.seq_length,
        position_embedding_type="rope",
        **arguments,
    )
    model.to(config.params_dtype)  # the norms have float32 weights
    return model.to(torch.cuda.current_device()) if torch.cuda.is_available() else model


def batches(options: argparse.Namespace):
    """Yield random token ids for each micro-batch; the cost of a step does not depend on them."""
    import torch

    generator = torch.Generator().manual_seed(1)
    vocabulary = shape(options)[1]["vocab_size"]
    while True:
        size = (options.sequences, options.seq_length + 1)
        tokens = torch.randint(0, vocabulary, size, generator=generator)
        yield tokens.cuda() if torch.cuda.is_available() else tokens


def forward_step(iterator, model):
    import torch

    tokens = next(iterator)
    positions = torch.arange(tokens.shape[1] - 1, device=tokens.device).expand(len(tokens), -1)
    loss = model(tokens[:, :-1], positions, None, labels=tokens[:, 1:])
    return loss, partial(lambda output: (output.mean(), {"loss": output.detach().mean()}))


def peak() -> float:
    """Return the peak memory so far in MiB: GPU memory if there is a GPU, otherwise host memory."""
    import torch

    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def synchronize() -> None:
    """Wait until the GPU has finished its work, if there is a GPU."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


def train(options: argparse.Namespace) -> None:
    """Build the model, and train one step for each line of standard input."""
    import torch

    from megatron.core.models.gpt import GPTModel  # noqa: F401 # imports what building needs
    from megatron.core.pipeline_parallel import get_forward_backward_func

    if options.wait:
        sys.stdin.readline()
    gpu = ""
    if torch.cuda.is_available():
        gpu = torch.cuda.get_device_name()  # creates the CUDA context
        torch.cuda.reset_peak_memory_stats()
    model = build(options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    data = batches(options)
    print("ready", peak(), gpu, flush=True)
    for _ in sys.stdin:
        synchronize()
        started = time.perf_counter()
        results = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=data,
            model=model,
            num_microbatches=options.micro_batches,
            seq_length=options.seq_length,
            micro_batch_size=options.sequences,
        )
        optimizer.step()
        optimizer.zero_grad()
        loss = float(results[-1]["loss"])
        synchronize()
        print(time.perf_counter() - started, peak(), loss, flush=True)


def main() -> None:
    options = parse()
    if not options.plain:
        sys.path.insert(0, str(REPO))
    sys.path[:] = [p for p in sys.path if not options.plain or Path(p or ".").resolve() != REPO]
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    load_cpu_backend()
    import torch

    try:
        train(options)
    finally:
        # If training fails, NCCL would otherwise print a warning after the exception.
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
