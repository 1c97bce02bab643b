"""Switch the collection of a running job on and off with a file: it is on while the file exists.

    touch collect_now        collect from the next iteration on
    rm collect_now           stop collecting after this iteration

The first rank checks the file at the beginning of every iteration and broadcasts the result to all
ranks, also to those that collect nothing. The ranks then agree even if their file systems differ.
"""

from pathlib import Path

from megatron.collection.collectives import first_rank_says


class FlagFile:
    """The file and its last known state; see the module's docstring."""

    def __init__(self, path: Path):
        self.path = path
        self.on = False

    @classmethod
    def parse(cls, collect_flag_file: str | None = None) -> "FlagFile | None":
        """Read the flag of the same name; return None if the collection is always on.

        Raises:
            ValueError: if the file could never be created.
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
        """Check the file together with all ranks; return whether the state has changed."""
        before, self.on = self.on, first_rank_says(self._is_there)
        return before != self.on

    def _is_there(self) -> bool:
        try:
            return self.path.exists()
        except OSError:  # a file system that is unavailable for a moment
            return self.on
