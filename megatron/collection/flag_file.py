"""A file that switches the collection of a running job on and off: it is on while the file is
there.

    touch collect_now        the next iteration is collected, and those after it
    rm collect_now           no further one is

The first rank looks at the beginning of every iteration and tells the others. All ranks take part,
whatever they collect, so that a file system which shows them different things holds up none.
"""

from pathlib import Path

from megatron.collection.collectives import first_rank_says


class FlagFile:
    """See the module's docstring."""

    def __init__(self, path: Path):
        self.path = path
        self.on = False

    @classmethod
    def parse(cls, collect_flag_file: str | None = None) -> "FlagFile | None":
        """Read the flag of the same name; None: the collection is always on.

        Raises:
            ValueError: the file could never be made.
        """
        path = collect_flag_file
        if path is None:
            return None
        if not path or not Path(path).absolute().parent.is_dir():
            raise ValueError(
                f"--collect-flag-file {path!r}: its folder does not exist; make it, or name a file "
                "in one that does (the file itself need not be there)"
            )
        if Path(path).is_dir():
            raise ValueError(
                f"--collect-flag-file {path!r} is a folder, which is always there; name a file in "
                "it that does not exist yet"
            )
        return cls(Path(path))

    def look(self) -> bool:
        """Look, together with all ranks; returns whether the collection was switched."""
        before, self.on = self.on, first_rank_says(self._is_there)
        return before != self.on

    def _is_there(self) -> bool:
        try:
            return self.path.exists()
        except OSError:  # a file system that is away for a moment
            return self.on
