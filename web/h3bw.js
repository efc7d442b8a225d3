// What this pack did, in ComfyUI's page: a panel in the sidebar, a few lines on our nodes, and the reports' text.
//
// The data comes as events over ComfyUI's own websocket (nodes/status.py); nothing is asked for and nothing is polled.
// Names and reasons are shown as text, never as HTML.

import { app } from "../../scripts/app.js";
import { loadTexts, text } from "./texts.js";
import { Panel } from "./panel.js";
import { isOurs, settingOf, showReport, showStatus } from "./node_view.js";

const EVENT = "h3bw.status";
const SCHEMA = "h3bw-status/1";
const SETTINGS = { onNodes: "H3BW.StatusOnNodes", reports: "H3BW.ReportsOnNodes" };

const panel = new Panel(() => app.rootGraph ?? app.graph);
let last = null; // the newest message, until the page is closed

// The node of an id as ComfyUI's queue writes it: "7", or "3:7" for node 7 of the subgraph that node 3 stands for.
function nodeOf(id) {
  let graph = app.rootGraph ?? app.graph;
  const parts = String(id).split(":");
  for (const [at, part] of parts.entries()) {
    const node = graph?.getNodeById(Number(part));
    if (at === parts.length - 1) return node ?? null;
    graph = node?.subgraph;
  }
  return null;
}

const wanted = (setting) => app.extensionManager.setting.get(setting) !== false;

function onStatus({ detail }) {
  if (detail?.schema !== SCHEMA) return;
  last = detail;
  panel.show(last);
  if (!wanted(SETTINGS.onNodes)) return;
  for (const [name, id] of Object.entries(detail.nodes ?? {})) {
    const node = nodeOf(id);
    // Only the node that made the setting; a benchmark patches models of its own and shows its own report.
    if (settingOf(node) === name) showStatus(node, detail);
  }
}

function onExecuted({ detail }) {
  if (!wanted(SETTINGS.reports)) return;
  const node = nodeOf(detail?.display_node ?? detail?.node);
  if (isOurs(node)) showReport(node, detail?.output?.text);
}

const shown = (id, name, tooltip) => ({ id, name, tooltip, type: "boolean", defaultValue: true });

app.registerExtension({
  name: "H3Blackwell.Status",
  settings: [
    {
      ...shown(SETTINGS.reports, "Show reports on nodes", "The text of reports, tables and checks, on the node that made it."),
      category: ["H3 Blackwell", "Display", "ReportsOnNodes"],
    },
    {
      ...shown(SETTINGS.onNodes, "Show status on nodes", "What a node of this pack did in the last run, on the node itself."),
      category: ["H3 Blackwell", "Display", "StatusOnNodes"],
    },
  ],

  async setup() {
    const sheet = document.createElement("link");
    sheet.rel = "stylesheet";
    sheet.href = new URL("./h3bw.css", import.meta.url).href;
    document.head.append(sheet);
    app.api.addEventListener(EVENT, onStatus);
    app.api.addEventListener("executed", onExecuted);
    await loadTexts(app);
    app.extensionManager.registerSidebarTab({
      id: "h3bw-status",
      icon: "pi pi-bolt",
      title: text("tab"),
      tooltip: text("tab_tooltip"),
      type: "custom",
      render(element) {
        panel.mount(element, last);
        app.api.addEventListener("graphChanged", panel.refresh);
      },
      destroy() {
        app.api.removeEventListener("graphChanged", panel.refresh);
        panel.unmount();
      },
    });
  },
});
