"""Script of another source tree: it trains, or shows how Python has started it (`--do`)."""

import multiprocessing
import os
import pickle
import sys
from pathlib import Path

import torch
from sibling import NAME

import megatron.core
import megatron.training
from megatron.training import get_args, initialize, train, training


class Message:
    """A class of the main module, which another process can unpickle only from this module."""

    def __init__(self, text: str):
        self.text = text


def run() -> None:
    generator = torch.Generator().manual_seed(0)
    batches = iter(lambda: torch.randint(64, (2, 16), generator=generator), None)
    train(batches, load=get_args().load)


def child(queue, message: Message) -> None:
    """Send the paths of this spawned process's packages to its parent, and train."""
    from megatron.fake_quant import policy

    files = [megatron.core.__file__, megatron.training.__file__]
    queue.put((message.text, *files, policy.current().quant_type, __name__))
    initialize()
    run()


def show() -> None:
    main = sys.modules["__main__"]
    print("argv", sys.argv)
    print("path", sys.path[0], NAME)
    print("main", main.__file__, main.__spec__, __name__, main.Message is Message)
    print("pickle", pickle.loads(pickle.dumps(Message("unpickled"))).text)
    print("tests", any((Path(folder) / "pretrain_gpt.py").is_file() for folder in sys.path))
    print("core", megatron.core.__file__)
    print("training", megatron.training.__file__)


def start_child() -> None:
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=child, args=(queue, Message("sent")))
    process.start()
    print("child", *queue.get(), flush=True)
    process.join()
    assert process.exitcode == 0


def train_alone(*_) -> None:
    initialize()
    run()


def start_pool() -> None:
    """Train in a process of a pool, which is killed at the end of the `with` block."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        pool.map(train_alone, [None])


def leave_child() -> None:
    """Train in a process of a fork server, for which this process waits when it exits."""
    multiprocessing.get_context("forkserver").Process(target=train_alone).start()


def configure_and_run() -> None:
    from megatron.core import tensor_saver

    folder, get_args().save = get_args().save, None
    tensor_saver.configure(save_tensors=True, save_dir=folder)
    run()


def move_and_run() -> None:
    os.chdir("/")
    run()


def run_and_leave() -> None:
    run()
    sys.stdout.flush()
    os._exit(0)


def run_without_log() -> None:
    training.training_log = lambda *arguments, **named: None
    run()


def fail() -> None:
    raise RuntimeError("the script fails")


if __name__ == "__main__":
    if "spawn" in sys.argv:
        start_child()
    elif "pool" in sys.argv:
        start_pool()
    elif "child" in sys.argv:
        leave_child()
    else:
        initialize()
        actions = {"train": run, "show": show, "exit": lambda: sys.exit(7), "fail": fail}
        actions |= {"configure": configure_and_run, "move": move_and_run, "leave": run_and_leave}
        actions["unlogged"] = run_without_log
        actions[get_args().do]()
