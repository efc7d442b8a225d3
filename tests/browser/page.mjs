// A chromium with ComfyUI's page in it, for scenarios.mjs: opened, watched for errors, photographed.

import { createRequire } from "node:module";
import { mkdtempSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";

const PACK = "h3-blackwell-runtime";
const FLAGS = [
  "--no-sandbox",
  "--disable-gpu",
  "--disable-quic",
  "--no-first-run",
  "--disable-background-networking",
  "--disable-component-update",
  "--disable-sync",
];
const PATIENCE_MS = 60_000;

/** Settings of a page that a test wants: no tour, no pop-ups, no animation to wait for. */
const QUIET = {
  "Comfy.TutorialCompleted": true,
  "Comfy.InstalledVersion": "1.0.0",
  "Comfy.Notification.ShowVersionUpdates": false,
  "Comfy.Workflow.WarnBlueprintOverwrite": false,
  "Comfy.Workflow.ShowMissingModelsWarning": false,
  "Comfy.Minimap.Visible": false,
  "LiteGraph.Canvas.MinFontSizeForLOD": 0,
};

/** Whether a line of the page's console or a failed request is about this pack. */
export const isOurs = (words) => words.includes(`/extensions/${PACK}`) || /h3bw|H3 ?Blackwell/i.test(words);

export class Session {
  constructor(options, browser, page, profile) {
    Object.assign(this, { options, browser, page, profile, errors: [], outside: [] });
  }

  /** Opens ComfyUI's page with the settings asked for; resolves when the graph can be used. */
  static async open(options) {
    const require = createRequire(join(options.playwright, "x.js"));
    const { chromium } = require("playwright-core");
    const profile = mkdtempSync(join(tmpdir(), "h3bw-chromium-"));
    const browser = await chromium.launchPersistentContext(profile, {
      executablePath: options.chromium,
      headless: true,
      args: FLAGS,
      viewport: options.viewport ?? { width: 1500, height: 950 },
    });
    const page = browser.pages()[0] ?? (await browser.newPage());
    const session = new Session(options, browser, page, profile);
    page.setDefaultTimeout(PATIENCE_MS);
    session.watch();
    // Nothing but the ComfyUI under test may be asked for anything.
    await page.route(
      (url) => url.hostname !== "127.0.0.1" && url.protocol.startsWith("http"),
      (route) => {
        session.outside.push(route.request().url());
        return route.abort();
      },
    );
    const settings = { ...QUIET, ...options.settings };
    await page.request.post(`${options.url}/api/settings`, { data: settings });
    await page.goto(options.url);
    await page.waitForFunction(() => window.app?.extensionManager && window.app.graph && !document.querySelector("#splash-loader"));
    await page.waitForFunction(() => window.app.extensions.some((found) => found.name === "H3Blackwell.Status"));
    await page.waitForFunction(() => window.LiteGraph.registered_node_types["H3BW_FuseBlocks"] !== undefined);
    return session;
  }

  watch() {
    this.page.on("console", (message) => {
      if (message.type() === "error" || message.type() === "warning") {
        const place = message.location();
        this.errors.push(`${message.type()}: ${message.text()} (${place.url}:${place.lineNumber})`);
      }
    });
    this.page.on("pageerror", (error) => this.errors.push(`page: ${error.stack ?? error}`));
    this.page.on("requestfailed", (request) => this.errors.push(`request: ${request.url()}`));
  }

  /** What the page complained of that has to do with this pack. */
  complaints() {
    return this.errors.filter(isOurs);
  }

  async close() {
    await this.browser.close();
    rmSync(this.profile, { recursive: true, force: true });
  }

  /** A picture into the folder of artefacts, where one was asked for. */
  async photograph(name, clip) {
    if (!this.options.pictures) return null;
    const path = join(this.options.pictures, `${name}.png`);
    await this.page.screenshot({ path, ...(clip ? { clip } : {}) });
    return path;
  }

  /** Opens a workflow (the UI format) in the editor. */
  async load(workflow) {
    await this.page.evaluate(async (graph) => {
      await window.app.loadGraphData(graph);
      window.app.canvas.setDirty(true, true);
    }, workflow);
    await this.frames();
  }

  /** Waits until the page has drawn. */
  async frames(count = 4) {
    await this.page.evaluate(async (left) => {
      for (; left > 0; left -= 1) await new Promise((done) => requestAnimationFrame(done));
    }, count);
  }

  /** Zooms so that the whole graph, or the nodes given, fill the canvas; returns where they are on the screen. */
  async fit(ids) {
    const place = await this.page.evaluate((wanted) => {
      const { canvas, graph } = window.app;
      const nodes = graph.nodes.filter((node) => !wanted || wanted.some((id) => String(id) === String(node.id)));
      const bar = 30;
      const left = Math.min(...nodes.map((node) => node.pos[0]));
      const top = Math.min(...nodes.map((node) => node.pos[1])) - bar;
      const right = Math.max(...nodes.map((node) => node.pos[0] + node.size[0]));
      const bottom = Math.max(...nodes.map((node) => node.pos[1] + node.size[1]));
      const [width, height] = [canvas.canvas.clientWidth, canvas.canvas.clientHeight];
      const margin = 60;
      const scale = Math.min((width - 2 * margin) / (right - left), (height - 2 * margin) / (bottom - top), 1);
      canvas.ds.scale = scale;
      canvas.ds.offset[0] = width / scale / 2 - (left + right) / 2;
      canvas.ds.offset[1] = height / scale / 2 - (top + bottom) / 2;
      canvas.setDirty(true, true);
      const box = canvas.canvas.getBoundingClientRect();
      const [x, y] = canvas.ds.convertOffsetToCanvas([left, top]);
      return { x: box.left + x, y: box.top + y, width: (right - left) * scale, height: (bottom - top) * scale };
    }, ids);
    await this.frames(8);
    return place;
  }

  /** Queues the graph and waits for the end of that run; returns how it ended and the events of ours on the way. */
  async queue() {
    return await this.page.evaluate(async () => {
      const { app } = window;
      const seen = [];
      const note = ({ detail }) => seen.push(structuredClone(detail));
      app.api.addEventListener("h3bw.status", note);
      const ends = { execution_success: "success", execution_error: "error", execution_interrupted: "interrupted" };
      const end = new Promise((done) => {
        for (const [event, word] of Object.entries(ends)) {
          app.api.addEventListener(event, ({ detail }) => done({ word, detail }), { once: true });
        }
      });
      const accepted = await app.queuePrompt(0, 1);
      const found = accepted === false ? { word: "refused", detail: app.lastNodeErrors } : await end;
      app.api.removeEventListener("h3bw.status", note);
      return { ended: found.word, detail: found.detail, messages: seen };
    });
  }

  /** Opens the pack's panel and returns it. */
  async openPanel() {
    const button = ".h3bw-status-tab-button, [data-testid=h3bw-status-tab-button]"; // older and newer pages
    const panel = this.page.locator(".h3bw-panel");
    if ((await panel.count()) === 0) await this.page.locator(button).click();
    await panel.waitFor();
    return panel;
  }

  /** The panel as data: state, and label and value of every line by section. */
  async panelLines() {
    await this.openPanel();
    return await this.page.evaluate(() => ({
      state: document.querySelector(".h3bw-state").textContent,
      sections: Object.fromEntries(
        [...document.querySelectorAll(".h3bw-section")].map((section) => [
          section.querySelector(".h3bw-heading").textContent,
          [...section.querySelectorAll(".h3bw-line")].map((line) => line.innerText.replaceAll("\n", " | ")),
        ]),
      ),
    }));
  }
}
