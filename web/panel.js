// The sidebar panel. It is built when it is opened and forgotten when it is closed; in between it only draws what comes.

import { sections, stateText } from "./describe.js";
import { isOurs } from "./node_view.js";
import { text } from "./texts.js";

const MUTED = 2; // LiteGraph's modes of a node
const BYPASSED = 4;

function element(tag, className, content) {
  const made = document.createElement(tag);
  made.className = className;
  if (content !== undefined) made.textContent = content;
  return made;
}

function line({ label, value, strong, warning }) {
  const row = element("div", `h3bw-line${warning ? " h3bw-warning" : ""}${label ? "" : " h3bw-whole"}`);
  if (label) row.append(element("span", "h3bw-label", label));
  row.append(element("span", `h3bw-value${strong ? " h3bw-strong" : ""}`, value));
  return row;
}

function section({ title, lines }) {
  const box = element("section", "h3bw-section");
  box.append(element("h4", "h3bw-heading", title), ...lines.map(line));
  return box;
}

/** Our nodes in a graph and its subgraphs, as lines: title and whether it is on. */
function nodesIn(graph) {
  const lines = [];
  for (const node of graph?.nodes ?? []) {
    if (node.subgraph) lines.push(...nodesIn(node.subgraph));
    if (!isOurs(node)) continue;
    const state = { [MUTED]: "muted", [BYPASSED]: "bypassed" }[node.mode] ?? "on";
    lines.push({ label: String(node.title ?? node.type), value: text(`node_${state}`) });
  }
  return lines;
}

export class Panel {
  #root = null;
  #message = null;
  #graph;

  /** @param graph a function that gives the graph in the editor */
  constructor(graph) {
    this.#graph = graph;
  }

  mount(parent, message) {
    this.#root = element("div", "h3bw-panel");
    parent.replaceChildren(this.#root);
    this.show(message);
  }

  unmount() {
    this.#root?.remove();
    this.#root = null;
  }

  show(message) {
    this.#message = message;
    this.refresh();
  }

  /** Draws it anew, when it is open; a listener of the page's `graphChanged` too. */
  refresh = () => {
    if (this.#root === null) return;
    const message = this.#message;
    const head = element("header", "h3bw-head");
    head.append(element("h3", "h3bw-title", text("title")));
    head.append(element("span", `h3bw-state h3bw-state-${message?.state ?? "none"}`, stateText(message)));
    const nodes = nodesIn(this.#graph());
    const graph = { title: text("section_graph"), lines: nodes.length > 0 ? nodes : [{ value: text("no_nodes") }] };
    const parts = message === null ? [] : sections(message);
    const hint = message === null ? [element("p", "h3bw-hint", text("hint"))] : [];
    this.#root.replaceChildren(head, ...hint, ...[...parts, graph].map(section));
  };
}
