"""The text of topologies: round trip, defaults, errors."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flux_inductor.planning.topology import Topology

few = st.integers(1, 8)
links = st.sampled_from([("cpu", "shm"), ("cuda", "nvlink"), ("cuda", "pcie")])


@given(few, few, few, links, st.booleans(), st.integers(0, 200))
def test_text_round_trips(
    per_domain: int, numa: int, nodes: int, link: tuple[str, str], shared: bool, sms: int
) -> None:
    ranks = per_domain * numa * nodes
    sms = sms if link[0] == "cuda" else 0
    topology = Topology(link[0], ranks, nodes, numa, link[1], shared, sms)  # type: ignore[arg-type]
    assert Topology.parse(str(topology)) == topology
    assert topology.ranks_per_node == per_domain * numa


def test_texts() -> None:
    assert str(Topology("cpu", 2)) == "cpu ranks=2 nodes=1 link=shm"
    text = "cuda ranks=16 nodes=2 numa=2 link=pcie"
    assert str(Topology.parse(text)) == text
    assert str(Topology("cuda", 2, link="nvlink", shared=True)) == (
        "cuda ranks=2 nodes=1 link=nvlink shared=yes"
    )
    assert Topology.parse("cuda ranks=2 link=nvlink shared=no") == Topology("cuda", 2, link="nvlink")
    assert Topology.parse("cuda link=nvlink   ranks=8") == Topology("cuda", 8, link="nvlink")
    assert Topology.parse("cuda link=nvlink ranks=8 sms=132") == Topology("cuda", 8, link="nvlink")
    assert str(Topology("cuda", 4, link="nvlink", sms=114)) == "cuda ranks=4 nodes=1 link=nvlink sms=114"
    assert (Topology("cpu", 2).sms, Topology("cuda", 2, link="nvlink").sms) == (0, 132)


@pytest.mark.parametrize(
    ("text", "token", "remedy"),
    [
        ("", "unknown device ''", "valid: cpu, cuda"),
        ("tpu ranks=4 link=ici", "'tpu'", "valid: cpu, cuda"),
        ("cpu ranks=2 link=nvlink", "'nvlink'", "valid: shm"),
        ("cuda ranks=2 link=shm", "'shm'", "valid: nvlink, pcie"),
        ("cpu ranks=2", "link is missing", "link=shm"),
        ("cpu link=shm", "ranks is missing", "ranks=2"),
        ("cpu ranks=two link=shm", "'ranks=two'", "ranks=2"),
        ("cpu ranks=-2 link=shm", "'ranks=-2'", "ranks=2"),
        ("cpu ranks=0 link=shm", "ranks=0", "at least 1"),
        ("cpu ranks=2 ranks=3 link=shm", "ranks is given twice", "twice"),
        ("cpu ranks=2 link=shm shared=maybe", "'shared=maybe'", "shared=yes or shared=no"),
        ("cpu ranks=2 link=shm fast", "'fast'", "valid: ranks=<count>, nodes=<count>, numa=<count>, sms="),
        ("cpu ranks=2 link=shm sms=8", "sms=8", "leave it out"),
        ("cuda ranks=6 nodes=4 link=pcie", "ranks=6", "every node must hold the same number"),
        ("cuda ranks=6 nodes=2 numa=2 link=pcie", "numa=2", "every NUMA domain must hold the same number"),
    ],
)
def test_an_error_names_the_token_and_the_remedy(text: str, token: str, remedy: str) -> None:
    with pytest.raises(ValueError, match="topology") as caught:
        Topology.parse(text)
    assert token in str(caught.value)
    assert remedy in str(caught.value)
