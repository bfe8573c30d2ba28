"""`vllm serve`'s arguments as the supervisor reads them."""

import errno
import json
import os
from pathlib import Path

import pytest

from aerie.engine_arguments import ConfigurationError
from aerie.supervisor.arguments import check_paths, draining, read


def config(tmp_path, text):
    path = tmp_path / "serve.yaml"
    path.write_text(text)
    return str(path)


@pytest.mark.parametrize(
    "arguments",
    [
        ["/m/kimi"],
        ["/m/kimi", "--enforce-eager"],
        ["--enforce-eager", "--model", "/m/kimi"],
        ["--enforce-eager", "--model=/m/kimi"],
    ],
)
def test_the_model_is_found_wherever_it_stands(arguments):
    found = read(arguments, {})
    assert (found.model, found.served_name, found.url) == ("/m/kimi", "/m/kimi", "http://127.0.0.1:8000")


@pytest.mark.parametrize(
    ("arguments", "url"),
    [
        (["--port", "8100"], "http://127.0.0.1:8100"),
        (["--port=8100", "--host", "0.0.0.0"], "http://127.0.0.1:8100"),
        (["--host", "::"], "http://[::1]:8000"),
        (["--host", "fe80::1%eth0"], "http://[fe80::1%eth0]:8000"),
        (["--host", "gpu-host_1.example"], "http://gpu-host_1.example:8000"),
        (["--host", "localhost."], "http://localhost.:8000"),
        (["--host", "192.0.2.7", "--ssl-keyfile", "k", "--ssl-certfile", "c"], "https://192.0.2.7:8000"),
        (["--port", "8100", "--port", "8101"], "http://127.0.0.1:8101"),
    ],
)
def test_the_address_is_one_that_can_be_reached_from_here(arguments, url):
    assert read(["m", *arguments], {}).url == url


@pytest.mark.parametrize(
    "arguments",
    [["--served-model-name", "kimi", "k2"], ["--served_model_name", "kimi"], ["--served-model-name=kimi"]],
)
def test_the_first_served_name_counts(arguments):
    assert read(["m", *arguments], {}).served_name == "kimi"


def test_the_config_file_is_read_and_the_command_line_wins(tmp_path):
    file = config(
        tmp_path,
        "model: /m/kimi\nserved_model_name: [kimi, k2]\nport: 9000\nhost: 0.0.0.0\n"
        "speculative-config:\n  model: /m/eagle\n  num_speculative_tokens: 3\n",
    )
    found = read(["--config", file], {})
    assert (found.model, found.served_name, found.url) == ("/m/kimi", "kimi", "http://127.0.0.1:9000")
    assert found.drafter == "/m/eagle"
    found = read(["/m/other", "--config", file, "--port", "9001", "--served-model-name", "mine"], {})
    assert (found.model, found.served_name, found.url) == ("/m/other", "mine", "http://127.0.0.1:9001")


@pytest.mark.parametrize(
    ("given", "tokens"),
    [
        ([], None),
        (["--max-num-batched-tokens", "9" * 5000], None),
        (["--max-num-batched-tokens", "8192"], 8192),
        (["--max_num_batched_tokens=4096"], 4096),
        (["--max-num-batched-tokens", "8k"], None),  # vLLM knows what that is; nobody else needs to
    ],
)
def test_the_largest_step_is_what_the_engine_was_told(given, tokens):
    assert read(["m", *given], {}).step_tokens == tokens


@pytest.mark.parametrize("flag", ["--speculative-config", "--speculative_config", "-sc"])
def test_the_drafter_stands_in_the_speculative_config(flag):
    assert read(["m", flag, json.dumps({"model": "/m/eagle"})], {}).drafter == "/m/eagle"
    assert read(["m", flag, json.dumps({"method": "ngram"})], {}).drafter is None
    assert read(["m", flag, "no json"], {}).drafter is None


