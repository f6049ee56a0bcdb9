"""`hpcrl envs`: the list, one environment, and what can't be looked at."""

import re

import numpy as np
import pytest
from click.testing import CliRunner

from env_wrappers.families import FAMILIES
from hpcrl.cli import main
from hpcrl.specs import ActionPart, ActionSpec
from hpcrl.start.environments import random_actions


def envs(*arguments):
    result = CliRunner().invoke(main, ["envs", *arguments], env={"COLUMNS": "200"})
    return result.exit_code, result.output


def test_every_family_is_listed_with_its_versions_or_the_command_that_installs_it():
    code, output = envs()
    assert code == 0
    for family in FAMILIES:
        line = next(line for line in output.splitlines() if line.startswith(family.key))
        versions = family.versions()
        if versions is None:
            assert f"no: {family.install_command[:24]}" in line
        else:
            assert all(version in line for version in versions.values())


def test_one_environment_is_described_and_stepped():
    code, output = envs(
        "synthetic:counting", "--num-envs", "4", "--seconds", "0.05", "observation_shape=[10, 10]"
    )
    assert code == 0
    assert re.search(r"observes obs +box uint8 10x10 *\n", output)
    assert re.search(r"action part 0 +discrete \[4\] \(1\) *\n", output)
    assert re.search(r"steps per second +[\d,]+ here, 4 rows", output)
    # 4 observations of 100 bytes in one aligned field, beside the fields of a row and the timers.
    assert float(re.search(r"bytes per step +(\d+) B", output)[1]) > 100


def test_flags_are_shown_as_they_are_seen_and_as_they_travel():
    code, output = envs("minatar", "--seconds", "0")
    assert code == 0
    assert "binary uint8 10x10x4, 50 bytes as bits" in output


def test_the_key_of_a_family_means_its_example():
    code, output = envs("gym", "--seconds", "0")
    assert code == 0
    assert "gym:CartPole-v1" in output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["minata"], "no family of environments 'minata'; did you mean 'minatar'"),
        (["external"], "external has no environment of its own to look at"),
        (["gym:CartPol-v1"], "did you mean 'CartPole-v1'"),
        (["gym", "kwargs"], "option 'kwargs' is not KEY=VALUE"),
        (["gym", "kwargs={"], "is no YAML value"),
    ],
)
def test_what_cannot_be_looked_at_is_told(arguments, message):
    code, output = envs(*arguments)
    assert code == 2
    assert message in output


def test_random_actions_fill_their_space():
    parts = (
        ActionPart("discrete", nvec=(2, 5)),
        ActionPart("box", low=(-3.0, -np.inf), high=(3.0, np.inf)),
    )
    actions = random_actions(ActionSpec(parts), 1000, np.random.default_rng(0))
    assert actions.shape == (1000, 4)
    np.testing.assert_array_equal(actions.min(0)[:2], [0, 0])
    np.testing.assert_array_equal(actions.max(0)[:2], [1, 4])
    np.testing.assert_allclose(actions.min(0)[2:], [-3, -1], atol=0.05)
    np.testing.assert_allclose(actions.max(0)[2:], [3, 1], atol=0.05)
