from __future__ import annotations

import dataclasses
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raysim.config import ClientSettings, RunConfig, load_config, resolve
from raysim.errors import ConfigError
from raysim.execution.settings import gpu_share
from raysim.weighting.fedvg import FedVG
from raysim.weighting.size import Size
from raysim.weighting.uniform import Uniform
from runs import QUICKSTART

CONFIGS = sorted(
    path for path in (Path(__file__).parents[1] / "configs").glob("*.yaml") if not path.stem.startswith("sweep")
)

Write = Callable[..., Path]


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch, tmp_path):
    """No variable that changes paths, and a current folder of the test's own."""
    for name in ("RAYSIM_OUTPUT_DIR", "RAYSIM_DATA_ROOT", "RAY_JOB_CONFIG_JSON_ENV_VAR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def write(tmp_path) -> Write:
    """Writes a configuration file."""

    def write(text: str, name: str = "run.yaml") -> Path:
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        return path

    return write


def problems(path: Path, *overrides: str) -> tuple[str, ...]:
    """What is wrong, without the folder of the file."""
    with pytest.raises(ConfigError) as info:
        load_config(path, overrides)
    assert info.value.exit_status == 2
    return tuple(problem.replace(f"{path.parent}/", "") for problem in info.value.problems)


# ---- what is read ----


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_configuration_of_the_repository_loads_and_reads_back(path, write):
    config = load_config(path)
    assert load_config(write(config.as_yaml())) == config


def test_an_almost_empty_file_gives_the_defaults(write):
    config = load_config(write("seed: 0\n", "my run.yaml"))
    assert config == dataclasses.replace(resolve({}), name="my run")
    assert config.weighting == Size()  # FedAvg's own.
    assert config.client.cohort_size(100) == 10
    assert config.cohort_size == 2
    assert config.execution.client.num_gpus == "auto"


def test_the_weighting_of_the_file_replaces_that_of_the_algorithm(write):
    assert load_config(write("weighting: {name: uniform}")).weighting == Uniform()
    assert load_config(write("weighting: {name: fedvg, norm: l2}")).weighting == FedVG(norm="l2")
    assert load_config(write("weighting: null")).weighting == Size()


names = st.text(st.characters(codec="utf-8", exclude_characters="/"), min_size=1, max_size=12).filter(
    lambda name: name.strip() == name and name not in (".", "..") and name.isprintable()
)
yaml_words = st.sampled_from(
    ["no", "yes", "null", "~", "010", "1e-3", "0x1f", "12:30:45", "2020-01-01", "1_0", "=", "<<"]
)


@settings(max_examples=25, deadline=None)
@given(name=st.one_of(names, yaml_words), seed=st.integers(0, 2**70), lr=st.floats(1e-30, 1e30))
def test_the_stored_configuration_reads_back_as_it_was(tmp_path_factory, name, seed, lr):
    values = {"name": name, "seed": seed, "client": {"optimizer": {"lr": lr}}, "weighting": {"name": "fedvg"}}
    config = resolve(values)
    assert (config.name, config.seed, config.client.optimizer.lr) == (name, seed, lr)
    path = tmp_path_factory.mktemp("stored") / "config.yaml"
    path.write_text(config.as_yaml(), encoding="utf-8")
    assert load_config(path) == config


def test_text_beyond_ascii(write):
    config = load_config(write("# été\nname: essai-é\noutput: {dir: out/été 1}\n", "données.yaml"))
    assert config.folder == Path.cwd() / "out" / "été 1" / "essai-é"
    assert "essai-é" in config.as_yaml()
    assert load_config(write(config.as_yaml())) == config


@pytest.mark.parametrize(("given", "read"), [("false", False), ("true", True)])
def test_a_truth_value_on_the_command_line_is_what_it_says(write, given, read):
    assert load_config(write("seed: 0"), [f"model.pretrained={given}"]).model.pretrained is read


# ---- YAML ----


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("client: {optimizer: {lr: 1e-3}}", lambda c: c.client.optimizer.lr == 0.001),
        ("seed: 010", lambda c: c.seed == 10),
        ("name: no", lambda c: c.name == "no"),
        ("name: off", lambda c: c.name == "off"),
        ("name: 12:30:45", lambda c: c.name == "12:30:45"),
        ("name: 2020-01-01", lambda c: c.name == "2020-01-01"),
        ("name: ${seed}", lambda c: c.name == "${seed}"),
        ("\ufeffname: marked", lambda c: c.name == "marked"),
        ("client: {optimizer: {lr: 1}}", lambda c: c.client.optimizer.lr == 1.0),
        ("deterministic: &d false", lambda c: c.deterministic is False),
        ("execution: {client: &c {num_cpus: 1}, scorer: {<<: *c}}", lambda c: c.execution.scorer.num_cpus == 1),
        ("execution: {client: &c {num_cpus: 1}, scorer: *c}", lambda c: c.execution.scorer.num_cpus == 1),
    ],
)
def test_yaml_1_2(write, text, found):
    assert found(load_config(write(text)))
    if "&" not in text and text.isascii():
        key, _, value = text.partition(": ")
        assert found(load_config(write("seed: 0"), [f"{key}={value}"]))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (
            "client:\n  optimizer:\n    lr: 0.1\n    lr: 0.01\n",
            'run.yaml:4: not YAML: found duplicate key "lr" with value "0.01" (original value: "0.1") (a key may be given ',
        ),
        (
            "client:\n\tlocal_epochs: 5\n",
            "run.yaml:2: not YAML: found character '\\t' that cannot start any token (YAML indents",
        ),
        ("", "run.yaml: a configuration is a mapping of sections (data, client, ...), this file is empty"),
        ("# nothing\n", "this file is empty"),
        (
            "- rounds: 3\n",
            "run.yaml: a configuration is a mapping of sections (data, client, ...), this file is a list",
        ),
        ("5\n", "this file is a single value"),
        ("a: {b: 1", "run.yaml:1: not YAML: expected ',' or '}'"),
        ("rounds: 1\n---\nrounds: 2\n", "run.yaml:2: not YAML: but found another document"),
        ("name: 2020-13-45", "run.yaml: not YAML: month must be in 1..12; text that looks like a date"),
        ("seed: !!int x", "run.yaml: not YAML: invalid literal"),
        ("name: a\0b", "run.yaml: not YAML: unacceptable character"),
    ],
)
def test_what_is_not_a_configuration(write, text, problem):
    (found,) = problems(write(text))
    assert problem in found