@pytest.mark.parametrize(
    "arguments",
    [["--api-key", "secret"], ["--api-key=secret"], ["--api_key", "secret"], ["--api-k", "secret"], ["--grpc"],
     ["--grpc-port", "9"], ["--uds", "/s"], ["--ud", "/s"], ["--headless"], ["--head"]],
)  # fmt: skip
def test_what_goes_round_the_keys_or_the_check_is_refused_without_telling_it(arguments):
    with pytest.raises(ConfigurationError, match="is refused: ") as refusal:
        read(["m", *arguments], {})
    assert "secret" not in str(refusal.value)


@pytest.mark.parametrize("given", ["--disable-log-stats", "--disable_log_stats", "--disable-log-s"])
def test_an_engine_without_statistics_is_refused_with_the_reason(given, tmp_path):
    with pytest.raises(ConfigurationError, match="a hung engine cannot be told from a busy one"):
        read(["m", given], {})
    with pytest.raises(ConfigurationError, match="--disable-log-stats is refused"):
        read(["--config", config(tmp_path, "model: m\ndisable-log-stats: true\n")], {})
    assert read(["--config", config(tmp_path, "model: m\ndisable-log-stats: false\n")], {}).model == "m"
    assert read(["m", "--disable-log-requests"], {}).model == "m"


@pytest.mark.parametrize("given", ["--enable-sleep-mode", "--enable_sleep_mode", "--enable-sleep"])
def test_an_engine_that_can_be_put_to_sleep_is_refused_with_the_reason(given, tmp_path):
    with pytest.raises(ConfigurationError, match="looks like one that hangs, and is ended as one"):
        read(["m", given], {})
    assert read(["--config", config(tmp_path, "model: m\nenable-sleep-mode: false\n")], {}).model == "m"


def test_the_routes_that_put_an_engine_to_sleep_are_refused_with_the_reason():
    with pytest.raises(ConfigurationError, match=r"VLLM_SERVER_DEV_MODE is refused: .* looks like one that hangs"):
        read(["m"], {"VLLM_SERVER_DEV_MODE": "1"})
    assert read(["m"], {"VLLM_SERVER_DEV_MODE": "0"}).model == "m"


@pytest.mark.parametrize(
    ("arguments", "added"),
    [([], ["--shutdown-timeout", "90"]), (["--shutdown-timeout", "90"], []), (["--shutdown-timeout=90"], [])],
)
def test_the_drain_timeout_is_vllms_shutdown_timeout(arguments, added, tmp_path):
    assert draining(read(["m", *arguments], {}), 90) == added
    assert draining(read(["--config", config(tmp_path, "model: m\nshutdown-timeout: 90\n")], {}), 90) == []


@pytest.mark.parametrize("given", ["0", "120", "no"])
def test_two_limits_of_a_drain_that_differ_are_refused(given):
    with pytest.raises(ConfigurationError) as error:
        draining(read(["m", "--shutdown-timeout", given], {}), 90)
    assert str(error.value).startswith(
        f"engine argument --shutdown-timeout {given} contradicts the supervisor's --drain-timeout 90: "
    )


def test_the_config_file_cannot_bring_them_in_either(tmp_path):
    with pytest.raises(ConfigurationError, match="--api-key is refused"):
        read(["--config", config(tmp_path, "model: m\napi-key: secret\n")], {})
    assert read(["--config", config(tmp_path, "model: m\ngrpc: false\n")], {}).model == "m"


@pytest.mark.parametrize("arguments", [["--hf-token", "secret"], ["--hf-token=secret"], ["--hf-t", "secret"]])
def test_a_token_on_the_command_line_is_refused_without_telling_it(arguments, tmp_path):
    with pytest.raises(ConfigurationError, match=r"--hf-t.* is refused with a value: .*HF_TOKEN_PATH") as refusal:
        read(["m", *arguments], {})
    assert "secret" not in str(refusal.value)
    assert read(["m", "--hf-token"], {}).model == "m"
    assert read(["--config", config(tmp_path, "model: m\nhf-token: x\n")], {}).model == "m"


def test_other_options_that_begin_alike_pass():
    assert read(["m", "--api-server-count", "2", "--grammar-backend", "x"], {}).model == "m"


