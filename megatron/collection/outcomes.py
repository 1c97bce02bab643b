"""How a collection ended, from how its ranks fared (`TensorSaver.outcome`)."""

from typing import Any

Ranks = list[dict[str, Any]]


def status(ranks: Ranks, aborted: str | None) -> str:
    """One word for the run card; what went wrong with the collection counts before what ended the
    training.
    """
    if any(rank["error"] for rank in ranks):
        return "failed"
    if any(rank["limit"] for rank in ranks):
        return "limited"
    return "finished" if aborted is None else "aborted"


def of_run(ranks: Ranks, status: str, reason: str | None) -> dict[str, Any]:
    """What the run card says of the end, or of the beginning."""
    return {
        "status": status,
        "ranks": ranks,
        "reason": reason,
        "error": next((rank["error"] for rank in ranks if rank["error"]), None),
        "limit": next((rank["limit"] for rank in ranks if rank["limit"]), None),
    }


def failure(ranks: Ranks) -> str | None:
    """What ended the writing of a rank; of several, of the first of them."""
    failed = [rank for rank in ranks if rank["error"]]
    if not failed:
        return None
    numbers = ", ".join(str(rank["rank"]) for rank in failed)
    return f"rank {numbers}: {failed[0]['error']}" if len(ranks) > 1 else failed[0]["error"]