def test_files_that_cannot_be_read(tmp_path):
    (tmp_path / "latin.yaml").write_bytes("name: été".encode("latin-1"))
    assert problems(tmp_path / "latin.yaml") == ("latin.yaml: is not UTF-8 text (invalid continuation byte at byte 6)",)
    assert problems(tmp_path / "none.yaml") == ("none.yaml: cannot be read: No such file or directory",)
    (found,) = problems(tmp_path)
    assert found.endswith("cannot be read: Is a directory")


# ---- mistakes ----


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("client: {local_epoch: 5}", "client.local_epoch: unknown key; did you mean client.local_epochs?"),
        ("partiton: {alpha: 0.1}", "partiton: unknown key; did you mean partition?"),
        ("zzz: 1", "zzz: unknown key; valid keys: name, seed, rounds, data, "),
        ("algorithm: {name: FedAgv}", '(did you mean fedavg?), got "FedAgv"'),
        ("algorithm: {name: fedavg, mu: 0.1}", "algorithm.mu: unknown key; valid keys: name"),
        ("weighting: {name: fedgv}", '(did you mean fedvg?), got "fedgv"'),
        ("weighting: {name: size, norm: l1}", "weighting.norm: unknown key; valid keys: name"),
        ("weighting: fedvg", 'weighting: should be a section of keys, got "fedvg"'),
        ("weighting: {norm: l1}", "weighting.name: should be "),
        ("weighting: {name: mix, first: {name: mixx}}", "weighting.first.name: should be size or uniform or fedvg or "),
        (
            "weighting: {name: guarded, of: {name: mix, second: {name: fedvg, epss: 1}}}",
            "weighting.of.second.epss: unknown key; did you mean weighting.of.second.eps?",
        ),
        ("weighting: {name: guarded, cap: 0.5}", "weighting.cap: should be greater than or equal to 1, got 0.5"),
        ("weighting: {name: guarded, of: {name: fedvg, window: 2}}", "weighting.of.window: should be odd, got 2"),
        (
            "{algorithm: {name: scaffold}, weighting: {name: guarded, clip: 1.0}}",
            "scaffold keeps sums of whole ones too",
        ),
        ("weighting: {name: mix, share: 1.5}", "weighting.share: should be less than or equal to 1, got 1.5"),
        ("fusion: {name: fedlow}", 'fusion.name: should be fedlaw or finetune (did you mean fedlaw?), got "fedlow"'),
        (
            "fusion: {name: fedlaw, training: {optimizer: {betas: [0, 1]}}}",
            "fusion.training.optimizer.betas: unknown key; did you mean fusion.training.optimizer.beta2?",
        ),
        ("client: {optimizer: {name: adam, momentum: 0.9}}", "client.optimizer.momentum: 0.9 has no effect with adam"),
        (
            "client: {optimizer: {schedule: {name: cosine, every: 5}}}",
            "client.optimizer.schedule.every: 5 has no effect with cosine",
        ),
        ("client: {optimizer: {lr: [0.1]}}", "client.optimizer.lr: should be a number, got [0.1]"),
        (
            "client: {optimizer: {momentun: 0.9}}",
            "client.optimizer.momentun: unknown key; did you mean client.optimizer.momentum?",
        ),
        ("client: 5", "client: should be a section of keys, got 5"),
        ("client: null", "client: should be a section of keys, got null"),
        ("rounds: ten", 'rounds: should be a whole number, got "ten"'),
        ("rounds: '5'", 'rounds: should be a whole number, got "5"'),
        ("rounds: -1", "rounds: should be greater than or equal to 1, got -1"),
        ("rounds: true", "rounds: should be a whole number, got true"),
        ("rounds: 3.0", "rounds: should be a whole number, got 3.0"),
        ("rounds:", "rounds: should be a whole number, got null"),
        ("deterministic: 1", "deterministic: should be a boolean, got 1"),
        ("deterministic: no", 'deterministic: should be a boolean, got "no"'),
        ("client: {batch_size: 16.5}", "client.batch_size: should be a whole number, got 16.5"),
        ("client: {optimizer: {lr: '1e-3'}}", 'client.optimizer.lr: should be a number, got "1e-3"'),
        ("client: {optimizer: {lr: .nan}}", "client.optimizer.lr: should be a finite number, got NaN"),
        ("client: {optimizer: {lr: .inf}}", "client.optimizer.lr: should be a finite number, got Infinity"),
        ("client: {optimizer: {lr: 1e999}}", "client.optimizer.lr: should be a finite number"),
        ("client: {optimizer: {lr: 0}}", "client.optimizer.lr: should be greater than 0, got 0"),
        ("client: {optimizer: {lr: true}}", "client.optimizer.lr: should be a number, got true"),
        ("partition: {alpha: 0}", "partition.alpha: should be greater than 0, got 0"),
        (
            "client: {last_batch: dropp}",
            "client.last_batch: should be auto or keep or drop or merge (did you mean drop?)",
        ),
        ("execution: {backend: Ray}", 'execution.backend: should be ray or serial (did you mean ray?), got "Ray"'),
        (
            "execution: {client_actors: per_clent}",
            "execution.client_actors: should be auto or per_client (did you mean per_client?)",
        ),
        ("client: {fraction: 0}", "client.fraction: should be greater than 0, got 0"),
        ("client: {fraction: 1.2}", "client.fraction: should be less than or equal to 1, got 1.2"),
        ("client: {per_round: 5, fraction: 0.5}", "client: give per_round or fraction, not both"),
        ("client: {per_round: 21}", "client.per_round: 21 exceeds partition.clients: 20"),
        ("partition: {scheme: file}", "partition.path is required with partition.scheme file"),
        ("name: a/b", "name: 'a/b' cannot be the name of a folder"),
        ("name: ''", "name: '' cannot be the name of a folder"),
        ("name: ..", "name: '..' cannot be the name of a folder"),
        ('name: "a\\nb"', r"name: 'a\nb' cannot be the name of a folder"),
        ("name: 5", "name: should be a string, got 5"),
        ("data: {root: 5}", "data.root: should be a string, got 5"),
    ],
)
def test_a_mistake_is_named_with_its_line_and_key(write, text, problem):
    (found,) = problems(write(f"# a comment\n{text}\n"))
    assert found.startswith("run.yaml:2: ")
    assert problem in found
    assert "\n" not in found


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("client.local_epoch=5", "client.local_epoch: unknown key; did you mean client.local_epochs?"),
        ("client={local_epoch: 5}", "client.local_epoch: unknown key; did you mean client.local_epochs?"),
        ("rounds=ten", 'rounds: should be a whole number, got "ten"'),
        ("rounds=", "rounds: should be a whole number, got null"),
        ("name=2020-13-45", "name: '2020-13-45' is not a YAML value: month must be in 1..12"),
        ("name=[1", "name: '[1' is not a YAML value: expected ',' or ']'"),
        ("client={a: 1, a: 2}", "client: '{a: 1, a: 2}' is not a YAML value: found duplicate key \"a\""),
        ("rounds", "'rounds' is not key.path=value"),
        ("=5", "'=5' is not key.path=value"),
        ("client..x=5", "'client..x=5' is not key.path=value"),
        ("rounds.x=1", "rounds.x: rounds is not a section"),
        ("client.per_round=50", "client.per_round: 50 exceeds partition.clients: 20"),
    ],
)
def test_mistakes_in_overrides_name_the_command_line(write, override, problem):
    (found,) = problems(write("rounds: 3\nclient: {local_epochs: 2}\n"), override)
    assert found.startswith(f"command line: {problem}")


