"""Settings: names, aliases, ranges, and the trip to a child process."""

from __future__ import annotations

import pathlib

import msgspec
import pytest
from ramet.runtime.config import (
    ABSENT,
    ALIASES,
    API_KEY_VARIABLE,
    EngineConfig,
    UnknownSettingError,
    settings,
)
from ramet.runtime.protocol import BadInputError


def test_aliases_reach_their_fields():
    config = EngineConfig.from_settings(
        {"model": "m", "max-model-len": 64, "max_num_seqs": 3, "gpu_memory_utilization": 0.5}
    )
    assert (config.model_path, config.context_length) == ("m", 64)
    assert (config.max_running_requests, config.mem_fraction_static) == (3, 0.5)


def test_prefix_caching_alias_is_turned_round():
    assert EngineConfig.from_settings({"enable_prefix_caching": False}).disable_radix_cache
    assert not EngineConfig.from_settings({"enable_prefix_caching": True}).disable_radix_cache


def test_every_alias_points_at_a_field_and_no_absent_name_is_one():
    fields = set(EngineConfig.__struct_fields__)
    assert set(ALIASES.values()) <= fields
    assert not fields & set(ABSENT)
    assert not set(ALIASES) & set(ABSENT)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"tp": 2}, "tensor parallelism"),
        ({"modle_path": "x"}, "did you mean model_path"),
        ({"nonsense": 1}, "unknown setting nonsense"),
    ],
)
def test_unknown_and_absent_settings_are_type_errors_that_name_them(given, said):
    with pytest.raises(TypeError, match=said) as caught:
        EngineConfig.from_settings(given)
    assert isinstance(caught.value, UnknownSettingError)
    assert caught.value.param == next(iter(given))


@pytest.mark.parametrize(
    "given",
    [
        {"page_size": 2},
        {"dtype": "float8"},
        {"context_length": 1},
        {"context_length": "64"},
        {"mem_fraction_static": 1.0},
        {"chunked_prefill_size": 0},
        {"chunked_prefill_size": -2},
        {"zmq_port": 70000},
        {"zmq_port": True},
        {"random_seed": 2**31},
        {"model_path": ""},
        {"model_path": None},
    ],
)
def test_values_out_of_range_name_their_setting(given):
    (name,) = given
    with pytest.raises(BadInputError, match=name) as caught:
        EngineConfig.from_settings(given)
    assert caught.value.param == name


def test_a_setting_given_by_two_names_is_refused():
    with pytest.raises(BadInputError, match="random_seed is given twice"):
        EngineConfig.from_settings({"seed": 1, "random_seed": 1})


def test_an_integer_will_do_for_a_float_and_a_path_for_a_string():
    config = EngineConfig.from_settings(
        {"schedule_conservativeness": 2, "model_path": pathlib.Path("folder/m")}
    )
    assert config.schedule_conservativeness == 2.0
    assert config.model_path == "folder/m"


def test_json_keeps_everything_but_the_key(monkeypatch):
    config = EngineConfig.from_settings({"dtype": "float32", "api_key": "secret", "seed": 7})
    assert "secret" not in config.to_json()
    monkeypatch.setenv(API_KEY_VARIABLE, "secret")
    assert EngineConfig.from_json(config.to_json()) == config
    monkeypatch.delenv(API_KEY_VARIABLE)
    assert EngineConfig.from_json(config.to_json(with_key=True)) == config


@pytest.mark.parametrize("text", ["", "[]", "{", '{"dtype": 3}', '{"unknown_thing": 1}'])
def test_bad_json_is_bad_input(text):
    with pytest.raises(BadInputError):
        EngineConfig.from_json(text)


def test_every_setting_is_described_and_its_default_is_in_range():
    assert [s.name for s in settings()] == list(EngineConfig.__struct_fields__)
    defaults = {s.name: s.default for s in settings()}
    assert EngineConfig.from_settings(defaults) == EngineConfig()
    for setting in settings():
        assert setting.help.endswith("."), setting.name
        assert setting.type in (int, float, str, bool)
        assert setting.optional == (setting.default is None)
        if setting.choices:
            assert setting.default in setting.choices


def test_config_cannot_be_changed():
    with pytest.raises(AttributeError):
        EngineConfig().dtype = "float32"  # pyright: ignore
    assert msgspec.structs.replace(EngineConfig(), dtype="float32").dtype == "float32"
