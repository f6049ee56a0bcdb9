"""Train as a rank of a job, and leave the names of the modules that this took in FOLDER/RANK."""

import sys
from pathlib import Path

from hpcrl.comm.transport import world_rank
from hpcrl.start.training import train_command

if __name__ == "__main__":
    folder, config, *overrides = sys.argv[1:]
    rank = world_rank()
    if train_command(config, overrides) != 0:
        raise SystemExit(1)
    Path(folder, str(rank)).write_text("\n".join(sorted(sys.modules)))
