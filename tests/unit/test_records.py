"""Every record in research/records is valid, and says where it was measured."""

import json

import pytest
from comfy_server import PACK_ROOT
from conftest import pack_module

RECORDS = sorted((PACK_ROOT / "research" / "records").glob("*.json"))


def test_there_are_records():
    assert RECORDS


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.name)
def test_record(path):
    data = json.loads(path.read_text(encoding="utf-8"))
    assert pack_module("kernels.measure.validation").validate(data) == []
    assert data["status"] == "finished"
    gpus = data["hardware"]["gpus"]
    if not path.name.startswith("cpu_"):
        assert gpus, "a record without a GPU is no measurement of one"
    assert path.name.startswith("h200") is bool(gpus and "H200" in gpus[0]["name"])


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.name)
def test_an_edited_record_is_refused(path):
    data = json.loads(path.read_text(encoding="utf-8"))
    case = next((case for case in data["cases"] if case.get("samples")), None)
    if case is not None:
        case["summary"]["median"] *= 0.5
    else:
        gate = next(gate for gate in data["gates"] if gate["result"] == "passed")
        gate["result"] = "failed"
    assert pack_module("kernels.measure.validation").validate(data)
