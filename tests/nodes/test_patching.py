"""Patches live in the clone: nothing leaks, nothing stacks, nobody else's patch is dropped."""

import gc
import types

import pytest
import torch
from conftest import pack_module
from h3_sampling import attend, equal, fuse, run_of, sample, selftest

pytestmark = pytest.mark.usefixtures("pack")


@pytest.fixture
def tiny():
    return selftest()


def world(model):
    """Everything of ComfyUI's that a patch could have touched, by identity."""
    import comfy.ldm.minimax.model as h3
    import comfy.ldm.modules.attention as attention
    import comfy.model_management
    import comfy.ops

    dit = model.model.diffusion_model
    return {
        "optimized_attention": attention.optimized_attention,
        "h3 attention": h3.optimized_attention,
        "block forward": h3.DiTBlock.forward,
        "attention forward": h3.Attention.forward,
        "mlp forward": h3.MLP.forward,
        "modulate": h3._mod_scale_shift,
        "cast": comfy.ops.cast_bias_weight,
        "training": comfy.model_management.in_training,
        "flags": (torch.backends.cuda.matmul.allow_tf32, torch.get_default_dtype(), torch.is_grad_enabled()),
        "hooks": [name for name, m in dit.named_modules() if m._forward_hooks or m._forward_pre_hooks],
        "forwards": [name for name, m in dit.named_modules() if "forward" in m.__dict__],
        "options": repr(sorted(model.model_options["transformer_options"])),
    }


class Boom(Exception):
    pass


def test_branches_do_not_see_each_other(tiny):
    """A, B, A; then an exception and a cancel inside A: B gives its first bytes each time."""
    import comfy.model_management

    model, positive, latent = tiny
    before = world(model)
    a, b = attend(fuse(model, emulate="w4a4")), model
    first_b, first_a = sample(b, positive, latent), sample(a, positive, latent)
    assert not equal(first_a, first_b)
    assert equal(sample(b, positive, latent), first_b)
    assert equal(sample(a, positive, latent), first_a)

    def boom(step):
        raise Boom

    with pytest.raises(Boom):
        sample(a, positive, latent, on_step=boom)
    assert run_of(a).state == "interrupted"
    assert equal(sample(b, positive, latent), first_b)

    def cancel(step):
        comfy.model_management.interrupt_current_processing()

    with pytest.raises(comfy.model_management.InterruptProcessingException):
        sample(a, positive, latent, on_step=cancel)
    assert equal(sample(b, positive, latent), first_b)
    assert equal(sample(a, positive, latent), first_a)
    assert world(model) == before


@pytest.mark.parametrize("where", ["attention", "fc2"])
def test_an_exception_inside_a_block_leaves_nothing_behind(tiny, where, monkeypatch):
    model, positive, latent = tiny
    expected = sample(model, positive, latent)
    before = world(model)
    casts = count_casts(monkeypatch)
    patched = fuse(model, emulate="w4a4")
    block = model.model.diffusion_model.blocks[1]

    def fail(*args, **kwargs):
        raise Boom

    if where == "attention":
        patched.model_options["transformer_options"]["optimized_attention_override"] = fail
    else:
        handle = block.mlp.fc2.register_forward_hook(fail)
    with pytest.raises(Boom):
        sample(patched, positive, latent)
    if where == "fc2":
        handle.remove()
    # A hook on fc2 fails in stock's own forward after its uncast, attention between a cast and its uncast of ours.
    assert casts["cast"] == casts["uncast"] > 0
    monkeypatch.undo()
    assert world(model) == before
    assert equal(sample(model, positive, latent), expected)


