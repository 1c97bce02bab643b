"""Script that starts a process with the `forkserver` method, without importing megatron-core."""

import multiprocessing
import sys


class Message:
    """A class of the main module, which another process can unpickle only from this module."""


def child(queue, message: Message) -> None:
    from megatron.fake_quant import policy

    queue.put((type(message).__module__, policy.current().quant_type))
    queue.put("megatron.core" in sys.modules)


if __name__ == "__main__":
    context = multiprocessing.get_context("forkserver")
    queue = context.Queue()
    process = context.Process(target=child, args=(queue, Message()))
    process.start()
    print(*queue.get(), queue.get())
    process.join()
