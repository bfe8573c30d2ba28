"""The alert rules: what they are made of, when they fire, and a real Prometheus that fires one."""

from __future__ import annotations

import re
import socket
import subprocess
import time
from datetime import UTC, datetime
from pathlib import Path

import httpx
import pytest
import yaml
from states import EXAMPLES, Examples
from status_port import StatusPort

from aerie.status.metrics import exposition

ROOT = Path(__file__).parents[2]
MONITORING = ROOT / "monitoring"
CASES = Path(__file__).parent / "alerts.test.yaml"
RULES = [
    rule for group in yaml.safe_load((MONITORING / "alerts.yaml").read_text())["groups"] for rule in group["rules"]
]
NAMES = [rule["alert"] for rule in RULES]
# Prometheus' own words in the rules' expressions; what else stands there with an underscore or a colon is a metric.
METRIC = re.compile(r"\b(?:aerie_|vllm:)\w+")


def anchors(page):
    """Return the addresses of the page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


def test_the_rules_are_sound(promtool):
    promtool("check", "rules", "--lint=all", "--lint-fatal", MONITORING / "alerts.yaml")
    promtool("check", "config", MONITORING / "prometheus.yaml")


def test_the_rules_fire_when_they_should_and_only_then(promtool):
    promtool("test", "rules", CASES)


@pytest.mark.parametrize("rule", RULES, ids=NAMES)
def test_a_rule_is_complete(rule):
    assert set(rule["annotations"]) == {"summary", "description", "runbook"}
    assert rule["labels"]["severity"] in {"critical", "warning"}
    page, anchor = rule["annotations"]["runbook"].split("#")
    assert anchor == rule["alert"].lower()
    assert anchor in anchors(ROOT / page)


@pytest.mark.parametrize("name", NAMES)
def test_every_rule_has_a_case_in_which_it_fires(name):
    cases = yaml.safe_load(CASES.read_text())["tests"]
    expected = [
        sample["labels"]
        for case in cases
        for expression in case["promql_expr_test"]
        for sample in expression.get("exp_samples", ())
    ]
    assert any(f'alertname="{name}"' in labels for labels in expected)


@pytest.mark.parametrize("rule", RULES, ids=NAMES)
def test_a_rule_asks_for_metrics_that_there_are(rule):
    example = Examples()
    ours = {
        line.split()[2]
        for name in EXAMPLES
        for line in exposition(getattr(example, name)(), example.now).decode().splitlines()
        if line.startswith("# TYPE")
    }
    engines = (ROOT / "src/aerie/engine_metrics.py").read_text()
    for metric in METRIC.findall(rule["expr"]):
        assert metric in ours or f'"{metric}"' in engines, metric


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_metrics_keep_prometheus_conventions(promtool, name):
    example = Examples()
    assert promtool("check", "metrics", text=exposition(getattr(example, name)(), example.now).decode()) == ""


def eventually(look, seconds=60.0):
    """Return what `look` gives as soon as it gives anything."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if found := look():
            return found
        time.sleep(0.2)
    pytest.fail(f"nothing within {seconds:.0f} s")


def test_a_real_prometheus_scrapes_the_status_port_and_fires(prometheus, tmp_path):
    """With the configuration that ships, but for the port and the pace."""
    configuration = yaml.safe_load((MONITORING / "prometheus.yaml").read_text())
    configuration["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    configuration["rule_files"] = [str(MONITORING / name) for name in configuration["rule_files"]]
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    with StatusPort(Examples().ready()) as status:
        aerie = next(job for job in configuration["scrape_configs"] if job["job_name"] == "aerie")
        aerie["static_configs"][0]["targets"] = [f"127.0.0.1:{status.port}"]
        (tmp_path / "prometheus.yaml").write_text(yaml.safe_dump(configuration))
        command = [prometheus, "--config.file=prometheus.yaml", f"--web.listen-address={address}", "--log.level=warn"]
        with (tmp_path / "log").open("w") as log:
            server = subprocess.Popen(command, cwd=tmp_path, stdout=log, stderr=subprocess.STDOUT)
        try:
            with httpx.Client(base_url=f"http://{address}/api/v1", trust_env=False, timeout=10) as client:

                def ready():
                    try:
                        found = client.get("/query", params={"query": "aerie_ready"}).json()["data"]["result"]
                    except (httpx.TransportError, KeyError, ValueError):
                        return None
                    return found and found[0]["value"][1]

                def firing():
                    alerts = client.get("/alerts").json()["data"]["alerts"]
                    return {alert["labels"]["alertname"]: alert for alert in alerts if alert["state"] == "firing"}

                assert eventually(ready) == "1"
                assert firing() == {}
                status.state = Examples(datetime.now(UTC)).held()
                held = eventually(lambda: firing().get("AerieHeld"))
                waits = f"Aerie at 127.0.0.1:{status.port} is held and waits for a person"
                assert held["annotations"]["summary"] == waits
                failed = firing()["AerieEngineFailed"]["annotations"]["summary"]
                assert failed.endswith("failed (configuration, eagle3-target-not-listed)")
                status.state = Examples().ready()
                assert eventually(lambda: firing() == {})
        finally:
            server.terminate()
            assert server.wait(30) == 0, (tmp_path / "log").read_text()