@pytest.mark.parametrize("variable", ["VLLM_API_KEY", "VLLM_USE_RUST_FRONTEND"])
def test_variables_that_go_round_the_keys_are_refused(variable):
    with pytest.raises(ConfigurationError, match=f"{variable} is refused"):
        read(["m"], {variable: "1"})
    assert read(["m"], {variable: "0"}).model == "m"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "no model was given"),
        (["--port", "8000"], "no model was given"),
        (["--config", "/no/such.yaml"], "--config /no/such.yaml does not exist"),
        (["--config", "/"], "--config / cannot be read"),
        (["--config"], "--config needs one file"),
        (["m", "--port", "http"], "--port 'http' is none: a port is a number from 1 to 65535"),
        (["m", "--port"], "--port None is none: a port is a number from 1 to 65535"),
        (["m", "--port", "0"], "--port '0' is none: a port is a number from 1 to 65535"),
        (["m", "--port", "-1"], "--port '-1' is none: a port is a number from 1 to 65535"),
        (["m", "--port", "99999"], "--port '99999' is none: a port is a number from 1 to 65535"),
        (["m", "--port", "9" * 5000], "99' is none: a port is a number from 1 to 65535"),
        (["m", "--port", "8000", "8001"], "--port ['8000', '8001'] is none: a port is a number from 1 to 65535"),
        (["m", "--host", "[::1]"], "--host needs an IP address or a host's name, not '[::1]'"),
        (["m", "--host", "http://x"], "--host needs an IP address or a host's name, not 'http://x'"),
        (["m", "--host", "a..b"], "--host needs an IP address or a host's name, not 'a..b'"),
        (["m", "--host", "x" * 64], "--host needs an IP address or a host's name, not 'xx"),
        (["m", "--host", "x/y"], "--host needs an IP address or a host's name, not 'x/y'"),
    ],
)
def test_what_cannot_work_is_told_in_one_line(arguments, message):
    with pytest.raises(ConfigurationError) as error:
        read(arguments, {})
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [", "is not YAML"),
        ("served-model-name: 2025-02-30", "is not YAML"),
        ("- a\n", "option: value"),
        ("", "option: value"),
    ],
)
def test_a_config_file_that_is_none_is_told(tmp_path, text, message):
    with pytest.raises(ConfigurationError, match=message) as error:
        read(["--config", config(tmp_path, text)], {})
    assert "\n" not in str(error.value)


def test_paths_that_are_not_there_are_told_with_their_role(tmp_path):
    target = tmp_path / "kimi"
    target.mkdir()
    with pytest.raises(ConfigurationError, match=f"model {target} is an empty directory"):
        check_paths(read([str(target)], {}))
    (target / "config.json").write_text("{}")
    check_paths(read([str(target)], {}))
    missing = json.dumps({"model": str(tmp_path / "eagle")})
    with pytest.raises(ConfigurationError, match=f"drafter {tmp_path}/eagle does not exist"):
        check_paths(read([str(target), "--speculative-config", missing], {}))


@pytest.mark.parametrize("number", [errno.EACCES, errno.ESTALE, errno.EIO])
def test_a_path_that_cannot_be_read_is_told_with_who_wants_to(tmp_path, monkeypatch, number):
    def fails(_path):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(Path, "exists", fails)
    message = f"model {tmp_path} cannot be read: {os.strerror(number)}; .*uid {os.getuid()}"
    with pytest.raises(ConfigurationError, match=message):
        check_paths(read([str(tmp_path)], {}))


def test_a_path_that_is_too_long_is_told(tmp_path):
    with pytest.raises(ConfigurationError, match="cannot be read: File name too long"):
        check_paths(read([f"{tmp_path}/{'x' * 300}"], {}))


def test_a_repositorys_name_is_left_to_vllm():
    check_paths(read(["moonshotai/Kimi-K2.5"], {}))


def test_a_drafter_that_a_file_names_in_json(tmp_path):
    file = config(tmp_path, """model: m\nspeculative-config: '{"method": "eagle3", "model": "/d"}'\n""")
    assert read(["--config", file], {}).drafter == "/d"


def test_a_drafter_by_the_short_way():
    assert read(["m", "--spec-method", "eagle3", "--spec-model", "/d"], {}).drafter == "/d"
