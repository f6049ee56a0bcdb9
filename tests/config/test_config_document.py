from pathlib import Path

from hpcrl.agents import AGENTS
from hpcrl.config.document import document
from hpcrl.config.load import flatten, parse_config, to_dict

DOCS = Path(__file__).parent.parent.parent / "docs"


def rows():
    lines = [line for line in document().splitlines() if line.startswith("| `")]
    return {line.split("`")[1]: [cell.strip() for cell in line.split("|")[1:-1]] for line in lines}


def test_the_committed_page_is_what_the_dataclasses_say():
    assert (DOCS / "configuration.md").read_text(encoding="utf-8") == document(), "run `make docs`"


def test_every_key_has_one_row_with_four_cells_and_a_meaning():
    agents = [parse_config({"agent": {"name": name}}) for name in AGENTS]
    assert rows().keys() == {key for config in agents for key in flatten(to_dict(config))}
    for key, cells in rows().items():
        assert len(cells) == 4, key
        assert len(cells[3]) > 5, key


def test_types_bounds_choices_and_defaults_are_those_of_the_fields():
    expected = {
        "learner.batch_unrolls": ["whole number > 0", "`32`"],
        "stop.frames": ["whole number ≥ 0", "`0`"],
        "learner.optimizer.beta1": ["number ≥ 0, < 1", "`0.9`"],
        "transport.max_message_bytes": ["whole number > 0, ≤ 2147483647", "`1073741824`"],
        "topology.learners": ["whole number or number or `auto`", "`auto`"],
        "network.core": ["`none`, `lstm`", "`none`"],
        "network.hidden_sizes": ["list of whole number > 0", "`[64, 64]`"],
        "network.shared_torso": ["true or false", "`true`"],
        "stop.mean_return": ["number or `null`", "`null`"],
        "env.options": ["mapping", "`{}`"],
        "run.dir": ["text", ""],
    }
    found = rows()
    assert {key: found[key][1:3] for key in expected} == expected
