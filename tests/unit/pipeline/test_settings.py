"""The pipeline's settings: what is refused, what it becomes, and which configuration a session gets."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from lakebed.core.settings import Contradiction, Secret, Section
from lakebed.pipeline.bronze.payloads import read_topic_contracts
from lakebed.pipeline.settings import AuditSettings, BronzeSettings, PipelineSettings
from lakebed.pipeline.silver import contract
from lakebed.pipeline.silver.contract import BadContract, read_contracts
from lakebed.spark.session import configuration
from lakebed.spark.settings import LineageSettings, SparkSettings


def refused(settings: Section, **changed: object) -> bool:
    try:
        msgspec.structs.replace(settings, **changed).check()
    except Contradiction as error:
        assert next(iter(changed)) in error.message
        return True
    return False


@pytest.mark.parametrize("name", ["step_objects", "step_rows", "step_bytes", "overlap_s", "file_bytes"])
def test_bronzes_limits_must_be_above_zero(name: str) -> None:
    """A step that takes nothing would run for ever."""
    assert [True, True, False] == [refused(BronzeSettings(), **{name: value}) for value in (0, -1, 1)]


@pytest.mark.parametrize("name", ["run_every_s", "retention_days", "upkeep_every_s"])
def test_bronzes_intervals_may_be_zero_and_not_below(name: str) -> None:
    """0 is never."""
    assert [False, True] == [refused(BronzeSettings(), **{name: value}) for value in (0, -1)]


def test_bronzes_folder_of_topics_is_none_unless_named() -> None:
    """An empty word is no folder of the working directory."""
    assert (None, Path("x")) == (BronzeSettings().topics_folder, BronzeSettings(topics="x").topics_folder)


@pytest.mark.parametrize("name", ["retention_interval_s"])
def test_retention_must_be_above_zero(name: str) -> None:
    """0 days would remove everything at once."""
    assert [True, False] == [refused(PipelineSettings(), **{name: value}) for value in (0, 1)]


def test_an_interval_is_not_negative_and_lineage_has_an_http_address() -> None:
    """Each refusal names the key."""
    assert refused(PipelineSettings(), models_every_s=-1)
    assert not refused(PipelineSettings(), gold="g", contracts="c")
    for url, wrong in (("ftp://x", True), ("http://x", False), ("https://x", False), ("", False)):
        assert wrong == refused(SparkSettings(), lineage=LineageSettings(url=url)), url
    folders = PipelineSettings(contracts="c", gold="examples")
    assert (Path("c"), "gold") == (folders.contracts_folder, (folders.gold_folder or Path()).name)
    assert (None, None) == (PipelineSettings().contracts_folder, PipelineSettings().gold_folder)
    assert list((folders.gold_folder or Path()).glob("*.sql"))


def test_a_lineage_address_is_joined_with_one_slash() -> None:
    """However it is written."""
    assert "http://h/api/v1/lineage" == LineageSettings(url="http://h/").address
    assert "http://h/x" == LineageSettings(url="http://h", endpoint="/x").address


def test_the_standard_environment_counts_where_no_address_is_set() -> None:
    """Settings come first; what the environment leaves out stays as it is set; it can be switched off there."""
    env = {"OPENLINEAGE_URL": "http://e", "OPENLINEAGE_API_KEY": "k", "OPENLINEAGE_NAMESPACE": "n"}
    ours = LineageSettings(url="http://s")
    found = LineageSettings(api_key=Secret("old")).or_environment(env)

    assert ours == ours.or_environment(env)
    assert ("http://e", "api/v1/lineage", "k", "n") == (
        found.url,
        found.endpoint,
        found.api_key.reveal(),
        found.namespace,
    )
    bare = LineageSettings(api_key=Secret("old"), namespace="mine").or_environment({"OPENLINEAGE_ENDPOINT": "e"})
    assert ("", "e", "old", "mine") == (bare.url, bare.endpoint, bare.api_key.reveal(), bare.namespace)
    assert "" == LineageSettings().or_environment({**env, "OPENLINEAGE_DISABLED": "TRUE"}).url


def test_a_session_is_remote_or_has_a_master_of_its_own() -> None:
    """A remote address has its form, and a shuffle at least one partition."""
    assert refused(SparkSettings(), remote="sc://h:1", master="spark://m")
    assert refused(SparkSettings(), remote="h:1")
    assert not refused(SparkSettings(), remote="sc://h:1")
    assert [True, False] == [refused(SparkSettings(), shuffle_partitions=value) for value in (0, 1)]
    local = {"local[2]": True, "local[*]": True, "spark://m:7077": False}
    assert local == {master: SparkSettings(master=master).is_local for master in local}
    assert not SparkSettings(remote="sc://h:1").is_local


def test_a_sessions_configuration_is_ours_and_the_settings_have_the_last_word() -> None:
    """Times are UTC; a local session listens on loopback alone; a cluster's driver is not pinned there."""
    reported = configuration(SparkSettings(shuffle_partitions=7, driver_memory="3g", conf={"spark.ui.enabled": "true"}))
    cluster = configuration(SparkSettings(master="spark://m:7077"))

    assert ("UTC", "7", "3g", "true", "local[*]") == (
        reported["spark.sql.session.timeZone"],
        reported["spark.sql.shuffle.partitions"],
        reported["spark.driver.memory"],
        reported["spark.ui.enabled"],
        reported["spark.master"],
    )
    assert ("127.0.0.1", "127.0.0.1") == (reported["spark.driver.host"], reported["spark.driver.bindAddress"])
    assert "spark.driver.host" not in cluster and "false" == cluster["spark.ui.enabled"]
    quick = configuration(SparkSettings(quick=True))["spark.driver.extraJavaOptions"]
    assert "TieredStopAtLevel=1" in quick and "TieredStopAtLevel" not in reported["spark.driver.extraJavaOptions"]


