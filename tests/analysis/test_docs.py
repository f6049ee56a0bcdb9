"""The examples of docs/recording.md work as they stand."""

import re
from pathlib import Path

from tests.recording_tools import write_run

PAGE = Path(__file__).resolve().parent.parent.parent / "docs" / "recording.md"


def test_the_data_loader_gives_random_sequences(tmp_path):
    run = write_run(tmp_path)
    (code,) = (
        block
        for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S)
        if "DataLoader" in block
    )
    names: dict = {}
    exec(code.replace('"runs/b1", 8', f'"{run}", 6'), names)
    batches = list(names["loader"])
    # 16 of 40 episodes have 6 or 7 steps.
    assert sum(len(batch["action"]) for batch in batches) == 16
    assert batches[0]["observation/obs"].shape == (4, 6, 3)
    first = batches[0]["observation/obs"][0, :, 0]
    assert first.tolist() == [3, 4, 5, 6, 7, 8]  # episode 3, steps 0 to 5