def count_casts(monkeypatch):
    """Count weight casts that need an uncast, made by this pack."""
    adapt = pack_module("nodes.adapt")
    ops = adapt.comfy.ops
    counts = {"cast": 0, "uncast": 0}
    real_cast, real_uncast = ops.cast_bias_weight, ops.uncast_bias_weight

    def cast(module, *args, **kwargs):
        counts["cast"] += bool(kwargs.get("offloadable"))
        return real_cast(module, *args, **kwargs)

    def uncast(*args, **kwargs):
        counts["uncast"] += 1
        return real_uncast(*args, **kwargs)

    monkeypatch.setattr(ops, "cast_bias_weight", cast)
    monkeypatch.setattr(ops, "uncast_bias_weight", uncast)
    return counts


def test_every_cast_is_given_back_when_an_op_raises(tiny, monkeypatch):
    model, positive, latent = tiny
    patched = fuse(model)
    counts = count_casts(monkeypatch)
    fused = pack_module("kernels.fused")

    def fail(*args, **kwargs):
        raise Boom

    monkeypatch.setattr(fused, "norm_modulate", fail)
    with pytest.raises(Boom):
        sample(patched, positive, latent)
    assert counts["cast"] == counts["uncast"] > 0


def test_twice_in_a_row_does_not_stack(tiny):
    model, positive, latent = tiny
    once, twice = attend(fuse(model)), attend(fuse(attend(fuse(model, emulate="w4a4"))))
    assert equal(sample(twice, positive, latent), sample(once, positive, latent))
    run = run_of(twice)
    assert dict(run.fused) == {0: 3, 1: 3, 2: 3} and run.attention["sdpa"] == 9 and run.steps == 3
    options = twice.model_options["transformer_options"]
    assert all(patch.previous is None for patch in options["patches_replace"]["dit"].values())
    assert pack_module("nodes.adapt_attention").installed(options).previous is None
    assert all(len(wrappers["h3bw"]) == 1 for wrappers in options["wrappers"].values())


def test_two_branches_keep_their_own_settings_and_counts(tiny):
    model, positive, latent = tiny
    base = fuse(model)
    left, right = fuse(base, emulate="w4a4"), fuse(base, mode="off")
    sample(left, positive, latent, steps=2)
    sample(right, positive, latent, steps=3)
    assert run_of(left).steps == 2 and len(run_of(left).fused) == 3
    assert run_of(right).steps == 3 and not run_of(right).fused
    assert run_of(base).state == "not started"
    assert {reason for _, reason in run_of(right).fallbacks} == {"mode is off"}


def test_an_ab_pair_is_not_reloaded(tiny):
    """ComfyUI compares the patchers' wrappers and callbacks; ours must not make the two sides differ."""
    model, _, _ = tiny
    patched = attend(fuse(model))
    assert patched.clone_has_same_weights(model) and model.clone_has_same_weights(patched)


class Recorder:
    """A patch as a ControlNet makes one: it calls the original block and changes its output."""

    def __init__(self, delta):
        self.delta = delta
        self.calls = 0

    def __call__(self, arguments, extra):
        self.calls += 1
        out = extra["original_block"](arguments)
        return {"img": out["img"] + self.delta}


@pytest.mark.parametrize("order", ["before ours", "after ours"])
def test_a_patch_that_owns_a_block_is_chained(tiny, order):
    model, positive, latent = tiny

    def with_control(base):
        control = Recorder(0.25)
        out = base.clone()
        table = out.model_options["transformer_options"].get("patches_replace", {}).get("dit", {})
        earlier = table.get(("double_block", 1))

        def chained(arguments, extra):
            if earlier is None:
                return control(arguments, extra)
            return control(arguments, {**extra, "original_block": lambda a: earlier(a, extra)})

        out.set_model_patch_replace(chained, "dit", "double_block", 1)
        return out, control

    alone, _ = with_control(model)
    expected = sample(alone, positive, latent)
    if order == "before ours":
        controlled, control = with_control(model)
        patched = fuse(controlled)
    else:
        patched, control = with_control(fuse(model))
    assert equal(sample(patched, positive, latent), expected)
    assert control.calls == 3
    assert dict(run_of(patched).fused) == {0: 3, 1: 3, 2: 3}


