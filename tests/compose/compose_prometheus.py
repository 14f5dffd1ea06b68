"""Prometheus as deploy/compose/observability.yml starts it, and what it knows.

Its public image cannot be pulled: the stand-in has the program of Debian's package (2.42), and the user, the folder and the entry
point of the public image.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import shutil
import subprocess
import tempfile
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Collection
from http import HTTPStatus
from pathlib import Path
from typing import Any

from compose_engine import Engine
from compose_images import BASE, BUILD_LIMIT_S, CACHE, ROOT
from compose_project import WHOLE_LIMIT_S, condition

IMAGE = "decant-tests/prometheus:debian"
DASHBOARD = ROOT / "deploy" / "grafana" / "dashboards" / "decant.json"
SCRAPE_INTERVAL_S = 5
RATE_INTERVAL = f"{4 * SCRAPE_INTERVAL_S}s"
"""What Grafana puts for `$__rate_interval`: four times the data source's `timeInterval`, on a panel that is not zoomed out."""

DOCKERFILE = f"""FROM {BASE}
COPY prometheus /bin/prometheus
RUN install -d -o nobody -g nogroup /prometheus
USER nobody
ENTRYPOINT ["/bin/prometheus"]
"""


def program(name: str) -> Path:
    """`prometheus` or `promtool`, taken out of Debian's package, which is not installed: it would start a server."""
    programs = CACHE / "prometheus" / "usr" / "bin"
    if not programs.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=CACHE, prefix=".prometheus-") as scratch:
            subprocess.run(["apt-get", "download", "-qq", "prometheus"], cwd=scratch, check=True, timeout=300)
            (package,) = Path(scratch).glob("prometheus_*.deb")
            subprocess.run(["dpkg-deb", "-x", str(package), f"{scratch}/out"], check=True, timeout=120)
            (Path(scratch) / "out").rename(CACHE / "prometheus")
    return programs / name


def build_image(engine: Engine) -> None:
    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(program("prometheus"), folder)
        (Path(folder) / "Dockerfile").write_text(DOCKERFILE)
        engine.docker("build", "--quiet", "--tag", IMAGE, folder, limit_s=BUILD_LIMIT_S)


def panels(rate_interval: str = RATE_INTERVAL) -> dict[str, tuple[str, ...]]:
    """PromQL of the dashboard's panels as Grafana sends it, by row and title. There are no template variables."""
    dashboard = json.loads(DASHBOARD.read_text())
    assert dashboard["templating"]["list"] == [], "a variable that is not put into the queries here"
    row, found = "", {}
    for panel in dashboard["panels"]:
        if panel["type"] == "row":
            row = panel["title"]
            continue
        title = f"{row}: {panel['title']}"
        assert title not in found
        found[title] = tuple(target["expr"].replace("$__rate_interval", rate_interval) for target in panel["targets"])
        assert not any("$" in query for query in found[title]), title
    return found


class Prometheus:
    """Asked over its HTTP API; what it complains of raises AssertionError, and OSError where nobody answers yet."""

    def __init__(self, port: int) -> None:
        self._url = f"http://127.0.0.1:{port}/api/v1"

    async def scrapes(self, instances: Collection[str]) -> None:
        """Waits until it scrapes all these, and nothing else."""
        found: dict[str, str] = {}

        async def all_up() -> bool:
            with contextlib.suppress(OSError):  # it has only just been started
                found.clear()
                found.update(await asyncio.to_thread(self.targets))
            return found == dict.fromkeys(instances, "up")

        await condition(all_up, WHOLE_LIMIT_S, lambda: f"every target is up: {found}")

    async def evaluated_rules(self) -> list[dict[str, Any]]:
        """Waits until each has been evaluated; all without an error."""
        rules: list[dict[str, Any]] = []

        async def evaluated() -> bool:
            rules[:] = await asyncio.to_thread(self.rules)
            return all(rule["health"] != "unknown" for rule in rules)

        await condition(evaluated, WHOLE_LIMIT_S, lambda: f"every rule is evaluated: {rules}")
        assert [rule for rule in rules if rule["health"] != "ok"] == []
        return rules

    async def alerts_on(self, *wanted: tuple[str, str]) -> float:
        """Seconds until it has noticed, by alert and `instance`: what must hold for a while before it fires is pending."""
        found: set[tuple[str, str]] = set()

        async def noticed() -> bool:
            found.update(await asyncio.to_thread(self.alerts))
            return found >= set(wanted)

        return await condition(noticed, WHOLE_LIMIT_S, lambda: f"alerts {wanted}; so far {found}")

    async def shows(self, *titles: str, of_the_last: str = RATE_INTERVAL) -> None:
        """Waits until each of these panels has had data."""
        queries, empty = panels(of_the_last), list(titles)

        async def shown(title: str) -> bool:
            return all([await asyncio.to_thread(self.query, query) for query in queries[title]])

        async def all_shown() -> bool:
            empty[:] = [title for title in empty if not await shown(title)]
            return not empty

        await condition(all_shown, WHOLE_LIMIT_S, lambda: f"data in {empty}")

    async def knows_how_many_are_usual(self, job: str) -> None:
        """Waits until `DecantProcessesMissing` has something to compare with."""
        usual = f'quantile_over_time(0.5, sum by (job) (up{{job="{job}"}})[1h:1m])'

        async def known() -> bool:
            return bool(await asyncio.to_thread(self.query, usual))

        await condition(known, WHOLE_LIMIT_S, f"Prometheus knows how many of {job} are usual")

    def query(self, expression: str) -> dict[str, float]:
        """Its values now that are numbers, by their labels."""
        result = self._get("query", query=expression)["result"]
        values = {json.dumps(one["metric"], sort_keys=True): float(one["value"][1]) for one in result}
        return {labels: value for labels, value in values.items() if not math.isnan(value)}

    def targets(self) -> dict[str, str]:
        """Health (up, down, unknown) by instance."""
        return {one["labels"]["instance"]: one["health"] for one in self._get("targets")["activeTargets"]}

    def rules(self) -> list[dict[str, Any]]:
        return [rule for group in self._get("rules")["groups"] for rule in group["rules"]]

    def alerts(self) -> dict[tuple[str, str], str]:
        """State (pending, firing) by name and instance."""
        found = self._get("alerts")["alerts"]
        return {(one["labels"]["alertname"], one["labels"].get("instance", "")): one["state"] for one in found}

    def _get(self, path: str, **asked: str) -> dict[str, Any]:
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(f"{self._url}/{path}?{urllib.parse.urlencode(asked)}", timeout=10) as answer:
                body = json.load(answer)
        except urllib.error.HTTPError as refused:
            if refused.code == HTTPStatus.SERVICE_UNAVAILABLE:  # it listens before it can answer
                raise
            raise AssertionError(f"{path} {asked}: {refused.read().decode()}") from refused
        assert body["status"] == "success", body
        assert not body.get("warnings"), body
        return dict(body["data"])