def test_an_audits_grace_may_be_zero_and_not_below() -> None:
    """Time does not run backwards."""
    assert [False, True] == [refused(AuditSettings(), grace_s=value) for value in (0.0, -0.1)]


# Folders of contracts and models.

ORDERS = "table: orders\nkeys: [id]\ncolumns:\n  id: {type: long, required: true}\n"


def test_contracts_are_read_in_the_order_of_their_names_up_to_a_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other files are left alone; one contract more than the limit is refused; two of one table too."""
    for name in ("b", "a"):
        (tmp_path / f"{name}.yaml").write_text(ORDERS.replace("orders", name))
    (tmp_path / "c.yml").write_text("no contract")
    monkeypatch.setattr(contract, "CONTRACTS_MAX", 2)
    assert ["a", "b"] == [one.table for one in read_contracts(tmp_path)]
    assert ["a", "b"] == [one.topic for one in read_topic_contracts(tmp_path)]
    (tmp_path / "d.yaml").write_text(ORDERS)
    for read in (read_contracts, read_topic_contracts):
        with pytest.raises(BadContract, match="more than 2"):
            read(tmp_path)
    (tmp_path / "b.yaml").unlink()
    (tmp_path / "d.yaml").write_text(ORDERS.replace("orders", "a"))
    for read in (read_contracts, read_topic_contracts):
        with pytest.raises(BadContract, match=r"d\.yaml: another contract is of table 'a' already"):
            read(tmp_path)


def test_a_contract_has_limits_and_a_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its bytes and its checks; any change of it gives another digest, and its source may have another name."""
    checks = "checks:\n" + "".join(f"  c{number}: id > {number}\n" for number in range(3))
    monkeypatch.setattr(contract, "CHECKS_MAX", 3)
    found = contract.read_contract(ORDERS + checks + "source: raw\n", "o")
    assert ("raw", 3) == (found.bronze, len(found.checks))
    with pytest.raises(BadContract, match="more than 3 checks"):
        contract.read_contract(ORDERS + checks + "  c9: id > 9\n", "o")
    assert found.digest == contract.read_contract(ORDERS + checks + "source: raw\n", "p").digest
    assert found.digest != contract.read_contract(ORDERS + checks, "o").digest
    assert found.digest.startswith("contract ")
    monkeypatch.setattr(contract, "CONTRACT_BYTES_MAX", len(ORDERS))
    contract.read_contract(ORDERS, "o")
    with pytest.raises(BadContract, match="at most"):
        contract.read_contract(ORDERS + " ", "o")