def test_an_override_takes_the_place_of_what_the_file_says_below_it(write):
    (found,) = problems(write("client: {local_epoch: 2}\n"), "client={local_epoch: 3}")
    assert found.startswith("command line: client.local_epoch")


def test_all_mistakes_are_listed_together(write):
    text = "rounds: ten\nname: a/b\nclient: {local_epoch: 5, batch_size: 0}\npartition: {alpha: -1}\n"
    text += "execution: {client: {num_gpus: 0.3}}\n"
    found = problems(write(text), "seed=x")
    assert sorted(found) == [
        'command line: seed: should be a whole number, got "x"',
        'run.yaml:1: rounds: should be a whole number, got "ten"',
        "run.yaml:2: name: 'a/b' cannot be the name of a folder",
        "run.yaml:3: client.batch_size: should be greater than or equal to 1, got 0",
        "run.yaml:3: client.local_epoch: unknown key; did you mean client.local_epochs?",
        "run.yaml:4: partition.alpha: should be greater than 0, got -1",
        "run.yaml:5: execution.client.num_gpus: must be auto, a whole number or 1/k (1/2, 1/3, 0.25, ...), got 0.3",
    ]
    assert all(line in str(ConfigError(found)) for line in found)


@pytest.mark.parametrize(
    ("given", "share"),
    [
        ("1/3", Fraction(1, 3)),
        ("0.3333", Fraction(1, 3)),
        ("0.5", Fraction(1, 2)),
        ("2", Fraction(2)),
        ("0", Fraction(0)),
        ("auto", None),
    ],
)
def test_shares_of_a_gpu(write, given, share):
    config = load_config(write("seed: 0"), [f"execution.client.num_gpus={given}"])
    assert gpu_share(config.execution.client.num_gpus) == share


