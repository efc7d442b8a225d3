// Text on a node of this pack: a widget that is neither saved with the workflow nor sent with the prompt.

import { nodeText } from "./describe.js";

const PREFIX = "H3BW_";
const LINE = 17; // pixels, as in h3bw.css
const PADDING = 14;
const MOST_LINES = { status: 5, report: 30 }; // more than these scroll
const LEAST_WIDTH = 320;
// The node that makes an entry of a run's settings, and that entry's name.
const SETTINGS = {
  H3BW_FuseBlocks: "FuseBlocks",
  H3BW_AttentionBackend: "AttentionBackend",
  H3BW_LoraSideBranch: "LoraSideBranch",
  H3BW_Calibrate: "Calibrate",
};

const TABLES = /^H3BW_(Bench|Parity|Roofline)/; // their lines are columns and must not wrap

const typeOf = (node) => node?.comfyClass ?? node?.type ?? "";

export const isOurs = (node) => typeOf(node).startsWith(PREFIX);

/** The name of the setting that a node makes, or undefined. */
export const settingOf = (node) => SETTINGS[typeOf(node)];

export function showStatus(node, message) {
  write(node, "status", nodeText(message, settingOf(node)));
}

/** Shows a report; `lines` is ComfyUI's `ui.text`, a list of texts. */
export function showReport(node, lines) {
  if (Array.isArray(lines) && lines.length > 0) write(node, "report", lines.join("\n"));
}

function write(node, kind, content) {
  const name = `h3bw_${kind}`;
  const widget = node.widgets?.find((found) => found.name === name) ?? add(node, name, kind);
  if (widget.element.textContent === content) return;
  widget.element.textContent = content;
  const lines = Math.min(content.split("\n").length, MOST_LINES[kind]);
  if (lines > widget.h3bwLines) {
    widget.h3bwLines = lines;
    widget.element.style.minHeight = `${heightOf(lines)}px`; // for Vue nodes, which do not ask getMinHeight
    grow(node);
  }
}

function add(node, name, kind) {
  const element = document.createElement("div");
  element.className = `h3bw-text h3bw-${kind}${TABLES.test(typeOf(node)) ? " h3bw-table" : ""}`;
  element.dataset.captureWheel = "true"; // for Vue nodes: the wheel scrolls the text, not the canvas
  element.tabIndex = 0;
  for (const event of ["pointerdown", "wheel"]) element.addEventListener(event, (happened) => happened.stopPropagation());
  const widget = node.addDOMWidget(name, name, element, {
    serialize: false,
    hideOnZoom: false,
    getMinHeight: () => heightOf(widget?.h3bwLines ?? 1),
    getValue: () => "",
    setValue: () => {},
  });
  widget.serialize = false; // saved widget values are positional: ours must not be among them
  widget.h3bwLines = 0;
  return widget;
}

const heightOf = (lines) => PADDING + LINE * Math.max(lines, 1);

function grow(node) {
  const [width, height] = node.computeSize();
  node.setSize([Math.max(node.size[0], width, LEAST_WIDTH), Math.max(node.size[1], height)]);
  node.setDirtyCanvas?.(true, true);
}
