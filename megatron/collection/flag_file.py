"""Switch the collection of a running job on and off by creating and removing a file.

    touch collect_now        collect from the next iteration on
    rm collect_now           stop collecting after this iteration

Rank 0 checks for the file at the beginning of every iteration and broadcasts the result to all
ranks, including ranks that collect nothing. All ranks thus agree even if their file systems differ.
"""

from pathlib import Path

from megatron.collection.collectives import first_rank_says


class FlagFile:
    """File whose existence switches the collection on, and the result of the last check for it."""

    def __init__(self, path: Path):
        self.path = path
        self.on = False

    @classmethod
    def parse(cls, collect_flag_file: str | None = None) -> "FlagFile | None":
        """Return the flag file that `--collect-flag-file` names; None if the flag is not set.

        Raises:
            ValueError: if no such file can be created: the path is a folder or its parent folder
                does not exist.
        """
        path = collect_flag_file
        if path is None:
            return None
        if not path or not Path(path).absolute().parent.is_dir():
            raise ValueError(
                f"--collect-flag-file {path!r}: its folder does not exist; create the folder, or "
                "name a file in an existing one (the file itself need not exist)"
            )
        if Path(path).is_dir():
            raise ValueError(
                f"--collect-flag-file {path!r} is a folder that already exists; name a file in it "
                "that does not exist yet"
            )
        return cls(Path(path))

    def look(self) -> bool:
        """Check for the file and return whether it appeared or disappeared since the last check.

        Must be called on all ranks.
        """
        before, self.on = self.on, first_rank_says(self._is_there)
        return before != self.on

    def _is_there(self) -> bool:
        try:
            return self.path.exists()
        except OSError:  # the file system may be temporarily unavailable
            return self.on
