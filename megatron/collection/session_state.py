"""State of the tensor collection in this process, which `session` and `session_end` share."""

from dataclasses import dataclass

from megatron.collection.collector import Collector
from megatron.collection.statistics.history import TensorStatistics


@dataclass(slots=True)
class SessionState:
    """The collector of this process, and what the trainer has told the collection."""

    collector: Collector | None = None  #: collector of this rank; None if nothing is collected
    statistics: TensorStatistics | None = None  #: statistics of this rank; None if there are none
    configured: bool = False  #: whether the training loop has called `configure`
    audited: bool = False  #: whether the trainer has passed the format audit to `configure`
    knows_end: bool = False  #: whether the trainer has passed its last iteration to `configure`
    owner: int = 0  #: ID of the process that started the collection
    completed_before: int = 0  #: number of iterations completed before this run
    observed: int = 0  #: number of completed iterations at the last call of `session.observe`
    warned: bool = False  #: whether a layer that runs more than once in a micro-batch was reported

    @property
    def enabled(self) -> bool:
        """True if this run collects tensors or measures their statistics."""
        return self.collector is not None or self.statistics is not None

    def reset(self, *, completed_before: int, audited: bool, knows_end: bool) -> None:
        """Begin a new run, whose trainer has called `configure`; the last run must be closed."""
        self.configured = True
        self.audited, self.knows_end = audited, knows_end
        self.completed_before, self.observed = completed_before, 0
        self.warned = False


state = SessionState()
