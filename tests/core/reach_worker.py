"""Train the models of `foreign_models` in a loop, and print what happened as one JSON line each.

    reach_worker.py TRAINER FOLDER MODEL...

TRAINER is `schedules` for the pipeline schedules, or `loop` for a loop without them. Each model
trains for one iteration of two micro-batches, with all tensors collected to FOLDER/MODEL. Then a
second model trains whose linear layers are not from this project, and its error is printed.
"""

import json
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
import gpt_worker

gpt_worker.activate_cpu_backend()  # before megatron-core is imported

import foreign_models  # noqa: E402
from foreign_models import BATCH, SEQ  # noqa: E402

from megatron.collection.module_identity import Identified  # noqa: E402
from megatron.core import tensor_saver  # noqa: E402
from megatron.core.low_precision import program_end  # noqa: E402
from megatron.core.pipeline_parallel import get_forward_backward_func, schedules  # noqa: E402


def with_schedules(model: torch.nn.Module, loss) -> None:
    """Train for one iteration as Megatron-LM does."""
    schedules._checked = False  # as in a new process
    get_forward_backward_func()(
        forward_step_func=lambda _, model: (loss(model), lambda x: (x, {"loss": x.detach()})),
        data_iterator=None,
        model=model,
        num_microbatches=2,
        seq_length=SEQ,
        micro_batch_size=BATCH,
    )


def with_loop(model: torch.nn.Module, loss) -> None:
    """Train for one iteration in a loop without the schedules."""
    program_end._reached = False  # as in a new process
    with tensor_saver.training_iteration(1):
        for _ in range(2):
            (loss(model) / 2).backward()


class Foreign(torch.nn.Linear):
    """A linear layer that is not from this project and is called like one that is."""

    def forward(self, x, weight=None):
        return super().forward(x), None


def replace_layers(model: torch.nn.Module) -> None:
    """Replace all linear layers of this project except the LM head."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            linear = isinstance(child, Identified) and child.layer_type == "linear"
            if linear and name != "output_layer":
                setattr(parent, name, Foreign(child.input_size, child.output_size))


def refusal(train, *args) -> str | None:
    try:
        train(*args)
    except ValueError as error:
        program_end._refused.clear()  # this program expects it
        return str(error)
    return None


def main() -> None:
    trainer, folder, *names = sys.argv[1:]
    gpt_worker.start(gpt_worker.parse([]))
    train = {"schedules": with_schedules, "loop": with_loop}[trainer]
    for name in names:
        directory = Path(folder, name)
        options = {"save_tensors": True, "collect_micro_batches": 0, "save_dir": str(directory)}
        tensor_saver.configure({"name": name}, **options)
        torch.manual_seed(1)
        model, loss = foreign_models.BUILDERS[name]()
        report = {"model": name, "error": refusal(train, model, loss)}
        report["failure"] = tensor_saver.close()
        if report["error"] is None:
            report["card"] = json.loads(next(directory.glob("run_*.json")).read_text())
            report["layers"] = {
                module.identity.name: module.formats_of(module.operations[0]) is not None
                for module in model.eval().modules()
                if isinstance(module, Identified)
            }
            model, loss = foreign_models.BUILDERS[name]()
            replace_layers(model)
            tensor_saver.configure()
            report["refusal"] = refusal(train, model, loss)
        print(json.dumps(report), flush=True)
    program_end._reached = True  # the refused models must not change the exit status


if __name__ == "__main__":
    main()