def test_a_patch_that_replaces_ours_is_named(tiny):
    model, positive, latent = tiny
    patched = fuse(model).clone()
    patched.set_model_patch_replace(lambda a, extra: extra["original_block"](a), "dit", "double_block", 2)
    expected = sample(model, positive, latent)
    out = sample(patched, positive, latent)
    assert equal(out, expected)
    report = pack_module("nodes.report").build(patched, out[0])
    assert "1 never called: another patch replaced those blocks after ours" in report["run"]["headline"]
    assert any("a later node owns 1 blocks" in note for note in report["notes"])


@pytest.mark.parametrize("part", ["", ".attn", ".mlp", ".norm1", ".adaln_proj"])
def test_a_foreign_forward_makes_that_block_fall_back(tiny, part):
    """Object patches, before or after ours; the other blocks stay fused."""
    model, positive, latent = tiny
    path = f"diffusion_model.blocks.1{part}.forward"
    patched = fuse(model)
    real = patched.get_model_object(path)
    calls = []

    def foreign(*args, **kwargs):
        calls.append(path)
        return real(*args, **kwargs)

    patched.add_object_patch(path, foreign)
    expected = sample(model, positive, latent)
    assert equal(sample(patched, positive, latent), expected)
    assert len(calls) >= 3
    run = run_of(patched)
    assert set(run.fused) == {0, 2}
    assert dict(run.fallbacks) == {
        (1, "another patch owns the forward of the block or of one of its parts"): 3
    }
    # ComfyUI leaves the bound stock method in the instance when it takes the patch off again; that is not foreign.
    assert equal(sample(fuse(model), positive, latent), expected)
    again = fuse(model)
    sample(again, positive, latent)
    assert set(run_of(again).fused) == {0, 1, 2}


@pytest.mark.parametrize("part", ["mlp", "norm1", "norm2"])
def test_a_module_in_a_parts_place_is_honoured(tiny, part):
    """An object patch may put a module of another class there; its forward must run."""
    model, positive, latent = tiny
    real = getattr(model.model.diffusion_model.blocks[1], part)
    calls = []

    class Doubled(type(real)):
        def forward(self, *args, **kwargs):
            calls.append(part)
            return super().forward(*args, **kwargs) * 2

    doubled = Doubled.__new__(Doubled)
    doubled.__dict__ = real.__dict__.copy()
    changed = model.clone()
    changed.add_object_patch(f"diffusion_model.blocks.1.{part}", doubled)
    expected = sample(changed, positive, latent)
    assert not equal(expected, sample(model, positive, latent))
    calls.clear()
    patched = fuse(changed)
    assert equal(sample(patched, positive, latent), expected) and len(calls) == 3
    assert {block for block, _ in run_of(patched).fallbacks} == {1}


@pytest.mark.parametrize("name", ["MLP", "DiTBlock"])
def test_a_class_patched_after_the_first_run_is_honoured(tiny, name, monkeypatch):
    """Many packs replace a method of ComfyUI's class while the process runs."""
    import comfy.ldm.minimax.model as h3

    model, positive, latent = tiny
    patched = fuse(model)
    sample(patched, positive, latent)
    assert not run_of(patched).fallbacks
    real = getattr(h3, name).forward
    monkeypatch.setattr(getattr(h3, name), "forward", lambda self, x, *a, **k: real(self, x, *a, **k) * 1.5)
    expected = sample(model, positive, latent)
    assert equal(sample(patched, positive, latent), expected)
    assert len({block for block, _ in run_of(patched).fallbacks}) == 3
    monkeypatch.undo()
    sample(patched, positive, latent)
    assert not run_of(patched).fallbacks


