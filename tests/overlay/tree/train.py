"""Script of another source tree: it trains, or shows how Python has started it (`--do`)."""

import multiprocessing
import pickle
import sys
from pathlib import Path

import torch
from sibling import NAME

import megatron.core
import megatron.training
from megatron.training import get_args, initialize, train


class Message:
    """A class of the main module, which another process can unpickle only from there."""

    def __init__(self, text: str):
        self.text = text


def child(queue, message: Message) -> None:
    """Put where this process finds its packages, and whether it can use CUDA's names."""
    from megatron.fake_quant import policy

    torch.zeros(1).to("cuda")
    files = [megatron.core.__file__, megatron.training.__file__]
    queue.put((message.text, *files, policy.current().quant_type, __name__))


def show() -> None:
    main = sys.modules["__main__"]
    print("argv", sys.argv)
    print("path", sys.path[0], NAME)
    print("main", main.__file__, main.__spec__, __name__, main.Message is Message)
    print("pickle", pickle.loads(pickle.dumps(Message("unpickled"))).text)
    print("tests", any((Path(folder) / "pretrain_gpt.py").is_file() for folder in sys.path))
    print("core", megatron.core.__file__)
    print("training", megatron.training.__file__)


def start_children() -> None:
    for method in ("spawn", "forkserver"):
        context = multiprocessing.get_context(method)
        queue = context.Queue()
        process = context.Process(target=child, args=(queue, Message(method)))
        process.start()
        process.join()
        assert process.exitcode == 0
        print("child", *queue.get())


def fail() -> None:
    raise RuntimeError("the script fails")


if __name__ == "__main__":
    initialize()
    action = get_args().do
    if action == "train":
        generator = torch.Generator().manual_seed(0)
        batches = iter(lambda: torch.randint(64, (2, 16), generator=generator), None)
        train(batches, load=get_args().load)
    elif action == "exit":
        sys.exit(7)
    else:
        {"show": show, "children": start_children, "fail": fail}[action]()