@pytest.mark.parametrize("given", ["0.3", "0.667", "0.6", "1.5", "-1", "x", "true", "null", ".nan", "1/0", "[1]"])
def test_other_shares_of_a_gpu_are_refused(write, given):
    (found,) = problems(write("seed: 0"), f"execution.scorer.num_gpus={given}")
    assert found.startswith("command line: execution.scorer.num_gpus: ")


# ---- overrides and participation ----


def test_overrides_replace_and_add(write):
    path = write("name: base\nrounds: 3\nweighting: {name: fedvg, norm: l2}\n")
    overrides = ["rounds=5", "client.optimizer.lr=0.5", "name=a=b", "data.image_size=null", "partition={clients: 7}"]
    config = load_config(path, overrides)
    assert (config.rounds, config.client.optimizer.lr, config.name) == (5, 0.5, "a=b")
    assert config.partition.clients == 7
    assert config.weighting == FedVG(norm="l2")
    assert load_config(path, ["rounds=5", "rounds=6"]).rounds == 6


def test_another_method_drops_the_settings_of_the_one_before(write):
    path = write("weighting: {name: fedvg, norm: l2}\n")
    assert load_config(path, ["weighting.name=size"]).weighting == Size()
    assert load_config(path, ["weighting.name=fedvg"]).weighting == FedVG(norm="l2")
    assert load_config(path, ["weighting.granularity=tensor"]).weighting == FedVG(norm="l2", granularity="tensor")


@pytest.mark.parametrize(
    ("fraction", "clients", "cohort"),
    [(0.29, 100, 29), (0.57, 100, 57), (0.05, 10, 1), (1.0, 10, 10), (0.1, 20, 2), (0.25, 10, 3), (1e-9, 10, 1)],
)
def test_clients_per_round(fraction, clients, cohort):
    config = resolve({"client": {"fraction": fraction}, "partition": {"clients": clients}})
    assert config.cohort_size == cohort