def test_a_hook_on_a_linear_is_honoured(tiny):
    """A hook-style LoRA on fc2 sees the bf16 input that it expects, also where SwiGLU would write codes."""
    import comfy.quant_ops

    model, positive, latent = tiny
    linear = model.model.diffusion_model.blocks[1].mlp.fc2
    seen = []

    def lora(module, arguments, output):
        seen.append(type(arguments[0]))
        return output + 0.5 * arguments[0].float().mean(-1, keepdim=True).to(output.dtype)

    handle = linear.register_forward_hook(lora)
    try:
        expected = sample(fuse(model, mode="off", emulate="w4a4"), positive, latent)
        assert len(seen) == 3 and not equal(expected, sample(fuse(model, mode="off"), positive, latent))
        patched = fuse(model, emulate="w4a4")
        seen.clear()
        ours = sample(patched, positive, latent)
    finally:
        handle.remove()
    assert seen and comfy.quant_ops.QuantizedTensor not in seen
    assert equal(ours, expected)
    assert dict(run_of(patched).bf16_inputs) == {("mlp.fc2", "another patch owns its forward"): 3}


def test_a_weight_function_keeps_the_layer_in_bf16(tiny):
    """A LoRA in low VRAM patches the weight during the forward: stock turns its FP4 path off, and so do we."""
    model, positive, latent = tiny
    plain = sample(fuse(model, mode="off", emulate="w4a4"), positive, latent)
    lora = model.clone()
    lora.add_weight_wrapper("diffusion_model.blocks.0.mlp.fc1.weight", lambda weight: weight * 1.5)
    expected = sample(fuse(lora, mode="off", emulate="w4a4"), positive, latent)
    assert not equal(expected, plain)
    patched = fuse(lora, emulate="w4a4")
    assert equal(sample(patched, positive, latent), expected)
    assert ("mlp.fc1", "a weight patch (LoRA in low VRAM) runs during its forward") in run_of(patched).bf16_inputs


def call_block(patched, model, **extra):
    """Call block 0's patch as core's forward does, once with ours and once with the original block."""
    run = pack_module("nodes.run")
    dit = model.model.diffusion_model
    block = dit.blocks[0]
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(13, dit.hidden_size, generator=generator).bfloat16()
    t_emb = torch.randn(2, block.adaln_proj.linear.in_features, generator=generator)
    import comfy.ldm.minimax.model as h3

    angles = torch.randn(13, 96, generator=generator)
    options = {run.DIT: dit, run.RUN: run_of(patched)}
    arguments = {
        "img": x,
        "t_emb": t_emb,
        "mod_segments": [(0, 6, 1), (6, 6, 0), (6, 13, 2)],
        "rope_freqs": h3.rope_rotation_table(angles, torch.bfloat16),
        "transformer_options": options,
        **extra,
    }
    patch = patched.model_options["transformer_options"]["patches_replace"]["dit"]["double_block", 0]
    seen = []

    def original(inner):
        seen.append(inner)
        return {"img": "stock"}

    with torch.inference_mode():
        out = patch(arguments, {"original_block": original})["img"]
    reasons = {reason for _, reason in run_of(patched).fallbacks}
    return out, seen, reasons, arguments


def test_known_arguments_are_fused(tiny):
    model, _, _ = tiny
    out, seen, reasons, _ = call_block(fuse(model), model, layout=object(), attention=None)
    assert not reasons
    assert torch.is_tensor(out) and not seen


@pytest.mark.parametrize(
    ("extra", "reason"),
    [
        ({"attention": object()}, "an argument this version of the pack does not know: attention"),
        ({"control": 1}, "an argument this version of the pack does not know: control"),
        ({"img": [torch.zeros(13, 256, dtype=torch.bfloat16)]}, "the stream is a list, not a tensor"),
        ({"img": torch.zeros(13, 256)}, "the stream is float32, not bfloat16"),
        ({"img": torch.zeros(13, 256, dtype=torch.float16)}, "the stream is float16, not bfloat16"),
        ({"img": torch.zeros(1, 13, 256, dtype=torch.bfloat16)}, "the stream has 3 axes, not 2"),
    ],
)
def test_an_unknown_call_runs_in_the_original_block_untouched(tiny, extra, reason):
    model, _, _ = tiny
    out, seen, reasons, arguments = call_block(fuse(model), model, **extra)
    assert out == "stock" and any(reason in found for found in reasons)
    assert seen[0].keys() == arguments.keys() and all(seen[0][name] is arguments[name] for name in arguments)


