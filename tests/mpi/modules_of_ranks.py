"""Train as a rank of a job, and leave the names of the modules that this took in FOLDER/RANK."""

import os
import sys
from pathlib import Path

from hpcrl.comm.transport import world_rank
from hpcrl.start.training import train_command

if __name__ == "__main__":
    folder, config, *overrides = sys.argv[1:]
    rank, leave = world_rank(), os._exit

    def leave_names(code: int) -> None:
        """A rank leaves without the interpreter's own end."""
        Path(folder, str(rank)).write_text("\n".join(sorted(sys.modules)))
        leave(code)

    os._exit = leave_names  # type: ignore[assignment]
    raise SystemExit(train_command(config, overrides))