@given(fraction=st.floats(0, 1, exclude_min=True), clients=st.integers(1, 10_000))
def test_a_cohort_has_someone_and_no_more_than_all(fraction, clients):
    assert 1 <= ClientSettings(fraction=fraction).cohort_size(clients) <= clients


def test_a_tenth_takes_part_unless_a_number_is_given():
    assert ClientSettings().cohort_size(100) == 10
    assert ClientSettings(per_round=7).cohort_size(100) == 7


# ---- paths ----


def test_relative_paths_become_absolute(write, tmp_path):
    config = load_config(write("data: {name: npz, path: x/y.npz}\npartition: {scheme: file, path: p.json}\n"))
    assert config.output.dir == tmp_path / "runs"
    assert config.folder == tmp_path / "runs" / "run"
    assert config.data.root == tmp_path / "data"
    assert config.data.path == tmp_path / "x" / "y.npz"
    assert config.partition.path == tmp_path / "p.json"


def test_the_home_folder_is_known(write, monkeypatch):
    monkeypatch.setenv("HOME", "/home/somebody")
    config = load_config(write("data: {name: npz, path: ~/x.npz}"), ["output.dir=~/runs"])
    assert config.output.dir == Path("/home/somebody/runs")
    assert config.data.path == Path("/home/somebody/x.npz")


def test_variables_give_the_folders_of_relative_paths(write, monkeypatch):
    monkeypatch.setenv("RAYSIM_OUTPUT_DIR", "/results")
    monkeypatch.setenv("RAYSIM_DATA_ROOT", "/sets")
    config = load_config(write("data: {name: npz, path: data/y.npz}"))
    assert config.output.dir == Path("/results")
    assert config.data.root == Path("/sets")
    assert config.data.path == Path("/sets/y.npz")
    config = load_config(write("data: {name: npz, root: /r, path: /p/y.npz}\noutput: {dir: /o}\n"))
    assert (config.output.dir, config.data.root, config.data.path) == (Path("/o"), Path("/r"), Path("/p/y.npz"))


def test_relative_paths_in_a_submitted_job_are_refused(write, monkeypatch):
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", "{}")
    (output,) = problems(write("seed: 0"))
    assert output.startswith("run.yaml: output.dir: runs is relative")
    assert output.endswith("set RAYSIM_OUTPUT_DIR")
    root, output = problems(write("data: {name: cifar10, root: sets}"))
    assert "data.root: sets is relative" in root
    assert root.endswith("set RAYSIM_DATA_ROOT")
    path, output = problems(write("data: {name: npz, path: x/y.npz}"))
    assert "data.path: x/y.npz is relative" in path
    assert path.endswith("set RAYSIM_DATA_ROOT")

    monkeypatch.setenv("RAYSIM_OUTPUT_DIR", "")  # Not a folder.
    problems(write("seed: 0"))
    monkeypatch.setenv("RAYSIM_OUTPUT_DIR", "/results")
    assert load_config(write("seed: 0")).output.dir == Path("/results")
    monkeypatch.delenv("RAYSIM_OUTPUT_DIR")
    stored = write(load_config(write("seed: 0"), ["output.dir=/o"]).as_yaml())
    assert load_config(stored).output.dir == Path("/o")


def test_a_configuration_made_in_code_is_complete():
    config = RunConfig()
    assert config.weighting == Size()
    with pytest.raises(ValueError, match=r"client\.per_round: 30 exceeds partition\.clients: 20"):
        RunConfig(client=ClientSettings(per_round=30))


def test_unknown_names_are_listed_with_the_rest(tmp_path):
    """A wrong number, data set, network and method at once: one look mends all."""
    path = tmp_path / "many.yaml"
    path.write_text("rounds: -1\ndata: {name: digitz}\nmodel: {name: lenet6}\nweighting: {name: fedvq}\n")
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    keys = sorted(problem.split(": ")[1] for problem in caught.value.problems)
    assert keys == ["data.name", "model.name", "rounds", "weighting.name"]


def test_an_algorithm_refuses_local_training_it_is_not_defined_for(tmp_path):
    with pytest.raises(ConfigError, match=r"algorithm: scaffold needs client\.optimizer sgd without momentum"):
        load_config(QUICKSTART, ["algorithm.name=scaffold", "client.optimizer.momentum=0.9"])
