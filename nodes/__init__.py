"""The pack's nodes. Each file here holds one job; this one only lists what they register."""

from comfy_api.latest import ComfyExtension, io

from .attention import AttentionBackend
from .bench_attention import BenchAttention
from .bench_block import BenchBlock
from .bench_kernels import BenchKernels
from .bench_step import BenchStep
from .calibrate import Calibrate, SaveCalibration
from .environment import Environment
from .fuse import FuseBlocks
from .load import LoadNVFP4
from .lora import LoraSideBranch
from .media import MediaCheck
from .parity_ladder import ParityLadder
from .quantize import QuantizeCheckpoint
from .report import RuntimeReport
from .roofline import Roofline
from .routes import register
from .selftest import SelfTestDecode, SelfTestModel
from .warmup import Warmup

NODES: tuple[type[io.ComfyNode], ...] = (
    LoadNVFP4,
    QuantizeCheckpoint,
    FuseBlocks,
    AttentionBackend,
    LoraSideBranch,
    Calibrate,
    SaveCalibration,
    SelfTestModel,
    SelfTestDecode,
    RuntimeReport,
    MediaCheck,
    Environment,
    BenchKernels,
    BenchAttention,
    ParityLadder,
    BenchStep,
    Roofline,
    BenchBlock,
    Warmup,
)


class H3BlackwellExtension(ComfyExtension):
    """What ComfyUI asks for the node classes."""

    async def on_load(self) -> None:
        """Add the two read-only routes to the server that is starting, if there is one."""
        register()

    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        """Return every node class of the pack."""
        return list(NODES)