def test_training_and_compiling_fall_back(tiny, monkeypatch):
    model, _, _ = tiny
    adapt = pack_module("nodes.adapt")
    monkeypatch.setattr(adapt.comfy.model_management, "in_training", True)
    assert call_block(fuse(model), model)[2] == {"training"}
    monkeypatch.setattr(adapt.comfy.model_management, "in_training", False)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert call_block(fuse(model), model)[2] == {"torch.compile is tracing the block"}


def test_the_cpu_without_emulation_falls_back_with_its_reason(tiny):
    model, positive, latent = tiny
    patched = fuse(model, emulate="off")
    assert equal(sample(patched, positive, latent), sample(model, positive, latent))
    assert {reason for _, reason in run_of(patched).fallbacks} == {"the stream is on cpu and emulate is off"}
    assert run_of(patched).headline() == "fused 0/3 blocks; 3 fell back: the stream is on cpu and emulate is off"


def test_a_block_class_that_computes_something_else_is_left_alone(pack):
    import comfy.ldm.minimax.model as h3

    adapt = pack_module("nodes.adapt")

    class Newer(h3.DiTBlock):
        def forward(self, x, t_emb, mod_segments, rope_freqs, transformer_options={}):  # noqa: B006
            return super().forward(x, t_emb, mod_segments, rope_freqs, transformer_options) * 2

    class Renamed(h3.DiTBlock):
        def forward(self, hidden, t_emb, mod_segments, rope_freqs):
            return hidden

    class Needs(h3.DiTBlock):
        def forward(self, x, t_emb, mod_segments, rope_freqs, context):
            return x

    class Broken(h3.DiTBlock):
        def __init__(self, *args, **kwargs):
            raise RuntimeError("no such thing")

    assert adapt.class_reason(h3.DiTBlock) is None
    assert "computes something else" in adapt.class_reason(Newer)
    assert "takes self, hidden" in adapt.class_reason(Renamed)
    assert "needs context" in adapt.class_reason(Needs)
    assert "could not be probed: RuntimeError: no such thing" in adapt.class_reason(Broken)


def test_nothing_survives_the_forward(tiny):
    """The newest core aborts when a tensor that was allocated inside the forward outlives it."""
    model, positive, latent = tiny
    patched = attend(fuse(model, emulate="w4a4"))
    sample(patched, positive, latent)

    def alive():
        gc.collect()
        return sum(1 for item in gc.get_objects() if type(item) is torch.Tensor)

    before = alive()
    for _ in range(2):
        sample(patched, positive, latent)
    assert alive() <= before
    assert run_of(patched)._flags is None


def test_a_removed_wrapper_is_a_reason_not_a_crash(tiny):
    model, positive, latent = tiny
    patched = fuse(model)
    patched.model_options["transformer_options"]["wrappers"].clear()
    expected = sample(model, positive, latent)
    assert equal(sample(patched, positive, latent), expected)
    assert {reason for _, reason in run_of(patched).fallbacks} == {
        "the forward did not say which model runs (a node removed this pack's wrapper)"
    }


def test_another_model_is_refused(pack):
    class Model:
        model = torch.nn.Linear(2, 2)

    refused = pack_module("nodes.adapt").NotH3
    with pytest.raises(refused, match="patches MiniMax H3 models, the model connected is Linear"):
        fuse(Model())


