"""``python -m kernels.measure research``: are the records and the registry of a folder whole and honest?

A line for each file, ``ok`` or ``BAD`` with everything that is wrong with it; exits 1 if anything is. Run it from the
pack's folder; it needs the standard library only.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

from . import experiments
from .manifest import ManifestError, read


def findings(folder: Path) -> Iterator[tuple[str, str, list[str]]]:
    """``(file, what it is, problems)`` of every record and of the registry."""
    records = folder / "records"
    found = sorted(records.rglob("*.json"))
    if not found:
        yield "records", "", ["holds no record"]
    for path in found:
        name = path.relative_to(folder).as_posix()
        try:
            record = read(path)
        except (ManifestError, OSError) as error:
            yield name, "", getattr(error, "problems", [type(error).__name__])
        else:
            yield name, f"{record['kind']}, {record['status']}, {record['run_id']}", []
    registry = folder / "experiments.json"
    if not registry.is_file():
        yield registry.name, "", ["is missing"]
        return
    data, problems = experiments.read(registry, records)
    yield registry.name, "" if problems else f"{len(data['experiments'])} experiments", problems


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m kernels.measure", description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path, help="with records/ and experiments.json: research")
    folder = parser.parse_args(arguments).folder
    bad = 0
    for name, told, problems in findings(folder):
        bad += bool(problems)
        print(f"BAD  {name}: {'; '.join(problems)}" if problems else f"ok   {name}: {told}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
