// What a status message says, as lines of text; no page is needed here.

import { text } from "./texts.js";

const GIB = 2 ** 30;

const settingsOf = (message, name) => message.settings?.[name];

const times = (entries) => entries.map(({ name, calls }) => `${name} × ${calls}`).join(", ");

/** Seconds of one model evaluation, or null before the first. */
function pace(message) {
  return message.steps > 0 ? message.seconds / message.steps : null;
}

function paceText(message, key) {
  const seconds = pace(message);
  return seconds === null ? text("not_yet") : text(key, { seconds: seconds.toFixed(3) });
}

export function stateText(message) {
  return message === null ? text("nothing_ran") : text(`state_${message.state.replaceAll(" ", "_")}`);
}

/** Lines about the fused blocks. */
function fusedLines(message) {
  const settings = settingsOf(message, "FuseBlocks");
  if (!settings) return [{ value: text("not_used") }];
  const lines = [{ label: text("fused_blocks"), value: `${message.fused}/${message.blocks}`, strong: true }];
  lines.push({ label: text("mode"), value: settings.mode });
  if (settings.emulate !== "off") lines.push({ label: text("emulation"), value: settings.emulate });
  for (const name of settings.forced_off_by_environment ?? []) {
    lines.push({ value: text("forced_off", { name }), warning: true });
  }
  return lines;
}

/** Lines about attention: what ran, why, and what went elsewhere. */
function attentionLines(message) {
  const settings = settingsOf(message, "AttentionBackend");
  if (!settings) return [{ value: text("not_used") }];
  const lines = [{ label: text("asked_for"), value: settings.backend }];
  if (message.attention.length > 0) lines.push({ label: text("ran"), value: times(message.attention), strong: true });
  for (const choice of message.attention_choices) lines.push({ label: text("why"), value: choice });
  for (const { name, calls } of message.attention_dense) {
    lines.push({ label: text("ran_exact", { calls }), value: name });
  }
  for (const { name, calls } of message.attention_handed_on) {
    lines.push({ label: text("handed_on", { calls }), value: name, warning: true });
  }
  return lines;
}

/** Lines about what did not run as asked for, each with its reason. */
function fallbackLines(message) {
  const lines = message.fallbacks.map(({ reason, blocks, first, calls }) => ({
    label: text(blocks === 1 ? "one_block" : "some_blocks", { blocks, first, calls }),
    value: reason,
    warning: true,
  }));
  for (const { linear, reason, calls } of message.bf16_inputs) {
    lines.push({ label: text("bf16_input", { linear, calls }), value: reason });
  }
  if (message.first_nonfinite) lines.push({ value: text("nonfinite", message.first_nonfinite), warning: true });
  return lines;
}

/** Lines about LoRAs that run beside the weights. */
function loraLines(message) {
  const loras = settingsOf(message, "LoraSideBranch")?.loras ?? [];
  const lines = loras.map(({ file, strength, linears }) => ({
    label: file,
    value: text("lora", { strength, linears }),
  }));
  for (const { name, calls } of message.side_branches) lines.push({ label: text("computed_from", { calls }), value: name });
  return lines;
}

/** Lines about the kernels' certification on the device of the run. */
function certificationLines(message) {
  const { needed, certified, refused } = message.certification;
  if (!needed) return [{ value: text("no_certification", { device: message.device }) }];
  const lines = [{ label: text("certified"), value: String(certified), strong: true }];
  for (const { op, implementation, reason } of refused) {
    lines.push({ label: text("refused", { op, implementation }), value: reason, warning: true });
  }
  return lines;
}

/** Lines about the run as a whole. */
function runLines(message) {
  const lines = [
    { label: text("device"), value: message.device },
    { label: text("evaluations"), value: String(message.steps) },
    { label: text("pace"), value: paceText(message, "seconds"), strong: true },
    { label: text("time"), value: text("seconds", { seconds: message.seconds.toFixed(1) }) },
  ];
  if (message.peak_bytes !== null) {
    lines.push({ label: text("peak_memory"), value: `${(message.peak_bytes / GIB).toFixed(2)} GiB` });
  }
  return lines;
}

/** Everything, in the order of the panel. */
export function sections(message) {
  const fallbacks = fallbackLines(message);
  const loras = loraLines(message);
  return [
    { title: text("section_run"), lines: runLines(message) },
    { title: text("section_fused"), lines: fusedLines(message) },
    { title: text("section_attention"), lines: attentionLines(message) },
    ...(loras.length > 0 ? [{ title: text("section_lora"), lines: loras }] : []),
    { title: text("section_fallbacks"), lines: fallbacks.length > 0 ? fallbacks : [{ value: text("none") }] },
    { title: text("section_certification"), lines: certificationLines(message) },
  ];
}

const PARTS = { FuseBlocks: fusedLines, AttentionBackend: attentionLines, LoraSideBranch: loraLines };

/** The short form for one node of ours: its own part, then how the run goes. */
export function nodeText(message, name) {
  const own = PARTS[name]?.(message) ?? [];
  const fallen = name === "FuseBlocks" ? fallbackLines(message) : [];
  const lines = [...own, ...fallen].map(({ label, value }) => (label ? `${label}: ${value}` : value));
  return [`${stateText(message)} · ${paceText(message, "seconds_each")}`, ...lines].join("\n");
}
