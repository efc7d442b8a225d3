"""The browser is told what runs: when, how often, in which words, and never at the cost of a run."""

import json
import sys
import types

import pytest
import torch
from conftest import pack_module
from h3_sampling import attend, equal, fuse, sample, selftest

pytestmark = pytest.mark.usefixtures("pack")


class Server:
    """What the channel uses of ComfyUI's server."""

    client_id = "the tab"

    def __init__(self):
        self.sent = []

    def send_sync(self, event, data, sid=None):
        self.sent.append((event, json.loads(json.dumps(data)), sid))


@pytest.fixture
def server(monkeypatch):
    found = Server()
    monkeypatch.setitem(
        sys.modules, "server", types.SimpleNamespace(PromptServer=types.SimpleNamespace(instance=found))
    )
    return found


def states(server):
    return [data["state"] for _, data, _ in server.sent]


def test_begin_and_end_are_told_to_the_one_who_queued(server, monkeypatch):
    monkeypatch.setattr(pack_module("nodes.status"), "LEAST_GAP_S", 3600.0)
    model, positive, latent = selftest()
    sample(attend(fuse(model)), positive, latent, steps=3)
    assert states(server) == ["running", "finished"]
    assert {(event, sid) for event, _, sid in server.sent} == {("h3bw.status", "the tab")}
    first, last = (data for _, data, _ in server.sent)
    assert first["steps"] == 0 and first["fused"] == 0 and first["schema"] == "h3bw-status/1"
    assert last["steps"] == 3 and last["fused"] == last["blocks"] == 3 and last["seconds"] > 0
    assert last["attention"] == [{"name": "sdpa", "calls": 9}]
    assert last["settings"]["FuseBlocks"]["mode"] == "exact"
    assert last["certification"] == {"needed": False, "certified": 0, "refused": []}


def test_every_step_is_told_when_the_gap_allows(server, monkeypatch):
    monkeypatch.setattr(pack_module("nodes.status"), "LEAST_GAP_S", 0.0)
    model, positive, latent = selftest()
    sample(fuse(model), positive, latent, steps=3)
    assert [data["steps"] for _, data, _ in server.sent] == [0, 1, 2, 3, 3]


def test_the_gap_is_half_a_second_of_the_hosts_clock(server, monkeypatch):
    status = pack_module("nodes.status")
    now = [100.0]
    monkeypatch.setattr(status.time, "perf_counter", lambda: now[0])
    channel, run = status.open_channel(torch.device("cpu")), pack_module("nodes.run").Run()
    channel.tell(run)
    for now[0] in (100.2, 100.4, 100.5, 100.9, 101.0):
        channel.tell_sometimes(run)
    assert len(server.sent) == 3


def test_fallbacks_are_grouped_by_reason(server):
    model, positive, latent = selftest()
    sample(fuse(model, emulate="off"), positive, latent)
    (entry,) = server.sent[-1][1]["fallbacks"]
    assert entry == {"reason": "the stream is on cpu and emulate is off", "blocks": 3, "first": 0, "calls": 9}
    assert server.sent[-1][1]["fused"] == 0


def test_an_exception_ends_as_interrupted(server):
    model, positive, latent = selftest()

    def stop(step):
        raise KeyError("a cancel")

    with pytest.raises(KeyError):
        sample(fuse(model), positive, latent, on_step=stop)
    assert states(server)[-1] == "interrupted"


def test_a_server_that_fails_changes_nothing(server, monkeypatch):
    def broken(*args):
        raise RuntimeError("the loop is closed")

    model, positive, latent = selftest()
    patched = fuse(model)
    expected = sample(patched, positive, latent)
    monkeypatch.setattr(Server, "send_sync", broken)
    assert equal(sample(patched, positive, latent), expected)


@pytest.mark.parametrize("module", [None, types.SimpleNamespace(), types.SimpleNamespace(PromptServer=object())])
def test_without_a_server_nothing_is_told_and_none_is_made(module, monkeypatch):
    if module is None:
        monkeypatch.delitem(sys.modules, "server", raising=False)
    else:
        monkeypatch.setitem(sys.modules, "server", module)
    before = set(sys.modules)
    assert pack_module("nodes.status").open_channel(torch.device("cpu")) is None
    assert "server" not in set(sys.modules) - before


def test_the_channel_goes_with_the_run(server):
    model, positive, latent = selftest()
    patched = fuse(model)
    sample(patched, positive, latent)
    assert pack_module("nodes.run").find(patched)._channel is None


def test_the_nodes_of_the_graph_are_named(server):
    from comfy_execution.utils import CurrentNodeContext

    model, positive, latent = selftest()
    with CurrentNodeContext("a prompt", "3:7"):
        patched = fuse(model)
    with CurrentNodeContext("a prompt", "8"):
        patched = attend(patched)
        sample(patched, positive, latent)
    assert server.sent[-1][1]["nodes"] == {"FuseBlocks": "3:7", "AttentionBackend": "8"}
    assert server.sent[-1][1]["prompt_id"] == "a prompt"
    assert server.sent[0][1]["nodes"] == server.sent[-1][1]["nodes"]


def test_a_message_stays_small():
    """Whatever a file's name or an exception's text holds, and however many there are."""
    status, run = pack_module("nodes.status"), pack_module("nodes.run").Run()
    for block in range(200):
        run.fallbacks[block, f"{block} " + "x" * 5000] += 1
        run.attention_handed_on["y" * 5000 + str(block)] += 1
        run.bf16_inputs[f"linear {block}", "z" * 5000] += 1
    run.settings = {"LoraSideBranch": {"loras": [{"file": "f" * 5000, "ranks": list(range(500))}] * 100}}
    assert len(json.dumps(status.message(run, torch.device("cpu")))) < 100_000


def test_certification_is_read_not_probed(monkeypatch):
    status, certify = pack_module("nodes.status"), pack_module("kernels.certify")
    entries = [
        {"op": "rows_nvfp4", "implementation": "triton", "state": "certified", "reason": None},
        {"op": "swiglu", "implementation": "triton", "state": "refused", "reason": "codes differ"},
        {"op": "swiglu", "implementation": "cute", "state": "not_run", "reason": "not probed yet"},
    ]
    monkeypatch.setattr(certify, "status", lambda device: entries)
    assert status.certification(torch.device("cuda", 0)) == {
        "needed": True,
        "certified": 1,
        "refused": [{"op": "swiglu", "implementation": "triton", "reason": "codes differ"}],
    }
