import json
import math
import re
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcrl.config.load import (
    ConfigError,
    config_hash,
    flatten,
    known_keys,
    load_config,
    parse_config,
    parse_overrides,
    to_dict,
    to_yaml,
)
from hpcrl.config.root import Config

CONFIGS = sorted((Path(__file__).parent.parent.parent / "configs").glob("**/*.yaml"))


def write(tmp_path, text):
    path = tmp_path / "config.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def message(text, tmp_path, *overrides):
    with pytest.raises(ConfigError) as caught:
        load_config(write(tmp_path, text), overrides)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_an_empty_file_is_the_default_configuration(tmp_path):
    assert load_config(write(tmp_path, "# nothing\n")) == Config()


def test_an_override_goes_before_the_file_and_the_file_before_the_default(tmp_path):
    path = write(tmp_path, "learner: {batch_unrolls: 8, unroll_steps: 5}\n")
    config = load_config(path, ["--learner.unroll_steps", "7"])
    learner = config.learner
    assert (learner.batch_unrolls, learner.unroll_steps, learner.micro_batches) == (8, 7, 1)


@pytest.mark.parametrize("arguments", [["--stop.frames=12"], ["--stop.frames", "12"]])
def test_both_forms_of_an_override_are_read(arguments):
    assert parse_overrides(arguments) == {"stop": {"frames": 12}}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-4", 1e-4),
        ("1E6", 1e6),
        ("1.5e+3", 1500.0),
        ("5_000_000", 5_000_000),
        ("-3", -3),
        ("-.5", -0.5),
        ("3.", 3.0),
        ("0x10", 16),
        (".inf", math.inf),
        ("true", True),
        ("null", None),
        ("[1, 2e1, x]", [1, 20.0, "x"]),
        ("{a: 1, b: {c: -2}}", {"a": 1, "b": {"c": -2}}),
        ("'1e5'", "1e5"),
        ('"7"', "7"),
        ("12:30", "12:30"),
        ("2030-12-31", "2030-12-31"),
        ("e5", "e5"),
        ("1e", "1e"),
        ("v1e5", "v1e5"),
        ("", ""),
    ],
)
def test_a_value_is_read_as_yaml_with_plain_exponents(text, value):
    read = parse_overrides(["--env.options.x", text])["env"]["options"]["x"]
    assert read == value
    assert type(read) is type(value)


@pytest.mark.parametrize(
    "value", ["2024", "1e5", "2030-12-31T23:59:00", "yes", "#a", "[x]", "a: b"]
)
def test_the_value_of_a_text_key_is_taken_as_it_stands(value, tmp_path):
    config = load_config(write(tmp_path, ""), ["--run.dir", value, f"--run.deadline={value}"])
    assert config.run.dir == config.run.deadline == value


def test_numbers_and_dates_in_a_file_serve_where_text_is_wanted(tmp_path):
    text = "run: {dir: 2024, deadline: 2030-12-31T23:59:00}\n"
    run = load_config(write(tmp_path, text)).run
    assert (run.dir, run.deadline) == ("2024", "2030-12-31T23:59:00")


def test_later_overrides_win_and_nested_ones_add_up():
    arguments = ["--env.options", "{a: 1, b: 2}", "--env.options.b", "3", "--env.options={c: 4}"]
    assert parse_overrides(arguments) == {"env": {"options": {"a": 1, "b": 3, "c": 4}}}


def test_hyphens_in_an_overrides_key_stand_for_underscores():
    assert parse_overrides(["--stop.agent-steps", "5"]) == {"stop": {"agent_steps": 5}}


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["learner.threads", "3"], "unexpected argument 'learner.threads'"),
        (["--"], "unexpected argument '--'"),
        (["--run.seed"], "--run.seed lacks a value"),
        (["--run.seed", "--run.dir", "x"], "--run.seed lacks a value"),
        (["--env.options", "{a: [1"], "--env.options: value '{a: [1' is not valid YAML: line 1"),
    ],
)
def test_a_malformed_override_is_named(arguments, expected):
    with pytest.raises(ConfigError, match=re.escape(expected)):
        parse_overrides(arguments)