@pytest.mark.parametrize(
    ("variable", "widget"),
    [
        ("H3_NVFP4_MODULATE_FUSION", "modulate"),
        ("H3_NVFP4_SWIGLU_FUSION", "swiglu"),
        ("H3_FUSED_ELEMENTWISE", "elementwise"),
    ],
)
def test_environment_zero_is_a_hard_off_that_the_report_shows(tiny, monkeypatch, variable, widget):
    model, positive, latent = tiny
    monkeypatch.setenv(variable, "0")
    schema = pack_module("nodes.fuse").FuseBlocks.define_schema()
    defaults = {item.id: getattr(item, "default", None) for item in schema.inputs}
    assert defaults[widget] is False
    patched = fuse(model, emulate="w4a4", **{widget: True})
    out = sample(patched, positive, latent, steps=1)
    settings = run_of(patched).settings["FuseBlocks"]
    assert settings[widget] is False and settings["forced_off_by_environment"] == [variable]
    report = pack_module("nodes.report")
    assert f"{variable}=0 in the environment switches this off" in report.as_text(report.build(patched, out[0]))


def test_the_first_block_that_is_not_finite_is_named(tiny):
    model, positive, latent = tiny
    patched = fuse(model)
    calls = []

    def poison(module, arguments, output):
        calls.append(1)
        if len(calls) == 2:
            output[3, 5] = float("nan")

    handle = model.model.diffusion_model.blocks[1].mlp.register_forward_hook(poison)
    try:
        out = sample(patched, positive, latent)
    finally:
        handle.remove()
    assert run_of(patched).nonfinite == (2, 1)
    report = pack_module("nodes.report")
    rung = next(item for item in report.build(patched, out[0])["rungs"] if item["rung"] == "finite")
    assert rung["result"] == "failed"
    assert rung["reason"] == "block 1 is the first with a non-finite output, in evaluation 2"


def test_what_a_run_watches_does_not_depend_on_the_dtype():
    """One forward marks blocks once, with its own number; other dtypes than the buffer's are noted too."""
    run = pack_module("nodes.run").Run()
    run.begin(torch.device("cpu"), 4)
    outs = [torch.ones(2, 3, dtype=dtype) for dtype in (torch.bfloat16, torch.float32, torch.float16)]
    for step, broken in ((1, None), (2, 1), (3, 0), (4, 1)):
        run.steps = step
        for block, out in enumerate(outs):
            run.watch(block, out.clone().fill_(float("nan")) if block == broken else out)
        run.watch(3, "no tensor")
        run.stepped()
    assert run._flags.tolist() == [3, 2, 0, 0]
    run.end(finished=True)
    assert run.nonfinite == (2, 1) and run._flags is None and run._extremes is None


def test_a_short_stream_in_bf16_is_left_to_comfyui(tiny):
    """Only on a GPU, only where no linear takes codes, and not in a comparison."""
    fuse_module, adapt = pack_module("nodes.fuse"), pack_module("nodes.adapt")
    block = adapt.h3_model(tiny[0]).blocks[0]
    linears = [block.get_submodule(name) for name in adapt.LINEARS]
    assert all(adapt.fp4_reason(linear) for linear in linears)  # this test runs without FP4

    def reason(rows, emulate="off", device="cuda", **options):
        x = types.SimpleNamespace(device=torch.device(device), shape=(rows, 5376))
        patch = fuse_module.BlockPatch(0, adapt.Sites(), "exact", emulate, None)
        return patch._rows_reason(block, {"img": x, "transformer_options": options})

    assert reason(514).startswith("514 rows in bf16: below 2048 ")
    assert reason(2048) is None and reason(514, device="cpu") is None and reason(514, emulate="w4a4") is None
    assert reason(514, **{fuse_module.ANY_ROWS: True}) is None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(adapt, "fp4_reason", lambda linear, emulated=False: None if linear is linears[2] else "no FP4")
        assert reason(514) is None


def test_the_device_is_asked_once_a_forward(tiny, monkeypatch):
    """What depends on the device alone is looked up once for all blocks, and again in the next evaluation."""
    model, positive, latent = tiny
    module, asked = pack_module("nodes.fuse"), []
    real = module.sites_on
    monkeypatch.setattr(module, "sites_on", lambda *key: asked.append(key) or real(*key))
    patched = fuse(model, emulate="w4a4")
    sample(patched, positive, latent, steps=3)
    run = run_of(patched)
    assert run.blocks > 1 and len(asked) == run.steps == 3
