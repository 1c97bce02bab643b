"""Functions that raise the error of one rank on all ranks."""

from collections.abc import Callable

import torch.distributed as dist

from megatron.training.errors import UserError


def first_rank_does(task: Callable[[], None]) -> None:
    """Run a task on the first rank; if it raises a `UserError`, raise this error on all ranks.

    Must be called on all ranks.

    Raises:
        UserError: on all ranks, if the task raises it.
    """
    problem: list[UserError | None] = [None]
    if dist.get_rank() == 0:
        try:
            task()
        except UserError as error:
            problem = [error]
    dist.broadcast_object_list(problem, src=0)
    if problem[0] is not None:
        raise problem[0]


def all_succeed(problem: str | None) -> None:
    """Raise an error on all ranks if at least one rank reports a problem.

    Must be called on all ranks; a rank without a problem passes None.

    Raises:
        UserError: on all ranks, with the problem of the lowest rank that reports one.
    """
    problems: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(problems, problem)
    for text in problems:
        if text is not None:
            raise UserError(text)