def test_every_section_takes_overrides(tmp_path):
    path = write(tmp_path, "agent: {name: vtrace, discount: 0.9}\n")
    agent = load_config(path, ["--agent.rho_bar", "2", "--agent.lambda_=0.5"]).agent
    assert (agent.discount, agent.rho_bar, agent.lambda_) == (0.9, 2.0, 0.5)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("lerner: {threads: 1}", "unknown key lerner; did you mean learner?"),
        ("learner: {thread: 1}", "unknown key learner.thread; did you mean learner.threads?"),
        (
            "learner: {learning_rate: 1}",
            "unknown key learner.learning_rate; did you mean learner.optimizer.learning_rate?",
        ),
        (
            "learner: {optimizer: {beta: 1}}",
            "unknown key learner.optimizer.beta; did you mean learner.optimizer.beta",
        ),
        (
            "checkpoint: {zzz: 1}",
            "unknown key checkpoint.zzz; keys of checkpoint are every_s, keep",
        ),
        ("zzz: 1", "unknown key zzz; sections are layout, placement, run,"),
    ],
)
def test_an_unknown_key_gets_a_suggestion(text, expected, tmp_path):
    assert message(text, tmp_path).startswith(expected)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("learner: {batch_unrolls: 0}", "learner.batch_unrolls must be greater than 0, got 0"),
        ("stop: {frames: -1}", "stop.frames must be at least 0, got -1"),
        ("agent: {discount: 1.5}", "agent.discount must be at most 1.0, got 1.5"),
        (
            "learner: {optimizer: {beta2: 1}}",
            "learner.optimizer.beta2 must be less than 1.0, got 1",
        ),
        ("stop: {frames: 1.5}", "stop.frames must be a whole number, got 1.5"),
        ("stop: {frames: many}", "stop.frames must be a whole number, got 'many'"),
        ("stop: {mean_return: x}", "stop.mean_return must be a number, got 'x'"),
        ("stop: {mean_return: .nan}", "stop.mean_return must be a finite number, got nan"),
        ("run: {seed: yes}", "run.seed: True is not a number"),
        ("run: {dir: no}", "run.dir must be text, got False"),
        ("metrics: {tensorboard: 2}", "metrics.tensorboard must be true or false, got 2"),
        ("env: {options: [1]}", "env.options must be keys with values, such as {key: value}"),
        ("network: {hidden_sizes: 3}", "network.hidden_sizes must be a list, such as [64, 64]"),
        ("network: {hidden_sizes: [1, 0]}", "network.hidden_sizes.1 must be greater than 0, got 0"),
        ("network: {core: gru}", "network.core must be 'none' or 'lstm', got 'gru'"),
        (
            "agent: {name: dqn}",
            "agent.name must be 'vtrace' or 'ppo' or 'a3c' or 'r2d2' or 'apex', got 'dqn'",
        ),
        ("learner:", "learner must be a section with keys of its own, got None"),
        (
            "topology: {learners: some}",
            "topology.learners must be a whole number or a number or 'auto', got 'some'",
        ),
        ("topology: {learners: 1.5}", "topology.learners: 1.5 is not a fraction of the world"),
        ("topology: {learners: on}", "topology.learners: True is not a count"),
        ("agent: {c_bar: 2}", "agent: c_bar is 2.0, above rho_bar 1.0"),
    ],
)
def test_a_wrong_value_is_named_with_its_key_and_bound(text, expected, tmp_path):
    assert message(text, tmp_path).startswith(expected)


def test_all_wrong_keys_are_named_at_once(tmp_path):
    text = "learner: {batch_unrolls: 0, thread: 1}\nstop: {frames: x}\n"
    said = message(text, tmp_path)
    for part in ("learner.batch_unrolls must", "key learner.thread;", "stop.frames must"):
        assert part in said


def test_whole_numbers_may_be_written_with_an_exponent(tmp_path):
    frames = load_config(write(tmp_path, "stop: {frames: 5e6}\n")).stop.frames
    assert frames == 5_000_000
    assert isinstance(frames, int)


