"""What one rank does for all, and fails for all."""

from collections.abc import Callable

import torch.distributed as dist

from megatron.training.errors import UserError


def first_rank_does(what: Callable[[], None]) -> None:
    """Run something on the first rank; what it raises, all ranks raise. Collective.

    Raises:
        UserError: the first rank's.
    """
    problem: list[UserError | None] = [None]
    if dist.get_rank() == 0:
        try:
            what()
        except UserError as error:
            problem = [error]
    dist.broadcast_object_list(problem, src=0)
    if problem[0] is not None:
        raise problem[0]


def all_succeed(problem: str | None) -> None:
    """Stop every rank if one has a problem. Collective.

    Raises:
        UserError: the first one's problem, on all ranks alike.
    """
    found: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(found, problem)
    for text in found:
        if text is not None:
            raise UserError(text)
