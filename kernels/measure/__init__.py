"""Measuring, and records of it that can be checked later.

    samples     orders, medians, the paired bootstrap and its verdict      standard library
    validation  ``validate(record) -> [problem, ...]``                     standard library
    provenance  what a record says of source, machine and versions         torch where there is a GPU
    experiments  the registry: ``experiments.validate(data, records)``      standard library
    manifest    ``Manifest``: writes a ``run-manifest/1`` file             standard library
    timing      ``time_rotating``: every variant once a round, in balanced orders, CUDA events around graph replays
    telemetry   clocks and power limit from the driver                     standard library
    roofline    copy bandwidth of the device, and time against it
    stock       ComfyUI's unfused chains with comfy-kitchen's quantiser
    producers   ``run``: all of it for the ops of ``kernels.fused``
    gemm_roofline  ``run``: the four GEMMs and the producers against their floors
    ladder      rungs of the parity ladder: their numbers, table and picture
    predictions what the roofline says of GPUs that were not timed; a record takes a prediction's place
    load_bench  ``run``: checkpoint loaders against one another

Nothing here imports torch or asks a device before it is called, so a record can be validated anywhere.
"""

from .manifest import Manifest, read
from .samples import BARS, balanced_orders, verdict
from .timing import time_rotating
from .validation import validate

__all__ = ["BARS", "Manifest", "balanced_orders", "read", "time_rotating", "validate", "verdict"]