def test_a_missing_file_a_folder_and_a_binary_are_named(tmp_path):
    with pytest.raises(ConfigError, match=r"absent\.yaml: No such file"):
        load_config(tmp_path / "absent.yaml")
    with pytest.raises(ConfigError, match="Is a directory"):
        load_config(tmp_path)
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="not a text file"):
        load_config(tmp_path / "binary")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a: b: c", "config.yaml is not valid YAML: line 1, column 5: mapping values are not"),
        ("run: {seed: 1\n", "config.yaml is not valid YAML: line 2"),
        ("run:\n\tseed: 1\n", "config.yaml is not valid YAML: line 2, column 1"),
        ("run: \x07", "config.yaml is not valid YAML: unacceptable character"),
        (
            "? [1, 2]\n: 3\n",
            "config.yaml is not valid YAML: line 1, column 3: found unhashable key",
        ),
        ("- 1\n- 2\n", "config.yaml must hold sections such as env:, found list"),
        ("train", "config.yaml must hold sections such as env:, found str"),
    ],
)
def test_a_file_that_is_no_configuration_is_refused_in_one_line(text, expected, tmp_path):
    assert expected in message(text, tmp_path)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("run: {seed: 1}\nrun: {seed: 2}\n", "line 1, column 1: key given twice: run"),
        ("env:\n  options:\n    a: 1\n    a: 1\n", "line 3, column 5: key given twice: a"),
    ],
)
def test_a_key_given_twice_is_refused(text, line, tmp_path):
    assert line in message(text, tmp_path)


OPTION_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


@settings(deadline=None)
@given(st.dictionaries(st.text(min_size=1), OPTION_VALUES, max_size=4))
def test_a_written_configuration_reads_back_equal(options):
    config = parse_config({"env": {"options": options}, "stop": {"mean_return": -1e-7}})
    text = to_yaml(config)
    # The same values for any reader of YAML 1.1, such as a notebook.
    assert parse_config(yaml.safe_load(text)) == config
    assert parse_overrides([f"--x={text}"])["x"] == to_dict(config)


@pytest.mark.parametrize(
    "text", ["1e5", "5", "yes", "null", "2020-01-01", "12:30", ".5", "1_0", ""]
)
def test_text_that_looks_like_something_else_stays_text(text, tmp_path):
    config = parse_config({"env": {"options": {"x": text}}})
    assert load_config(write(tmp_path, to_yaml(config))).env.options == {"x": text}


def test_a_configuration_crosses_ranks_as_json_unchanged():
    options = {"bound": math.inf, "sizes": [1, 2.0], "text": "1e5", "nothing": None}
    config = parse_config({"env": {"options": options}, "network": {"hidden_sizes": [3, 4]}})
    assert parse_config(json.loads(json.dumps(to_dict(config)))) == config


def test_the_hash_depends_on_every_value_but_the_excepted_keys():
    base, seeded = parse_config({}), parse_config({"run": {"seed": 2}})
    option = parse_config({"env": {"options": {"a": 1}}})
    assert config_hash(base) == config_hash(Config())
    assert len({config_hash(base), config_hash(seeded), config_hash(option)}) == 3
    assert config_hash(base, ["run."]) == config_hash(seeded, ["run."])
    assert config_hash(base, ["env."]) != config_hash(seeded, ["env."])
    assert re.fullmatch("[0-9a-f]{16}", config_hash(base))


def test_the_hash_does_not_depend_on_how_a_value_was_written(tmp_path):
    texts = ("stop: {frames: 5e6}", "stop: {frames: 5_000_000}", "stop:\n  frames: 5000000 # all")
    assert len({config_hash(load_config(write(tmp_path, text))) for text in texts}) == 1


def test_flatten_names_leaves_by_dotted_keys_and_keeps_empty_mappings():
    assert flatten({"a": {"b": {"c": 1}, "d": {}}, "e": [2]}) == {"a.b.c": 1, "a.d": {}, "e": [2]}


def test_known_keys_are_sections_and_leaves_of_all_depths():
    keys = known_keys()
    assert {"learner", "learner.optimizer", "learner.optimizer.beta1", "agent.discount"} <= {*keys}
    leaves = {*keys} - {"learner", "learner.optimizer"}
    assert flatten(to_dict(Config())).keys() <= leaves


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_shipped_configurations_load(path):
    load_config(path)
